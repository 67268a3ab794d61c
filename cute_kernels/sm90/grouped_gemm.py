"""The grouped GEMM, ragged in rows: y[row] = epilogue(x[row] @ w[e]^T) for every row of every group e."""

from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int32, Int64, const_expr

from ..device.select import select
from ..epilogue.base import Epilogue, Inputs
from ..memory.weights import weight_rows, weight_view
from ..schedule.groups import Groups
from ..schedule.ticket_scheduler import TicketScheduler
from ..schedule.tickets import Tickets, counter
from ..schedule.tile_scheduler import GroupTileScheduler
from ..schedule.work import TileGrid
from ..specs import RaggedSpec
from .budget import ALONG_REGISTERS, LOADING_REGISTERS
from .epilogue.store import make_store
from .gemm_policy import MIN_TICKET_DEPTH
from .mainloop.adapted import AdaptedMainloop
from .mainloop.fp8 import Fp8Mainloop
from .mainloop.gemm import GemmMainloop
from .mainloop.halves import HalvesMainloop
from .persistent import PersistentGemm


class GroupedGemm(PersistentGemm):
    """GEMM of rows of x with the weights of each row's expert.

    transposed: w[e] has rows of k instead of rows of n: y[row] = epilogue(x[row] @ w[e]).

    in_halves: two transposed w, one for each half of x's columns.

    spec.adapted: the accumulators also get low[row] @ b[e]^T (transposed: @ b[e]); b is stored like w.
    """

    epilogue: Epilogue
    load_registers = ALONG_REGISTERS
    mainloops: ClassVar[dict[str, Any]] = {
        "rows": GemmMainloop, "halves": HalvesMainloop, "adapted": AdaptedMainloop,
    }  # fmt: skip

    def __init__(
        self, spec: RaggedSpec, dtype: type[cutlass.Numeric], epilogue: Epilogue, transposed: bool = False,
        in_halves: bool = False,
    ):  # fmt: skip
        super().__init__(spec, dtype, epilogue)
        self.transposed = transposed
        self.mainloop_type: Any = self.mainloops["halves" if in_halves else "adapted" if spec.adapted else "rows"]
        if self.shape.has_load_warp:
            self.load_registers = LOADING_REGISTERS

    def make_mainloop(self) -> GemmMainloop:
        return self.mainloop_type(
            self.dtype, self.tile, self.shape.parts, self.transposed, self.stages, self.policy,
            self.shape.has_load_warp,
        )  # fmt: skip

    def _make_store(self, view: cute.Tensor) -> Any:
        """Host side: make the TMA store of an output, as `slots_type` uses it."""
        return make_store(view, cols=self.epilogue.store_columns(view.element_type))

    def mainloop_scales(self, x: cute.Tensor, w: cute.Tensor, x_scale: Int64, inputs: Inputs, *w_blocks: Int64) -> Any:
        """Host side: return the scales that the mainloop multiplies by: an address, or a tuple of addresses."""
        return x_scale

    def make_scheduler(self, groups: Groups, grid: TileGrid, tickets: Tickets | None) -> GroupTileScheduler:
        if tickets is None:
            return GroupTileScheduler(self.tile, groups, grid)
        return TicketScheduler(self.tile, groups, grid, self.policy.light_rows, tickets)

    @cute.jit
    def launch(
        self, x: cute.Tensor, w: cute.Tensor, outputs: tuple, groups: tuple[Int64, Int32, Int32, Int64], w_table: Int64,
        rows: Int64, inputs: Inputs, num_sms: Int32, position: Int32, stream: cuda.CUstream,
        x_scale: Int64 | int = 0, w_up: Int64 | None = None, low: Any = None, w_blocks: Int64 | None = None,
    ):  # fmt: skip
        """Launch on `stream`.

        Args:
            inputs: the epilogue's inputs.
            rows: address of the indices of x's rows; 0: rows lie in order.
            x_scale: address of the scales of x, if x is in FP8.
            w_up: address of the weights' second half, as in `weight_view`.
            low: tensors (low, b) of an adapted GEMM; None: not adapted.
            w_blocks: address of the weights' block scales, if weight rows have scales, too; None: they have none.
            position: see PersistentGemm.start.
        """
        epilogue, shape = self.epilogue, self.shape
        view, address = weight_view(w, w_table, shape.parts, shape.layout, self.transposed, inputs.gate, w_up)
        blocks = () if const_expr(w_blocks is None) else (w_blocks,)
        scales = self.mainloop_scales(x, w, Int64(x_scale), inputs, *blocks)
        mainloop: Any = self.make_mainloop()
        operands = mainloop.operands(x, view, address, rows, scales)
        if const_expr(low is not None):
            b, in_order = weight_view(low[1], Int64(0), shape.parts, shape.layout, self.transposed, inputs.gate)
            operands = mainloop.with_low(operands, low[0], b, in_order)
        stores = tuple(self._make_store(view) for view in epilogue.store_views(outputs, inputs))
        groups = *groups[:3], select(x.shape[1] < MIN_TICKET_DEPTH, Int64(0), counter(groups[3], position))
        n = w.shape[2] if const_expr(self.transposed) else weight_rows(w, w_up)
        grid = TileGrid(Int32(0), cute.ceil_div(n, self.tile.n * self.tile.cluster_n))
        inputs = epilogue.kernel_inputs(inputs)
        self.start(operands, stores, inputs, Groups(*groups, outputs[0].shape[0]), grid, num_sms, stream, position)


class GroupedFp8Gemm(GroupedGemm):
    """GEMM of MXFP8 rows and E4M3 weights whose scales are folded to one a row, on a cooperative tile."""

    def __init__(self, spec: RaggedSpec, epilogue: Epilogue):
        super().__init__(spec, Float8E4M3FN, epilogue)

    def make_mainloop(self) -> Fp8Mainloop:
        return Fp8Mainloop(self.tile, self.shape.parts, self.stages, self.policy, self.shape.has_load_warp)
