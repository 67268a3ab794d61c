"""The grouped GEMM y[row] = epilogue(x[row] @ w[e]) of 16-bit rows of x and quantised weights w[e].

It computes data gradients through quantised weights. Its contraction runs over the rows of w[e], whereas the forward's
runs along them. Two warpgroups of the kernel decode the weights to 16 bits.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..epilogue.base import Epilogue, Inputs
from ..formats import Format
from ..schedule.groups import Groups
from ..schedule.tickets import Tickets
from ..schedule.tile_scheduler import GroupTileScheduler
from ..schedule.work import TileGrid
from ..specs import GemmSpec
from . import budget
from .epilogue.store import make_store
from .mainloop.decoded_lines import DECODING_WARPGROUPS, DecodedLinesMainloop, slots_bytes
from .persistent import PersistentGemm


class DecodedLinesGemm(PersistentGemm):
    """GEMM of 16-bit rows of x and quantised weights, contracted over weight rows.

    weights: format of the weights.
    """

    decoding_warpgroups = DECODING_WARPGROUPS

    def __init__(self, spec: GemmSpec, dtype: type[cutlass.Numeric], epilogue: Epilogue, weights: Format):
        super().__init__(spec, dtype, epilogue)
        self.weights = weights

    def make_mainloop(self) -> DecodedLinesMainloop:
        return DecodedLinesMainloop(self.dtype, self.weights, self.tile, self.stages)

    def make_scheduler(self, groups: Groups, grid: TileGrid, tickets: Tickets | None) -> GroupTileScheduler:
        return GroupTileScheduler(self.tile, groups, grid)

    @property
    def stages(self) -> int:
        staging = self._slot_owners * self.shape.slots.num_bytes
        return budget.stages(
            self.tile, staging + DECODING_WARPGROUPS * slots_bytes(self.weights, self.tile.n), self.dtype.width // 8
        )

    @cute.jit
    def launch(
        self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, groups: tuple[Int64, Int32, Int32, Int64],
        inputs: Inputs, num_sms: Int32, position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch on `stream`.

        Args:
            x: [T, weight rows], 16-bit.
            w: [E, weight rows, words or bytes of a row], quantised.
            y: [T, columns], the result.
            groups: address, encoding, count and tickets of schedule.groups.Groups.
            inputs: the epilogue's inputs, which also hold the address of the weights' scales.
            num_sms: number of SMs to use.
            position: how many kernels of the same call come before this one (PersistentGemm.start).
        """
        columns = Int32(y.shape[1])
        operands = self.make_mainloop().operands(x, w, inputs.w_scale, columns)
        stores = (make_store(y, cols=self.shape.slots.columns()),)
        grid = TileGrid(Int32(0), cute.ceil_div(columns, self.tile.n))
        self.start(operands, stores, inputs, Groups(*groups, x.shape[0]), grid, num_sms, stream, position)
