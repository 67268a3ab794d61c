"""GlulamExperts: the experts class that vLLM's modular MoE kernel calls between its prepare and finalize steps."""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    kFp8Static128BlockSym,
    kMxfp4Static,
    kMxfp8Static,
    kNvfp4Static,
)
from vllm.platforms import current_platform

from glulam.activations import Activation
from glulam.errors import UnsupportedDevice
from glulam.host import device as gpus
from glulam.integrations.serving import NotServed, ServedExperts, gate_of

from .choice import FP8, MXFP4, MXFP8, NVFP4

WEIGHT_KEYS = {FP8: kFp8Static128BlockSym, MXFP8: kMxfp8Static, MXFP4: kMxfp4Static, NVFP4: kNvfp4Static}
"""For each quantised format, vLLM's key of weights in that format."""


def gate_in(activation: MoEActivation, numbers: ApplyMoEActivationConfig) -> Activation:
    """Return Glulam's activation for a layer, with the same constants (limit, alpha, ...) that vLLM's own kernels use.

    Args:
        activation: the layer's activation.
        numbers: vLLM's constants of the activation.

    Raises:
        NotServed: Glulam has no such activation.
    """
    name, is_gated = activation.value.removesuffix("_no_mul"), activation.is_gated
    given: dict[str, Any] = {}
    if activation == MoEActivation.SILU:
        given = {"limit": numbers.clamp_limit}
    elif activation == MoEActivation.SWIGLUOAI:  # vLLM's kernel has gpt-oss' numbers built in
        given = {"interleaved": True}
    elif activation == MoEActivation.SWIGLUOAI_UNINTERLEAVE:
        if numbers.clamp_limit is None:
            raise NotServed(f"activation {name!r} without a limit")
        given = {"limit": numbers.clamp_limit, "alpha": numbers.alpha, "beta": numbers.beta}
    elif activation == MoEActivation.SITU:
        given = {"beta": numbers.activation_situ_beta, "linear": numbers.activation_situ_linear_beta}
    return gate_of(name, gated=is_gated, **given)


def reason_against(moe: FusedMoEConfig) -> str | None:
    """Return why Glulam does not run a layer that passes vLLM's own checks; None: Glulam runs the layer."""
    parallel = moe.moe_parallel_config
    if moe.moe_backend != "auto":
        return f"another backend is asked for (--moe-backend {moe.moe_backend})"
    if parallel.enable_eplb:
        return "experts move between ranks (--enable-eplb)"
    if _is_offloaded():
        return "weights are offloaded to the CPU"
    if parallel.use_all2all_kernels or parallel.use_passthrough_all2all:
        return f"tokens go between ranks (--all2all-backend {parallel.all2all_backend})"
    try:
        gate_in(moe.activation, ApplyMoEActivationConfig.from_configs(moe, FusedMoEQuantConfig.make()))
        if current_platform.is_cuda():
            gpus.gpu(torch.cuda.current_device())
    except (NotServed, UnsupportedDevice) as error:
        return str(error)
    return None


def _is_offloaded() -> bool:
    """Return True if vLLM may move a layer's weights between calls."""
    config = get_current_vllm_config_or_none()
    if config is None:
        return False
    return bool(config.offload_config.uva.cpu_offload_gb or config.offload_config.prefetch.offload_group_size)


class GlulamExperts(mk.FusedMoEExpertsModular):
    """vLLM's interface to a layer's experts on Glulam: FC1 with its activation, FC2, and each token's weighted sum.

    Attributes:
        held: the quantised experts, prepared when their weights were loaded. None: weights have 16 bits, and each call
            passes them.
    """

    def __init__(self, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig) -> None:
        super().__init__(moe_config, quant_config)
        self.gate = gate_in(moe_config.activation, self.activation_config)
        self.held: ServedExperts | None = None

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def is_supported_config(
        cls: type[mk.FusedMoEExperts],
        moe_config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        activation_format: mk.FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        if reason := reason_against(moe_config):
            return False, reason
        asked = moe_config, weight_key, activation_key, activation_format
        supported: tuple[bool, str | None] = mk.FusedMoEExperts.is_supported_config(cls, *asked)
        return supported

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cuda() or current_platform.is_cpu())  # the CPU computes torch's reference

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        """Return True if Glulam reads weights of this format.

        Any activation_key is accepted, since Glulam itself decides how to quantise activations.
        """
        return weight_key is None or weight_key in WEIGHT_KEYS.values()

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return True  # reason_against looks at activations with their numbers

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return not moe_parallel_config.use_all2all_kernels

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int,
        expert_tokens_meta: Any, activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:  # fmt: skip
        """Return the shapes of vLLM's two workspaces, (0,) since Glulam allocates its own memory, and of the result."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def apply(
        self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        activation: MoEActivation, global_num_experts: int, expert_map: Tensor | None, a1q_scale: Tensor | None,
        a2_scale: Tensor | None, workspace13: Tensor | None, workspace2: Tensor | None, expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:  # fmt: skip
        """Write the experts' weighted sums into output.

        With apply_router_weight_on_input the prepare step has already multiplied hidden_states by the router's weights.
        """
        experts = self.held
        if experts is None:
            experts = ServedExperts.bf16(w1, w2, self.w1_bias, self.w2_bias, gate=self.gate)
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        experts(hidden_states, topk_ids, weights, expert_map=expert_map, out=output)
