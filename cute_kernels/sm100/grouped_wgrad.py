"""The weight gradient, ragged in the contraction: dw[e] = dy_e^T @ x_e over the rows of group e."""

from __future__ import annotations

import cutlass

from ..device.target import is_plain
from ..sm90 import grouped_wgrad
from ..sm90.budget import ACROSS_REGISTERS
from ..specs import GroupedWgradSpec
from .epilogue.wgrad import WgradEpilogue
from .mainloop import ClearingWgradMainloop, WgradMainloop
from .persistent import TensorMemoryGemm
from .tensor_memory import SLAB_LANES


class GroupedWgrad(TensorMemoryGemm, grouped_wgrad.GroupedWgrad):
    """Arguments are those of Hopper's."""

    role_registers = ACROSS_REGISTERS  # of a scheduler with two walks
    epilogue_type = WgradEpilogue
    store_rows = SLAB_LANES

    def __init__(self, spec: GroupedWgradSpec, dtype: type[cutlass.Numeric], out_dtype: type[cutlass.Numeric]):
        self.mainloop_type = ClearingWgradMainloop if is_plain("rows") else WgradMainloop
        super().__init__(spec, dtype, out_dtype)
