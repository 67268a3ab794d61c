"""Whether the results of a case are right, operator by operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import oracle
from .criterion import assert_close
from .inputs import Case

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
