"""The backend's runner: it computes an MoE layer by one call of Glulam, from SGLang's dispatched tokens and choices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.distributed.device_communicators.pynccl_allocator import (
    is_symmetric_memory_enabled,
    use_symmetric_memory,
)
from sglang.srt.layers.dp_attention import is_allocation_symmetric
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeQuantInfo, MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.layers.moe.utils import get_moe_runner_backend, resolve_moe_runner_backend
from sglang.srt.runtime_context import get_flags, get_parallel
from torch import Tensor

from glulam.integrations.serving import ServedExperts

from . import NAME


def is_chosen() -> bool:
    """Return True if the engine was started with --moe-runner-backend glulam."""
    return get_moe_runner_backend().value == NAME


@contextmanager
def running_as(backend: str) -> Iterator[None]:
    """Context in which the engine's own code sees `backend` as the value of --moe-runner-backend."""
    flags = get_flags().moe
    kept = flags.runner_backend
    flags.runner_backend = resolve_moe_runner_backend(backend)
    try:
        yield
    finally:
        flags.runner_backend = kept


@dataclass
class GlulamQuantInfo(MoeQuantInfo):
    """A layer's experts, in the type in which SGLang passes weights to a runner."""

    experts: ServedExperts


class GlulamRunnerCore(DispatchMoeRunnerCore):
    """Runner that computes weighted sums [N, H] of experts' results from tokens [N, H] and their choices [N, K].

    The expert ids in the choices are local to this rank.
    """

    @property
    def runner_backend(self) -> Any:
        return resolve_moe_runner_backend(NAME)

    def run_from_dispatch(
        self, dispatch_output: Any, quant_info: MoeQuantInfo, runner_config: MoeRunnerConfig, hooks: Any = None
    ) -> StandardCombineInput:
        """Compute one layer: return, for each dispatched token, the weighted sum of its experts' results.

        Raises:
            RuntimeError: an argument that the checks of the layer (`layers.taken`) should have excluded, such as LoRA.
        """
        if not isinstance(quant_info, GlulamQuantInfo):
            raise RuntimeError(f"glulam: {type(quant_info).__name__} of a MoE method that this plugin has no hook on")
        if hooks is not None:
            raise RuntimeError("glulam: LoRA on experts; choose another --moe-runner-backend")
        x = dispatch_output.hidden_states
        if dispatch_output.hidden_states_scale is not None:
            raise RuntimeError("glulam: tokens were quantised by the dispatcher; choose --moe-a2a-backend none")
        topk = _choices(dispatch_output.topk_output, runner_config)
        made = quant_info.experts(
            x, topk.topk_ids, topk.topk_weights, scale=_scale(runner_config),
            weights_on_rows=runner_config.apply_router_weight_on_input, world_experts=_world_experts(runner_config),
            out=_symmetric_result(x),
        )  # fmt: skip
        return StandardCombineInput(hidden_states=made)


def _choices(topk: Any, config: MoeRunnerConfig) -> Any:
    """Return a layer's choices in SGLang's standard format, which has tensors of ids and weights."""
    if TopKOutputChecker.format_is_bypassed(topk):
        if config.layer is not None and config.moe_ep_size > 1:  # ids would be global
            raise RuntimeError("glulam: router logits instead of choices, with expert parallelism")
        topk = topk.to_standard()
    if not TopKOutputChecker.format_is_standard(topk):
        raise RuntimeError(f"glulam: choices in SGLang's format {topk.format.name}; served is STANDARD")
    return topk


def _scale(config: MoeRunnerConfig) -> float:
    """Return the factor that multiplies the router's weights; 1 if there is none or the weights include it already."""
    is_in_weights = getattr(config.layer, "should_fuse_routed_scaling_factor_in_topk", False)
    factor = config.routed_scaling_factor
    return 1.0 if factor is None or is_in_weights else factor


def _world_experts(config: MoeRunnerConfig) -> int | None:
    """Return the number of experts on all ranks; None: this rank has all of them."""
    here, world = config.num_local_experts, config.num_experts
    return world if here is not None and world is not None and world > here else None


def _symmetric_result(x: Tensor) -> Tensor | None:
    """Return a buffer for the layer's result, shaped like x, in NCCL's symmetric memory for the engine's all-reduce.

    None: the engine does not use symmetric memory here.
    """
    if not is_symmetric_memory_enabled() or not is_allocation_symmetric():
        return None
    with use_symmetric_memory(get_parallel().tp_group):
        return torch.empty_like(x)
