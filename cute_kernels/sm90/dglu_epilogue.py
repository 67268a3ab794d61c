"""Epilogue of the backward of a fused FC1: dm = dy @ w2 in the accumulators becomes dpreact, act and d_row_scale.

    act = f(a, u) s        dpreact = (dm s f_a, dm s f_u)        d_s[row] = sum_i dm_i f_i

The activation is recomputed from the preactivation. The row sum spans the tiles of a row, which are on other CTAs: each
warpgroup leaves its partial sums in a workspace and counts itself in; the one that comes last for its rows adds the
partials in the order of the tiles, whoever came when, and takes the count back to zero. So the sum is complete in one
launch and has the same bits every time.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .. import activation as act
from ..gmem import vector_at
from ..specs import GroupedDgluSpec
from .epilogue import Addends, Epilogue, WarpgroupState, chunk_of, registers, store_gate_pair
from .store import CHUNK_REGS, COLS, ROWS, SLOTS, Slots, halves
from .tile_scheduler import Groups, WorkTile


class RowScaleGradient(NamedTuple):
    """Addresses of d_row_scale (float32 [T], 0: not wanted), of partial sums (float32 [n_tiles, T]) and of counters."""

    result: Int64
    partials: Int64
    counters: Int64


class DgluInputs(NamedTuple):
    """Run-time inputs: preact [T, 2I or I], the row scale's address, and where the row scale's gradient goes."""

    addends: Addends
    params: act.ActivationParams
    bias_size: Int32
    preact: cute.Tensor
    width: Int32
    num_n_tiles: Int32
    d_scale: RowScaleGradient


def _pair(values: cute.Tensor, index: int) -> cute.Tensor:
    return cute.make_tensor(values.iterator + 2 * index, cute.make_layout(2))


class DgluState(WarpgroupState):
    def __init__(self, inputs: DgluInputs, groups: Groups, slots: Slots, sBias: cute.Tensor):
        super().__init__(inputs, slots, sBias)
        self.preact = inputs.preact
        self.width = inputs.width
        self.num_n_tiles = inputs.num_n_tiles
        self.d_scale = inputs.d_scale
        self.num_rows = groups.rows


class DgluEpilogue(Epilogue):
    """Stores: dpreact, then act. Slots alternate over act, dpreact, dpreact of each chunk of 64 columns."""

    def __init__(self, dtype: type[cutlass.Numeric], spec: GroupedDgluSpec):
        self.spec = spec
        chunks = spec.tile.n // COLS
        super().__init__(dtype, spec.tile, extra_chunks=chunks * (2 if spec.gated else 1))
        self.glu_layout = spec.glu_layout
        self.prefetches = not spec.tile.takes_turns

    def store_views(self, outputs: tuple) -> tuple:
        if self.spec.gated and self.glu_layout == "concat":
            return halves(outputs[0]), outputs[1]
        return outputs

    def make_state(self, inputs: DgluInputs, groups: Groups, slots: Slots, row_smem: cute.Tensor) -> DgluState:
        return DgluState(inputs, groups, slots, row_smem)

    @cute.jit
    def begin(self, state: DgluState, work: WorkTile, first_slab: Int32):
        """The row scales and, where no other warpgroup's MMAs hide its latency, the first chunk's preactivations."""
        scales = super().begin(state, work, first_slab)
        return (scales, self._load_preact(state, work, first_slab, 0)) if self.prefetches else scales

    @cute.jit
    def finish(
        self, state: DgluState, acc: cute.Tensor, prefetched: tuple, stores: tuple, work: WorkTile, first_slab: Int32
    ):
        all_scales, raw = prefetched if const_expr(self.prefetches) else (prefetched, None)
        sums = cute.make_rmem_tensor(2, Float32)
        chunks = self.tile_n // COLS
        per_chunk = 3 if const_expr(self.spec.gated) else 2
        for i in cutlass.range_constexpr(self.slabs * chunks):
            slab, chunk = i // chunks, i % chunks
            if const_expr(chunk == 0):
                sums.fill(0.0)
            scales = registers(all_scales, 2 * slab, 2)
            row = work.row + (first_slab + slab) * ROWS
            column = work.n_tile * self.tile_n + chunk * COLS
            slot = i * per_chunk % SLOTS
            if const_expr(not self.prefetches):
                raw = self._load_preact(state, work, first_slab + slab, chunk)
            outputs, d_a, d_u = self._backward(state, chunk_of(acc, i), raw, scales, sums)
            if const_expr(self.prefetches and i + 1 < self.slabs * chunks):
                raw = self._load_preact(state, work, first_slab + (i + 1) // chunks, (i + 1) % chunks)
            state.slots.put(outputs, stores[1], stores[1].tile(work, row, column), slot)
            if const_expr(self.spec.gated):
                store_gate_pair(
                    state.slots, self.glu_layout, d_a, d_u, stores[0], work, row, column, (slot + 1) % SLOTS
                )
            else:
                state.slots.put(d_a, stores[0], stores[0].tile(work, row, column), (slot + 1) % SLOTS)
            if const_expr(chunk + 1 == chunks):
                if state.d_scale.result != 0:
                    self._reduce(state, sums, work, row)

    @cute.jit
    def _load_preact(self, state: DgluState, work: WorkTile, slab: Int32, chunk: cutlass.Constexpr[int]) -> tuple:
        """This thread's preactivations of one chunk, 16-bit, in the accumulators' order; zeros where there are none.

        A chunk that lies inside the group and the width, as most do, is read without a branch, at fixed distances from
        four addresses, so that its 32 loads are under way at once and cost no registers but their results.
        """
        dtype = state.preact.element_type
        a, u = cute.make_rmem_tensor(CHUNK_REGS, dtype), cute.make_rmem_tensor(CHUNK_REGS, dtype)
        a.fill(0.0)
        u.fill(0.0)
        row = work.row + slab * ROWS
        column = work.n_tile * self.tile_n + chunk * COLS
        thread_row = row + state.row_in_slab
        thread_column = column + state.lane % 4 * 2
        if (row + ROWS <= work.group_end) & (column + COLS <= state.width):
            for i in cutlass.range_constexpr(CHUNK_REGS // 2):
                line = state.preact[thread_row + i % 2 * 8, None]
                self._load_pairs(state, line, thread_column, i // 2 * 8, _pair(a, i), _pair(u, i))
        else:
            for i in cutlass.range_constexpr(CHUNK_REGS // 2):
                at_row = thread_row + i % 2 * 8
                if (at_row < work.group_end) & (thread_column + i // 2 * 8 < state.width):
                    line = state.preact[at_row, None]
                    self._load_pairs(state, line, thread_column, i // 2 * 8, _pair(a, i), _pair(u, i))
        return a, u

    def _load_pairs(
        self, state: DgluState, line: cute.Tensor, column: Int32, ahead: int, a: cute.Tensor, u: cute.Tensor
    ) -> None:
        """Columns column + ahead and the next, of a and of u, from a row of the preactivation laid as `glu_layout`.

        `column` is even and less than 8 into a chunk of 64; `ahead` is a multiple of 8 in it.
        """

        def elements(first: Int32, distance: int, count: int) -> cute.Tensor:
            at = line.iterator + first // count * count + distance
            return cute.make_tensor(at.align(2 * count), cute.make_layout(count))

        if not self.spec.gated:
            a.store(elements(column, ahead, 2).load())
        elif self.glu_layout == "concat":
            a.store(elements(column, ahead, 2).load())
            u.store(elements(state.width + column, ahead, 2).load())
        elif self.glu_layout == "interleaved32":
            first = 2 * (column // COLS * COLS) + column % COLS
            distance = ahead // 32 * 64 + ahead % 32
            a.store(elements(first, distance, 2).load())
            u.store(elements(first, distance + 32, 2).load())
        else:
            quad = cute.make_rmem_tensor(4, state.preact.element_type)
            quad.store(elements(2 * column, 2 * ahead, 4).load())
            a[0], u[0], a[1], u[1] = quad[0], quad[1], quad[2], quad[3]

    @cute.jit
    def _backward(self, state: DgluState, dm: cute.Tensor, raw: tuple, scales: cute.Tensor, sums: cute.Tensor) -> tuple:
        """The scaled activation and the gradients of a and u, 16-bit; adds to the row sums.

        Results are narrowed as they are made: in float32 they and the accumulators would not fit 240 registers.
        """
        results = tuple(cute.make_rmem_tensor(CHUNK_REGS, self.dtype) for _ in range(3))
        for i in cutlass.range(CHUNK_REGS // 2, unroll_full=True):
            scale = scales[i % 2]
            pairs = tuple(cute.make_rmem_tensor(2, Float32) for _ in range(3))
            for j in cutlass.range_constexpr(2):
                at = 2 * i + j
                scaled = dm[at] * scale
                if const_expr(self.spec.gated):
                    gated = act.GATED_BACKWARD[self.spec.activation]
                    value, slope_a, slope_u = gated(Float32(raw[0][at]), Float32(raw[1][at]), state.params)
                    pairs[2][j] = scaled * slope_u
                else:
                    value, slope_a = act.UNGATED_BACKWARD[self.spec.activation](Float32(raw[0][at]))
                pairs[0][j] = value * scale
                pairs[1][j] = scaled * slope_a
                sums[i % 2] += dm[at] * value
            for result, pair in zip(results, pairs, strict=True):
                if const_expr(self.spec.gated or result is not results[2]):
                    _pair(result, i).store(pair.load().to(self.dtype))
        return results

    @cute.jit
    def _reduce(self, state: DgluState, sums: cute.Tensor, work: WorkTile, row: Int32):
        """Add this tile's share of d_row_scale; the last of a row's tiles completes it."""
        partials = vector_at(Float32, state.d_scale.partials)
        for i in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction(sums[i], lambda x, y: x + y, threads_in_group=4)
            at_row = row + state.row_in_slab + 8 * i
            if (state.lane % 4 == 0) & (at_row < work.group_end):
                partials[work.n_tile * state.num_rows + at_row] = total
        cute.arch.fence_acq_rel_gpu()
        state.slots.sync()
        if (state.slots.thread < 32) & (row < work.group_end):
            # 64-row slabs of different groups differ in this index: see the bound on `counters`.
            counter = vector_at(Int32, state.d_scale.counters).iterator + (row // ROWS + work.expert)
            arrived = Int32(0)
            if state.lane == 0:
                arrived = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
            arrived = cute.arch.shuffle_sync(arrived, 0)
            if arrived == state.num_n_tiles - 1:
                cute.arch.fence_acq_rel_gpu()
                self._complete(state, partials, work, row)
                if state.lane == 0:
                    vector_at(Int32, state.d_scale.counters)[row // ROWS + work.expert] = Int32(0)

    @cute.jit
    def _complete(self, state: DgluState, partials: cute.Tensor, work: WorkTile, row: Int32):
        """Sum a slab's partials in the order of the tiles; two rows a lane."""
        for i in cutlass.range_constexpr(ROWS // 32):
            at_row = row + state.lane + 32 * i
            if at_row < work.group_end:
                total = Float32(0.0)
                for tile in cutlass.range(state.num_n_tiles, unroll=4):
                    total += partials[tile * state.num_rows + at_row]
                vector_at(Float32, state.d_scale.result)[at_row] = total
