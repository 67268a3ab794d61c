"""The mainloop of dx = dy w with quantised weights w, contracted over weight rows. In this file dy is called x.

x comes by TMA. A decoding warpgroup writes a k-tile of decoded weights (64 weight rows by tile.n columns) into the same
stage, in the layout in which TMA would bring 16-bit weights (decoding/lines.py). A stage is full after TMA's bytes and
1 arrival of each thread of the decoding warpgroup. Before its arrival, a fence orders the thread's writes before
wgmma's reads.

To decode 64 x 128 weights, each of an SM's warp schedulers issues 150 to 300 instructions of a decoding warp, while the
MMAs of these weights with 128 rows of dy take 512 cycles.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode

from ...decoding.lines import DEPTH, WORD_BYTES, DecodedLines, experts_of
from ...decoding.scales import power
from ...device.gmem import CHUNK_BYTES
from ...device.select import select
from ...epilogue.sizes import THREADS
from ...formats import Format
from ...memory.row_boxes import acquire, num_boxes
from ...schedule.work import WorkTile
from ...tiles import TileConfig
from .base import WARPS_PER_GROUP, Mainloop, Operands, Source
from .decoders import decoder_of, product
from .gathered_rows import NO_ROWS

DECODING_WARPGROUPS = 2
"""Number of decoding warpgroups, which take turns at k-tiles. A warpgroup needs 700 cycles for a k-tile, mostly
latency; the MMAs of a k-tile need 512.
"""
SLOTS = 3
"""Number of slots of a decoding warpgroup in shared memory. A slot has one k-tile of packed weights, which is being
copied ahead or decoded."""


class HopperLines(DecodedLines):
    """Decoder of k-tiles by Hopper's instructions."""

    def pair(self, word: Int32, pair: int, value: Int32) -> Int32:
        element = self.decoder.element
        if element.read_exponent == 0:
            return element.decoded(word, pair, value)
        return product(element.decoded(word, pair, Int32(power(-element.read_exponent))), value)


def slots_bytes(weights: Format, width: int) -> int:
    """Return the bytes of all slots of a decoding warpgroup.

    A slot has a k-tile's packed weights in chunks of 16 bytes, and a 32-bit word of scales for each chunk.

    Args:
        weights: format of the weights.
        width: columns of a k-tile.
    """
    chunks = int(weights.num_bytes(DEPTH * width)) // CHUNK_BYTES
    return SLOTS * chunks * (CHUNK_BYTES + WORD_BYTES)


class DecodedLinesMainloop(Mainloop):
    """Mainloop that multiplies tile.m rows of x (operand A) by an expert's quantised weights (B), contracted over the
    weight rows.

    Rows of x are neighbours and may begin at any row.
    """

    gathers = False

    def __init__(self, dtype: type[cutlass.Numeric], weights: Format, tile: TileConfig, stages: int):
        super().__init__(dtype, tile, OperandMajorMode.K, OperandMajorMode.MN, stages)
        self.format = weights
        self.slots_bytes = slots_bytes(weights, tile.n)
        self.narrow_bytes = DECODING_WARPGROUPS * self.slots_bytes

    def operands(self, x: cute.Tensor, w: cute.Tensor, scales: Int64, columns: Int32) -> Operands:
        """Host side: make the TMA descriptor of x (rows, k), and the addresses of the weights and their scales.

        Args:
            x: [T, weight rows], 16-bit.
            w: [E, rows, words or bytes of a row], quantised weights.
            scales: address of their scales.
            columns: number of w's columns.
        """
        atom, a = self._tma(x, self.a_major, self.tile.box_rows, 1)
        return Operands(atom, a, atom, a, (experts_of(w, scales, self.format, columns),), NO_ROWS)

    def make_pipeline(self, barriers: cute.Pointer, gathers: Boolean) -> pipeline.PipelineTmaAsync:
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1 + THREADS),
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, self.tile.warpgroups_per_tile * WARPS_PER_GROUP
            ),
            tx_count=self.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )

    def num_k_tiles(self, operands: Operands, work: WorkTile) -> Int32:
        return cute.ceil_div(cute.size(operands.a, mode=[1]), self.tile.k)

    @cute.jit
    def load(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, ahead: Int32,
    ):  # fmt: skip
        """Load the rows of x of all k-tiles of one output tile into stages; called by the TMA warp. Returns the
        advanced state."""
        box = self.tile.box_rows, self.tile.k
        source = Source(operands.atom_a, operands.a, 1)
        rows = cute.local_tile(cute.domain_offset((work.row, 0), operands.a), box, (None, None))
        tAsA, tAgA = source.partition(cute.flat_divide(sA, box), rows)
        boxes = num_boxes(self.tile, work)
        num_bytes = boxes * (self.tile.box_rows * self.tile.k * self.dtype.width // 8)
        for k_tile in cutlass.range(self.num_k_tiles(operands, work), unroll=1):
            acquire(stages, state, num_bytes)
            barrier = stages.producer_get_barrier(state)
            for i in cutlass.range(boxes, unroll=1):
                source.copy(tAgA[None, i, k_tile], tAsA[None, i, 0, state.index], barrier)
            state.advance()
        return state

    def lines(self, operands: Operands) -> HopperLines:
        """Make the decoder of a thread of a decoding warpgroup."""
        return HopperLines(self.format, decoder_of(self.format), self.tile.n)

    @cute.jit
    def decode(
        self, lines: HopperLines, operands: Operands, sB: cute.Tensor, slots: Int32,
        stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, work: WorkTile, rank: Int32,
    ):  # fmt: skip
        """Decode every k-tile of an output tile at which it is the turn of decoding warpgroup `rank`.

        The two decoding warpgroups take turns at k-tiles, and the turns continue from tile to tile. Correctness depends
        on this, since a wait on an mbarrier cannot tell a phase from the phase two before it. Number the k-tiles of all
        tiles, and let S >= 2 be the number of stages. Before k-tile t, a warpgroup decoded k-tile t - 2. For that, it
        waited until k-tile t - 2 - S was multiplied, and therefore k-tile t - 2S. So its wait for the stage of k-tile t
        can end only when k-tile t - S is multiplied, even if the other warpgroup decoded k-tile t - S.

        Args:
            lines: the thread's decoder, from `lines`.
            sB: shared memory for decoded weights, all stages.
            slots: shared-memory address of the warpgroup's slots. A slot has a k-tile of packed weights.
            state: pipeline state of the tile's first stage.
            rank: 0 or 1, the index of this decoding warpgroup.

        Returns:
            The pipeline state after the tile's k-tiles.
        """
        sources = lines.sources(operands.extra[0], work.expert, work.n_tile)
        num_k_tiles = self.num_k_tiles(operands, work)
        stage_bytes = self.tile.n * self.tile.k * self.dtype.width // 8
        turns = DECODING_WARPGROUPS
        first = (rank + turns - state.count % turns) % turns
        last = slots + (SLOTS - 1) * lines.slot_bytes
        slot_before = last
        for i in cutlass.range_constexpr(SLOTS - 1):
            self._begin(lines, sources, slots + i * lines.slot_bytes, first + i * turns, num_k_tiles, slot_before)
            slot_before = slots + i * lines.slot_bytes
        slot, free = slots, last
        for k_tile in cutlass.range(num_k_tiles, unroll=1):
            if state.count % turns == rank:
                self._begin(lines, sources, free, k_tile + (SLOTS - 1) * turns, num_k_tiles, slot_before)
                slot_before = free
                cute.arch.cp_async_wait_group(SLOTS - 1)
                chunks, scales = lines.read(slot, lines.times)
                stages.sync_object_empty.wait(state.index, state.phase)
                lines.write(chunks, scales, Int32(sB.iterator.toint()) + state.index * stage_bytes, lines.times)
                cute.arch.fence_view_async_shared()
                cute.arch.mbarrier_arrive(stages.sync_object_full.get_barrier(state.index))
                free = slot
                slot = select(slot == last, slots, slot + lines.slot_bytes)
            state.advance()
        return state

    @cute.jit
    def _begin(
        self, lines: HopperLines, sources: Any, slot: Int32, k_tile: Int32, num_k_tiles: Int32, slot_before: Int32
    ):  # fmt: skip
        """Start copying packed weights of k-tile number `k_tile` into `slot`, and start loading its scales into
        registers. Nothing is copied past the last k-tile.

        Also write the scales that the previous call loaded to that call's slot, `slot_before`. Each call commits one
        cp.async group, even an empty one, so that wait counts stay fixed.

        Args:
            lines: the thread's decoder.
            sources: the addresses of the thread's weights and scales in the tile (`DecodedLines.sources`).
            slot, slot_before: shared-memory addresses of slots, each for a k-tile of packed weights.
        """
        if k_tile < num_k_tiles:
            lines.copy(sources, slot, k_tile * DEPTH)
        lines.start_loads(sources, k_tile * DEPTH, slot_before)
        cute.arch.cp_async_commit_group()
