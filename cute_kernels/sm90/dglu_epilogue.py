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
from .epilogue import Addends, Epilogue, WarpgroupState, chunk_of, store_gate_pair
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
        super().__init__(dtype, spec.tile.n, extra_chunks=chunks * (2 if spec.gated else 1))
        self.glu_layout = spec.glu_layout

    def store_views(self, outputs: tuple) -> tuple:
        if self.spec.gated and self.glu_layout == "concat":
            return halves(outputs[0]), outputs[1]
        return outputs

    def make_state(self, inputs: DgluInputs, groups: Groups, slots: Slots, row_smem: cute.Tensor) -> DgluState:
        return DgluState(inputs, groups, slots, row_smem)

    @cute.jit
    def finish(
        self, state: DgluState, acc: cute.Tensor, scales: cute.Tensor, stores: tuple, work: WorkTile, index: Int32
    ):
        row = work.row + index * ROWS
        sums = cute.make_rmem_tensor(2, Float32)
        sums.fill(0.0)
        per_chunk = 3 if const_expr(self.spec.gated) else 2
        for chunk in cutlass.range_constexpr(self.tile_n // COLS):
            column = work.n_tile * self.tile_n + chunk * COLS
            slot = chunk * per_chunk % SLOTS
            a, u = self._load_preact(state, work, row, column)
            outputs = self._backward(state, chunk_of(acc, chunk), a, u, scales, sums)
            state.slots.put(outputs, stores[1], stores[1].tile(work, row, column), slot)
            if const_expr(self.spec.gated):
                store_gate_pair(state.slots, self.glu_layout, a, u, stores[0], work, row, column, (slot + 1) % SLOTS)
            else:
                state.slots.put(a, stores[0], stores[0].tile(work, row, column), (slot + 1) % SLOTS)
        if state.d_scale.result != 0:
            self._reduce(state, sums, work, row)

    @cute.jit
    def _load_preact(self, state: DgluState, work: WorkTile, row: Int32, column: Int32):
        """This thread's preactivations of one chunk, in the accumulators' order; zeros past the group and the width."""
        a = cute.make_rmem_tensor(CHUNK_REGS, Float32)
        u = cute.make_rmem_tensor(CHUNK_REGS, Float32)
        a.fill(0.0)
        u.fill(0.0)
        for i in cutlass.range(CHUNK_REGS // 2, unroll_full=True):
            at_row = row + state.row_in_tile + i % 2 * 8
            at_column = column + i // 2 * 8 + state.lane % 4 * 2
            if (at_row < work.group_end) & (at_column < state.width):
                line = state.preact[at_row, None]
                a_pair, u_pair = self._pairs(state, line, at_column)
                a[2 * i], a[2 * i + 1] = a_pair
                if const_expr(self.spec.gated):
                    u[2 * i], u[2 * i + 1] = u_pair
        return a, u

    def _pairs(self, state: DgluState, line: cute.Tensor, column: Int32):
        """Two neighbouring columns of a and of u from a row of the preactivation, as `glu_layout` lays them."""

        def elements(first: Int32, count: int) -> list[Float32]:
            values = cute.make_rmem_tensor(count, state.preact.element_type)
            values.store(cute.local_tile(line, (count,), (first // count,)).load())
            return [Float32(values[i]) for i in range(count)]

        if not self.spec.gated:
            return elements(column, 2), None
        if self.glu_layout == "concat":
            return elements(column, 2), elements(state.width + column, 2)
        if self.glu_layout == "interleaved32":
            first = column // 32 * 64 + column % 32
            return elements(first, 2), elements(first + 32, 2)
        quad = elements(2 * column, 4)
        return quad[0::2], quad[1::2]

    @cute.jit
    def _backward(
        self, state: DgluState, dm: cute.Tensor, a: cute.Tensor, u: cute.Tensor, scales: cute.Tensor, sums: cute.Tensor
    ) -> cute.Tensor:
        """Replace a and u by their gradients, add to the row sums, and return the scaled activation."""
        outputs = cute.make_rmem_tensor(CHUNK_REGS, Float32)
        for i in cutlass.range(CHUNK_REGS, unroll_full=True):
            half = i // 2 % 2
            scaled = dm[i] * scales[half]
            if const_expr(self.spec.gated):
                value, d_a, d_u = act.GATED_BACKWARD[self.spec.activation](a[i], u[i], state.params)
                u[i] = scaled * d_u
            else:
                value, d_a = act.UNGATED_BACKWARD[self.spec.activation](a[i])
            a[i] = scaled * d_a
            outputs[i] = value * scales[half]
            sums[half] += dm[i] * value
        return outputs

    @cute.jit
    def _reduce(self, state: DgluState, sums: cute.Tensor, work: WorkTile, row: Int32):
        """Add this tile's share of d_row_scale; the last of a row's tiles completes it."""
        partials = vector_at(Float32, state.d_scale.partials)
        for i in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction(sums[i], lambda x, y: x + y, threads_in_group=4)
            at_row = row + state.row_in_tile + 8 * i
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
