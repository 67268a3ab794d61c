"""The portable weight gradient: dw[e] = dy_e^T @ x_e, contracted over the rows of group e.

A group overwrites dw[e] or adds to it. One CTA computes each element of dw in one pass, and adds the previous dw if the
group adds, so the result is deterministic. An empty group that adds leaves dw[e] as it was; an empty group that
overwrites stores zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.select import select
from ..epilogue.fragments import TileShare, chunk_of
from ..epilogue.shape import EpilogueShape, SlotShape
from ..epilogue.sizes import ROWS, SLOTS
from ..memory.weights import UNIT_BYTES, ExpertAddress, expert_offset, weight_view
from ..schedule.groups import Groups
from ..schedule.wgrad_scheduler import SameTiles
from ..schedule.work import TileGrid, WorkTile
from ..specs import GroupedWgradSpec
from .mainloop import Mainloop
from .operands import Across
from .persistent import TileKernel, TileWalk
from .sources import Rows, column_sources, rows_of
from .store import Place, Slots


class WgradWalk(SameTiles, TileWalk):
    """The tile scheduler of the weight gradient.

    Every group, even an empty one, has the same tiles, which cover its dw. The warps that multiply also find their
    tiles, as there is no scheduler warp.
    """


class WgradInputs(NamedTuple):
    """Run-time inputs of the epilogue.

    Attributes:
        base, address: the address of dw, and the offset of each expert's dw from it (memory/weights.py).
        rows, columns: number of rows and columns of an expert's dw.
        mask: the address of bool [E], True for each group that adds to dw; 0: `accumulate` decides for all groups.
        accumulate: read only if there is no mask. Not 0: all groups add to dw; 0: all groups overwrite dw.
    """

    base: Int64
    address: ExpertAddress
    rows: Int32
    columns: Int32
    mask: Int64
    accumulate: Int32


class WgradState(Invariant):
    """State of the epilogue: its inputs and slots."""

    def __init__(self, inputs: WgradInputs, slots: Slots):
        self.inputs, self.slots = inputs, slots


class WgradEpilogue(Invariant):
    """Epilogue of a weight gradient: converts accumulators to dw's dtype, then overwrites dw or adds to it."""

    def __init__(self, dtype: type[cutlass.Numeric], tile):
        self.dtype, self.tile = dtype, tile
        self.shape = EpilogueShape(SlotShape(dtype, 0))

    def make_state(self, inputs: WgradInputs, groups: Groups, slots: Slots, smem: dict, ring: None) -> WgradState:
        return WgradState(inputs, slots)

    @cute.jit
    def begin(self, state: WgradState, work: WorkTile, share: TileShare) -> Boolean:
        """Return True if this tile adds to dw, False if it overwrites dw. The result is an argument of `finish`."""
        adds = state.inputs.accumulate != 0
        if state.inputs.mask != 0:
            adds = vector_at(Uint8, state.inputs.mask)[work.expert] != 0
        return adds

    @cute.jit
    def finish(
        self, state: WgradState, acc: cute.Tensor, adds: Boolean, stores: tuple, work: WorkTile, share: TileShare
    ):  # fmt: skip
        """Store a tile of dw: overwrite dw, or add to it.

        Args:
            state: the inputs and slots.
            acc: the thread's accumulators.
            adds: True: add to dw; False: overwrite dw (`begin` decides).
            stores: not used; `state.inputs` has the address of dw.
            work: the output tile.
            share: not used, since a CTA has the whole tile.
        """
        inputs, cols = state.inputs, state.slots.cols
        base = inputs.base + expert_offset(inputs.address, work.expert) * UNIT_BYTES
        pitch = Int64(inputs.columns) * (self.dtype.width // 8)
        across = self.tile.n // cols
        for chunk in cutlass.range_constexpr(self.tile.slabs * across):
            row = work.m_tile * self.tile.m + chunk // across * ROWS
            column = work.n_tile * self.tile.n + chunk % across * cols
            address = base + row * pitch + column * (self.dtype.width // 8)
            place = Place(address, pitch, inputs.rows - row, inputs.columns - column)
            state.slots.put(chunk_of(acc, chunk, cols), None, place, chunk % SLOTS, adds)


class Operands(NamedTuple):
    """Inputs of the weight gradient's mainloop: the rows of dy and of x, over which it contracts."""

    dy: Rows
    x: Rows


class GroupedWgrad(TileKernel):
    """The portable weight gradient: dw [E, N, K], of `out_dtype`, from dy [T, N] and x [T, K] in 16 bits."""

    walk = WgradWalk

    def __init__(self, spec: GroupedWgradSpec, dtype: type[cutlass.Numeric], out_dtype: type[cutlass.Numeric]):
        super().__init__(spec.name, dtype, spec.tile, WgradEpilogue(out_dtype, spec.tile))

    def make_operands(self) -> tuple[Across, Across]:
        return Across(self.dtype, self.tile.m), Across(self.dtype, self.tile.n)

    @cute.jit
    def launch(
        self, dy: cute.Tensor, x: cute.Tensor, dw: cute.Tensor, groups: tuple[Int64, Int32, Int32, Int64],
        rows: tuple[Int64, Int64], dw_table: Int64, mask: Int64, accumulate: Int32, num_sms: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch the kernel on `stream`.

        Args:
            dy: [T, N], or the tensor that row indices select from.
            x: [T, K], or the tensor that row indices select from.
            dw: [E, N, K], the result.
            groups: address, encoding, count and tickets of schedule.groups.Groups.
            rows: the addresses of the indices of dy's rows and of x's rows; 0: rows lie in order. At least one of the
                two is 0.
            dw_table: the address of the offsets of experts' dw; 0: dw is packed.
            mask: the address of bool [E], True for each group that adds to dw; 0: `accumulate` decides for all groups.
            accumulate: read only if there is no mask. Not 0: all groups add to dw; 0: all groups overwrite dw.
        """
        view, address = weight_view(dw, dw_table, 1, "concat", False)
        num_rows = select(rows[0] == 0, Int32(dy.shape[0]), Int32(x.shape[0]))
        n, k = Int32(dy.shape[1]), Int32(x.shape[1])
        inputs = WgradInputs(view.iterator.toint(), address, n, k, mask, accumulate)
        grid = TileGrid(cute.ceil_div(n, self.tile.m), cute.ceil_div(k, self.tile.n))
        operands = Operands(rows_of(dy, rows[0]), rows_of(x, rows[1]))
        self.start(operands, (), inputs, Groups(*groups, num_rows), grid, num_sms, stream)

    @cute.jit
    def multiply(self, mainloop: Mainloop, acc: cute.Tensor, operands: Operands, work: WorkTile):
        a = column_sources(operands.dy, work, mainloop.a, work.m_tile)
        b = column_sources(operands.x, work, mainloop.b, work.n_tile)
        mainloop.run(acc, a, b, work.group_end - work.row)
