"""Epilogue of a fused FC1 in FP8 with block scales.

The epilogue stores the activation as E4M3, with a float32 scale for each 128 elements of a row
(quantize/float_scales.py). It applies no weight scales, since the mainloop has already multiplied the sums by them.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...device.gmem import vector_at
from ...quantize.float_scales import inverse_of, scale_of
from .quantizing import QuantizingEpilogue, QuantizingState


class BlockQuantizingEpilogue(QuantizingEpilogue):
    """Epilogue that stores the activation act in E4M3 with a float32 scale for each 128 elements of a row."""

    def _scale_of(self, amax: Float32) -> Float32:
        return scale_of(amax)

    def _multiplier_of(self, scale: Float32) -> Float32:
        return inverse_of(scale)

    @cute.jit
    def _store_scale(self, state: QuantizingState, scale: Float32, row: Int32, column: Int32):
        block = column // self.block_cols
        if block < state.pitch:
            vector_at(Float32, state.inputs.out_scale)[Int64(row) * state.pitch + block] = scale
