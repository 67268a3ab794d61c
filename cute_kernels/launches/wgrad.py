"""The launch of grouped_wgrad in 16 bits: dw = grouped_wgrad(dy, x)."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..specs import GroupedWgradSpec
from ..tracing import DTYPES, Traced, traced


class Wgrad:
    """Host function that launches a grouped_wgrad. `signatures._wgrad` describes its arguments: tensors, then addresses
    (0: not given) and numbers."""

    def __init__(self, spec: GroupedWgradSpec, wgrad_type: Any):
        self.wgrad = wgrad_type(spec, DTYPES[spec.dtype], DTYPES[spec.out_dtype])

    @cute.jit
    def __call__(
        self, dy: cute.Tensor, x: cute.Tensor, dw: cute.Tensor, dy_rows: Int64, x_rows: Int64, groups: Int64,
        group_form: Int32, num_groups: Int32, tickets: Int64, dw_table: Int64, mask: Int64, accumulate: Int32,
        num_sms: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if x.shape[0] > 0:
            sizes, rows = (groups, group_form, num_groups, tickets), (dy_rows, x_rows)
            self.wgrad.launch(dy, x, dw, sizes, rows, dw_table, mask, accumulate, num_sms, stream)


def trace(spec: GroupedWgradSpec, wgrad_type: Any) -> Traced:
    """Return a pair to compile: the host function that launches the spec's kernel, and stand-ins for the function's
    arguments.

    wgrad_type: the architecture's class of weight gradient kernels.
    """
    return traced(spec, Wgrad(spec, wgrad_type))
