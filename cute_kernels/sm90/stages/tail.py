"""What a backward leaves for last."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...specs import TailSpec
from ...tracing import DTYPES, Traced, traced
from ..tail import BackwardTail, Rows, RowSums
from ..tile_scheduler import Groups


class Tail:
    def __init__(self, spec: TailSpec):
        self.tail = BackwardTail(spec.name, DTYPES[spec.dtype])

    @cute.jit
    def __call__(
        self, act: cute.Tensor, dx: Int64, dx_columns: Int32, dx_pitch: Int64, d_scale: Int64, partials: Int64,
        part_columns: Int32, groups: Int64, group_form: Int32, num_groups: Int32, tickets: Int64, num_sms: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        if act.shape[0] > 0:
            sums = RowSums(d_scale, partials, cute.ceil_div(act.shape[1], part_columns))
            sizes = Groups(groups, group_form, num_groups, tickets, act.shape[0])
            self.tail.launch(Rows(dx, dx_columns, dx_pitch), sums, sizes, num_sms, stream)


def trace(spec: TailSpec) -> Traced:
    return traced(spec, Tail(spec))
