"""NVFP4: E2M1 elements, an E4M3 scale for each 16 of them, and a float32 global scale for a matrix."""

from .quantize import quantize_nvfp4
from .tensor import NVFP4Tensor

__all__ = ["NVFP4Tensor", "quantize_nvfp4"]
