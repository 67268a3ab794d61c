"""Fused grouped GEMMs for mixture-of-experts layers: precompiled kernels, one call a layer, safe under CUDA graphs."""

from ffi_bridge import __version__

from . import library as library  # registers torch.ops.glulam
from .errors import CaptureError, GradientNotSupported, UnsupportedDevice
from .explanation import Explanation, explain
from .kernels import compile, preload
from .ops import grouped_glu, grouped_mlp, grouped_mm

__all__ = [
    "CaptureError",
    "Explanation",
    "GradientNotSupported",
    "UnsupportedDevice",
    "__version__",
    "compile",
    "explain",
    "grouped_glu",
    "grouped_mlp",
    "grouped_mm",
    "preload",
]
