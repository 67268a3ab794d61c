"""Quantising in all its forms at the models' sizes, against a copy of as many bytes. The bar is bytes.

quantize_mxfp8 of a layer's input, and prepare_mxfp8_weight, without its report, of the weights of FC1.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import product
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

import glulam
from glulam.formats.mxfp8 import MXFP8Tensor

from ..cases import DECODE, DEEPSEEK, GPT_OSS, MIXTRAL, QWEN3, Case, select
from ..options import Options
from ..problem import MAX_COPIES, ROTATION_BYTES
from ..timing import Call, Summary, measure_device

CASES = [MIXTRAL, QWEN3, DEEPSEEK, GPT_OSS, DECODE[0]]
CHECKED_ROWS = 384
BLOCK = 32


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to quantise x [rows, columns]."""

    label: str
    rows: int
    columns: int
    dtype: str = "bfloat16"
    axis: Any = "row"
    block: str = "1x32"
    scale_layout: str = "plain"

    @property
    def bytes(self) -> int:
        """The fewest: x once, each copy's elements and scales once."""
        elements = self.rows * self.columns
        copies = 2 if self.axis == "both" else 1
        width: int = getattr(torch, self.dtype).itemsize
        return elements * width + copies * (elements + elements // BLOCK)

    @property
    def options(self) -> dict[str, Any]:
        return {"axis": self.axis, "block": self.block, "scale_layout": self.scale_layout}


@dataclasses.dataclass(frozen=True)
class Fold(Form):
    """One way to fold w [experts, rows / experts, columns]."""

    block: str = "a row"
    experts: int = 1

    @property
    def bytes(self) -> int:
        """The fewest: w once, elements and scales once."""
        elements = self.rows * self.columns
        width: int = getattr(torch, self.dtype).itemsize
        return elements * (width + 1) + (self.rows if self.axis == "row" else self.experts * self.columns)


def folds_of(case: Case) -> list[Fold]:
    """The weights of FC1, along either axis."""
    n = 2 * case.intermediate
    base = Fold(
        f"{case.name} w1 [{case.experts}, {n}, {case.hidden}]", case.experts * n, case.hidden, experts=case.experts
    )
    return [dataclasses.replace(base, dtype=d, axis=a) for d, a in product(("bfloat16", "float32"), ("row", "col"))]


def forms_of(case: Case) -> list[Form]:
    """The input of a layer: every axis, block and layout in bfloat16, and the axes in the other dtypes."""
    base = Form(f"{case.name} x [{case.rows}, {case.hidden}]", case.rows, case.hidden)
    axes = ("row", "col", "both")
    every = product(axes, ("1x32", "1x128"), ("plain", "swizzled"))
    forms = [dataclasses.replace(base, axis=a, block=b, scale_layout=s) for a, b, s in every]
    return forms + [dataclasses.replace(base, dtype=d, axis=a) for d, a in product(("float16", "float32"), axes)]


def _copies(result: Any) -> tuple[MXFP8Tensor, ...]:
    return tuple(result) if isinstance(result, tuple) else (result,)


def check(form: Form, x: Tensor) -> None:
    """Raises RuntimeError where the first rows are not what the CPU reference makes of them."""
    part = x[:CHECKED_ROWS]
    got = glulam.quantize_mxfp8(part, **form.options)
    wanted = glulam.quantize_mxfp8(part.cpu(), **form.options)
    for one, other in zip(_copies(got), _copies(wanted), strict=True):
        for mine, reference in ((one.data, other.data), (one.scale, other.scale)):
            if not torch.equal(mine.cpu().view(torch.uint8), reference.view(torch.uint8)):
                raise RuntimeError(f"quantize_mxfp8 is wrong: {form}")


def check_fold(form: Fold, w: Tensor) -> None:
    """The same of the first rows of the first expert of w."""
    part = w[:1, :CHECKED_ROWS]
    got = glulam.prepare_mxfp8_weight(part, axis=form.axis, report=False)
    wanted = glulam.prepare_mxfp8_weight(part.cpu(), axis=form.axis, report=False)
    for mine, reference in ((got.data, wanted.data), (got.scale, wanted.scale)):
        if not torch.equal(mine.cpu().view(torch.uint8), reference.view(torch.uint8)):
            raise RuntimeError(f"prepare_mxfp8_weight is wrong: {form}")


def _fold_contestants(form: Fold) -> dict[str, Call]:
    count = min(math.ceil(ROTATION_BYTES / form.bytes), MAX_COPIES)
    shape = form.experts, form.rows // form.experts, form.columns
    ws = [torch.randn(shape, dtype=getattr(torch, form.dtype), device="cuda") for _ in range(count)]
    check_fold(form, ws[0])
    halves = [torch.empty(2, form.bytes // 2, dtype=torch.uint8, device="cuda") for _ in range(count)]
    return {
        "glulam": lambda n: glulam.prepare_mxfp8_weight(ws[n % count], axis=form.axis, report=False),
        "copy": lambda n: halves[n % count][0].copy_(halves[n % count][1]),
    }


def _contestants(form: Form) -> dict[str, Call]:
    """Calls into caches that the calls before have swept, each with its own buffers."""
    if isinstance(form, Fold):
        return _fold_contestants(form)
    dtype = getattr(torch, form.dtype)
    count = min(math.ceil(ROTATION_BYTES / form.bytes), MAX_COPIES)
    xs = [torch.randn(form.rows, form.columns, device="cuda").to(dtype) for _ in range(count)]
    check(form, xs[0])
    outs = [glulam.quantize_mxfp8(x, **form.options) for x in xs]
    halves = [torch.empty(2, form.bytes // 2, dtype=torch.uint8, device="cuda") for _ in range(count)]
    return {
        "glulam": lambda n: glulam.quantize_mxfp8(xs[n % count], out=outs[n % count], **form.options),
        "copy": lambda n: halves[n % count][0].copy_(halves[n % count][1]),
    }


def make_record(form: Form, times: dict[str, Summary]) -> dict[str, Any]:
    summaries = {name: dataclasses.asdict(summary) for name, summary in times.items()}
    return {**dataclasses.asdict(form), "bytes": form.bytes, "times": summaries}


def run_quantize(options: Options) -> list[dict[str, Any]]:
    """One record a form."""
    cases = select(CASES, options.case)
    forms = [form for case in cases for form in [*forms_of(case), *folds_of(case)]]
    records = []
    for form in track(forms, "quantize"):
        records.append(make_record(form, measure_device(_contestants(form), options.budget_s / len(forms))))
        torch.cuda.empty_cache()
    return records
