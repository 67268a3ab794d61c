"""Quantising in all its forms at the models' sizes, against a copy of as many bytes. The bar is bytes.

quantize_mxfp8 of a layer's input, and prepare_mxfp8_weight, without its report, of the weights of FC1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from itertools import product, starmap
from typing import Any

import torch
from torch import Tensor

import glulam

from ..cases import Case, cases_of
from ..cells import OURS
from ..contest import listed, records_of, rotating
from ..mlp import copies_needed
from ..options import Options
from ..results import Record
from ..timing import measure_device

CHECKED_ROWS = 384
BLOCK = 32


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to quantise x [rows, columns].

    With `experts` it is one way to prepare weights [experts, rows / experts, columns] (`prepare_mxfp8_weight`).
    """

    label: str
    rows: int
    columns: int
    dtype: str = "bfloat16"
    axis: Any = "row"
    block: Any = "1x32"
    scale_layout: Any = "plain"
    experts: int | None = None

    @property
    def bytes(self) -> int:
        """Return the fewest bytes: the input once, each result's elements and scales once."""
        elements, width = self.rows * self.columns, getattr(torch, self.dtype).itemsize
        if not self.experts:
            return int(elements * width + (2 if self.axis == "both" else 1) * (elements + elements // BLOCK))
        return int(elements * (width + 1) + (self.rows if self.axis == "row" else self.experts * self.columns))

    @property
    def shape(self) -> tuple[int, ...]:
        rows = (self.experts, self.rows // self.experts) if self.experts else (self.rows,)
        return *rows, self.columns

    def call(self, x: Tensor, **given: Any) -> Any:
        if self.experts:
            return glulam.prepare_mxfp8_weight(x, axis=self.axis, report=False)
        return glulam.quantize_mxfp8(x, axis=self.axis, block=self.block, scale_layout=self.scale_layout, **given)


def forms_of(case: Case) -> Iterator[Form]:
    """Yield the forms (ways to quantise) that are measured for a layer.

    These are: x in bfloat16 with every axis, block and layout of scales; x in the other dtypes with every axis; the
    weights of FC1 along either axis.
    """
    axes, rows, n, hidden = ("row", "col", "both"), case.rows, 2 * case.intermediate, case.hidden
    x = partial(Form, f"{case.name} x [{rows}, {hidden}]", rows, hidden)
    yield from starmap(partial(x, "bfloat16"), product(axes, ("1x32", "1x128"), ("plain", "swizzled")))
    yield from starmap(x, product(("float16", "float32"), axes))
    w1 = partial(Form, f"{case.name} w1 [{case.experts}, {n}, {hidden}]", case.experts * n, hidden)
    for dtype, axis in product(("bfloat16", "float32"), ("row", "col")):
        yield w1(dtype, axis, "a row", experts=case.experts)


def check(form: Form, x: Tensor) -> None:
    """Raise RuntimeError if the results for the first rows (of w, for the first expert's) differ from the CPU
    reference's.
    """
    part = x[:1, :CHECKED_ROWS] if form.experts else x[:CHECKED_ROWS]
    pairs = zip(*(listed(form.call(each)) for each in (part, part.cpu())), strict=True)
    for got, wanted in ((getattr(a, field), getattr(b, field)) for a, b in pairs for field in ("data", "scale")):
        if not torch.equal(got.cpu().view(torch.uint8), wanted.view(torch.uint8)):
            raise RuntimeError(f"{'prepare_mxfp8_weight' if form.experts else 'quantize_mxfp8'} is wrong: {form}")


def _measure(form: Form, budget_s: float) -> list[Record]:
    """Time a form, and a copy of as many bytes. Calls alternate between sets of buffers, so none is found in L2."""
    sets = []
    for _ in range(copies_needed(form.bytes)):
        x = torch.randn(form.shape, device="cuda").to(getattr(torch, form.dtype))
        halves = torch.empty(2, form.bytes // 2, dtype=torch.uint8, device="cuda")
        sets.append((x, {} if form.experts else {"out": form.call(x)}, halves))
    check(form, sets[0][0])
    calls = {
        OURS: rotating(lambda made: form.call(made[0], **made[1]), sets),
        "copy": rotating(lambda made: made[2][0].copy_(made[2][1]), sets),
    }
    fields = {name: value for name, value in vars(form).items() if value is not None}
    return [{**fields, "op": "quantize", "bytes": form.bytes, "times": measure_device(calls, budget_s)}]


def run_quantize(options: Options) -> list[Record]:
    """Measure and return one record for each form."""
    forms = [form for case in cases_of("quantize", options.case) for form in forms_of(case)]
    return records_of("quantize", [partial(_measure, form) for form in forms], options.budget_s)
