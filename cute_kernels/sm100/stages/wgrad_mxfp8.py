"""Blackwell's dw = grouped_wgrad(dy, x) with dy and x in MXFP8.

A scale is for a block of 32 rows of a column. A group's first block begins at the group's first row.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...specs import WgradSpec
from ...tracing import Traced, traced
from ..grouped_wgrad import GroupedMxfp8Wgrad


class Wgrad:
    """Host function that launches a grouped_wgrad in MXFP8. `signatures._scaled_wgrad` describes its arguments:
    tensors, then addresses (0: not given) and numbers."""

    def __init__(self, spec: WgradSpec):
        self.wgrad = GroupedMxfp8Wgrad(spec)

    @cute.jit
    def __call__(
        self, dy: cute.Tensor, x: cute.Tensor, dw: cute.Tensor, dy_scale: Int64, x_scale: Int64, groups: Int64,
        group_form: Int32, num_groups: Int32, tickets: Int64, dw_table: Int64, mask: Int64, accumulate: Int32,
        num_sms: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if x.shape[0] > 0:
            sizes = groups, group_form, num_groups, tickets
            self.wgrad.launch_scaled(
                dy, x, dw, (dy_scale, x_scale), sizes, dw_table, mask, accumulate, num_sms, stream
            )  # fmt: skip


def trace(spec: WgradSpec) -> Traced:
    return traced(spec, Wgrad(spec))
