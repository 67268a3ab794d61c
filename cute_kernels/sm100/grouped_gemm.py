"""The grouped GEMM, ragged in rows: y[row] = epilogue(x[row] @ w[e]^T) for every row of every group e."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from ..epilogue.base import Epilogue
from ..sm90 import grouped_gemm
from ..specs import RaggedSpec
from .epilogue.store import BoxStore, make_store
from .mainloop import GemmMainloop, HalvesMainloop
from .persistent import TensorMemoryGemm


class GroupedGemm(TensorMemoryGemm, grouped_gemm.GroupedGemm):
    """Arguments are those of Hopper's."""

    mainloops = {"halves": HalvesMainloop, "rows": GemmMainloop}

    def make_mainloop(self) -> Any:
        return self.mainloop_type(
            self.dtype, self.tile, self.shape.parts, self.transposed, self.stages, self.policy, False
        )  # fmt: skip

    def _make_store(self, view: cute.Tensor) -> BoxStore:
        return make_store(view, self.shape.slots.columns(view.element_type))
