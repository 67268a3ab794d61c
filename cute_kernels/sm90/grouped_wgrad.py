"""Hopper's weight gradient: dw[e] = dy_e^T @ x_e, contracted over the rows of group e.

One CTA computes each element of dw in one pass, so the result is deterministic. A group overwrites dw[e] or adds to it.
If it adds, either the kernel loads dw's previous values and adds them in registers, or the TMA store adds in memory.
Either way each element gets one addition, so the order is fixed. An empty group that adds leaves dw[e] as it was; an
empty group that overwrites stores zeros.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ..device.select import select
from ..epilogue.sizes import ROWS
from ..epilogue.slots import smem_layout
from ..memory.weights import weight_view
from ..schedule.groups import Groups
from ..schedule.tickets import Tickets
from ..schedule.tile_scheduler import GroupTileScheduler
from ..schedule.wgrad_scheduler import WgradTileScheduler
from ..schedule.work import TileGrid
from ..specs import GroupedWgradSpec, WgradSpec
from .budget import ACROSS_REGISTERS
from .epilogue.slot_loads import TileLoads
from .epilogue.wgrad import WgradEpilogue, WgradInputs, WgradStores
from .mainloop.base import Operands
from .mainloop.wgrad import WgradMainloop
from .persistent import PersistentGemm

# dw's previous values are loaded if groups have on average fewer rows than this constant times the bytes of an element
# of dw (384 rows for 16 bits, 768 for 32 bits); otherwise TMA stores add in memory. L2 adds to dw at 1.2 TB/s. Loads
# and stores reach 1.5 TB/s, but a tile's epilogue takes longer. With loads and 512 rows, 16 bits are 7 to 18 % slower
# and 32 bits 14 to 20 % faster; with 1024 rows, both are 3 to 9 % slower.
LOADING_ROWS_PER_BYTE = 192


class GroupedWgrad(PersistentGemm):
    """Kernel of dw[e] = dy_e^T @ x_e over the rows of each group: dy [T, N] and x [T, K] of `dtype`, dw [E, N, K] of
    `out_dtype`.
    """

    epilogue: WgradEpilogue
    load_registers = ACROSS_REGISTERS
    epilogue_type: type[WgradEpilogue] = WgradEpilogue
    mainloop_type: type[WgradMainloop] = WgradMainloop
    # Rows of one TMA store into dw.
    store_rows = ROWS

    def __init__(
        self, spec: GroupedWgradSpec | WgradSpec, dtype: type[cutlass.Numeric], out_dtype: type[cutlass.Numeric]
    ):  # fmt: skip
        super().__init__(spec, dtype, self.epilogue_type(out_dtype, spec.tile))

    def make_mainloop(self) -> WgradMainloop:
        keeps_operands = self.epilogue.dtype.width == 32
        return self.mainloop_type(self.dtype, self.tile, self.stages, keeps_operands)

    def make_scheduler(self, groups: Groups, grid: TileGrid, tickets: Tickets | None) -> GroupTileScheduler:
        return WgradTileScheduler(self.tile, groups, grid, self.policy.light_rows)

    @cute.jit
    def launch(
        self, dy: cute.Tensor, x: cute.Tensor, dw: cute.Tensor, groups: tuple[Int64, Int32, Int32, Int64],
        rows: tuple[Int64, Int64], dw_table: Int64, mask: Int64, accumulate: Int32, num_sms: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch on `stream`.

        Args:
            dy: [T, N], or the tensor that row indices select from.
            x: [T, K], or the tensor that row indices select from.
            dw: [E, N, K], the result.
            groups: address, encoding, count and tickets of schedule.groups.Groups.
            rows: addresses of the indices of dy's and of x's rows; 0: rows lie in order. At least one of them is 0.
            dw_table: address of the offsets of dw's experts (memory.weights.ExpertAddress); 0: dw is packed.
            mask: address of bool [E]: group e adds to dw[e] if mask[e] is true; 0: `accumulate` decides.
            accumulate: without a mask, all groups add to dw if this is not 0; else all overwrite dw.
            num_sms: number of SMs to use.
        """
        operands = self.make_mainloop().operands(dy, x, *rows)
        num_rows = select(rows[0] == 0, Int32(dy.shape[0]), Int32(x.shape[0]))
        self._launch(operands, num_rows, dy, x, dw, groups, dw_table, mask, accumulate, num_sms, stream)

    @cute.jit
    def _launch(
        self, operands: Operands, num_rows: Int32, dy: cute.Tensor, x: cute.Tensor, dw: cute.Tensor,
        groups: tuple[Int64, Int32, Int32, Int64], dw_table: Int64, mask: Int64, accumulate: Int32, num_sms: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch the kernel with `operands`. `launch` describes the arguments that are not listed here.

        Args:
            operands: the mainloop's inputs, from `WgradMainloop.operands`.
            num_rows: number of rows of all groups together.
            dy, x: only their numbers of columns, N and K, are used.
        """
        view, address = weight_view(dw, dw_table, 1, "concat", False)
        tile = (self.store_rows, self.epilogue.cols)
        layout = smem_layout(dw.element_type, rows=self.store_rows)
        overwrite, tensor = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), view, layout, tile)
        add, _ = cpasync.make_tiled_tma_atom(cpasync.CopyReduceBulkTensorTileS2GOp(), view, layout, tile)
        loads = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, layout, tile)
        adds = (accumulate != 0) | (mask != 0)
        loads_dw = adds & (num_rows < LOADING_ROWS_PER_BYTE * self.epilogue.dtype.width // 8 * groups[2])
        grid = TileGrid(
            cute.ceil_div(dy.shape[1], self.tile.m * self.tile.cluster_m),
            cute.ceil_div(x.shape[1], self.tile.n * self.tile.cluster_n),
        )
        self.start(
            operands, WgradStores(overwrite, add, tensor),
            WgradInputs(address, mask, accumulate, Boolean(loads_dw), TileLoads(*loads)),
            Groups(*groups, num_rows), grid, num_sms, stream, Int32(0),
        )  # fmt: skip
