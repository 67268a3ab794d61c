"""MXFP4: E2M1 elements, two a byte, and a power of two (E8M0) for each 32 of them along a row."""

from .codec import values_of
from .quantize import quantize_mxfp4
from .rebase import RebasedWeight, prepare_mxfp4_weight
from .tensor import MXFP4Tensor

__all__ = ["MXFP4Tensor", "RebasedWeight", "prepare_mxfp4_weight", "quantize_mxfp4", "values_of"]
