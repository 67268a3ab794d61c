"""MXFP8 quantisation: x [T, K] to E4M3, with a scale (E8M0) for each block of 32 or 128 elements along rows or columns.

A CTA reads a tile once, 16 bytes a load, into registers, where the numbers stay. Threads exchange only magnitudes: by
shuffles along a row, through 2 or 4 KB of shared memory along a column.

A band is 128 rows; a quarter is 32 rows of a band. A tile is some rows of a band by some columns. It depends on the
spec's axis:

    row              2 rows of each quarter of a band, whose swizzled scales share sectors, by 1024 columns; a thread
                     has 16 bytes of each of 8 rows
    col              128 rows by 128 columns, an atom of scales; a thread has 16 bytes of each of 16 rows, as in the
                     tiles below
    both             128 rows by 256 columns (float32: 128)
    both, strips     32 rows by 512 columns; only for plain scales of blocks of 32, which need no whole band

Up to 128 KB of loads are in flight on an SM; 4.3 TB/s at 1 us of latency needs 33 KB. Tiles are wide because of the
plain scales of rows: storing less than a sector (32 bytes) costs as much as storing two sectors. A row has 4 bytes of
scales in 128 columns, 8 in 256, 16 in a strip's 512 columns, and a whole sector in the 1024 columns of axis "row".

A call moves T K (width + copies (1 + 1/32)) bytes, each once. Here width is the bytes of an element of x, 2 or 4;
copies is 1, or 2 for both axes. For 16-bit x that is 3.03 bytes an element for axis "row", 4.06 for both axes.
Instructions do not bound the time. The kernel needs 9 instructions an element for axis "row" and 13 for both axes. In
the time that the bytes take at 4.3 TB/s, an SM can issue 21 and 28.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils
from cutlass import Float32, Int32, Int64, const_expr

from ..specs import QuantizeMxfp8Spec
from ..tracing import DTYPES, Traced, traced
from .e4m3 import e4m3_values
from .mxfp8 import QuantizeMxfp8
from .scales import multiplier_of, power_of_two
from .tile import (
    STRIP,
    Origin,
    Outputs,
    Reach,
    ScaleLayout,
)


class RoundMxfp8(QuantizeMxfp8):
    """Kernel that rounds x to the values that it would have in MXFP8, in blocks of 32 along rows. The result has x's
    dtype: the kernel reads T K elements and writes as many.

    `outputs.row_data` is the address of the result [T, K]. The other outputs and the layout are ignored.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric]):
        super().__init__(name, dtype, "row")

    @cute.jit
    def _quantize(
        self, x: cute.Tensor, outputs: Outputs, layout: ScaleLayout, values: cute.Tensor, reach: Reach, origin: Origin
    ):
        exponents = cute.make_rmem_tensor(self.rows_per_thread, Int32)
        self._row_exponents(cute.recast_tensor(values, Int32), layout, exponents)
        row_bytes = Int64(x.shape[1]) * (self.dtype.width // 8)
        first = outputs.row_data + origin.row * row_bytes + origin.column * (self.dtype.width // 8)
        if origin.column < x.shape[1]:
            for i in cutlass.range_constexpr(self.rows_per_thread):
                if origin.row + self.stores.below(i) < reach.stop:
                    scaled = values[None, i].load().to(Float32) * multiplier_of(exponents[i])
                    rounded = e4m3_values(scaled, self.vector) * power_of_two(exponents[i])
                    result = cute.make_rmem_tensor(self.vector, self.dtype)
                    result.store(rounded.to(self.dtype))
                    cute.autovec_copy(result, self._vector_at(self.dtype, first + self.stores.below(i) * row_bytes))


class Quantize:
    """Host function of the quantiser. With axis "both" it has two kernels. The second, with wider tiles (STRIP), is
    launched for plain scales of blocks of 32 elements."""

    def __init__(self, spec: QuantizeMxfp8Spec):
        dtype = DTYPES[spec.dtype]
        self.quantize = QuantizeMxfp8(spec.name, dtype, spec.axis)
        self.strips = QuantizeMxfp8(f"{spec.name}_strips", dtype, spec.axis, STRIP)
        self.has_strips = spec.axis == "both"

    @cute.jit
    def __call__(
        self, x: cute.Tensor, row_data: Int64, row_scale: Int64, col_data: Int64, col_scale: Int64, offs: Int64,
        num_groups: Int32, wide: Int32, swizzled: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if x.shape[0] > 0:
            outputs = Outputs(row_data, row_scale, col_data, col_scale)
            arguments = (x, outputs, offs, num_groups, ScaleLayout(wide, swizzled), stream)
            if const_expr(not self.has_strips):
                self.quantize.launch(*arguments)
            elif (wide == 0) & (swizzled == 0):
                self.strips.launch(*arguments)
            else:
                self.quantize.launch(*arguments)


class Round:
    """Host function of `RoundMxfp8`."""

    def __init__(self, spec: QuantizeMxfp8Spec):
        self.round = RoundMxfp8(spec.name, DTYPES[spec.dtype])

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, offs: Int64, num_groups: Int32, stream: cuda.CUstream):
        if x.shape[0] > 0:
            outputs = Outputs(Int64(out.iterator.toint()), Int64(0), Int64(0), Int64(0))
            self.round.launch(x, outputs, offs, num_groups, ScaleLayout(Int32(0), Int32(0)), stream)


def trace(spec: QuantizeMxfp8Spec) -> Traced:
    return traced(spec, (Round if spec.rounded else Quantize)(spec))
