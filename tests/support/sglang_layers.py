"""SGLang's own MoE layers on the CPU: its configurations, FusedMoE layers and weight loaders.

A fixture imports this module, since it imports SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import BypassedTopKOutput, StandardTopKOutput, TopKConfig
from sglang.srt.layers.moe.utils import MoeA2ABackend, resolve_moe_runner_backend
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
from sglang.srt.runtime_context import get_context, get_exec, get_flags, get_lora, get_parallel
from torch import Tensor

from .serving import BF16, Held, held, interleaved

__all__ = ["Fp8Config", "Fp8MoEMethod", "FusedMoE", "get_context", "get_exec", "get_flags", "get_lora", "get_parallel"]

EXPERTS, HIDDEN, WIDTH = 5, 256, 128
ONE_RANK = {
    "moe_ep_size": 1,
    "moe_ep_rank": 0,
    "moe_tp_size": 1,
    "moe_tp_rank": 0,
    "tp_group": SimpleNamespace(world_size=1),
}
PARTS = {
    "bf16": ("",), "fp8_block": ("", "_scale_inv"), "mxfp8": ("", "_scale_inv"), "deepseek_v4": ("", "_scale_inv"),
    "gpt_oss": ("", "_scale"), "mxfp4": ("", "_scale"), "nvfp4": ("", "_scale", "_scale_2"),
}  # fmt: skip
"""Suffixes of the names of a weight's tensors, by the kind of checkpoint."""
HELD = {"deepseek_v4": "mxfp4", "gpt_oss": "mxfp4"}
"""For kinds of checkpoints whose format has another name in `serving.held`: that name."""


@contextmanager
def engine() -> Iterator[None]:
    """Context with SGLang's state of a one-rank process that was started with --moe-runner-backend glulam."""
    arguments = get_context().override_server_args(moe_runner_backend="glulam")
    with arguments, get_parallel().override(**ONE_RANK), running("glulam"):
        yield


@contextmanager
def running(backend: str, a2a: str = "none") -> Iterator[None]:
    flags = {"runner_backend": resolve_moe_runner_backend(backend), "a2a_backend": MoeA2ABackend(a2a)}
    with get_flags().moe.override(**flags):
        yield


def config_of(kind: str) -> Any:
    """Return SGLang's quantisation configuration for a kind of checkpoint."""
    if kind in ("gpt_oss", "mxfp4"):
        return Mxfp4Config(is_checkpoint_mxfp4_serialized=True)
    if kind == "nvfp4":
        return ModelOptFp4Config(is_checkpoint_nvfp4_serialized=True, group_size=16)
    if kind == "bf16":
        return None
    mxfp8 = kind == "mxfp8"
    return Fp8Config(
        is_checkpoint_fp8_serialized=True, weight_block_size=[1, 32] if mxfp8 else [128, 128], use_mxfp8=mxfp8,
        is_fp4_experts=kind == "deepseek_v4",
    )  # fmt: skip


def layer_of(kind: str, *, quant_config: Any = None, **options: Any) -> FusedMoE:
    """Return an MoE layer of the engine without loaded weights."""
    given = {
        "num_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": WIDTH, "layer_id": 0, "top_k": 3,
        "params_dtype": BF16, "prefix": "model.layers.0.mlp.experts",
    }  # fmt: skip
    if kind == "gpt_oss":
        given |= {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "with_bias": True}
    return FusedMoE(**{**given, **options}, quant_config=config_of(kind) if quant_config is None else quant_config)


class Weights:
    """A layer's weights as a checkpoint stores them, and their values in float64."""

    def __init__(self, kind: str, gated: bool = True, width: int = WIDTH, form: str = "") -> None:
        """Make random weights. form: the format for `serving.held`. Empty: the usual one of `kind`."""
        halves, form = (2 if gated else 1), form or HELD.get(kind, kind)
        self.kind, self.gated = kind, gated
        self.w13 = held(form, EXPERTS, halves * width, HIDDEN, seed=1, halves=halves)
        self.w2 = held(form, EXPERTS, HIDDEN, width, seed=2)
        self.b13 = self.b2 = None
        if kind == "gpt_oss":
            self.w13 = Held(tuple(map(interleaved, self.w13.parts)), interleaved(self.w13.values))
            generator = torch.Generator().manual_seed(3)
            self.b13 = torch.randn(EXPERTS, 2 * width, generator=generator).to(BF16)
            self.b2 = torch.randn(EXPERTS, HIDDEN, generator=generator).to(BF16)

    def load(self, layer: FusedMoE, experts: range | None = None) -> None:
        """Load the weights by the engine's own loader, then run its own call after loading."""
        if self.kind == "gpt_oss":
            self._load_whole(layer)
        else:
            for expert in experts or range(layer.num_experts):
                self._load_expert(layer, expert)
        layer.quant_method.process_weights_after_loading(layer)

    def _load_whole(self, layer: FusedMoE) -> None:
        """Load tensors that hold all experts."""
        for name, weight, bias in (("w13", self.w13, self.b13), ("w2", self.w2, self.b2)):
            for suffix, part in zip(PARTS[self.kind], weight.parts, strict=True):
                self._give(layer, f"{name}_weight{suffix}", _bytes(part), "", None)
            assert bias is not None
            self._give(layer, f"{name}_weight_bias", bias, "", None)

    def _load_expert(self, layer: FusedMoE, expert: int) -> None:
        shards = [("w1", "w13", 0), ("w3", "w13", 1)] if self.gated else [("w1", "w13", 0)]
        for shard, name, half in (*shards, ("w2", "w2", 0)):
            weight = self.w13 if name == "w13" else self.w2
            count = len(shards) if name == "w13" else 1
            for suffix, part in zip(PARTS[self.kind], weight.parts, strict=True):
                mine = part[expert].chunk(count)[half] if part[expert].dim() else part[expert]
                if self.kind == "mxfp4":
                    mine = _bytes(mine)
                if suffix == "_scale_2":
                    mine = mine.reshape(())
                self._give(layer, f"{name}_weight{suffix}", mine, shard, expert)

    def _give(self, layer: FusedMoE, name: str, loaded: Tensor, shard: str, expert: int | None) -> None:
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, loaded, name, shard_id=shard, expert_id=expert)


def _bytes(part: Tensor) -> Tensor:
    return part.view(torch.uint8) if part.itemsize == 1 else part


def standard(ids: Tensor, weights: Tensor) -> StandardTopKOutput:
    return StandardTopKOutput(weights, ids, torch.zeros(len(ids), EXPERTS))


def bypassed(x: Tensor, logits: Tensor, k: int) -> BypassedTopKOutput:
    return BypassedTopKOutput(x, logits, TopKConfig(top_k=k, renormalize=True))
