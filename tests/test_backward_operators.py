"""The gradient operators on the CPU, against the float64 oracle, which uses torch's autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle
from support.checks import check_bias_grad, check_dglu, check_wgrad
from support.criterion import same_bits
from support.inputs import Case, gradient, make_case, preactivation
from support.routing import catalogue

import glulam
from cute_kernels.shipped import activation_forms
from cute_kernels.specs import GATED

FORMS = activation_forms()
SIZES = [5, 0, 17, 1, 0, 40, 8]
HIDDEN, INTER = 40, 64
F64 = torch.float64


def case_for(form: tuple[str, str] = ("swiglu", "concat"), dtype: torch.dtype = F64, **options: Any) -> Case:
    return make_case(SIZES, HIDDEN, INTER, gated=form[0] in GATED, tail=6, dtype=dtype, **options)


def close(got: torch.Tensor, exact: torch.Tensor) -> None:
    if exact.numel():
        scale = float(exact.abs().max())
        assert scale > 0, "zeros would pass"
        torch.testing.assert_close(got.double(), exact, rtol=1e-10, atol=1e-12 * scale)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_grouped_dglu(form: tuple[str, str], scaled: bool) -> None:
    c = case_for(form)
    dy, h = gradient(c), preactivation(c)
    scale = c.row_scale.double() if scaled else None
    params = {"limit": 1.5, "alpha": 1.1, "offset": 0.3}
    got = glulam.grouped_dglu(
        dy, c.w2, h, offs=c.offs, row_scale=scale, activation=form[0], glu_layout=form[1], **params
    )
    exact = oracle.grouped_dglu(dy, c.w2, h, c.ends, row_scale=scale, form=form, params=params)
    close(got.dpreact[: c.rows], exact[0][: c.rows])
    close(got.act[: c.rows], exact[1][: c.rows])
    if scaled:
        close(got.d_row_scale[: c.rows], exact[2][: c.rows])
    else:
        assert got.d_row_scale is None


def test_gradients_at_kinks_and_clamps() -> None:
    """Zero beyond a clamp and at relu's kink; the clamped value itself still has a gradient, as torch's clamp."""
    a, u = torch.tensor([[0.0, -1.0, 2.0, 3.0]], dtype=F64), torch.tensor([[1.0, 5.0, -5.0, 2.0]], dtype=F64)
    h, w2 = torch.cat((a, u), dim=1), torch.eye(4, dtype=F64)[None]
    dy = torch.ones(1, 4, dtype=F64)
    relu = glulam.grouped_dglu(dy, w2, h, splits=[1], activation="reglu").dpreact
    assert relu.tolist() == [[0.0, 0.0, -5.0, 2.0, 0.0, 0.0, 2.0, 3.0]]
    clamped = glulam.grouped_dglu(dy, w2, h, splits=[1], activation="clamped_swiglu", limit=2.0).dpreact[0]
    assert (clamped == 0).tolist() == [False, False, False, True, True, True, True, False]


def test_row_scale_gradient_only_where_asked_for() -> None:
    c = case_for()
    options = {"offs": c.offs, "row_scale": c.row_scale}
    with_it, without = (
        glulam.grouped_dglu(gradient(c), c.w2, preactivation(c), row_scale_grad=asked, **options)
        for asked in (True, False)
    )
    assert with_it.d_row_scale.dtype == torch.float32 and without.d_row_scale is None
    assert same_bits(with_it.dpreact[: c.rows], without.dpreact[: c.rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    c = case_for(("swiglu", "interleaved"), dtype)
    dy, h = gradient(c), preactivation(c)
    got = glulam.grouped_dglu(dy, c.w2, h, offs=c.offs, row_scale=c.row_scale, glu_layout="interleaved")
    check_dglu(c, dy, h, got, ("swiglu", "interleaved"), row_scale=c.row_scale)
    assert got.dpreact.dtype == got.act.dtype == dtype and got.d_row_scale.dtype == torch.float32
    dw = glulam.grouped_wgrad(dy, c.x, offs=c.offs)
    assert dw.dtype == dtype
    check_wgrad(c, dy, c.x, dw)
    check_wgrad(c, dy, c.x, glulam.grouped_wgrad(dy, c.x, offs=c.offs, out_dtype=torch.float32))
    for scale in (None, c.row_scale):
        check_bias_grad(c, dy, glulam.grouped_bias_grad(dy, offs=c.offs, row_scale=scale), scale)
        wide = glulam.grouped_bias_grad(dy, offs=c.offs, row_scale=scale, out_dtype=torch.float32)
        assert wide.dtype == torch.float32
        check_bias_grad(c, dy, wide, scale)


@pytest.mark.parametrize("name", catalogue(64, 8))
def test_routings(name: str) -> None:
    sizes = catalogue(64, 8)[name]
    c = make_case(sizes, HIDDEN, INTER, tail=3, dtype=F64)
    dy, h, scale = gradient(c), preactivation(c), c.row_scale.double()
    for groups in (
        {"offs": c.offs},
        {"splits": c.splits()},
        {"splits": c.splits(torch.int64)},
        {"splits": sizes},
        {"splits": tuple(sizes)},
    ):
        dw = glulam.grouped_wgrad(dy, c.x, **groups)
        db = glulam.grouped_bias_grad(dy, row_scale=scale, **groups)
        got = glulam.grouped_dglu(dy, c.w2, h, row_scale=scale, **groups)
        exact = oracle.grouped_dglu(dy, c.w2, h, c.ends, row_scale=scale)
        torch.testing.assert_close(dw, oracle.grouped_wgrad(dy, c.x, c.ends))
        torch.testing.assert_close(db, oracle.grouped_bias_grad(dy, c.ends, row_scale=scale))
        for value, want in zip(got, exact, strict=True):
            torch.testing.assert_close(value[: c.rows], want[: c.rows])
        assert bool(dw.any()) == bool(c.rows) and not bool(dw.isnan().any())


def buffers(c: Case, listed: bool, dtype: torch.dtype = F64) -> Any:
    out = torch.randn(len(c.sizes), HIDDEN, HIDDEN, dtype=dtype)
    return [one.clone() for one in out] if listed else out


def copied(out: Any) -> list[torch.Tensor]:
    return [one.clone() for one in out]


@pytest.mark.parametrize("listed", [False, True])
class TestGivenBuffers:
    def test_overwrite(self, listed: bool) -> None:
        c = case_for()
        out = buffers(c, listed)
        out[0].fill_(math.nan)
        assert glulam.grouped_wgrad(gradient(c), c.x, offs=c.offs, out=out) is out
        check_wgrad(c, gradient(c), c.x, out)

    def test_accumulate(self, listed: bool) -> None:
        c = case_for()
        out = buffers(c, listed)
        before = copied(out)
        assert glulam.grouped_wgrad(gradient(c), c.x, offs=c.offs, out=out, accumulate=True) is out
        check_wgrad(c, gradient(c), c.x, out, before)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_mask(self, listed: bool, dtype: torch.dtype) -> None:
        c = case_for(dtype=torch.bfloat16)
        out = buffers(c, listed, dtype)
        mask = torch.tensor([e % 3 == 0 or e == 1 for e in range(len(c.sizes))])
        before = [one.clone() if add else None for one, add in zip(out, mask, strict=True)]
        for one, add in zip(out, mask, strict=True):
            if not add:
                one.fill_(math.nan)
        glulam.grouped_wgrad(gradient(c), c.x, offs=c.offs, out=out, mask=mask)
        check_wgrad(c, gradient(c), c.x, out, before)

    def test_no_rows(self, listed: bool) -> None:
        c = make_case([0, 0, 0], HIDDEN, INTER, dtype=F64)
        out = buffers(c, listed)
        before = copied(out)
        options = {"offs": c.offs, "out": out}
        glulam.grouped_wgrad(gradient(c), c.x, accumulate=True, **options)
        assert all(map(torch.equal, before, out))
        glulam.grouped_wgrad(gradient(c), c.x, mask=torch.tensor([True, False, True]), **options)
        assert torch.equal(out[0], before[0]) and torch.equal(out[2], before[2]) and not bool(out[1].any())
        glulam.grouped_wgrad(gradient(c), c.x, **options)
        assert not any(bool(one.any()) for one in out)


@pytest.mark.parametrize("experts", [1, 512])
def test_no_rows_at_all(experts: int) -> None:
    c = make_case([0] * experts, 8, 16)
    dy = gradient(c)
    assert not bool(glulam.grouped_wgrad(dy, c.x, offs=c.offs).any())
    assert glulam.grouped_bias_grad(dy, offs=c.offs).tolist() == [[0.0] * 8] * experts
    got = glulam.grouped_dglu(dy, c.w2, preactivation(c), offs=c.offs, row_scale=c.row_scale)
    assert [value.shape[0] for value in got] == [0, 0, 0]


def test_row_scales_lose_no_bits_in_narrow_bias_gradients() -> None:
    scale = torch.tensor([1 / 3, 2 / 7], dtype=torch.float32)
    db = glulam.grouped_bias_grad(
        torch.ones(2, 8, dtype=torch.bfloat16), splits=[1, 1], row_scale=scale, out_dtype=torch.float32
    )
    assert torch.equal(db[:, 0], scale)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=7),
    hidden=st.integers(1, 19),
    form=st.sampled_from(FORMS),
    tail=st.integers(0, 3),
    seed=st.integers(0, 9),
)
def test_any_shape(sizes: list[int], hidden: int, form: tuple[str, str], tail: int, seed: int) -> None:
    c = make_case(sizes, hidden, 32, gated=form[0] in GATED, tail=tail, dtype=F64, seed=seed)
    dy, h, scale = gradient(c), preactivation(c), c.row_scale.double()
    got = glulam.grouped_dglu(dy, list(c.w2), h, splits=sizes, row_scale=scale, activation=form[0], glu_layout=form[1])
    exact = oracle.grouped_dglu(dy, c.w2, h, c.ends, row_scale=scale, form=form)
    for value, want in zip(got, exact, strict=True):
        torch.testing.assert_close(value[: c.rows], want[: c.rows], rtol=1e-9, atol=1e-11)
    dw = glulam.grouped_wgrad(got.dpreact, c.x, splits=sizes)
    torch.testing.assert_close(dw, oracle.grouped_wgrad(exact[0], c.x, c.ends), rtol=1e-9, atol=1e-11)
