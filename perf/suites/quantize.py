"""Quantising in all its forms at the models' sizes, against a copy of as many bytes. The bar is bytes.

quantize_mxfp8 of a layer's input, and prepare_mxfp8_weight, without its report, of the weights of FC1.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import product
from typing import Any

import torch
from torch import Tensor

import glulam
from glulam.formats.mxfp8 import MXFP8Tensor

from ..cases import DECODE, DEEPSEEK, GPT_OSS, MIXTRAL, QWEN3, Case, select
from ..contest import as_times, records_of
from ..options import Options
from ..problem import MAX_COPIES, ROTATION_BYTES
from ..results import Record
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
    def shape(self) -> tuple[int, ...]:
        return self.rows, self.columns

    @property
    def options(self) -> dict[str, Any]:
        return {"axis": self.axis, "block": self.block, "scale_layout": self.scale_layout}

    @property
    def operator(self) -> str:
        return "quantize_mxfp8"

    def call(self, x: Tensor, **given: Any) -> Any:
        return getattr(glulam, self.operator)(x, **self.options, **given)


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

    @property
    def shape(self) -> tuple[int, ...]:
        return self.experts, self.rows // self.experts, self.columns

    @property
    def options(self) -> dict[str, Any]:
        return {"axis": self.axis, "report": False}

    @property
    def operator(self) -> str:
        return "prepare_mxfp8_weight"


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
    """Raise RuntimeError if the first rows, of w the first expert's, are not what the CPU reference makes of them."""
    part = x[:1, :CHECKED_ROWS] if isinstance(form, Fold) else x[:CHECKED_ROWS]
    got, wanted = (_copies(form.call(each)) for each in (part, part.cpu()))
    for one, other in zip(got, wanted, strict=True):
        for mine, reference in ((one.data, other.data), (one.scale, other.scale)):
            if not torch.equal(mine.cpu().view(torch.uint8), reference.view(torch.uint8)):
                raise RuntimeError(f"{form.operator} is wrong: {form}")


def _contestants(form: Form) -> dict[str, Call]:
    """Calls into caches that the calls before have swept, each with its own buffers."""
    count = min(math.ceil(ROTATION_BYTES / form.bytes), MAX_COPIES)
    xs = [torch.randn(form.shape, device="cuda").to(getattr(torch, form.dtype)) for _ in range(count)]
    check(form, xs[0])
    outs = [{} if isinstance(form, Fold) else {"out": form.call(x)} for x in xs]
    halves = [torch.empty(2, form.bytes // 2, dtype=torch.uint8, device="cuda") for _ in range(count)]
    return {
        "glulam": lambda n: form.call(xs[n % count], **outs[n % count]),
        "copy": lambda n: halves[n % count][0].copy_(halves[n % count][1]),
    }


def record_of(form: Form, times: dict[str, Summary]) -> Record:
    return {**dataclasses.asdict(form), "op": "quantize", "bytes": form.bytes, "times": as_times(times)}


def run_quantize(options: Options) -> list[Record]:
    """One record a form."""
    cases = select(CASES, options.case)
    forms = [form for case in cases for form in [*forms_of(case), *folds_of(case)]]
    share = options.budget_s / len(forms)
    return records_of("quantize", forms, lambda form: [record_of(form, measure_device(_contestants(form), share))])
