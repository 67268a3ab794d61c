"""Routings by plain loops in float64, to which the layer's results are compared, and inputs that expose mistakes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

F64 = torch.float64


def _best(values: list[float], count: int) -> list[int]:
    """Return the indices of the `count` largest values: NaN first, then by value, ties by index."""
    return sorted(range(len(values)), key=lambda e: (not math.isnan(values[e]), -values[e], e))[:count]


def _choose(by: list[float], k: int, num_groups: int, top_groups: int) -> list[int]:
    size = len(by) // num_groups
    groups = [by[g * size : (g + 1) * size] for g in range(num_groups)]
    totals = [sum(group[e] for e in _best(group, 2)) for group in groups]
    members = [e for g in sorted(_best(totals, top_groups)) for e in range(g * size, (g + 1) * size)]
    return [members[i] for i in _best([by[e] for e in members], k)]


def route(
    logits: Tensor, k: int, score: str = "softmax", bias: Tensor | None = None, num_groups: int = 1,
    top_groups: int = 1, normalize: bool = True, scale: float = 1.0, num_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the expected ids and weights of `glulam.route`."""
    ids, weights = torch.full((len(logits), k), -1), torch.zeros(len(logits), k, dtype=F64)
    for n, row in enumerate(logits.to(F64)[:num_tokens]):
        scores = row.sigmoid() if score == "sigmoid" else row
        by = scores if bias is None else scores + bias.to(F64)
        mine = torch.tensor(_choose(by.tolist(), k, num_groups, top_groups))
        if score == "sigmoid":
            found = scores[mine] / (scores[mine].sum() + 1e-20) if normalize else scores[mine]
        else:
            found = row[mine].softmax(0) if normalize or score == "topk_softmax" else row.softmax(0)[mine]
        ids[n], weights[n] = mine, found * scale
    return ids, weights


def check_rows(routing: Any, ids: Tensor, weights: Tensor, experts: int) -> None:
    """Check that a routing has a row for each choice in `ids` (local expert numbers).

    Rows must be in stable order, and have the weights of their choices.
    """
    choices = [(int(e), i) for i, e in enumerate(ids.view(-1).tolist()) if 0 <= e < experts]
    order = [i for _, i in sorted(choices)]
    ends = torch.tensor([sum(e <= last for e, _ in choices) for last in range(experts)])
    assert routing.offs.dtype == torch.int32 and routing.offs.cpu().equal(ends.int())
    k, end = ids.shape[1], len(order)
    assert routing.token_of_row[:end].tolist() == [i // k for i in order]
    assert routing.weight_of_row[:end].cpu().equal(weights.reshape(-1)[order].cpu())
    rows = [-1] * ids.numel()
    for row, i in enumerate(order):
        rows[i] = row
    assert routing.row_of.view(-1).tolist() == rows and routing.row_of.shape == ids.shape


def some_logits(tokens: int, experts: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return logits whose scale differs by token, with some ties, and none so large that a sigmoid rounds to 1."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator) * torch.logspace(-1, 1, max(tokens, 1))[:tokens, None]
    logits[::3] = (logits[::3] * 2).round() / 2
    return logits.clamp(-5, 5).to(dtype)


RULES: dict[str, dict[str, Any]] = {
    "qwen3": {"k": 8},
    "not normalised": {"k": 3, "normalize": False, "scale": 2.5},
    "gpt-oss": {"k": 4, "score": "topk_softmax"},
    "gpt-oss, not normalised": {"k": 3, "score": "topk_softmax", "normalize": False},
    "deepseek": {"k": 8, "score": "sigmoid", "num_groups": 8, "top_groups": 4, "scale": 2.5, "biased": True},
    "sigmoid": {"k": 2, "score": "sigmoid", "normalize": False},
    "biased softmax": {"k": 2, "biased": True},
    "one": {"k": 1, "normalize": False},
    "groups of a softmax": {"k": 4, "num_groups": 4, "top_groups": 2, "normalize": False},
}


def options_of(rule: str, experts: int) -> dict[str, Any]:
    """Return the options of a rule of RULES, with its bias, for this number of experts."""
    options = dict(RULES[rule])
    generator = torch.Generator().manual_seed(experts)
    if options.pop("biased", False):
        options["bias"] = torch.randn(experts, generator=generator) / 2
    return options
