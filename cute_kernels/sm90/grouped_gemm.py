"""The grouped GEMM, ragged in rows: y[row] = epilogue(x[row] @ w[e]^T) for every row of every group e."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ..specs import TileConfig
from . import epilogue as epi
from . import store
from . import tile_scheduler as sched
from .fp8_mainloop import Fp8Mainloop
from .mainloop import GemmMainloop
from .persistent import PersistentGemm
from .weights import weight_view


class GroupedGemm(PersistentGemm):
    """`transposed` takes w as rows of k instead of rows of n: y[row] = epilogue(x[row] @ w[e])."""

    def __init__(
        self,
        name: str,
        dtype: type[cutlass.Numeric],
        tile: TileConfig,
        epilogue: epi.Epilogue,
        transposed: bool = False,
    ):
        super().__init__(name, dtype, tile, epilogue)
        self.transposed = transposed

    def make_mainloop(self) -> GemmMainloop:
        if self.dtype.width == 8:
            return Fp8Mainloop(self.tile, self.epilogue.parts, self.stages)
        return GemmMainloop(self.dtype, self.tile, self.epilogue.parts, self.transposed, self.stages)

    def make_scheduler(self, groups: sched.Groups, grid: sched.TileGrid) -> sched.GroupTileScheduler:
        return sched.GroupTileScheduler(self.tile, groups, grid)

    @cute.jit
    def launch(
        self, x: cute.Tensor, w: cute.Tensor, outputs: tuple, groups: tuple[Int64, Int32, Int32], w_table: Int64,
        inputs: epi.Inputs, num_sms: Int32, stream: cuda.CUstream, after_launch: cutlass.Constexpr[bool] = False,
        x_scale: Int64 | int = 0,
    ):  # fmt: skip
        """Launch on `stream`; `inputs` are the epilogue's own; `x_scale`: the address of the scales of x in MXFP8.

        See PersistentGemm.start for `after_launch`.
        """
        view, address = weight_view(w, w_table, self.epilogue.parts, self.epilogue.layout, self.transposed)
        operands = self.make_mainloop().operands(x, view, address, Int64(x_scale))
        stores = tuple(store.make_store(view) for view in self.epilogue.store_views(outputs))
        n = w.shape[2] if const_expr(self.transposed) else w.shape[1]
        grid = sched.TileGrid(Int32(0), cute.ceil_div(n, self.tile.n * self.tile.cluster_n))
        inputs = self.epilogue.kernel_inputs(inputs)
        self.start(operands, stores, inputs, sched.Groups(*groups, x.shape[0]), grid, num_sms, stream, after_launch)
