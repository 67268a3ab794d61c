"""Quantisation of rows to FP8 with block scales: x [T, K] to E4M3, with a float32 scale for each 128 elements of a row
(float_scales.py).

Tiles are the same as in `quantize_mxfp8` by rows. A float32 scale has the size of four E8M0 scales of 32 elements. So
this kernel also moves 3.03 bytes for each element of a 16-bit x.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils
from cutlass import Float32, Int32, Int64, Uint8

from ..formats import FP8_ROWS
from ..specs import QuantizeFp8BlockSpec
from ..tracing import DTYPES, Traced, traced
from .float_scales import inverse_of, scale_of
from .mxfp8 import QuantizeMxfp8
from .scale_stores import BLOCK, WORD_BYTES, Strip
from .tile import WORDS, Origin, Outputs, Reach, ScaleLayout


class QuantizeFp8Block(QuantizeMxfp8):
    """Kernel that quantises x (bfloat16, float16 or float32) to E4M3 with a float32 scale for each 128 elements of a
    row. Rows of x start at multiples of 16 bytes and hold a multiple of 16 elements.

    Results go to `outputs.row_data` [T, K] and `outputs.row_scale` [T, ceil(K / 128)]; `layout` is ignored.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric]):
        super().__init__(name, dtype, "row")
        self.lanes_per_block = FP8_ROWS.block // self.vector

    @cute.jit
    def _quantize(
        self, x: cute.Tensor, outputs: Outputs, layout: ScaleLayout, values: cute.Tensor, reach: Reach, origin: Origin
    ):
        shape = cute.make_layout((self.columns // BLOCK, self.rows))
        held = cutlass.utils.SmemAllocator().allocate_tensor(Uint8, shape, 16)
        scales = self._row_scales(cute.recast_tensor(values, Int32))
        self._hold(scales, held)
        first = outputs.row_data + Int64(origin.row) * x.shape[1] + origin.column
        if origin.column < x.shape[1]:
            for i in cutlass.range_constexpr(self.rows_per_thread):
                if origin.row + self.stores.below(i) < reach.stop:
                    numbers = values[None, i].load().to(Float32) * inverse_of(scales[i])
                    self._store(numbers, first + Int64(self.stores.below(i)) * x.shape[1])
        cute.arch.sync_threads()
        words = FP8_ROWS.num_scales(Int32(x.shape[1]))
        strip = Strip(
            outputs.row_scale, origin.row0, reach.stop, origin.col0 // BLOCK, words * WORD_BYTES
        )  # fmt: skip
        self.stores.words(held, strip)

    def _row_scales(self, words: cute.Tensor) -> cute.Tensor:
        """Return a scale for each of this thread's rows: that of the block to which the thread's 16 bytes of the row
        belong."""
        kind = self.magnitudes
        maxima = cute.make_rmem_tensor(self.rows_per_thread, Int32)
        scales = cute.make_rmem_tensor(self.rows_per_thread, Float32)
        for i in range(self.rows_per_thread):
            maxima[i] = kind.absolute(words[0, i])
            for j in range(1, WORDS):
                maxima[i] = kind.max(maxima[i], kind.absolute(words[j, i]))
        self._max_over_lanes(maxima, 1, self.lanes_per_block)
        for i in range(self.rows_per_thread):
            scales[i] = scale_of(kind.greatest(maxima[i]))
        return scales

    @cute.jit
    def _hold(self, scales: cute.Tensor, held: cute.Tensor):
        """Write this thread's scales, one for each of its rows, to `held` in shared memory. There, the scales of a row
        are neighbours, four bytes for each 128 columns."""
        thread, _, _ = cute.arch.thread_idx()
        if thread % self.lanes_per_block == 0:
            block, slot = thread % self.lanes // self.lanes_per_block, thread // self.lanes
            for i in cutlass.range_constexpr(self.rows_per_thread):
                row = cute.recast_tensor(held[None, slot * self.rows_per_thread + i], Float32)
                row[block] = scales[i]


class Quantize:
    """Host function that launches `QuantizeFp8Block`. `signatures._quantize8_block` describes its arguments: x, then
    addresses and numbers."""

    def __init__(self, spec: QuantizeFp8BlockSpec):
        self.quantize = QuantizeFp8Block(spec.name, DTYPES[spec.dtype])

    @cute.jit
    def __call__(
        self, x: cute.Tensor, data: Int64, scale: Int64, offs: Int64, num_groups: Int32, stream: cuda.CUstream
    ):  # fmt: skip
        if x.shape[0] > 0:
            outputs = Outputs(data, scale, Int64(0), Int64(0))
            self.quantize.launch(x, outputs, offs, num_groups, ScaleLayout(Int32(0), Int32(0)), stream)


def trace(spec: QuantizeFp8BlockSpec) -> Traced:
    return traced(spec, Quantize(spec))
