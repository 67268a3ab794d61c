"""MXFP8: E4M3 elements, and a power of two (E8M0) as the scale of each 32. Quantisers; folding to one scale a row."""

from .fold import FoldedWeight, FoldError, FoldReport, prepare_mxfp8_weight, rebase_mxfp8
from .quantize import quantize_mxfp8
from .square_blocks import mxfp8_of_square_blocks
from .tensor import MXFP8Copies, MXFP8Tensor

__all__ = [
    "FoldError",
    "FoldReport",
    "FoldedWeight",
    "MXFP8Copies",
    "MXFP8Tensor",
    "mxfp8_of_square_blocks",
    "prepare_mxfp8_weight",
    "quantize_mxfp8",
    "rebase_mxfp8",
]
