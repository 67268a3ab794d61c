"""Selection of the layers that Glulam runs, before their weights are allocated.

If vLLM runs a layer instead, its log has the reason once.
"""

from __future__ import annotations

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.utils.math_utils import round_up

from glulam.integrations.serving import NotServed, mxfp4_kind, served_recipe

from .choice import FP8, MXFP4, chosen
from .experts import WEIGHT_KEYS, GlulamExperts

_log = init_logger(f"vllm.{__name__}")


def constructor_of(format: str, rows: str = "bf16") -> str:
    """Return the name of ServedExperts' constructor for a format.

    Args:
        format: one of `choice.FORMATS`.
        rows: dtype of activations for which an MXFP4 checkpoint was made, "bf16" or "fp8".
    """
    if format == MXFP4:
        return mxfp4_kind(rows)
    return "fp8_block" if format == FP8 else format


def is_served(moe: FusedMoEConfig, format: str, reason: str | None = None, multiple: int = 1) -> bool:
    """Return True if Glulam runs a layer's experts; log the answer if GLULAM_VLLM selects their format.

    Args:
        moe: the layer's configuration.
        format: the format of the layer's weights, one of `choice.FORMATS`.
        reason: a reason known to the caller why Glulam does not run it. None: no such reason.
        multiple: the method will round the intermediate size up to a multiple of this number.
    """
    if format not in chosen():
        return False
    if reason := reason or _reason(moe, format, multiple):
        log_left(format, reason)
        return False
    _log.info_once("Glulam computes %s experts", format)
    return True


def log_left(what: str, reason: str) -> None:
    """Log once that vLLM, not Glulam, runs experts of the format `what`, and the reason."""
    _log.warning_once("Glulam leaves %s experts to vLLM: %s", what, reason)


def _reason(moe: FusedMoEConfig, format: str, multiple: int) -> str | None:
    is_batched = moe.moe_parallel_config.use_batched_activation_format
    layout = mk.FusedMoEActivationFormat.BatchedExperts if is_batched else mk.FusedMoEActivationFormat.Standard
    supported, reason = GlulamExperts.is_supported_config(GlulamExperts, moe, WEIGHT_KEYS.get(format), None, layout)
    if not supported:
        return reason
    kind, width = constructor_of(format), round_up(moe.intermediate_size_per_partition, multiple)
    try:
        served_recipe(kind, moe.hidden_dim, width, moe.in_dtype, torch.empty(0, device=moe.device))
    except NotServed as error:
        return str(error)
    return None
