"""Epilogue of the backward of a fused FC1: turns the accumulators, dm = dy @ w2, into dpreact, act and d_row_scale.

    act = f(a, u) s        dpreact = (dm s f_a, dm s f_u)        d_s[row] = sum_i dm_i f_i

f is the activation and s the row scale. f_a and f_u are the derivatives of f by a and u, and d_s is d_row_scale. f is
computed again from the preactivation (a, u).

A row's sum d_s runs over all columns i, and so over the tiles of several CTAs. Each tile writes its partial sums to a
workspace, and the next kernel adds them (layer/finish_backward.py). If the last warp to arrive added them here, each
warp would need a fence and an atomic for each tile. That took a quarter of the time at K = 2048.

base.py explains the terms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .. import activation as act
from ..device.gmem import vector_at
from ..formats import OPERANDS
from ..memory.weights import NO_GATE, GateRows
from ..schedule.groups import Groups
from ..schedule.work import WorkTile
from ..specs import GroupedDgluSpec
from .base import ColumnSmem, Epilogue, OptionalInputs, Prefetched, WarpgroupState
from .fragments import TileShare, chunk_of, registers, slab_of
from .preact import PIECE, PIECE_REGS, PreactLayout, PreactPair
from .sizes import COLS, ROWS


class RowParts(NamedTuple):
    """The workspace for partial sums of the row scale's gradient.

    Attributes:
        parts: the address of float32 [count, T], a partial sum for each row and each tile along the columns; 0: no
            gradient is wanted.
        count: number of tiles along the columns.
    """

    parts: Int64
    count: Int32


class DgluInputs(NamedTuple):
    """Run-time inputs of grouped_dglu's epilogue. `base.Inputs` describes `params`, `bias_size`, `w_scale` and `gate`.

    Attributes:
        optional: optional inputs, of which `scale` is the row scale.
        preact: the preactivation [T, 2I], or [T, I] without a gate. `kernel_inputs` replaces it by the object through
            which an architecture loads it.
        sums: the workspace of the row scale's gradient.
    """

    optional: OptionalInputs
    params: act.ActivationParams
    bias_size: Int32
    preact: Any
    sums: RowParts
    w_scale: Int64 = Int64(0)
    gate: GateRows = NO_GATE


class DgluState(WarpgroupState):
    """State of a warpgroup's epilogue of grouped_dglu.

    Args:
        ring: the slots (buffers in shared memory) that first hold preactivations, then their gradients (preact.py).
        pair_type: the class by which a thread reads and writes these slots.
    """

    def __init__(
        self, inputs: DgluInputs, groups: Groups, slots: Any, smem: ColumnSmem, ring: Any, pair_type: type[PreactPair]
    ):  # fmt: skip
        super().__init__(inputs, slots, smem)
        self.preact = pair_type(ring, slots)
        self.ring = ring
        self.sums = inputs.sums
        self.num_rows = groups.rows


class DgluEpilogue(Epilogue):
    """Epilogue of grouped_dglu. Its first store is for dpreact, its second for act.

    Each architecture loads preactivations in its own way. So each has a subclass, which defines `shape`,
    `kernel_inputs` and `make_state`.

    A warpgroup works through its slabs of a tile chunk by chunk, 64 x 64 outputs each. Chunks are numbered over all
    tiles of the CTA. A chunk's number determines its slots in shared memory: for act, for the preactivation and for the
    preactivation's gradient.
    """

    def __init__(self, dtype: type[cutlass.Numeric], spec: GroupedDgluSpec):
        super().__init__(dtype, spec.tile, weights=OPERANDS[spec.operands].w)
        self.spec = spec
        self.preact_layout = PreactLayout(spec.glu_layout, spec.gated)
        self.chunks_per_slab = spec.tile.n // COLS
        self.chunks_per_share = self.slabs * self.chunks_per_slab

    def store_views(self, outputs: tuple, inputs: DgluInputs) -> tuple:
        return self.preact_layout.view(outputs[0]), outputs[1]

    def _chunk_at(self, work: WorkTile, turn: Int32, first_slab: Int32 | int, chunk: int) -> tuple[Int32, Int32, Int32]:
        """Return three numbers of a chunk (64 x 64 outputs): its number in the CTA, its first row and its first column.

        Args:
            turn: number of tiles that the CTA computed before.
            first_slab: the warpgroup's first slab (64 rows of the tile).
            chunk: the chunk's index among the chunks of the warpgroup's slabs.
        """
        sharers = self.tile.warpgroups_per_tile
        number = (turn * self.chunks_per_share + chunk) * sharers + first_slab
        row = work.row + (first_slab + chunk // self.chunks_per_slab) * self.tile.slab_step
        return number, row, work.n_tile * self.tile_n + chunk % self.chunks_per_slab * COLS

    @cute.jit
    def finish(
        self, state: DgluState, acc: cute.Tensor, prefetched: Prefetched, stores: tuple, work: WorkTile,
        share: TileShare,
    ):  # fmt: skip
        """Turn a warpgroup's accumulators of a tile into dpreact and act, chunk by chunk, and start to store both. Also
        write the row sums to the workspace.

        Args:
            acc: the thread's accumulators of all its slabs, dm = dy w2.
            prefetched: the thread's row scales and scale bytes of columns, which `begin` loaded.
            stores: the objects that stand for dpreact and act in memory (stores, slots.py).
            share: the warpgroup's slabs (64 rows each) of the tile.
        """
        scales = prefetched.row_scales
        if const_expr(self.scales_columns):
            self._put_column_scales(state, prefetched.column_scales)
            count = cute.size(acc) // self.slabs
            for slab in cutlass.range_constexpr(self.slabs):
                self._scale_columns(state, registers(acc, slab * count, count))
        sums = cute.make_rmem_tensor(2, Float32)
        for slab in cutlass.range_constexpr(self.slabs):
            values = slab_of(acc, slab, self.slabs)
            sums.fill(0.0)
            for chunk in cutlass.range_constexpr(self.chunks_per_slab):
                place = self._chunk_at(work, share.turn, share.first_slab, slab * self.chunks_per_slab + chunk)
                two_scales = registers(scales, 2 * slab, 2)
                self._finish_chunk(state, chunk_of(values, chunk, COLS), two_scales, sums, stores, work, place)
            if state.sums.parts != 0:
                self._leave_sums(state, sums, work, place[1])

    @cute.jit
    def _finish_chunk(
        self, state: DgluState, acc: cute.Tensor, scales: cute.Tensor, sums: cute.Tensor, stores: tuple, work: WorkTile,
        place: tuple,
    ):  # fmt: skip
        """Start to store dpreact and act of a chunk (64 x 64 outputs), and add the chunk's contribution to the sums of
        the thread's two rows.

        Args:
            acc: the chunk's accumulators, dm = dy w2 (the gradient of act).
            scales: the row scales of the thread's two rows.
            sums: for the same two rows, the sums of dm f, where f is the activation's value. The chunk's terms are
                added to them.
            stores: the objects that stand for dpreact and act in memory (stores, slots.py).
            place: three numbers of the chunk: its number in the CTA, its first row and its first column.
        """
        number, row, column = place
        act_slot = state.ring.act_slot(number)
        state.ring.wait(number)
        for piece in cutlass.range_constexpr(COLS // PIECE):
            dm = registers(acc, piece * PIECE_REGS, PIECE_REGS)
            parts = state.preact.read(number, piece)
            outputs, gradients = self._backward(state, dm, parts, scales, sums)
            state.preact.write(number, piece, gradients)
            state.slots.fill_piece(outputs, act_slot, piece)
        state.slots.publish()
        if state.slots.is_storing_warp:
            state.preact.store(stores[0], work, number, row, column)
            state.slots.start(stores[1].atom, stores[1].tile(work, row, column), act_slot)
            state.slots.drain()
            state.ring.release(number)

    @cute.jit
    def _backward(self, state: DgluState, dm: cute.Tensor, parts: tuple, scales: cute.Tensor, sums: cute.Tensor):
        """Compute the backward of the activation for a piece of 16 columns.

        Return the thread's act (times the row scale) and gradients of a and u, in 16 bits. Add to `sums`.

        Args:
            dm: the thread's accumulators of the piece: the gradient of act, dy w2.
            parts: the thread's preactivations of the piece: a (the activated half) and u (the linear half); a alone
                without a gate.
            scales, sums: row scales, and sums of dm f (f: the activation's value), one for each of the thread's two
                rows.
        """
        outputs = cute.make_rmem_tensor(PIECE_REGS, self.dtype)
        gradients = tuple(cute.make_rmem_tensor(PIECE_REGS, self.dtype) for _ in parts)
        for i in cutlass.range(PIECE_REGS // 2, unroll_full=True):
            scale = scales[i % 2]
            results = tuple(cute.make_rmem_tensor(2, Float32) for _ in range(1 + len(parts)))
            for j in cutlass.range_constexpr(2):
                at = 2 * i + j
                value, *slopes = act.slopes(self.spec.activation, [Float32(part[at]) for part in parts], state.params)
                results[0][j] = value * scale
                for result, slope in zip(results[1:], slopes, strict=True):
                    result[j] = dm[at] * scale * slope
                sums[i % 2] += dm[at] * value
            for target, result in zip((outputs, *gradients), results, strict=True):
                registers(target, 2 * i, 2).store(result.load().to(self.dtype))
        return outputs, gradients

    @cute.jit
    def _leave_sums(self, state: DgluState, sums: cute.Tensor, work: WorkTile, row: Int32):
        """Write the row sums of a slab (64 rows) to the workspace, as this tile's partial sums of d_row_scale. row: the
        slab's first row.

        An adaptive cluster may have a tile past the last column; such a tile writes nothing.
        """
        parts = vector_at(Float32, state.sums.parts)
        end = work.group_end
        if const_expr(self.tile.m < ROWS):  # the slab's other rows belong to other tiles
            end = cutlass.min(end, row + self.tile.m)
        for i in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction(sums[i], lambda x, y: x + y, threads_in_group=4)
            at_row = row + state.row_in_slab + 8 * i
            if (state.lane % 4 == 0) & (at_row < end) & (work.n_tile < state.sums.count):
                parts[work.n_tile * state.num_rows + at_row] = total
