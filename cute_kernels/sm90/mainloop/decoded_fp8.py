"""The FP8 mainloop of 4-bit weights: TMA brings rows of x and packed weights; warpgroups decode the weights to E4M3.

Two rings of k-tiles:

    stages    rows of x and packed weights
        full      TMA's bytes, and the copies of rows that come by index
        empty     1 arrival of each MMA warp, and 1 of each warp of the warpgroup that decodes the k-tile
    decoded   weights as wgmma reads them
        full      1 arrival of each thread of the warpgroup that decodes the k-tile, after a fence
        empty     1 arrival of each MMA warp

The fence orders the decoding warpgroup's writes, and the copies of rows in the stage for which it waited, before
wgmma's reads. So MMA warps need no fence of their own, which would wait for their loads of scales.

Decoding warpgroups take turns at k-tiles. For a k-tile of 256 weight rows, each warp scheduler issues 400 instructions
of a decoding warp, while the MMAs with 64 rows of x take 512 cycles.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from ...decoding.rows_in_fp8 import RowsInFp8, ScaleAddresses
from ...device.invariant import Invariant
from ...device.swizzle import SWIZZLE_BYTES, swizzled_layout
from ...epilogue.fragments import registers
from ...epilogue.sizes import THREADS
from ...formats import WORD_ELEMENTS
from ...memory.weights import ExpertAddress
from ...schedule.work import WorkTile
from ...tiles import TileConfig
from .. import budget
from ..gemm_policy import GemmPolicy
from .base import WARPS_PER_GROUP, Operands
from .fp8 import PIECE_N, PIECE_REGS, Fp8Mainloop, RowScales
from .gathered_rows import row_indices

WORD_BYTES = 4


class Scales(NamedTuple):
    """Scales of both operands.

    Attributes:
        rows: address of the scales of x's rows.
        weights: block scales and row scales of the weights.
    """

    rows: Int64
    weights: ScaleAddresses


class DecodedRing(Invariant):
    """The ring of decoded k-tiles, with a full and an empty barrier for each slot.

    A CTA numbers its k-tiles over all of its output tiles; k-tile n takes slot n % `slots`.

    Args:
        barriers: shared memory of the barriers.
        slots: number of slots; a slot is the shared memory of one decoded k-tile.
        mma_warps: number of MMA warps, which free a slot together.
    """

    def __init__(self, barriers: cute.Pointer, slots: int, mma_warps: int):
        self.slots = slots
        self.pipeline = pipeline.PipelineAsync.create(
            barrier_storage=barriers,
            num_stages=slots,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, THREADS),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, mma_warps),
            defer_sync=True,
        )

    def slot(self, number: Int32) -> Int32:
        return number % self.slots

    def _phase(self, number: Int32) -> Int32:
        return number // self.slots % 2

    def wait_empty(self, number: Int32) -> None:
        """Wait until the slot for k-tile `number` is free; called by the warpgroup that decodes the k-tile."""
        self.pipeline.sync_object_empty.wait(self.slot(number), self._phase(number) ^ 1)

    def arrive_full(self, number: Int32) -> None:
        """Report k-tile `number` as decoded; called by each thread of the warpgroup that decoded it."""
        cute.arch.mbarrier_arrive(self.pipeline.sync_object_full.get_barrier(self.slot(number)))

    def wait_full(self, number: Int32) -> None:
        """Wait until k-tile `number` is decoded."""
        self.pipeline.sync_object_full.wait(self.slot(number), self._phase(number))

    @cute.jit
    def release(self, number: Int32):
        """Free the slot of k-tile `number`; called by all lanes of an MMA warp, once its wgmmas have read the slot."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.pipeline.sync_object_empty.get_barrier(self.slot(number)))


class DecodedFp8Mainloop(Fp8Mainloop):
    """Mainloop that multiplies E4M3 rows of x (operand A) by E2M1 weight rows of an expert (B), decoded to E4M3.

    Weights are stored as words of 8 elements. `operands.scales` is a `Scales`.

    Attributes:
        warpgroups: number of decoding warpgroups.
    """

    def __init__(self, tile: TileConfig, parts: int, stages: int, policy: GemmPolicy):
        super().__init__(tile, parts, stages, policy, False)
        decoding = budget.DECODING_TO_FP8[tile.m]
        self.warpgroups, self.decoded_stages, self.ahead = decoding.warpgroups, decoding.slots, decoding.ahead
        assert stages >= self.decoded_stages >= self.warpgroups, "see decode"
        self.b_layout = self._smem_layout(self.b_major, tile.n, self.decoded_stages)
        self.w_box = self.part_n, tile.k // WORD_ELEMENTS
        self.narrow_layout = swizzled_layout(Int32, (tile.n, self.w_box[1], stages))
        self.packed_bytes = budget.packed_bytes(tile)
        self.narrow_bytes = stages * self.packed_bytes

    @property
    def stage_bytes(self) -> int:
        return self.tile.m * self.tile.k + self.packed_bytes

    def num_bytes(self, boxes: Int32) -> Int32:
        """Return the bytes that TMA brings into a stage with `boxes` boxes of rows of x."""
        return boxes * (self.tile.box_rows * self.tile.k) + self.packed_bytes

    def operands(
        self, x: cute.Tensor, w: cute.Tensor, address: ExpertAddress, rows: Int64, scales: Scales
    ) -> Operands:  # fmt: skip
        """Host side: make the TMA descriptors of x (rows, k) and of the 4-bit weights (n, word, lo, hi).

        A weight row n lies in memory as 32-bit words of 8 elements. (lo, hi) is the offset of an expert's weights, in
        units of 16 bytes and of 1 GiB (memory/weights.py).

        Args:
            x: the tensor that has the rows of x.
            w: a view (n, word, lo, hi) of all experts' weights.
            address: offsets of the weights' experts.
            rows: address of the indices of x's rows; 0: rows lie in order.
            scales: scales of both operands.
        """
        atom_a, a = self._tma(x, self.a_major, self.tile.box_rows, 1)
        load, layout = cpasync.CopyBulkTensorTileG2SOp(), swizzled_layout(Int32, self.w_box)
        atom_b, b = cpasync.make_tiled_tma_atom(load, w, layout, self.w_box, num_multicast=1)
        return Operands(atom_a, a, atom_b, b, (address,), row_indices(rows, x), scales)

    def weight_row_bytes(self, operands: Operands) -> Int32:
        return cute.size(operands.b, mode=[1]) * WORD_BYTES

    def make_pipeline(self, barriers: cute.Pointer, gathers: Boolean) -> pipeline.PipelineTmaAsync:
        """Make the pipeline of the stages. Also make the ring of decoded weights, whose barriers follow those of the
        stages.
        """
        mma_warps = self.tile.warpgroups_per_tile * WARPS_PER_GROUP
        self.decoded = DecodedRing(barriers + 2 * self.stages, self.decoded_stages, mma_warps)
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.producers(gathers)),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, mma_warps + WARPS_PER_GROUP),
            tx_count=self.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )

    def scales_of_rows(self, operands: Operands) -> Int64:
        return operands.scales.rows

    def lines(self, operands: Operands) -> RowsInFp8:
        """Make the decoder of a thread of a decoding warpgroup."""
        return RowsInFp8(operands.scales.weights, self.parts, self.part_n, self.ahead)

    def decoding_state(self) -> pipeline.PipelineState:
        return self.consumer_state()

    @cute.jit
    def decode(
        self, lines: RowsInFp8, operands: Operands, sB: cute.Tensor, narrow: Int32, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, rank: Int32,
    ):  # fmt: skip
        """Decode every k-tile of an output tile at which it is the turn of decoding warpgroup `rank`.

        Args:
            lines: the thread's decoder, from `lines`.
            sB: shared memory of the slots for decoded k-tiles.
            narrow: shared-memory address of the stages' packed weights.
            state: pipeline state of the tile's first stage.
            rank: the index of this decoding warpgroup.

        Returns:
            The pipeline state after the tile's k-tiles.

        A wait on an mbarrier cannot tell a phase from the phase two before it. Three rules keep a warpgroup from such a
        mistake; correctness depends on each of them:

        1. Turns at k-tiles continue from tile to tile. If they began anew with each tile, a warpgroup could come to a
           slot whose last two k-tiles it did not decode, and mistake the barrier's phase for the one two phases older.
        2. A warpgroup waits for an empty slot of the decoded ring before it waits for the stage. The previous k-tile in
           that stage may be another warpgroup's and not yet loaded; an empty decoded slot proves that this previous
           k-tile was multiplied.
        3. There are at least as many slots as warpgroups, and at least as many stages as slots.
        """
        turns = self.warpgroups
        first = (rank + turns - state.count % turns) % turns
        lines.begin(work, first, first + turns)
        wide, wide_bytes = Int32(sB.iterator.toint()), self.tile.n * SWIZZLE_BYTES
        for k_tile in cutlass.range(self.num_k_tiles(operands, work), unroll=1):
            if state.count % turns == rank:
                slot = wide + self.decoded.slot(state.count) * wide_bytes
                self.decoded.wait_empty(state.count)
                stages.consumer_wait(state)
                lines.decode(narrow + state.index * self.packed_bytes, slot)
                cute.arch.fence_view_async_shared()
                self.decoded.arrive_full(state.count)
                cute.arch.sync_warp()
                stages.consumer_release(state)
                lines.turn(k_tile + 2 * turns)
            state.advance()
        return state

    @cute.jit
    def _skip(self, num_k_tiles: Int32, stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState):
        """Release all stages and decoded k-tiles of an output tile without multiplying, each once it is full. Returns
        the advanced state.
        """
        for _ in cutlass.range(num_k_tiles, unroll=1):
            stages.consumer_wait(state)
            stages.consumer_release(state)
            self.decoded.wait_full(state.count)
            self.decoded.release(state.count)
            state.advance()
        return state

    @cute.jit
    def _multiply(
        self, acc: cute.Tensor, tCrA: cute.Tensor, tCrB: cute.Tensor, scales: RowScales, num_k_tiles: Int32,
        stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState,
    ):  # fmt: skip
        tiled_mma = self.tiled_mma()
        partial = cute.make_rmem_tensor(PIECE_REGS, Float32)
        wgmma_acc = cute.make_tensor(partial.iterator, tiled_mma.partition_shape_C((tiled_mma.shape_mnk[0], PIECE_N)))
        for k_tile in cutlass.range(num_k_tiles, unroll=1):
            stages.consumer_wait(state)
            self.decoded.wait_full(state.count)
            slot = self.decoded.slot(state.count)
            taken = cute.make_rmem_tensor(scales.count, Float32)
            for piece in cutlass.range_constexpr(self.tile.slabs * self.pieces):
                slab, columns = piece // self.pieces, piece % self.pieces
                self._start_piece(tiled_mma, wgmma_acc, (tCrA, slab, state.index), (tCrB, columns, slot))
                if const_expr(piece == 0):
                    taken.store(scales.take(k_tile).load())
                warpgroup.wait_group(0)
                if const_expr(piece == self.tile.slabs * self.pieces - 1):
                    self.decoded.release(state.count)
                    stages.consumer_release(state)
                self._promote(registers(acc, piece * PIECE_REGS, PIECE_REGS), partial, scales, taken, slab, columns)
            state.advance()
        return state
