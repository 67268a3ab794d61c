"""Other layers as contestants, where they can be imported: SonicMoE, and FlashInfer's of CuTe DSL.

SonicMoE: names and arguments of sonic-moe 0.1.2 on quack-kernels 0.3.11, which ask for nvidia-cutlass-dsl 4.4.2. Its
own tuner is switched off: it takes minutes for each shape, and the default configuration needs none. The first calls
compile for half a minute each. FlashInfer: names and arguments of `cute_dsl_fused_moe_bf16`, pull request 4878, which
infers only; its default tactic.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .contest import or_left_out
from .layer_data import Batch, LayerData, choose

SONIC, FLASHINFER = "SonicMoE", "FlashInfer"
SONIC_GEMMS = {"forward": ("gemm", "gemm_gated"), "backward": ("gemm", "gemm_dgated")}
FLASHINFER_MODULE = "flashinfer.fused_moe.cute_dsl.sm90_fused_moe"


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another package's layer; `glu_layout` says how it reads the rows of w1."""

    name: str
    forward: Callable[[LayerData, Batch], Tensor]
    glu_layout: str
    trains: bool


def _untuned(package: Any, name: str) -> None:
    gemm = getattr(package, name)
    if not isinstance(gemm, partial):
        setattr(package, name, partial(gemm, tuned=False))


def _sonic() -> Peer:
    """Its function of the whole layer, the router's GEMM included."""
    api: Any = importlib.import_module("sonicmoe.functional")
    for module, names in SONIC_GEMMS.items():
        for name in names:
            _untuned(importlib.import_module(f"sonicmoe.functional.{module}"), name)

    def forward(d: LayerData, b: Batch) -> Tensor:
        """Of several choices softmax over the best, which is ours divided by its sum; else the probability."""
        w1, w2 = d.w1.permute(1, 2, 0), d.w2.permute(1, 2, 0)
        stream, infers = torch.cuda.current_stream().cuda_stream, not torch.is_grad_enabled()
        y, _, _ = api.moe_TC_softmax_topk_layer(
            b.x, d.router, w1, None, w2, None, d.case.top_k, stream, activation_type="swiglu",
            is_inference_mode_enabled=infers, is_softmax_over_topk=d.case.top_k > 1,
        )  # fmt: skip
        result: Tensor = y
        return result

    return Peer(SONIC, forward, "interleaved", trains=True)


def _flashinfer() -> Peer:
    """It takes experts and weights, which torch chooses."""
    fused: Any = importlib.import_module(FLASHINFER_MODULE).cute_dsl_fused_moe_bf16

    def forward(d: LayerData, b: Batch) -> Tensor:
        k = d.case.top_k
        weights, ids = choose(F.linear(b.x, d.router), k)
        y: Tensor = fused(b.x, ids.int(), weights, d.w1, d.w2, num_experts=d.case.experts, top_k=k)
        return y

    return Peer(FLASHINFER, forward, "interleaved32, linear first", trains=False)


PACKAGES: dict[str, Callable[[], Peer]] = {"sonicmoe": _sonic, "flashinfer": _flashinfer}


def find_peers() -> list[Peer]:
    """Those that are installed and can be imported; a warning says why one of them cannot."""
    found = []
    for package, make in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            continue
        with or_left_out(package):
            found.append(make())
    return found
