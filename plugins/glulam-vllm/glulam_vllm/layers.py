"""Which layers Glulam computes: asked before a layer has weights, and answered in vLLM's log, once for each answer."""

from __future__ import annotations

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.utils.math_utils import round_up

from glulam import recipes
from glulam.integrations.serving.weights import MULTIPLE

from .choice import BF16, FP8, MXFP4, MXFP8, NVFP4, chosen
from .experts import WEIGHT_KEYS, GlulamExperts

RECIPES = {
    FP8: recipes.FP8_BLOCK_WEIGHT_ONLY, MXFP8: recipes.MXFP8_WEIGHT_ONLY, MXFP4: recipes.MXFP4_WEIGHT_ONLY,
    NVFP4: recipes.NVFP4_WEIGHT_ONLY,
}  # fmt: skip
"""The recipe of each quantised format that takes the least of dtypes and widths."""
_log = init_logger(f"vllm.{__name__}")


def is_served(moe: FusedMoEConfig, format: str, reason: str | None = None, multiple: int = 1) -> bool:
    """Return True if Glulam computes a layer's experts, and log the answer where the user chose the format.

    Args:
        moe: the layer's configuration.
        format: the format of the layer's weights, of `choice.FORMATS`.
        reason: why Glulam does not, if the caller knows.
        multiple: the intermediate size is going to be rounded up to a multiple of this number.
    """
    if format not in chosen():
        return False
    if reason := reason or _reason(moe, format, multiple):
        log_left(format, reason)
        return False
    _log.info_once("Glulam computes %s experts", format)
    return True


def log_left(what: str, reason: str) -> None:
    """Log, once, that Glulam does not compute these experts."""
    _log.warning_once("Glulam leaves %s experts to vLLM: %s", what, reason)


def _reason(moe: FusedMoEConfig, format: str, multiple: int) -> str | None:
    is_batched = moe.moe_parallel_config.use_batched_activation_format
    layout = mk.FusedMoEActivationFormat.BatchedExperts if is_batched else mk.FusedMoEActivationFormat.Standard
    supported, reason = GlulamExperts.is_supported_config(GlulamExperts, moe, WEIGHT_KEYS.get(format), None, layout)
    if not supported:
        return reason
    hidden, width = moe.hidden_dim, round_up(moe.intermediate_size_per_partition, multiple)
    if format == BF16:
        if moe.in_dtype not in (torch.bfloat16, torch.float16):
            return f"the model's dtype is {moe.in_dtype}"
        has_kernels = not (hidden % MULTIPLE or width % MULTIPLE)
        return None if has_kernels else f"H = {hidden} and I = {width}; kernels read multiples of {MULTIPLE}"
    dtype = str(moe.in_dtype).removeprefix("torch.")
    try:
        recipes.check_fits("moe", RECIPES[format], dtype, True, H=hidden, I=width)
    except (TypeError, ValueError) as error:
        return str(error)
    return None
