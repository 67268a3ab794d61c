"""Fused grouped GEMMs for mixture-of-experts layers: precompiled kernels, one call a layer, safe under CUDA graphs."""

from ffi_bridge import __version__

from . import library as library  # registers torch.ops.glulam
from . import mhc as mhc
from . import nn as nn
from .errors import CaptureError, GradientNotSupported, UnsupportedDevice
from .explanation import Explanation, explain
from .kernels import compile, preload
from .mxfp8 import FoldError, MXFP8Tensor, prepare_mxfp8_weight, quantize_mxfp8
from .ops import (
    GluGradients,
    grouped_bias_grad,
    grouped_dglu,
    grouped_glu,
    grouped_mlp,
    grouped_mm,
    grouped_wgrad,
)
from .tuner import TuneReport, tune

__all__ = [
    "CaptureError",
    "Explanation",
    "FoldError",
    "GluGradients",
    "GradientNotSupported",
    "MXFP8Tensor",
    "TuneReport",
    "UnsupportedDevice",
    "__version__",
    "compile",
    "explain",
    "grouped_bias_grad",
    "grouped_dglu",
    "grouped_glu",
    "grouped_mlp",
    "grouped_mm",
    "grouped_wgrad",
    "mhc",
    "nn",
    "preload",
    "prepare_mxfp8_weight",
    "quantize_mxfp8",
    "tune",
]
