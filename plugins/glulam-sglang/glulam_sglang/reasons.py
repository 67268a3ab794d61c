"""Reasons for which Glulam does not run a layer of SGLang.

They are all conditions under which Glulam's result would differ, and are checked before weights load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.runtime_context import get_exec, get_lora, get_parallel

from glulam.activations import Activation
from glulam.integrations.serving import NotServed, gate_of

SITU_GATE_CAP = 4.0
"""The cap of the activation "situ" if a model's configuration has none: SGLang's default."""


class Reason(NamedTuple):
    """A reason for which Glulam does not run a layer.

    Attributes:
        why: the reason, as text.
        applies: function (MoE method, layer, MoeRunnerConfig) -> True if the reason applies.
    """

    why: str
    applies: Callable[[Any, Any, Any], bool]


REASONS = (
    Reason(
        "another method wraps this layer's MoE method", lambda method, layer, config: layer.quant_method is not method
    ),
    Reason("results of single choices are asked for (no_combine)", lambda method, layer, config: config.no_combine),
    Reason(
        "tokens go to experts by an all-to-all (--moe-a2a-backend)",
        lambda method, layer, config: not get_moe_a2a_backend().is_none(),
    ),
    Reason("experts move between ranks (--enable-eplb)", lambda method, layer, config: get_exec().moe.enable_eplb),
    Reason("experts are shared by ranks (DWDP)", lambda method, layer, config: (get_parallel().dwdp_size or 1) > 1),
    Reason(
        "weights are offloaded to the CPU",
        lambda method, layer, config: max(get_exec().offload.cpu_offload_gb, get_exec().offload.offload_group_size) > 0,
    ),
    Reason(
        "LoRA may be put on experts (--enable-lora)",
        lambda method, layer, config: bool(get_lora().enable_lora or get_lora().lora_paths),
    ),
    Reason(
        "router weights multiply tokens of several experts (apply_router_weight_on_input)",
        lambda method, layer, config: config.apply_router_weight_on_input and config.top_k != 1,
    ),
    Reason(
        "router weights multiply biases as well (apply_router_weight_on_input)",
        lambda method, layer, config: config.apply_router_weight_on_input and layer.with_bias,
    ),
    Reason("intermediates of the gate stay in float32", lambda method, layer, config: config.silu_mul_keep_fp32),
)


def check_layer(method: Any, layer: Any, config: Any) -> None:
    """Raise NotServed with the first reason that applies to the layer."""
    for reason in REASONS:
        if reason.applies(method, layer, config):
            raise NotServed(reason.why)


def gate_of_config(config: Any) -> Activation:
    """Return a layer's activation. Raises NotServed if Glulam has no such activation."""
    name, numbers = config.activation, {}
    if name == "situ":
        cap = SITU_GATE_CAP if config.gemm1_alpha is None else config.gemm1_alpha
        return gate_of(name, gated=config.is_gated, beta=cap, linear=config.gemm1_clamp_limit)
    if config.gemm1_alpha is not None:
        numbers = {"alpha": config.gemm1_alpha, "beta": 1.0 if config.gemm1_beta is None else config.gemm1_beta}
        if config.gemm1_clamp_limit is not None:
            numbers["limit"] = config.gemm1_clamp_limit
        if config.swiglu_limit is not None:
            raise NotServed("gemm1_alpha and swiglu_limit in one layer")
    elif config.gemm1_clamp_limit is not None:
        raise NotServed("the gate is clamped after its activation (gemm1_clamp_limit without gemm1_alpha)")
    elif config.swiglu_limit is not None:
        numbers = {"limit": config.swiglu_limit}
    interleaved = config.gemm1_alpha is not None and config.gate_up_interleaved
    return gate_of(name, gated=config.is_gated, interleaved=interleaved, **numbers)
