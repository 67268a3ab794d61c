"""MoE blocks of other libraries: random state dicts, and the blocks' forward in plain torch.

The forwards are written from each model's formulas, independently of the library, and compute in the tensors' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import routes

State = dict[str, Tensor]
HIDDEN, INTER, SHARED, EXPERTS = 24, 32, 64, 8


class Family(NamedTuple):
    """A family of models.

    `options`: options of the equivalent `nn.MoE`. `shapes`: function that returns the shapes of the state dict. `gate`:
    key of the router's weight. `expert(state, e, x)`: function that computes rows of expert e. `shared(state, x)`:
    function that computes the shared expert; None: the block has none.
    """

    options: dict[str, Any]
    shapes: Callable[[], dict[str, tuple[int, ...]]]
    gate: str
    expert: Callable[[State, int, Tensor], Tensor]
    shared: Callable[[State, Tensor], Tensor] | None = None


def _apart(prefix: str, gate: str, up: str, down: str, inter: int = INTER) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.{gate}.weight": (inter, HIDDEN),
        f"{prefix}.{up}.weight": (inter, HIDDEN),
        f"{prefix}.{down}.weight": (HIDDEN, inter),
    }


def _each(*names: str) -> dict[str, tuple[int, ...]]:
    found = {"gate.weight": (EXPERTS, HIDDEN)}
    for e in range(EXPERTS):
        found.update(_apart(f"experts.{e}", *names))
    return found


def _swiglu(state: State, prefix: str, gate: str, up: str, down: str, x: Tensor) -> Tensor:
    gate, up, down = (state[f"{prefix}.{name}.weight"] for name in (gate, up, down))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


QWEN = ("gate_proj", "up_proj", "down_proj")
STACKED = {
    "gate.weight": (EXPERTS, HIDDEN),
    "experts.gate_up_proj": (EXPERTS, 2 * INTER, HIDDEN),
    "experts.down_proj": (EXPERTS, HIDDEN, INTER),
}
GPT_OSS = {
    "router.weight": (EXPERTS, HIDDEN),
    "router.bias": (EXPERTS,),
    "experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * INTER),
    "experts.gate_up_proj_bias": (EXPERTS, 2 * INTER),
    "experts.down_proj": (EXPERTS, INTER, HIDDEN),
    "experts.down_proj_bias": (EXPERTS, HIDDEN),
}


def _qwen(state: State, e: int, x: Tensor) -> Tensor:
    return _swiglu(state, f"experts.{e}", *QWEN, x)


def _stacked(state: State, e: int, x: Tensor) -> Tensor:
    h = x @ state["experts.gate_up_proj"][e].T
    return (F.silu(h[:, :INTER]) * h[:, INTER:]) @ state["experts.down_proj"][e].T


def _gpt_oss(state: State, e: int, x: Tensor) -> Tensor:
    h = x @ state["experts.gate_up_proj"][e] + state["experts.gate_up_proj_bias"][e]
    gate, up = h[:, ::2].clamp(max=7.0), h[:, 1::2].clamp(-7.0, 7.0)
    m = (up + 1) * (gate * torch.sigmoid(1.702 * gate))
    return m @ state["experts.down_proj"][e] + state["experts.down_proj_bias"][e]


def _gated_shared(state: State, x: Tensor) -> Tensor:
    return torch.sigmoid(x @ state["shared_expert_gate.weight"].T) * _swiglu(state, "shared_expert", *QWEN, x)


DEEPSEEK = {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5}
FAMILIES: dict[str, Family] = {
    "qwen3": Family({"top_k": 3}, lambda: _each(*QWEN), "gate.weight", _qwen),
    "qwen3 of transformers 5": Family({"top_k": 3}, lambda: dict(STACKED), "gate.weight", _stacked),
    "qwen2": Family(
        {"top_k": 2, "normalize": False, "shared_intermediate_size": SHARED, "shared_gate": True},
        lambda: {
            **_each(*QWEN), **_apart("shared_expert", *QWEN, SHARED), "shared_expert_gate.weight": (1, HIDDEN)
        },
        "gate.weight", _qwen, _gated_shared,
    ),
    "mixtral": Family(
        {"top_k": 2}, lambda: _each("w1", "w3", "w2"), "gate.weight",
        lambda state, e, x: _swiglu(state, f"experts.{e}", "w1", "w3", "w2", x),
    ),
    "gpt-oss": Family(
        {"top_k": 4, "score": "topk_softmax", "router_bias": True, "bias": True, "activation": "clamped_swiglu",
         "glu_layout": "interleaved"},
        lambda: dict(GPT_OSS), "router.weight", _gpt_oss,
    ),
    "deepseek": Family(
        {"top_k": 3, "choice_bias": True, "shared_intermediate_size": SHARED, **DEEPSEEK},
        lambda: {
            **_each(*QWEN), **_apart("shared_experts", *QWEN, SHARED), "gate.e_score_correction_bias": (EXPERTS,)
        },
        "gate.weight", _qwen, lambda state, x: _swiglu(state, "shared_experts", *QWEN, x),
    ),
}  # fmt: skip


def some_state(name: str, dtype: torch.dtype = torch.float64, device: str = "cpu") -> State:
    """Return a random state dict. Experts differ in scale, so that swapped experts are noticed; biases are large."""
    generator = torch.Generator().manual_seed(len(name))
    state = {}
    for index, (key, shape) in enumerate(FAMILIES[name].shapes().items()):
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        is_bias = "bias" in key
        value *= 0.1 if is_bias else shape[-1] ** -0.5 * (1 + index % 5 / 4)
        state[key] = value.to(dtype).to(device)
    return state


def block(name: str, state: State, x: Tensor, ids: Tensor | None = None) -> Tensor:
    """Return a block's result for tokens x [N, H]. Differentiable.

    Args:
        ids: the chosen experts [N, K]. None: the block's router chooses.
    """
    family, options = FAMILIES[name], FAMILIES[name].options
    logits = x @ state[family.gate].T + state.get("router.bias", 0)
    choice = {key: options[key] for key in ("score", "num_groups", "top_groups") if key in options}
    if ids is None:
        bias = state.get("gate.e_score_correction_bias")
        ids = routes.route(logits.detach(), options["top_k"], bias=bias, **choice)[0]
    weights = _weights(logits, ids, options).to(x.dtype)
    out = torch.zeros_like(x) if family.shared is None else family.shared(state, x)
    for e in range(EXPERTS):
        token, place = torch.where(ids == e)
        if len(token):
            out = out.index_add(0, token, family.expert(state, e, x[token]) * weights[token, place, None])
    return out


def _weights(logits: Tensor, ids: Tensor, options: dict[str, Any]) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    score = options.get("score", "softmax")
    if score == "topk_softmax":
        return wide.gather(1, ids).softmax(1)
    weights = (wide.sigmoid() if score == "sigmoid" else wide.softmax(1)).gather(1, ids)
    if options.get("normalize", True):
        weights = weights / weights.sum(1, keepdim=True)
    return weights * options.get("scale", 1.0)
