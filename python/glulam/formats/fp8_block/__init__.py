"""FP8 with block scales: float8_e4m3fn elements, and a float32 scale for each 128 x 128 of a weight or 128 of a row."""

from .quantize import quantize_fp8_block
from .tensor import FP8BlockTensor

__all__ = ["FP8BlockTensor", "quantize_fp8_block"]
