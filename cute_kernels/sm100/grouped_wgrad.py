"""The weight gradient, ragged in the contraction: dw[e] = dy_e^T @ x_e over the rows of group e."""

from __future__ import annotations

from ..sm90 import grouped_wgrad
from ..sm90.budget import ACROSS_REGISTERS
from .epilogue.wgrad import WgradEpilogue
from .mainloop import WgradMainloop
from .persistent import TensorMemoryGemm
from .tensor_memory import SLAB_LANES


class GroupedWgrad(TensorMemoryGemm, grouped_wgrad.GroupedWgrad):
    """Arguments are those of Hopper's."""

    role_registers = ACROSS_REGISTERS  # of a scheduler with two walks
    epilogue_type = WgradEpilogue
    mainloop_type = WgradMainloop
    store_rows = SLAB_LANES
