"""The mainloop of quantised weights that are decoded in registers, for 16-bit MMAs.

wgmma reads its first operand from registers or shared memory and its second from shared memory, so decoded weights must
be the first operand, and the GEMM is computed transposed: y^T = w x^T. Weight rows are the rows of the MMA and rows of
x its columns. A warpgroup has one or two slabs of 64 weight rows. It decodes a k-tile of 128 in steps of 32 elements
while the wgmmas of the previous step run; the fragments of two steps alternate.

The fragment of one wgmma, 64 x 16 weights, gives thread t of the warpgroup four registers: for r and h = 0, 1, register
r + 2 h has two neighbouring elements of row 16 (t / 32) + (t % 32) / 4 + 8 r, from column 8 h + 2 (t % 4) on. For E4M3
these two elements are 2 bytes of shared memory; for E2M1 they are a part of one word, which holds the thread's 8
elements of the row and step. The 2 bytes or the word that a thread reads from shared memory at once are called a share.
The swizzle puts the 8 rows of a load (8 x 8 or 8 x 16 bytes) into different banks.

swapped_rows.py says which weight rows, and which of their bytes, a thread has; the format's decoder turns the bytes
into 16-bit numbers.
"""

from __future__ import annotations

import itertools
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ...device.swizzle import SWIZZLE_BYTES, swizzle_of, swizzled_layout
from ...epilogue.fragments import TileShare
from ...epilogue.sizes import ROWS
from ...formats import Format
from ...memory.row_boxes import acquire, num_boxes
from ...memory.weights import ExpertAddress, GateRows, expert_offset, lo_hi
from ...schedule.work import WorkTile
from ...tiles import TileConfig
from ..budget import stage_k
from ..gemm_policy import GemmPolicy
from ..split_depth import KTiles
from ..swapped_rows import ROW_HALVES, SWIZZLE_CHUNK, SwappedRows, chunk_of_k
from ..turns import Turns
from .base import BEFORE_MMA, MMA_K, MmaTile, Operands
from .decoders import decoder_of, product
from .gathered_rows import NO_ROWS
from .weight_scales import SCALES_PER_WORD, ScaleGrid, WeightScales, thread_of_warpgroup
from .weights_first import WeightsFirst

# STEP_K: elements of k that are decoded in one step, since a word of E2M1 holds a thread's 8 elements of each 32. STEP:
# wgmmas of a step.
STEP_K = 32
STEP = STEP_K // MMA_K
# FRAGMENT_REGS: 32-bit registers of a slab's fragment for one wgmma; each holds a pair of elements, and the pairs lie
# in two rows. WGMMA_PAIRS, STEP_PAIRS: pairs of one row in a wgmma and in a step.
FRAGMENT_REGS = 4
WGMMA_PAIRS = FRAGMENT_REGS // ROW_HALVES
STEP_PAIRS = STEP * WGMMA_PAIRS


class DecodingMainloop(WeightsFirst):
    """Mainloop that multiplies ranges of an expert's quantised weight rows (operand A) by tile.m neighbouring rows of x
    (B), which may begin at any row.

    `operands.scales` is the address of the weights' scale bytes, [E, N, K / block]. A k-tile takes one or two stages.

    Args:
        dtype: element type of x and of decoded weights.
        weights: format of the weights.
        parts: number of ranges of weight rows in a tile: 2 (both halves) for a gated layer, else 1.
        layout: order of the weight rows, one of specs.LAYOUT_FORMS.
    """

    gathers = False
    scales_type = WeightScales
    looks_ahead = BEFORE_MMA  # during a tile's last k-tile the first scales of the next tile are loaded
    scales_are_ready = True

    def __init__(
        self, dtype: type[cutlass.Numeric], weights: Format, tile: TileConfig, parts: int, layout: str, stages: int,
        policy: GemmPolicy,
    ):  # fmt: skip
        self.format = weights
        self.decoder = decoder_of(weights)
        self.dtype = self.b_dtype = dtype
        self.a_dtype = self.decoder.element.dtype
        self.policy = policy
        self.tile = tile
        self.parts = parts
        self.part_n = tile.n // parts
        self.rows = SwappedRows(tile, parts)
        self.layout = layout
        self.stages = stages
        self.x_box = tile.box_rows, SWIZZLE_BYTES * 8 // dtype.width
        self.stage_k = stage_k(tile)
        self.row_bytes = weights.num_bytes(self.stage_k)
        self.w_box = self.part_n, self.row_bytes * 8 // self.a_dtype.width
        self.a_layout = swizzled_layout(self.a_dtype, (tile.n, self.w_box[1], stages))
        self.b_layout = swizzled_layout(dtype, (tile.m, self.stage_k, stages))

    @property
    def stage_bytes(self) -> int:
        return (self.tile.n * self.format.bits + self.tile.m * self.dtype.width) * self.stage_k // 8

    def tiled_mma(self, columns: int | None = None) -> cute.TiledMma:
        """Make the MMA: wgmmas of 64 x `columns` of one warpgroup, A from registers. columns: rows of x; None: all of a
        tile."""
        k_major = OperandMajorMode.K
        return sm90_utils.make_trivial_tiled_mma(
            self.dtype, self.dtype, k_major, k_major, Float32, (1, 1, 1), (ROWS, columns or self.tile.m),
            warpgroup.OperandSource.RMEM,
        )  # fmt: skip

    def operands(
        self, x: cute.Tensor, w: cute.Tensor, address: ExpertAddress, rows: Int32, scales: Int64, gate: GateRows
    ) -> Operands:
        """Host side: make the TMA descriptors of weights (n, k, lo, hi) and x (row, k).

        Args:
            x: [T, K], the rows of x.
            w: the view (n, k, lo, hi) of all experts' weights (memory/weights.py).
            address: offsets of the weights' experts.
            rows: number of weight rows of an expert.
            scales: address of the weights' scales.
            gate: order of a gated layer's weight rows.
        """
        load = cpasync.CopyBulkTensorTileG2SOp()
        w_box, x_box = self.w_box, self.x_box
        atom_a, a = cpasync.make_tiled_tma_atom(load, w, swizzled_layout(self.a_dtype, w_box), w_box)
        atom_b, b = cpasync.make_tiled_tma_atom(load, x, swizzled_layout(self.dtype, x_box), x_box)
        return Operands(atom_a, a, atom_b, b, (address, rows, gate), NO_ROWS, scales)

    def weight_row_bytes(self, operands: Operands) -> Int32:
        return self.format.num_bytes(cute.size(operands.b, mode=[1]))

    def num_k_tiles(self, operands: Operands, work: WorkTile) -> Int32:
        return cute.ceil_div(cute.size(operands.b, mode=[1]), self.tile.k)

    def num_stages(self, operands: Operands, work: WorkTile) -> Int32:
        return self.num_k_tiles(operands, work) * (self.tile.k // self.stage_k)

    @cute.jit
    def _fill(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, ahead: Int32, count: Int32,
        with_rows: cutlass.Constexpr[bool], policy: Int64 | None,
    ):  # fmt: skip
        """Fill `count` stages, the first `ahead` of which already have their weights. Returns the advanced state.

        Args:
            sA, sB: shared memory of all stages: weights, and rows of x.
            with_rows: True: load rows of x, too; False: load weights alone.
            policy: L2 policy of the weights' loads; None: the default.
        """
        address, *_ = operands.extra
        w_box, x_box = self.w_box, self.x_box
        tAsA, tAgA = _partition(
            operands.atom_a, cute.flat_divide(sA, w_box), cute.local_tile(operands.a, w_box, (None, None, None, None))
        )
        x_rows = cute.domain_offset((work.row, 0), operands.b)
        x_tiles = cute.local_tile(x_rows, x_box, (None, None))
        tBsB, tBgB = _partition(operands.atom_b, cute.flat_divide(sB, x_box), x_tiles)
        first = expert_offset(address, work.expert)
        boxes, lines = num_boxes(self.tile, work), self.stage_k // x_box[1]
        num_bytes = boxes * (x_box[0] * lines * SWIZZLE_BYTES) + self.tile.n * self.row_bytes
        for stage in cutlass.range(count, unroll=1):
            barrier = stages.producer_get_barrier(state)
            if stage >= ahead:
                acquire(stages, state, num_bytes)
                for part in cutlass.range_constexpr(self.parts):
                    lo, hi = lo_hi(first + part * address.part_units)
                    source = tAgA[None, work.n_tile, stage, lo, hi]
                    target = tAsA[None, part, 0, state.index]
                    cute.copy(operands.atom_a, source, target, tma_bar_ptr=barrier, cache_policy=policy)
            if const_expr(with_rows):
                for box in cutlass.range(boxes, unroll=1):
                    for i in cutlass.range_constexpr(lines):
                        source = tBgB[None, box, stage * lines + i]
                        cute.copy(operands.atom_b, source, tBsB[None, box, i, state.index], tma_bar_ptr=barrier)
            state.advance()
        return state

    def fragments(self, sA: cute.Tensor, sB: cute.Tensor, warpgroup_index: Int32) -> tuple[Int32, list[cute.Tensor]]:
        """Return the shared-memory address of a thread's first share of A (2 bytes or a word) in the first stage, and
        B of all stages as wgmma descriptors: for each number in `column_counts`, that many first rows of x.
        """
        thread = thread_of_warpgroup()
        lane = thread % 32
        # Rows 8 apart have the same swizzle, so one address serves all rows of a thread.
        swizzled = swizzle_of(lane // 4, self.row_bytes) * SWIZZLE_CHUNK + lane % 4 * self.decoder.element.share_bytes
        first = Int32(sA.iterator.toint()) + self.rows.column(0, warpgroup_index, thread) * self.row_bytes + swizzled
        rows_of_x = []
        for count in self.column_counts:
            mma = self.tiled_mma(count)
            some = cute.local_tile(sB, (count, self.stage_k, self.stages), (0, 0, 0))
            rows_of_x.append(mma.make_fragment_B(mma.get_slice(0).partition_B(some)))
        return first, rows_of_x

    @property
    def column_counts(self) -> tuple[int, ...]:
        """Numbers of rows of x for which there is a loop of MMAs: all tile.m rows and, in some kernels, also half of
        them, for tiles of which a group fills at most half. With 8-bit weights, only kernels with tile.m of at least
        128 have the second loop.
        """
        is_worth = self.tile.m >= 128 or self.format.bits < 8
        return (self.tile.m, self.tile.m // 2) if is_worth else (self.tile.m,)

    def accumulators(self) -> cute.Tensor:
        """Allocate a thread's accumulators: (registers of a wgmma, slab, 1). A slab is 64 weight rows."""
        shape = (self.tile.slabs * ROWS, self.tile.m)
        return cute.make_rmem_tensor(self.tiled_mma().partition_shape_C(shape), Float32)

    def scales(self, operands: Operands, share: TileShare) -> Any:
        """Make the object that holds a thread's scales for all of its tiles."""
        _, expert_rows, gate = operands.extra
        k = cute.size(operands.b, mode=[1])
        blocks, k_tiles = self.format.num_scales(k), KTiles(self.tile.splits, cute.ceil_div(k, self.tile.k))
        words = self.format.scale_words(self.tile.k)
        grid = ScaleGrid(operands.scales, expert_rows, blocks, k_tiles, words, share, gate)
        return self.scales_type(grid, self.rows, self.layout, self.decoder)

    @cute.jit
    def mma(
        self, acc: cute.Tensor, fragments: tuple, scales: WeightScales, tile: MmaTile,
        stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, turns: Turns,
    ):  # fmt: skip
        """Compute acc = A B^T for a tile; called by a whole warpgroup. Returns the state after the tile's k-tiles.

        If the group fills at most half of the tile's rows of x and there is a loop for half of them (`column_counts`),
        only this half is multiplied; the accumulators of the other rows keep their values. A branch may choose the
        loop, unlike in `base.Mainloop`, since no wgmma is in flight where a loop begins or ends.
        """
        first, rows_of_x = fragments
        whole, half, m = rows_of_x[0], rows_of_x[-1], self.tile.m
        if const_expr(self.tile.splits > 1):
            if scales.k_tiles.count == 0:
                acc.fill(0.0)
            self._k_tiles(acc, first, whole, m, scales, tile, stages, scales.k_tiles.state(state))
            state.advance(scales.k_tiles.total)
        elif const_expr(len(rows_of_x) == 1):
            state = self._k_tiles(acc, first, whole, m, scales, tile, stages, state)
        elif tile.work.group_end - tile.work.row > m // 2:
            state = self._k_tiles(acc, first, whole, m, scales, tile, stages, state)
        else:
            registers = cute.make_layout(((2, 2, m // 16), self.tile.slabs, 1), stride=((1, 2, 4), m // 2, 0))
            some = cute.make_tensor(acc.iterator, registers)
            state = self._k_tiles(some, first, half, m // 2, scales, tile, stages, state)
        scales.write_nan_rows(acc)
        return state

    @cute.jit
    def _k_tiles(
        self, acc: cute.Tensor, first: Int32, tCrB: cute.Tensor, columns: cutlass.Constexpr[int], scales: WeightScales,
        tile: MmaTile, stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState,
    ):  # fmt: skip
        """Multiply all k-tiles of a tile by its first `columns` rows of x, into `acc`. Returns the advanced state.

        While the wgmmas of a step (32 elements of k) run, the next step is decoded, even if it belongs to the next
        k-tile. At the end of the loop body no wgmma may be in flight, or the compiler would run all of them one by one.
        """
        tiled_mma = self.tiled_mma(columns)
        shape = tiled_mma.partition_shape_A((self.tile.slabs * ROWS, STEP_K))
        buffers = [tiled_mma.make_fragment_A(shape) for _ in range(2)]
        steps, stage_steps = self.tile.k // STEP_K, self.stage_k // STEP_K
        num_k_tiles, splits = scales.k_tiles.count, scales.k_tiles.splits
        if num_k_tiles > 0:
            self._open(first, buffers[0], scales, stages, state)
        for k_tile in cutlass.range(num_k_tiles, unroll=1):
            # Loads begin at the top of a round and are taken at its bottom. If they were carried into the next round,
            # the compiler would copy their registers and therefore wait for the loads.
            scales.start_loads(k_tile + 1, tile.next_work)
            first_stage = state.clone()
            state.advance(splits)
            last_stage = first_stage
            if const_expr(steps > stage_steps):
                last_stage = state.clone()
                state.advance()
            for step in cutlass.range_constexpr(steps):
                fragment, following = buffers[step % 2], buffers[(step + 1) % 2]
                stage, in_stage = (first_stage if step < stage_steps else last_stage).index, step % stage_steps
                if const_expr(in_stage + 1 < stage_steps):
                    shares = self._read(first, stage, in_stage + 1)
                warpgroup.fence()
                for i in cutlass.range_constexpr(STEP):
                    tiled_mma.set(
                        warpgroup.Field.ACCUMULATE, Boolean(k_tile > 0) if const_expr(step + i == 0) else True
                    )
                    b = tCrB[None, None, in_stage * STEP + i, stage]
                    cute.gemm(tiled_mma, acc, fragment[None, None, i], b, acc)
                warpgroup.commit_group()
                warpgroup.wait_group(1)
                if const_expr(step == stage_steps):
                    stages.consumer_release(first_stage)
                if const_expr(in_stage + 1 < stage_steps):
                    self._decode(shares, scales, following, step + 1)
                elif const_expr(step + 1 < steps):
                    stages.consumer_wait(last_stage)
                    self._decode(self._read(first, last_stage.index, 0), scales, following, step + 1)
                elif k_tile + 1 < num_k_tiles:
                    self._open(first, following, scales, stages, state)
            warpgroup.wait_group(0)
            stages.consumer_release(last_stage)
        return state

    @cute.jit
    def _open(
        self, first: Int32, fragment: cute.Tensor, scales: WeightScales, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState,
    ):  # fmt: skip
        """Make the next k-tile's scales the current ones, wait for its first stage, and decode its first step into
        `fragment`."""
        scales.take()
        stages.consumer_wait(state)
        self._decode(self._read(first, state.index, 0), scales, fragment, 0)

    def _read(self, first: Int32, stage: Int32, step: int) -> cute.Tensor:
        """Read a thread's shares (2 bytes or a word each) of a step from a stage, as a tensor (share of a row, row).

        Args:
            first: shared-memory address of the thread's first share in the first stage.
            stage: index of the stage.
            step: index of the step (32 elements of k) in the stage.
        """
        pairs = self.decoder.element.pairs
        shares = cute.make_rmem_tensor((STEP_PAIRS // pairs, self.rows.count), Int32)
        for i in range(STEP):
            chunk, inside = chunk_of_k(self.format, step * STEP_K + i * MMA_K)
            at_chunk = (first + stage * (self.tile.n * self.row_bytes)) ^ Int32(chunk * SWIZZLE_CHUNK)
            for slab, register in itertools.product(range(self.tile.slabs), range(FRAGMENT_REGS)):
                half, row = divmod(register, ROW_HALVES)
                pair, row = WGMMA_PAIRS * i + half, ROW_HALVES * slab + row
                if pair % pairs == 0:
                    beside = half * self.format.num_bytes(MMA_K // 2)
                    at = at_chunk + (self.rows.distance(row) * self.row_bytes + inside + beside)
                    shares[pair // pairs, row] = self.decoder.element.read(at)
        return shares

    def _decode(self, shares: cute.Tensor, scales: WeightScales, fragment: cute.Tensor, step: int) -> None:
        """Decode a thread's shares (2 bytes or a word each) of a step into `fragment`, an MMA operand in registers.

        step: index of the step (32 elements of k) in the k-tile.
        """
        registers = cute.recast_tensor(fragment, Int32)
        element, pairs = self.decoder.element, self.decoder.element.pairs
        count = self.format.num_scales(STEP_K)
        word, first = divmod(step * count, SCALES_PER_WORD)
        for row in range(self.rows.count):
            slab, half = divmod(row, ROW_HALVES)
            multipliers = self.decoder.scales.multipliers(scales.words[word, row], first, count)
            for number in range(STEP_PAIRS):
                share, pair = divmod(number, pairs)
                i, beside = divmod(element.place(number, step), WGMMA_PAIRS)
                decoded = element.decoded(shares[share, row], pair, multipliers[i * count // STEP])
                registers[half + ROW_HALVES * beside, slab, i] = decoded
        if self.decoder.scales.first_large is not None:
            self._enlarge(scales, registers, step)

    @cute.jit
    def _enlarge(self, scales: WeightScales, registers: cute.Tensor, step: cutlass.Constexpr[int]):
        """Multiply decoded weights a second time, if their scale is large: by the factor that is still missing.

        A large scale's multiplier exceeds bfloat16's range, so `_decode` has multiplied by the greatest multiplier in
        range. The missing factor is `Scales.rest_of_multiplier` (decoding/scales.py), 1 for all other scales. Few
        weights have large scales. So a warp without any in this k-tile skips the second product.

        Args:
            scales: the thread's scales of the k-tile.
            registers: the decoded weights of the step.
            step: index of the step (32 elements of k) in the k-tile.
        """
        if cute.arch.vote_any_sync(scales.large[0] != 0):
            for slab in cutlass.range_constexpr(self.tile.slabs):
                for half in cutlass.range_constexpr(ROW_HALVES):
                    rest = self.decoder.scales.rest_of_multiplier(scales.words[0, ROW_HALVES * slab + half], step)
                    for i in cutlass.range_constexpr(STEP):
                        for register in cutlass.range_constexpr(half, FRAGMENT_REGS, ROW_HALVES):
                            registers[register, slab, i] = product(registers[register, slab, i], rest)


def _partition(atom: cute.CopyAtom, smem: cute.Tensor, gmem: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """Partition shared and global memory for a TMA load of boxes; the first two modes of both tensors are (rows, k)."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )
