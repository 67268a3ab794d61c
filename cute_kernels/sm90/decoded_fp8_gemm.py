"""The grouped GEMM of FP8 rows of x and 4-bit weights, which separate warpgroups of the kernel decode to FP8."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int32, Int64

from ..decoding.rows_in_fp8 import ScaleAddresses
from ..epilogue.base import Epilogue, Inputs
from ..epilogue.sizes import THREADS
from ..formats import MXFP4_ROWS
from ..specs import RaggedSpec
from . import budget
from .epilogue.swapped import SwappedEpilogue
from .grouped_gemm import GroupedGemm
from .mainloop.decoded_fp8 import DecodedFp8Mainloop, Scales
from .mainloop.swapped_fp8 import SwappedFp8Mainloop


class GroupedDecodedFp8Gemm(GroupedGemm):
    """GEMM of MXFP8 rows of x and MXFP4 weights on a cooperative tile. Its subclass GroupedSwappedFp8Gemm takes swapped
    tiles.

    Weights have two kinds of scales: of blocks, which decoding applies, and a power of two for each weight row, by
    which the epilogue multiplies the row's sums.
    """

    decoding_mainloop = DecodedFp8Mainloop

    def __init__(self, spec: RaggedSpec, epilogue: Epilogue):
        super().__init__(spec, Float8E4M3FN, epilogue)
        decoding = budget.DECODING_TO_FP8[spec.tile.m]
        self.decoding_warpgroups, self.beside_decoding = decoding.warpgroups, decoding.registers
        self.threads = (1 + self.num_warpgroups + self.decoding_warpgroups) * THREADS

    @property
    def stages(self) -> int:
        return budget.stages_to_decode(self.tile, self._slot_owners * self.shape.slots.num_bytes)

    def make_mainloop(self) -> DecodedFp8Mainloop:
        return self.decoding_mainloop(self.tile, self.shape.parts, self.stages, self.policy)

    def _loaded_weights(self, storage: Any, mainloop: Any, sB: cute.Tensor) -> cute.Tensor:
        layout = mainloop.narrow_layout
        words = cute.recast_ptr(storage.narrow.data_ptr(), layout.inner, dtype=Int32)
        return cute.make_tensor(words, layout.outer)

    def mainloop_scales(
        self, x: cute.Tensor, w: cute.Tensor, x_scale: Int64, inputs: Inputs, *w_blocks: Int64
    ) -> Scales:  # fmt: skip
        (blocks_at,) = w_blocks
        blocks = MXFP4_ROWS.num_scales(Int32(x.shape[1]))
        return Scales(x_scale, ScaleAddresses(blocks_at, inputs.w_scale, Int32(w.shape[1]), blocks, inputs.gate))


class GroupedSwappedFp8Gemm(GroupedDecodedFp8Gemm):
    """GEMM of MXFP8 rows of x and MXFP4 weights on a swapped tile, for few rows of x: weights are the rows of the MMA,
    rows of x its columns."""

    decoding_mainloop = SwappedFp8Mainloop

    def __init__(self, spec: RaggedSpec, epilogue: SwappedEpilogue):
        super().__init__(spec, epilogue)
        self.slots_type = epilogue.slots_type
