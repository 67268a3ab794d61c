"""The CPU reference against the float64 oracle, which shares no code with it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle
from support.checks import check_mlp
from support.criterion import same_bits
from support.inputs import Case, make_case, poisoned
from support.routing import catalogue

import glulam
from cute_kernels.shipped import activation_forms
from cute_kernels.specs import GATED

FORMS = activation_forms()
SIZES = [5, 0, 17, 1, 0, 40, 8]
HIDDEN, INTER = 40, 64


def case_for(form: tuple[str, str], dtype: torch.dtype = torch.float64, **options: int) -> Case:
    return make_case(SIZES, HIDDEN, INTER, gated=form[0] in GATED, tail=6, dtype=dtype, **options)


def assert_exact(got: torch.Tensor, exact: torch.Tensor, rows: int) -> None:
    """Compare two float64 results, which may differ only by the order of sums."""
    if rows:
        scale = float(exact[:rows].abs().max())
        assert scale > 0, "zeros would pass"
        torch.testing.assert_close(got[:rows], exact[:rows], rtol=1e-11, atol=1e-12 * scale)


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("bias", [None, "packed", "list"])
@pytest.mark.parametrize("scaled", [False, True])
def test_grouped_mm(transpose_w: bool, bias: str | None, scaled: bool) -> None:
    c = case_for(("swiglu", "concat"))
    w = c.w2.mT.contiguous() if transpose_w else c.w2
    x = torch.randn(c.x.shape[0], INTER, dtype=torch.float64)
    b = {None: None, "packed": c.b2, "list": list(c.b2)}[bias]
    scale = c.row_scale if scaled else None
    y = glulam.grouped_mm(x, w, offs=c.offs, bias=b, bias_scale=scale, transpose_w=transpose_w)
    exact = oracle.grouped_mm(x, w, c.ends, bias=b, bias_scale=scale, transpose_w=transpose_w)
    assert_exact(y, exact, c.rows)


@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("extras", [False, True])
def test_grouped_glu(form: tuple[str, str], extras: bool) -> None:
    c = case_for(form)
    options = {"bias": c.b1, "row_scale": c.row_scale} if extras else {}
    params = {"limit": 1.5, "alpha": 1.1, "offset": 0.3} if extras else {}
    act, preact = glulam.grouped_glu(
        c.x, c.w1, splits=c.splits(), activation=form[0], glu_layout=form[1], return_preact=True, **options, **params
    )
    exact, h = oracle.grouped_glu(c.x, c.w1, c.ends, form=form, params=params, **options)
    assert_exact(act, exact, c.rows)
    assert_exact(preact, h, c.rows)
    alone = glulam.grouped_glu(
        c.x, c.w1, splits=c.splits(), activation=form[0], glu_layout=form[1], **options, **params
    )
    assert same_bits(alone[: c.rows], act[: c.rows])


@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("extras", [False, True])
def test_grouped_mlp(form: tuple[str, str], extras: bool) -> None:
    c = case_for(form)
    options = {"b1": c.b1, "b2": c.b2, "row_scale": c.row_scale} if extras else {}
    y = glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, activation=form[0], glu_layout=form[1], **options)
    assert_exact(y, oracle.grouped_mlp(c.x, c.w1, c.w2, c.ends, form=form, **options), c.rows)


def test_clamping_takes_effect() -> None:
    """The clamped form differs from the unclamped one on these inputs; else a wrong limit would pass."""
    c = case_for(("clamped_swiglu", "concat"))
    tight = glulam.grouped_glu(c.x, c.w1, offs=c.offs, activation="clamped_swiglu", limit=0.5)
    loose = glulam.grouped_glu(c.x, c.w1, offs=c.offs, activation="clamped_swiglu", limit=math.inf)
    assert float((tight - loose)[: c.rows].abs().max()) > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    c = case_for(("swiglu", "interleaved"), dtype)
    options = {"b1": c.b1, "b2": c.b2, "row_scale": c.row_scale}
    y = glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, glu_layout="interleaved", **options)
    assert y.dtype == dtype
    check_mlp(c, y, ("swiglu", "interleaved"), **options)


@pytest.mark.parametrize("name", catalogue(64, 8))
def test_routings(name: str) -> None:
    sizes = catalogue(64, 8)[name]
    c = make_case(sizes, HIDDEN, INTER, tail=3, dtype=torch.float64)
    exact = oracle.grouped_mlp(c.x, c.w1, c.w2, c.ends)
    for groups in (
        {"offs": c.offs},
        {"splits": c.splits()},
        {"splits": c.splits(torch.int64)},
        {"splits": sizes},
        {"splits": tuple(sizes)},
    ):
        assert_exact(glulam.grouped_mlp(c.x, c.w1, c.w2, **groups), exact, c.rows)


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("experts", [1, 512])
def test_extreme_counts(rows: int, experts: int) -> None:
    sizes = [0] * (experts - 1) + [rows]
    c = make_case(sizes, 8, 16, dtype=torch.float64)
    y = glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs)
    assert y.shape == (rows, 8)
    assert_exact(y, oracle.grouped_mlp(c.x, c.w1, c.w2, c.ends), rows)


def test_lists_equal_packed() -> None:
    c = case_for(("swiglu", "concat"))
    packed = glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, b1=c.b1, b2=c.b2, row_scale=c.row_scale)
    listed = glulam.grouped_mlp(
        c.x, list(c.w1), tuple(c.w2), offs=c.offs, b1=list(c.b1), b2=tuple(c.b2), row_scale=c.row_scale
    )
    assert same_bits(packed[: c.rows], listed[: c.rows])


@pytest.mark.parametrize("padding", [0, 5])
def test_outputs_keep_their_tail(padding: int) -> None:
    c = case_for(("swiglu", "concat"))
    total = c.x.shape[0]
    for width, call in (
        (HIDDEN, lambda out: glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, out=out)),
        (INTER, lambda out: glulam.grouped_glu(c.x, c.w1, offs=c.offs, out=out)),
        (2 * INTER, lambda out: glulam.grouped_mm(c.x, c.w1, offs=c.offs, out=out)),
    ):
        buffer = torch.full((total, width + padding), 7.0, dtype=c.x.dtype)
        out = buffer[:, :width]
        assert call(out) is out
        assert not bool(out[: c.rows].isnan().any()) and bool((out[: c.rows] != 7).any(dim=1).all())
        assert bool((buffer[c.rows :] == 7).all()) and bool((buffer[:, width:] == 7).all())


def test_a_poisoned_output_is_overwritten() -> None:
    c = case_for(("swiglu", "concat"))
    out = poisoned(c.x.shape[0], HIDDEN, c.x)
    glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, out=out)
    assert not bool(out[: c.rows].isnan().any()) and bool(out[c.rows :].isnan().all())


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=7),
    hidden=st.integers(1, 19),
    blocks=st.integers(1, 2),
    form=st.sampled_from(FORMS),
    tail=st.integers(0, 3),
    seed=st.integers(0, 9),
)
def test_any_shape(sizes: list[int], hidden: int, blocks: int, form: tuple[str, str], tail: int, seed: int) -> None:
    c = make_case(sizes, hidden, 32 * blocks, gated=form[0] in GATED, tail=tail, dtype=torch.float64, seed=seed)
    options = {"b1": c.b1, "b2": c.b2, "row_scale": c.row_scale}
    y = glulam.grouped_mlp(c.x, c.w1, c.w2, splits=sizes, activation=form[0], glu_layout=form[1], **options)
    exact = oracle.grouped_mlp(c.x, c.w1, c.w2, c.ends, form=form, **options)
    torch.testing.assert_close(y[: c.rows], exact[: c.rows], rtol=1e-10, atol=1e-11)
