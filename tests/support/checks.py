"""Checks of a case's results against the oracle, one for each operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glulam import library
from glulam.activations import DEFAULTS

from . import oracle
from .criterion import assert_close
from .inputs import Case


def torch_arguments(name: str, **given: Any) -> tuple[Any, ...]:
    """Return the positional arguments of torch.ops.glulam.<name>.

    Arguments that are not in `given` are None; flags are False, and the activation has its defaults.
    """
    defaults = {"activation": "swiglu", "glu_layout": "concat", "numbers": DEFAULTS}
    flags = {**dict.fromkeys(("recompute", "transpose_w", "accumulate"), False), "world_experts": 0}
    operator = library.TORCH_OPS[name]
    assert given.keys() <= set(operator.names), given.keys() - set(operator.names)
    return tuple({**defaults, **flags, "recipe": "bf16", **given}.get(each) for each in operator.names)


Form = tuple[str, str]
SWIGLU: Form = ("swiglu", "concat")


def check_mm(c: Case, w: Any, y: Tensor, **options: Any) -> None:
    exact, yardstick = (
        oracle.grouped_mm(c.x, w, c.ends, dtype=dtype, **options) for dtype in (torch.float64, c.x.dtype)
    )
    assert_close(y, exact, yardstick, c.rows)


def check_glu(c: Case, act: Tensor, preact: Tensor | None, form: Form = SWIGLU, **options: Any) -> None:
    exact, yardstick = (
        oracle.grouped_glu(c.x, c.w1, c.ends, form=form, dtype=dtype, **options) for dtype in (torch.float64, c.x.dtype)
    )
    assert_close(act, exact[0], yardstick[0], c.rows)
    if preact is not None:
        assert_close(preact, exact[1], yardstick[1], c.rows)


def check_mlp(c: Case, y: Tensor, form: Form = SWIGLU, **options: Any) -> None:
    exact, yardstick = (
        oracle.grouped_mlp(c.x, c.w1, c.w2, c.ends, form=form, dtype=dtype, **options)
        for dtype in (torch.float64, c.x.dtype)
    )
    assert_close(y, exact, yardstick, c.rows)


def check_wgrad(c: Case, dy: Tensor, x: Tensor, dw: Any, before: Any = None) -> None:
    """Check weight gradients dw, [E, N, K] or a list of E.

    Args:
        before: for each expert, the gradient that dw was added to. None: dw was overwritten.
    """
    exact = oracle.grouped_wgrad(dy, x, c.ends)
    same = oracle.grouped_wgrad(dy, x, c.ends, dtype=dw[0].dtype)
    for e, size in enumerate(c.sizes):
        start = None if before is None else before[e]
        if size:
            added = (0, 0) if start is None else (start.double(), start)
            assert_close(dw[e], exact[e] + added[0], same[e] + added[1], dw[e].shape[0])
        else:
            assert torch.equal(dw[e], torch.zeros_like(dw[e]) if start is None else start), "an empty group"


def check_bias_grad(c: Case, dy: Tensor, db: Tensor, row_scale: Tensor | None = None) -> None:
    exact, same = (
        oracle.grouped_bias_grad(dy, c.ends, row_scale=row_scale, dtype=d) for d in (torch.float64, db.dtype)
    )
    filled = [e for e, size in enumerate(c.sizes) if size]
    assert_close(db[filled], exact[filled], same[filled], len(filled))
    assert not bool(db[[e for e, size in enumerate(c.sizes) if not size]].any()), "an empty group"


def check_dglu(c: Case, dy: Tensor, preact: Tensor, got: Any, form: Form = SWIGLU, **options: Any) -> None:
    exact, same = (
        oracle.grouped_dglu(dy, c.w2, preact, c.ends, form=form, dtype=dtype, **options)
        for dtype in (torch.float64, dy.dtype)
    )
    dpreact, act, d_row_scale = got
    assert_close(dpreact, exact[0], same[0], c.rows)
    assert_close(act, exact[1], same[1], c.rows)
    if d_row_scale is None:
        return
    if c.rows == 1:  # one number, whose terms may cancel: torch's own error is no yardstick then
        torch.testing.assert_close(d_row_scale[:1].double(), exact[2][:1], rtol=1e-3, atol=0)
    elif c.rows:
        valid = (value[: c.rows][None] for value in (d_row_scale, exact[2], same[2]))
        assert_close(*valid, rows=1)
