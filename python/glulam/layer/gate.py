"""An activation and its gradient of rows, where no GEMM has them in its epilogue."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..activations import ActivationParams, activate, activate_backward


def gate(preact: Tensor, row_scale: Tensor | None, activation: str, glu_layout: str, **numbers: float) -> Tensor:
    """The activation of h [T, 2I or I] times a scale for each row: [T, I] in h's dtype, computed in float32."""
    h = preact.to(torch.promote_types(preact.dtype, torch.float32))
    act = activate(h, activation, glu_layout, ActivationParams(**numbers))
    return (act if row_scale is None else act * row_scale.to(h.dtype)[:, None]).to(preact.dtype)


def gate_gradients(
    d_act: Tensor, preact: Tensor, row_scale: Tensor | None, of_row_scale: bool, groups: dict[str, Any],
    activation: str, glu_layout: str, **numbers: float,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The gradients of h, in its dtype, and of the row scale, zero behind the last group; None where not wanted."""
    wide = torch.promote_types(preact.dtype, torch.float32)
    dm, h = d_act.to(wide), preact.to(wide)
    scaled = dm if row_scale is None else dm * row_scale.to(wide)[:, None]
    dh, act = activate_backward(scaled, h, activation, glu_layout, ActivationParams(**numbers))
    d_scale = None
    if of_row_scale and row_scale is not None:
        d_scale = (dm * act).sum(dim=1).masked_fill(is_behind(groups, h), 0)
    return dh.to(preact.dtype), d_scale


def is_behind(groups: dict[str, Any], rows: Tensor) -> Tensor:
    """Which rows lie behind the last group, where nothing is known: bool [T]."""
    ends = groups["offs"][-1] if "offs" in groups else groups["splits"].sum()
    return torch.arange(rows.shape[0], device=rows.device) >= ends
