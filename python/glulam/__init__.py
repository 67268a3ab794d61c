"""Fused grouped GEMMs for mixture-of-experts layers: precompiled kernels, one call for each layer, usable in CUDA
graphs.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ffi_bridge import __version__

from . import layer as layer
from . import library as library  # registers torch.ops.glulam
from . import mhc as mhc
from . import nn as nn
from . import recipes as recipes
from .choose.kernels import compile, preload
from .errors import CaptureError, GradientNotSupported, UnsupportedDevice
from .expert_lora import ExpertLora
from .explanation import Explanation, explain
from .formats.checkpoints import load_experts
from .formats.fp8_block import FP8BlockTensor, quantize_fp8_block
from .formats.mxfp4 import MXFP4Tensor, prepare_mxfp4_weight, quantize_mxfp4
from .formats.mxfp8 import (
    FoldError,
    MXFP8Tensor,
    mxfp8_of_square_blocks,
    prepare_mxfp8_weight,
    quantize_mxfp8,
)
from .formats.nvfp4 import NVFP4Tensor, quantize_nvfp4
from .formats.prepared import refresh_weights
from .host.experts import GateUp
from .host.invariance import batch_invariant
from .layer import Routing, combine, load_balancing_loss, moe, permute, route, router_z_loss
from .ops.grouped_bias_grad import grouped_bias_grad
from .ops.grouped_dglu import GluGradients, grouped_dglu
from .ops.grouped_glu import grouped_glu
from .ops.grouped_mlp import grouped_mlp
from .ops.grouped_mm import grouped_mm
from .ops.grouped_wgrad import grouped_wgrad

if TYPE_CHECKING:
    from . import distributed as distributed
    from .tuner import TuneReport as TuneReport
    from .tuner import tune as tune

__all__ = [
    "CaptureError",
    "ExpertLora",
    "Explanation",
    "FP8BlockTensor",
    "FoldError",
    "GateUp",
    "GluGradients",
    "GradientNotSupported",
    "MXFP4Tensor",
    "MXFP8Tensor",
    "NVFP4Tensor",
    "Routing",
    "TuneReport",
    "UnsupportedDevice",
    "__version__",
    "batch_invariant",
    "combine",
    "compile",
    "distributed",
    "explain",
    "grouped_bias_grad",
    "grouped_dglu",
    "grouped_glu",
    "grouped_mlp",
    "grouped_mm",
    "grouped_wgrad",
    "load_balancing_loss",
    "load_experts",
    "mhc",
    "moe",
    "mxfp8_of_square_blocks",
    "nn",
    "permute",
    "preload",
    "prepare_mxfp4_weight",
    "prepare_mxfp8_weight",
    "quantize_fp8_block",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "recipes",
    "refresh_weights",
    "route",
    "router_z_loss",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Import `distributed` and `tuner` when they are first used: serving in one process needs neither."""
    if name == "distributed":
        return importlib.import_module(".distributed", __name__)
    if name in ("TuneReport", "tune"):
        from . import tuner

        return getattr(tuner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
