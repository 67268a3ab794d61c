"""The grouped GEMM of 16-bit rows of x and quantised weights: y[row]^T = epilogue(w[e] @ x[row]^T), ragged in rows.

MMA warpgroups decode the weights in registers.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..epilogue.base import Inputs
from ..formats import Format
from ..memory.weights import weight_view
from ..schedule.groups import Groups
from ..schedule.tickets import Tickets
from ..schedule.tile_scheduler import GroupTileScheduler
from ..schedule.work import TileGrid
from ..specs import GemmSpec
from .budget import RESERVED_BYTES, SMEM_BYTES, smem_bytes, stage_k
from .by_words import FEW_ROWS, multiplies_by_words
from .epilogue.store import make_store
from .epilogue.swapped import SwappedEpilogue, SwappedSlots
from .mainloop.block_decoding import BlockDecodingMainloop
from .mainloop.decoding import DecodingMainloop
from .mainloop.few_rows import FewRowsMainloop
from .persistent import PersistentGemm
from .split_depth import sums_size

# Upper limit of the bytes of barriers and the ring's slots. The epilogue's small fields follow, then the first buffer,
# aligned to ALIGNMENT.
BARRIER_BYTES = 512
ALIGNMENT = 1024
LINE_BYTES = 128


class SwappedGemm(PersistentGemm):
    """GEMM whose MMAs have weight rows as rows and rows of x as columns. weights: format of the weights."""

    slots_type = SwappedSlots

    def __init__(self, spec: GemmSpec, dtype: type[cutlass.Numeric], epilogue: SwappedEpilogue, weights: Format):
        super().__init__(spec, dtype, epilogue)
        self.weights = weights

    def make_mainloop(self) -> DecodingMainloop:
        by_words = multiplies_by_words(self.weights, self.tile)
        by_blocks = BlockDecodingMainloop if self.weights.rows > 1 else DecodingMainloop
        return (FewRowsMainloop if by_words else by_blocks)(
            self.dtype, self.weights, self.tile, self.shape.parts, self.shape.layout, self.stages, self.policy
        )  # fmt: skip

    def make_scheduler(self, groups: Groups, grid: TileGrid, tickets: Tickets | None) -> GroupTileScheduler:
        return GroupTileScheduler(self.tile, groups, grid)

    @property
    def stages(self) -> int:
        tile, slots = self.tile, self.num_warpgroups * self.shape.slots.num_bytes
        stage = (tile.n * self.weights.bits + tile.m * self.dtype.width) * stage_k(tile) // 8
        small = BARRIER_BYTES + self.num_warpgroups * self.shape.smem_bytes
        before_stages = (small + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        exchange = sums_size(tile) * Float32.width // 8
        count = (smem_bytes(tile) - self._cache_bytes - before_stages - slots - exchange) // stage
        return count // tile.splits * tile.splits

    @property
    def _cache_bytes(self) -> int:
        return self.tile.n * LINE_BYTES if self.tile.m <= FEW_ROWS else 0

    @property
    def smem_percent(self) -> int | None:
        """Percentage of the memory for L1 and shared memory that becomes shared memory; None: no preference.

        If several CTAs share an SM, the L1 cache gets a line for each of their weight rows, from which scales are read;
        the rest becomes shared memory.
        """
        ctas = self.tile.ctas_per_sm
        return None if ctas == 1 else 100 - 100 * ctas * self._cache_bytes // (SMEM_BYTES + RESERVED_BYTES)

    @cute.jit
    def launch(
        self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, groups: tuple[Int64, Int32, Int32, Int64],
        inputs: Inputs, num_sms: Int32, position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch on `stream`.

        Args:
            x: [T, K], 16-bit.
            w: [E, N, words or bytes of a row], quantised.
            y: the result, [T, N], or [T, N / 2] if gated.
            groups: address, encoding, count and tickets of schedule.groups.Groups.
            inputs: the epilogue's inputs, which also hold the address of the weights' scales.
            num_sms: number of SMs to use.
            position: how many kernels of the same call come before this one (PersistentGemm.start).
        """
        rows, slots = Int32(w.shape[1]), self.shape.slots
        view, address = weight_view(w, Int64(0), self.shape.parts, self.shape.layout, False, inputs.gate)
        operands = self.make_mainloop().operands(x, view, address, rows, inputs.w_scale, inputs.gate)
        stores = (make_store(y, slots.rows, slots.columns()),)
        grid = TileGrid(Int32(0), cute.ceil_div(rows, self.tile.n))
        self.start(operands, stores, inputs, Groups(*groups, x.shape[0]), grid, num_sms, stream, position)
