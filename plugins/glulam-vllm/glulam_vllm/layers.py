"""Which layers Glulam computes: asked before a layer has weights, and answered in vLLM's log, once for each answer."""

from __future__ import annotations

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from glulam import recipes

from .choice import BF16, FP8, MXFP4, MXFP8, NVFP4, chosen
from .experts import WEIGHT_KEYS, GlulamExperts

RECIPES = {
    FP8: recipes.FP8_BLOCK_WEIGHT_ONLY, MXFP8: recipes.MXFP8_WEIGHT_ONLY, MXFP4: recipes.MXFP4_WEIGHT_ONLY,
    NVFP4: recipes.NVFP4_WEIGHT_ONLY,
}  # fmt: skip
"""The recipe of each quantised format that takes the least of dtypes and widths."""
_log = init_logger(f"vllm.{__name__}")


def is_served(moe: FusedMoEConfig, format: str, reason: str | None = None) -> bool:
    """Return True if Glulam computes a layer's experts, and log the answer where the user chose the format.

    Args:
        moe: the layer's configuration.
        format: the format of the layer's weights, of `choice.FORMATS`.
        reason: why it does not, if the caller knows.
    """
    if format not in chosen():
        return False
    if reason := reason or _reason(moe, format):
        _log.warning_once("Glulam leaves %s experts to vLLM: %s", format, reason)
        return False
    _log.info_once("Glulam computes %s experts", format)
    return True


def _reason(moe: FusedMoEConfig, format: str) -> str | None:
    is_batched = moe.moe_parallel_config.use_batched_activation_format
    layout = mk.FusedMoEActivationFormat.BatchedExperts if is_batched else mk.FusedMoEActivationFormat.Standard
    supported, reason = GlulamExperts.is_supported_config(GlulamExperts, moe, WEIGHT_KEYS.get(format), None, layout)
    if not supported:
        return reason
    if moe.in_dtype not in (torch.bfloat16, torch.float16):
        return f"the model's dtype is {moe.in_dtype}"
    if format == BF16:
        return None
    widths = {"hidden size": moe.hidden_dim, "intermediate size of a rank": moe.intermediate_size_per_partition}
    try:
        recipes.check_fits(format, RECIPES[format], str(moe.in_dtype).removeprefix("torch."), True, **widths)
    except (TypeError, ValueError) as error:
        return str(error)
    return None
