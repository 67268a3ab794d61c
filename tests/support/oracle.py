"""Expected results of the operators in float64, written independently of the library's own reference.

With another `dtype` the functions compute as a user of torch would in that dtype. The error of such a result is the
yardstick for the library's errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PLACES = {"clamped_swiglu": ("limit", "alpha", "offset"), "situ": ("gate_cap", "up_cap")}
"""The names of an activation's constants, in the order in which kernels take them."""
Params = Mapping[str, Any]
DEFAULTS: Params = {"limit": 7.0, "alpha": 1.702, "offset": 1.0, "gate_cap": 4.0, "up_cap": 25.0}


def params_of(name: str, floats: Sequence[float]) -> Params:
    """Return an activation's constants by name, from the floats that a kernel takes."""
    return dict(zip(PLACES.get(name, ()), floats, strict=False))


def _sigmoid(z: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-z))


def _gelu_tanh(z: Tensor) -> Tensor:
    return 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def _gelu_erf(z: Tensor) -> Tensor:
    return 0.5 * z * (1 + torch.erf(z / math.sqrt(2)))


def _positive(z: Tensor) -> Tensor:
    return torch.where(z > 0, z, torch.zeros_like(z))


def _at_most(z: Tensor, bound: float) -> Tensor:
    """Return min(z, bound), whose gradient at the bound is 1, like torch.clamp's; torch.minimum's would be 0.5."""
    return torch.where(z > bound, torch.full_like(z, bound), z)


def _capped(z: Tensor, cap: float | None) -> Tensor:
    if cap in (None, math.inf):
        return z
    return cap * (2 * _sigmoid(2 * z / cap) - 1)


def activation(h: Tensor, name: str, layout: str, params: Params = DEFAULTS) -> Tensor:
    """Compute an activation from its formula, written out in elementary functions."""
    p = SimpleNamespace(**{**DEFAULTS, **params})
    if name in ("srelu", "silu", "gelu", "none"):
        return {
            "srelu": lambda: _positive(h) * _positive(h),
            "silu": lambda: h * _sigmoid(h),
            "gelu": lambda: _gelu_erf(h),
            "none": lambda: h,
        }[name]()
    a, u = halves(h, layout)
    if name == "swiglu":
        return a * _sigmoid(a) * u
    if name == "geglu":
        return _gelu_tanh(a) * u
    if name == "reglu":
        return _positive(a) * u
    if name == "situ":
        return _capped(a, p.gate_cap) * _sigmoid(a) * _capped(u, p.up_cap)
    assert name == "clamped_swiglu"
    gate = _at_most(a, p.limit)
    linear = -_at_most(-_at_most(u, p.limit), p.limit)
    return gate * _sigmoid(p.alpha * gate) * (linear + p.offset)


def torch_activation(h: Tensor, name: str, layout: str, params: Params = DEFAULTS) -> Tensor:
    """Compute an activation as a user of torch would, in h's dtype: few operators, so few roundings."""
    p = SimpleNamespace(**{**DEFAULTS, **params})
    if name in ("srelu", "silu", "gelu", "none"):
        return {"srelu": lambda: F.relu(h).square(), "silu": lambda: F.silu(h), "gelu": lambda: F.gelu(h)}.get(
            name, lambda: h
        )()
    a, u = halves(h, layout)
    if name == "clamped_swiglu":
        a, u = a.clamp(max=p.limit), u.clamp(-p.limit, p.limit)
        return a * torch.sigmoid(a * p.alpha) * (u + p.offset)
    if name == "situ":
        linear = u if p.up_cap in (None, math.inf) else p.up_cap * torch.tanh(u / p.up_cap)
        return p.gate_cap * torch.tanh(a / p.gate_cap) * torch.sigmoid(a) * linear
    gate = {"swiglu": F.silu, "geglu": lambda z: F.gelu(z, approximate="tanh"), "reglu": F.relu}[name]
    return gate(a) * u


def halves(h: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Split h into (gate, up-projection), column by column, by the layout's definition."""
    width = h.shape[1] // 2
    of_a, of_u = [], []
    for i in range(width):
        if layout == "concat":
            a, u = i, width + i
        elif layout == "interleaved":
            a, u = 2 * i, 2 * i + 1
        else:
            a = 64 * (i // 32) + i % 32
            u = a + 32
        of_a.append(a)
        of_u.append(u)
    return h[:, of_a], h[:, of_u]


def _groups(ends: Sequence[int]) -> list[tuple[int, int, int]]:
    starts = [0, *ends[:-1]]
    return [(e, lo, hi) for e, (lo, hi) in enumerate(zip(starts, ends, strict=True)) if hi > lo]


def grouped_mm(
    x: Tensor, w: Any, ends: Sequence[int], *, bias: Any = None, bias_scale: Tensor | None = None,
    transpose_w: bool = False, dtype: torch.dtype = torch.float64,
) -> Tensor:  # fmt: skip
    """Return the expected result of grouped_mm; rows after the last group are NaN."""
    width = w[0].shape[1 if transpose_w else 0]
    y = torch.full((x.shape[0], width), math.nan, dtype=dtype, device=x.device)
    for e, lo, hi in _groups(ends):
        weight = w[e].to(dtype) if transpose_w else w[e].to(dtype).T
        part = x[lo:hi].to(dtype) @ weight
        if bias is not None:
            scale = 1.0 if bias_scale is None else bias_scale[lo:hi, None].to(dtype)
            part = part + bias[e].to(dtype) * scale
        y[lo:hi] = part
    return y


def grouped_glu(
    x: Tensor, w1: Any, ends: Sequence[int], *, bias: Any = None, row_scale: Tensor | None = None,
    form: tuple[str, str] = ("swiglu", "concat"), params: Params = DEFAULTS,
    transpose_w: bool = False, dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the expected (act, preact) of grouped_glu."""
    h = grouped_mm(x, w1, ends, bias=bias, transpose_w=transpose_w, dtype=dtype)
    act = (activation if dtype == torch.float64 else torch_activation)(h, *form, params)
    return (act if row_scale is None else act * row_scale[:, None].to(dtype)), h


def grouped_mlp(
    x: Tensor, w1: Any, w2: Any, ends: Sequence[int], *, b1: Any = None, b2: Any = None,
    row_scale: Tensor | None = None, form: tuple[str, str] = ("swiglu", "concat"),
    params: Params = DEFAULTS, dtype: torch.dtype = torch.float64,
) -> Tensor:  # fmt: skip
    act, _ = grouped_glu(x, w1, ends, bias=b1, row_scale=row_scale, form=form, params=params, dtype=dtype)
    return grouped_mm(act, w2, ends, bias=b2, bias_scale=row_scale, dtype=dtype)


def grouped_wgrad(dy: Tensor, x: Tensor, ends: Sequence[int], *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the expected weight gradients [E, N, K]; zeros for an expert without rows."""
    dw = torch.zeros(len(ends), dy.shape[1], x.shape[1], dtype=dtype, device=x.device)
    for e, lo, hi in _groups(ends):
        dw[e] = dy[lo:hi].to(dtype).T @ x[lo:hi].to(dtype)
    return dw


def grouped_bias_grad(
    dy: Tensor, ends: Sequence[int], *, row_scale: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return the expected bias gradients [E, N]; zeros for an expert without rows."""
    db = torch.zeros(len(ends), dy.shape[1], dtype=dtype, device=dy.device)
    for e, lo, hi in _groups(ends):
        rows = dy[lo:hi].to(dtype)
        db[e] = (rows if row_scale is None else rows * row_scale[lo:hi, None].to(dtype)).sum(dim=0)
    return db


def grouped_dglu(
    dy: Tensor, w2: Any, preact: Tensor, ends: Sequence[int], *, row_scale: Tensor | None = None,
    form: tuple[str, str] = ("swiglu", "concat"), params: Params = DEFAULTS,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the expected (dpreact, act, d_row_scale), differentiated by torch. Rows after the last group are NaN."""
    rows = ends[-1] if ends else 0
    formula = activation if dtype == torch.float64 else torch_activation
    h = preact[:rows].to(dtype).detach().requires_grad_()
    ones = torch.ones(rows, dtype=dtype, device=dy.device)
    s = (ones if row_scale is None else row_scale[:rows].to(dtype)).detach().requires_grad_()
    with torch.enable_grad():
        act = formula(h, *form, params) * s[:, None]
    dm = grouped_mm(dy, w2, ends, transpose_w=True, dtype=dtype)[:rows]
    dh, ds = torch.autograd.grad(act, (h, s), dm)
    return tuple(_with_nan_tail(value.detach(), dy.shape[0]) for value in (dh, act, ds))  # type: ignore[return-value]


def _with_nan_tail(value: Tensor, rows: int) -> Tensor:
    tail = torch.full((rows - value.shape[0], *value.shape[1:]), math.nan, dtype=value.dtype, device=value.device)
    return torch.cat((value, tail))
