"""The gradient of grouped_glu: act = activation(h) s, h = x w1_e^T + b_e.

Forward keeps h. What its gradient takes besides GEMMs is made by torch, element by element, in float32: fused into a
GEMM it is where another GEMM follows, in grouped_mlp.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..activations import ActivationParams, activate_backward
from ..host.experts import GateUp
from ..ops.grouped_bias_grad import grouped_bias_grad
from ..ops.grouped_glu import grouped_glu
from ..ops.grouped_mm import grouped_mm
from .function import Formula
from .parts import Targets, contracted, groups_of


class Options(NamedTuple):
    """`form`: the activation, the layout of its gate and their numbers, as keywords."""

    form: dict[str, Any]
    return_preact: bool
    transpose_w: bool
    in_halves: bool


def _options(call: Any) -> Options:
    form = {name: getattr(call, name) for name in ("activation", "glu_layout", "limit", "alpha", "offset")}
    return Options(form, call.return_preact, call.transpose_w, isinstance(call.w1, GateUp))


def _forward(
    given: dict[str, Any], wanted: frozenset[str], options: Options, out: Tensor | None
) -> tuple[Any, dict[str, Any]]:
    act, preact = grouped_glu(
        **given, **options.form, return_preact=True, transpose_w=options.transpose_w, out=out
    )  # fmt: skip
    used = {"x": "w1" in wanted, "w1": "x" in wanted, "bias": False, "row_scale": True, "offs": True, "splits": True}
    kept = {name: value for name, value in given.items() if used[name]}
    return (act, preact) if options.return_preact else act, {**kept, "preact": preact}


def _gradients(
    saved: dict[str, Any], options: Options, targets: Targets, wanted: frozenset[str], d_act: Tensor, *d_preact: Tensor
) -> dict[str, Any]:
    groups = groups_of(saved)
    result: dict[str, Any] = {}
    dpreact, d_scale = _through_activation(d_act, saved["preact"], saved["row_scale"], options.form)
    if "row_scale" in wanted:
        result["row_scale"] = d_scale.masked_fill(_is_behind(groups, d_scale), 0)
    for of_preact in d_preact:
        dpreact = dpreact + of_preact
    if "bias" in wanted:
        result["bias"] = grouped_bias_grad(dpreact, **groups)
    if "w1" in wanted:
        halves = dpreact.chunk(2, dim=1) if options.in_halves else (dpreact,)
        x, of_weight = saved["x"], targets.grad_of("w1")
        made = [of_weight(x, half, groups) if options.transpose_w else of_weight(half, x, groups) for half in halves]
        result["w1"] = made if options.in_halves else made[0]
    if "x" in wanted:
        dx = targets.new_grad_input(dpreact, contracted(saved["w1"], options.transpose_w))
        result["x"] = grouped_mm(dpreact, saved["w1"], **groups, transpose_w=not options.transpose_w, out=dx)
    return result


def _through_activation(
    d_act: Tensor, preact: Tensor, scale: Tensor | None, form: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The gradients of h, in its dtype, and of the row scale."""
    wide = torch.promote_types(preact.dtype, torch.float32)
    name, layout, *numbers = form.values()
    dm, h = d_act.to(wide), preact.to(wide)
    scaled = dm if scale is None else dm * scale.to(wide)[:, None]
    dh, act = activate_backward(scaled, h, name, layout, ActivationParams(*numbers))
    return dh.to(preact.dtype), (dm * act).sum(dim=1)


def _is_behind(groups: dict[str, Any], rows: Tensor) -> Tensor:
    """Which rows lie behind the last group, where nothing is known."""
    ends = groups["offs"][-1] if "offs" in groups else groups["splits"].sum()
    return torch.arange(rows.shape[0], device=rows.device) >= ends


FORMULA = Formula(("x", "w1", "bias", "row_scale"), _options, _forward, _gradients)
