"""NVFP4: E2M1 (4-bit) elements, an E4M3 scale for each 16 elements of a row, a float32 global scale for a matrix."""

from .quantize import quantize_nvfp4
from .tensor import NVFP4Tensor

__all__ = ["NVFP4Tensor", "quantize_nvfp4"]
