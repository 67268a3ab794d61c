"""Hopper's grouped GEMM: y[row] = epilogue(x[row] @ w[e]^T) for every row of every group e.

A group is the rows of one expert; groups may have different numbers of rows.
"""

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
    """GEMM that multiplies each row of x by the weights of the row's expert: y[row] = epilogue(x[row] @ w[e]^T).

    Args:
        dtype: element type of x and w.
        epilogue: turns accumulators into results.
        transposed: True: w[e] is stored transposed, so that y[row] = epilogue(x[row] @ w[e]).
        in_halves: True: y[row] = epilogue(x[row, :K / 2] @ w[e] + x[row, K / 2 :] @ w_up[e]), with two transposed
            weights w and w_up.

    LoRA: if `spec.adapted`, low[row] @ b[e]^T (transposed: low[row] @ b[e]) is added to the accumulators. Here low is
    [T, r], r is the adapters' rank, and b is stored like w.
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
        """Host side: make the TMA store from staging slots (shared memory) to `view`, a view of one output tensor."""
        return make_store(view, self.shape.slots.rows, self.epilogue.store_columns(view.element_type))

    def mainloop_scales(self, x: cute.Tensor, w: cute.Tensor, x_scale: Int64, inputs: Inputs, *w_blocks: Int64) -> Any:
        """Host side: return where the mainloop finds the scales that it multiplies by: here `x_scale`.

        Subclasses whose mainloop also multiplies by weight scales return a tuple of addresses.

        Args:
            x_scale: address of the scales of x; 0: x has none.
            inputs: the epilogue's inputs; `inputs.w_scale` is the address of the weights' scales.
            w_blocks: the address of the weights' block scales, if weights have two kinds of scales: one for each block
                and one for each weight row. Otherwise empty.
        """
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
            x: [T, K], or the tensor that `rows` selects rows from.
            w: weights [E, N, K], or [E, K, N] if transposed; offsets in `w_table` count from its address.
            outputs: results, as the epilogue's `store_views` takes them; the first dimension is T.
            groups: address, encoding, count and tickets of schedule.groups.Groups.
            w_table: address of the experts' offsets (memory.weights.ExpertAddress); 0: weights are packed.
            rows: address of the indices of x's rows, int32 [T]; 0: rows lie in order.
            inputs: the epilogue's inputs.
            num_sms: number of SMs to use.
            position: how many kernels of the same call come before this one (PersistentGemm.start).
            x_scale: address of the scales of x; 0: x has none.
            w_up: address of a second weight tensor like w: the linear half u of a gated layer or, with `in_halves`, the
                weights of the second half of x's columns. 0 or None: w has all weights.
            low: with LoRA adapters, the tensors (low, b), whose product is added (see the class); None: no adapters.
            w_blocks: address of the weights' block scales, if weights have a scale for each block and another for each
                weight row; None: weights have at most one kind of scales.
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
    """GEMM of MXFP8 rows of x and E4M3 weights with one scale for each weight row, on a cooperative tile.

    The weights' block scales were folded into the row scales beforehand (quantize/fold_mxfp8.py).
    """

    def __init__(self, spec: RaggedSpec, epilogue: Epilogue):
        super().__init__(spec, Float8E4M3FN, epilogue)

    def make_mainloop(self) -> Fp8Mainloop:
        return Fp8Mainloop(self.tile, self.shape.parts, self.stages, self.policy, self.shape.has_load_warp)
