"""Kernels of cp.async and mma.sync on a GPU: the same bits as Hopper's own, which test_numerics.py holds against
float64.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.criterion import same_bits
from support.inputs import Case, make_case
from support.portable import FORMS, Spec, function, glu, mm
from support.routing import catalogue, spread, zipf

import glulam
from cute_kernels.chains import signature_of
from cute_kernels.specs import DTYPES, GLU_LAYOUTS, KINDS, LAYOUTS
from ffi_bridge.errors import ToolchainError
from glulam.host.groups import OFFS_INT32

pytestmark = pytest.mark.gpu
ROWS, EXPERTS, TAIL = 700, 8, 13
DTYPE = {name: getattr(torch, name) for name in DTYPES}
SIZES = pytest.mark.parametrize(
    ("sizes", "hidden", "inter"),
    [
        (zipf(ROWS, EXPERTS), 200, 352),
        (spread(300, 4), 736, 96),
        ([3, 0, 5], 8, 32),
        ([1], 64, 32),
        ([128, 129, 0, 127], 4096, 64),
        ([5000, 0, 3], 72, 160),
        (zipf(1000, 300), 72, 96),
    ],
)


def case(sizes: list[int], hidden: int = 200, inter: int = 352, **options: Any) -> Case:
    return make_case(sizes, hidden, inter, device="cuda", tail=TAIL, **options)


def call(spec: Spec, c: Case, columns: dict[str, int], **arguments: Any) -> list[torch.Tensor]:
    """New outputs of so many columns, NaN before and, behind the last group, after."""
    try:
        kernel = function(spec)
    except ToolchainError as error:
        pytest.skip(f"these kernels are in no bundle, and here is no compiler: {error}")
    offs, dtype = c.offs, c.x.dtype
    outputs = {name: torch.full((len(c.x), n), math.nan, dtype=dtype, device="cuda") for name, n in columns.items()}
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    groups = {"groups": offs.data_ptr(), "group_form": OFFS_INT32, "num_groups": len(offs), "num_sms": sms}
    kernel(*signature_of(spec).pack(**{"x": c.x, **arguments}, **outputs, **groups))
    assert all(output[c.rows :].isnan().all() for output in outputs.values())
    return list(outputs.values())


def check_same(made: list[torch.Tensor], wanted: Any, rows: int) -> None:
    for one, other in zip(made, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        assert same_bits(one[:rows], other[:rows]) and (rows == 0 or other[:rows].abs().max() > 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@SIZES
def test_mm(sizes: list[int], hidden: int, inter: int, dtype: str) -> None:
    c = case(sizes, hidden, inter, dtype=DTYPE[dtype])
    made = call(mm(dtype), c, {"y": 2 * inter}, w=c.w1, bias=c.b1.data_ptr(), scale=c.row_scale.data_ptr())
    check_same(made, glulam.grouped_mm(c.x, c.w1, offs=c.offs, bias=c.b1, bias_scale=c.row_scale), c.rows)


@pytest.mark.parametrize("name", catalogue(ROWS, EXPERTS))
def test_routings(name: str) -> None:
    sizes = catalogue(ROWS, EXPERTS)[name]
    c = case(sizes)
    for _ in range(5):
        made = call(mm("bfloat16"), c, {"y": 704}, w=c.w1)
        check_same(made, glulam.grouped_mm(c.x, c.w1, offs=c.offs), c.rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("save_preact", [False, True])
@pytest.mark.parametrize("form", FORMS, ids="-".join)
@SIZES
def test_glu(
    sizes: list[int], hidden: int, inter: int, form: tuple[str, str], save_preact: bool, dtype: str
) -> None:  # fmt: skip
    is_gated = form[0] == "gated"
    c = case(sizes, hidden, inter, dtype=DTYPE[dtype], gated=is_gated)
    columns = {"act": inter} | ({"preact": c.w1.shape[1]} if save_preact else {})
    given = {"w": c.w1, "bias": c.b1.data_ptr(), "scale": c.row_scale.data_ptr()}
    layouts = GLU_LAYOUTS if form[1] == "blocked" else GLU_LAYOUTS[:2] if is_gated else GLU_LAYOUTS[:1]
    for layout in layouts:
        for activation in ("swiglu", "geglu") if is_gated else ("srelu", "silu"):
            made = call(
                glu(dtype, form, save_preact), c, columns, kind=KINDS[activation], glu_layout=LAYOUTS[layout], **given
            )
            wanted = glulam.grouped_glu(
                c.x, c.w1, offs=c.offs, bias=c.b1, row_scale=c.row_scale, activation=activation, glu_layout=layout,
                return_preact=save_preact,
            )  # fmt: skip
            check_same(made, wanted, c.rows)


def test_rows_by_index() -> None:
    c = case(zipf(ROWS, EXPERTS))
    rows = torch.randint(-3, 97, (len(c.x),), device="cuda", dtype=torch.int32)
    tokens = c.x[:90].contiguous()
    for spec, columns in ((mm("bfloat16"), {"y": 704}), (glu("bfloat16", FORMS[0], False), {"act": 352})):
        options = {"w": c.w1, "kind": KINDS["swiglu"]} if "act" in columns else {"w": c.w1}
        made = call(spec, c, columns, **{**options, "x": tokens, "rows": rows.data_ptr()})
        copy = tokens[rows.clamp(0, 89).long()]
        made_of_copy = call(spec, c, columns, **{**options, "x": copy})
        check_same(made, tuple(made_of_copy), c.rows)


def test_experts_and_halves_that_lie_apart() -> None:
    c = case(zipf(ROWS, EXPERTS))
    order = torch.randperm(EXPERTS).tolist()
    apart = torch.stack([c.w1[expert] for expert in order])
    places = [order.index(expert) * apart[0].nbytes // 16 for expert in range(EXPERTS)]
    table = torch.tensor(places, dtype=torch.int64, device="cuda")
    wanted = glulam.grouped_mm(c.x, c.w1, offs=c.offs)
    check_same(call(mm("bfloat16"), c, {"y": 704}, w=apart, w_table=table.data_ptr()), wanted, c.rows)
    gate, up = (half.contiguous() for half in c.w1.chunk(2, 1))
    for first, second in ((gate, up), (up, gate)):
        whole = torch.cat((first, second), 1)
        given = {"w": first, "w_up": second.data_ptr(), "kind": KINDS["swiglu"]}
        made = call(glu("bfloat16", FORMS[0], False), c, {"act": 352}, **given)
        check_same(made, glulam.grouped_glu(c.x, whole, offs=c.offs), c.rows)
