"""Blackwell's grouped GEMM: y[row] = epilogue(x[row] @ w[e]^T) for every row of every group e."""

from __future__ import annotations

from typing import Any, ClassVar

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int32, Int64

from ..device.target import is_plain
from ..epilogue.base import Epilogue, Inputs
from ..portable.store import make_store as make_row_store
from ..sm90 import grouped_gemm
from ..specs import RaggedSpec
from . import budget
from .block_scaled import BlockScaledMainloop, Scales
from .epilogue.row_store import RowSlots
from .epilogue.store import Slots, make_store
from .mainloop import GemmMainloop, HalvesMainloop
from .persistent import TensorMemoryGemm


class GroupedGemm(TensorMemoryGemm, grouped_gemm.GroupedGemm):
    """The grouped GEMM in 16 bits, with the arguments of sm90.grouped_gemm.GroupedGemm."""

    mainloops: ClassVar[dict[str, Any]] = {"halves": HalvesMainloop, "rows": GemmMainloop}

    def make_mainloop(self) -> Any:
        return self.mainloop_type(
            self.dtype, self.tile, self.shape.parts, self.transposed, self.stages, self.policy, False
        )  # fmt: skip

    def __init__(self, spec: RaggedSpec, *arguments: Any, **named: Any):
        super().__init__(spec, *arguments, **named)
        self.slots_type: type[Slots] = RowSlots if is_plain("rows") else Slots

    def _make_store(self, view: cute.Tensor) -> Any:
        if is_plain("rows"):
            return make_row_store(view)
        return make_store(view, self.epilogue.store_columns(view.element_type))


class GroupedMxfp8Gemm(GroupedGemm):
    """The grouped GEMM of rows of x and weights in MXFP8; tensor cores apply the scales of both."""

    mainloops: ClassVar[dict[str, Any]] = {"rows": BlockScaledMainloop}

    def __init__(self, spec: RaggedSpec, epilogue: Epilogue):
        super().__init__(spec, Float8E4M3FN, epilogue)

    @property
    def stages(self) -> int:
        tile, staging = self.tile, self._slot_owners * self.shape.slots.num_bytes
        return budget.block_scaled_stages(tile, staging)

    def make_mainloop(self) -> BlockScaledMainloop:
        return BlockScaledMainloop(
            self.tile, self.shape.parts, False, self.stages, self.policy, False, layout=self.shape.layout
        )  # fmt: skip

    def mainloop_scales(self, x: cute.Tensor, w: cute.Tensor, x_scale: Int64, inputs: Inputs) -> Scales:
        """Host side: return the addresses of both operands' scales, which the mainloop brings to the tensor cores.

        Args:
            x_scale: the address of x's scales.
            inputs: the epilogue's inputs, which hold the address of w's scales.
        """
        return Scales(x_scale, inputs.w_scale, Int32(w.shape[1]), inputs.gate)
