"""FP8 with block scales: E4M3 elements, and one float32 scale for 128 x 128 elements of a weight, or for 128 elements
of a row of x.
"""

from .quantize import quantize_fp8_block
from .tensor import FP8BlockTensor

__all__ = ["FP8BlockTensor", "quantize_fp8_block"]
