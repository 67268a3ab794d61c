"""quantize_mxfp8 in all its forms at the models' sizes, against a copy of as many bytes. The bar is bytes."""

from __future__ import annotations

import dataclasses
import math
from itertools import product
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

import glulam
from glulam.mxfp8 import MXFP8Tensor

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
    axis: str = "row"
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


def _contestants(form: Form) -> dict[str, Call]:
    """Calls into caches that the calls before have swept, each with its own buffers."""
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
    forms = [form for case in select(CASES, options.case) for form in forms_of(case)]
    records = []
    for form in track(forms, "quantize"):
        records.append(make_record(form, measure_device(_contestants(form), options.budget_s / len(forms))))
        torch.cuda.empty_cache()
    return records
