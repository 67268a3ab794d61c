"""MXFP4: E2M1 (4-bit) elements, two a byte, and a power of two (E8M0) as the scale of each 32 elements of a row."""

from .codec import values_of
from .quantize import quantize_mxfp4
from .rebase import RebasedWeight, prepare_mxfp4_weight
from .tensor import MXFP4Tensor

__all__ = ["MXFP4Tensor", "RebasedWeight", "prepare_mxfp4_weight", "quantize_mxfp4", "values_of"]
