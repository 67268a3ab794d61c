"""SGLang's MoE methods that this plugin hooks.

For each method: how it stores experts, and which SGLang backend runs the layers that Glulam does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from glulam.integrations.serving import NotServed, mxfp4_kind

QUANTIZATION = "sglang.srt.layers.quantization"
FP8_BLOCK = [128, 128]
FP8_PARTS, MXFP4_PARTS = ("", "_scale_inv"), ("", "_scale")


class Method(NamedTuple):
    """A class of SGLang's MoE methods.

    Attributes:
        path: import path of the class.
        format_of: function of a method object that returns the format of its weights, the name of a constructor of
            ServedExperts; raises NotServed.
        parts: suffixes of the names of a weight's tensors, after `w13_weight` and `w2_weight`.
        fallback: function of a method object that returns the --moe-runner-backend for layers that Glulam does not run;
            "": there is none.
    """

    path: str
    format_of: Callable[[Any], str]
    parts: tuple[str, ...]
    fallback: Callable[[Any], str]

    @property
    def class_name(self) -> str:
        return self.path.rpartition(".")[2]

    def tensors(self, layer: Any) -> list[torch.Tensor]:
        """Return the tensors of w13, then of w2, in the order that ServedExperts' constructors take."""
        return [getattr(layer, f"{name}_weight{part}") for name in ("w13", "w2") for part in self.parts]


def _fp8_format(method: Any) -> str:
    config = method.quant_config
    if method.is_fp4_expert:
        if method.dequant_fp4_to_fp8:
            raise NotServed("MXFP4 experts are converted to FP8 (SGLANG_DSV4_FP4_DEQUANT)")
        return mxfp4_kind()
    if not config.is_checkpoint_fp8_serialized:
        raise NotServed("weights in 16 bits are quantised while they load")
    if method.use_mxfp8:
        return "mxfp8"
    if not method.block_quant or list(method.weight_block_size) != FP8_BLOCK:
        raise NotServed(f"FP8 weights with weight_block_size {method.weight_block_size}; served is {FP8_BLOCK}")
    return "fp8_block"


def _fp8_fallback(method: Any) -> str:
    """Return the backend for layers of Fp8MoEMethod that Glulam does not run: "triton", or "" for none.

    "triton" runs FP8 weights, and MXFP8 weights that SGLang converts to FP8 at load. Nothing runs MXFP4 or
    other MXFP8.
    """
    if method.is_fp4_expert or (method.use_mxfp8 and not method.convert_mxfp8_to_block):
        return ""
    return "triton"


def _nvfp4_format(method: Any) -> str:
    if not method.quant_config.is_checkpoint_nvfp4_serialized:
        raise NotServed("weights in 16 bits are quantised while they load")
    return "nvfp4"


UNQUANTIZED = Method(
    f"{QUANTIZATION}.unquant.UnquantizedFusedMoEMethod", lambda method: "bf16", ("",), lambda method: "triton"
)
FP8 = Method(f"{QUANTIZATION}.fp8.Fp8MoEMethod", _fp8_format, FP8_PARTS, _fp8_fallback)
MXFP4 = Method(f"{QUANTIZATION}.mxfp4.Mxfp4MoEMethod", lambda method: mxfp4_kind(), MXFP4_PARTS, lambda method: "")
NVFP4 = Method(
    f"{QUANTIZATION}.modelopt_quant.ModelOptNvFp4FusedMoEMethod",
    _nvfp4_format,
    (*MXFP4_PARTS, "_scale_2"),
    lambda method: "marlin",
)
METHODS = (UNQUANTIZED, FP8, MXFP4, NVFP4)
