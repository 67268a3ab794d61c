"""The CPU reference: what every operator computes, by plain torch operators, one expert at a time.

16-bit inputs compute in float32 and are rounded once, on output; float32 and float64 compute as they are. Rows behind
the last group are not touched. `experts` arguments hold E tensors: a packed tensor or a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .activations import ActivationParams, activate, activate_backward
from .experts import GateUp


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype.itemsize == 2 else x.dtype


def groups_of(ends: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, with its rows."""
    begin = 0
    for expert, end in enumerate(ends):
        if end > begin:
            yield expert, slice(begin, end)
        begin = end


def _linear(x: Tensor, w: Tensor, bias: Tensor | None, bias_scale: Tensor | None, transpose_w: bool = False) -> Tensor:
    """x w^T + bias * scale, or with `transpose_w` x w + ..., of one expert, in x's dtype."""
    weight = w.to(x.dtype)
    y = x @ (weight if transpose_w else weight.mT)
    if bias is None:
        return y
    addend = bias.to(x.dtype)
    return y + (addend if bias_scale is None else addend * bias_scale.to(x.dtype)[:, None])


def _weight(w: Any, expert: int) -> Tensor:
    """An expert's weight; of a GateUp both halves' rows."""
    weight: Tensor = torch.cat([half[expert] for half in w]) if isinstance(w, GateUp) else w[expert]
    return weight


def _one(values: Any, expert: int) -> Any:
    return None if values is None else values[expert]


def _rows(values: Tensor | None, rows: slice) -> Tensor | None:
    return None if values is None else values[rows]


def grouped_mm(
    x: Tensor, w: Any, ends: Sequence[int], bias: Any, bias_scale: Tensor | None, transpose_w: bool, out: Tensor
) -> None:
    """Writes out [T, N]; `ends` are the groups' ends."""
    for expert, rows in groups_of(ends):
        addend = _one(bias, expert), _rows(bias_scale, rows)
        out[rows] = _linear(x[rows].to(_compute_dtype(x)), _weight(w, expert), *addend, transpose_w).to(out.dtype)


def _glu(h: Tensor, row_scale: Tensor | None, activation: str, glu_layout: str, params: ActivationParams) -> Tensor:
    act = activate(h, activation, glu_layout, params)
    return act if row_scale is None else act * row_scale.to(act.dtype)[:, None]


def grouped_glu(
    x: Tensor,
    w1: Any,
    ends: Sequence[int],
    bias: Any,
    row_scale: Tensor | None,
    form: tuple[str, str, ActivationParams],
    out: Tensor,
    preact: Tensor | None,
    transpose_w: bool = False,
) -> None:
    """Writes out [T, I], and preact [T, 2I or I] unless None. `form`: activation, glu_layout and their numbers."""
    for expert, rows in groups_of(ends):
        h = _linear(x[rows].to(_compute_dtype(x)), _weight(w1, expert), _one(bias, expert), None, transpose_w)
        out[rows] = _glu(h, _rows(row_scale, rows), *form).to(out.dtype)
        if preact is not None:
            preact[rows] = h.to(preact.dtype)


def grouped_mlp(
    x: Tensor,
    w1: Any,
    w2: Any,
    ends: Sequence[int],
    b1: Any,
    b2: Any,
    row_scale: Tensor | None,
    form: tuple[str, str, ActivationParams],
    out: Tensor,
    transpose_w: bool = False,
) -> None:
    """Writes out [T, H]. The row scale multiplies the activation, and so the second bias as well."""
    for expert, rows in groups_of(ends):
        scale = _rows(row_scale, rows)
        h = _linear(x[rows].to(_compute_dtype(x)), _weight(w1, expert), _one(b1, expert), None, transpose_w)
        out[rows] = _linear(_glu(h, scale, *form), w2[expert], _one(b2, expert), scale, transpose_w).to(out.dtype)


def grouped_dglu(
    dy: Tensor,
    w2: Any,
    preact: Tensor,
    ends: Sequence[int],
    row_scale: Tensor | None,
    form: tuple[str, str, ActivationParams],
    dpreact: Tensor,
    out: Tensor,
    d_row_scale: Tensor | None,
    transpose_w: bool = False,
) -> None:
    """Writes dpreact [T, 2I or I], the activation out [T, I], and d_row_scale [T] unless None."""
    dtype = _compute_dtype(dy)
    for expert, rows in groups_of(ends):
        dm = _linear(dy[rows].to(dtype), w2[expert], None, None, not transpose_w)
        scale = None if row_scale is None else row_scale[rows].to(dtype)[:, None]
        dh, act = activate_backward(dm if scale is None else dm * scale, preact[rows].to(dtype), *form)
        dpreact[rows] = dh.to(dpreact.dtype)
        out[rows] = (act if scale is None else act * scale).to(out.dtype)
        if d_row_scale is not None:
            d_row_scale[rows] = (dm * act).sum(dim=1).to(d_row_scale.dtype)


def grouped_wgrad(dy: Tensor, x: Tensor, ends: Sequence[int], adds: Sequence[bool], out: Any) -> None:
    """Writes out [E, N, K] or its list; adds where `adds`. An empty group writes zeros, or adds nothing."""
    dtype = _compute_dtype(x)
    begin = 0
    for expert, end in enumerate(ends):
        start, begin = begin, end
        dw = dy[start:end].to(dtype).mT @ x[start:end].to(dtype)
        if not adds[expert]:
            out[expert].copy_(dw)
        elif end > start:
            out[expert].add_(dw.to(out[expert].dtype))
