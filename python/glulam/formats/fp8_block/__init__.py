"""FP8 with block scales: E4M3, one float32 scale for 128 x 128 elements of a weight, or 128 elements of a row of x."""

from .quantize import quantize_fp8_block
from .tensor import FP8BlockTensor

__all__ = ["FP8BlockTensor", "quantize_fp8_block"]
