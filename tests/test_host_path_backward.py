"""The host path of gradient operators to their kernels' arguments, on the fake GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.checks import check_bias_grad, check_dglu, check_wgrad
from support.fake_gpu import FakeGpu
from support.inputs import Case, gradient, make_case, preactivation

import glulam
from cute_kernels.shipped import activation_forms
from cute_kernels.sm90.configs import LARGE, WGRAD
from cute_kernels.specs import GATED, GroupedDgluSpec, GroupedWgradSpec
from glulam.host import workspace

pytest_plugins = ["support.fixtures"]

SIZES = [5, 0, 17, 1, 0, 40, 8]
HIDDEN, INTER = 40, 64
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def fresh_workspaces() -> None:
    workspace.forget()


def case(form: tuple[str, str] = ("swiglu", "concat"), dtype: torch.dtype = BF16) -> Case:
    return make_case(SIZES, HIDDEN, INTER, gated=form[0] in GATED, tail=6, dtype=dtype)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("form", activation_forms(), ids="-".join)
def test_grouped_dglu(fake_gpu: FakeGpu, form: tuple[str, str], dtype: torch.dtype) -> None:
    c = case(form, dtype)
    dy, h = gradient(c), preactivation(c)
    options = {"offs": c.offs, "row_scale": c.row_scale, "activation": form[0], "glu_layout": form[1]}
    for w2 in (c.w2, list(c.w2)):
        got = glulam.grouped_dglu(dy, w2, h, **options)
        check_dglu(c, dy, h, got, form, row_scale=c.row_scale)
    spec = fake_gpu.specs[0]
    assert isinstance(spec, GroupedDgluSpec) and (spec.activation, spec.glu_layout) == form
    assert len(fake_gpu.launches) == 2


def test_params_reach_dglu(fake_gpu: FakeGpu) -> None:
    c = case()
    dy, h, form = gradient(c), preactivation(c), ("clamped_swiglu", "concat")
    for params in ((1, 2, 0), (1.5, 1.25, 0.5)):
        named = dict(zip(("limit", "alpha", "offset"), params, strict=True))
        got = glulam.grouped_dglu(dy, c.w2, h, offs=c.offs, activation=form[0], **named)
        check_dglu(c, dy, h, got, form, params=named)


def test_row_sums_are_asked_for_only_where_needed(fake_gpu: FakeGpu) -> None:
    c = case()
    for scale, asked in ((None, True), (c.row_scale, False)):
        got = glulam.grouped_dglu(
            gradient(c), c.w2, preactivation(c), offs=c.offs, row_scale=scale, row_scale_grad=asked
        )
        assert got.d_row_scale is None and not workspace.stats().buffers
        last = fake_gpu.launches[-1]
        assert (last["d_scale"], last["partials"]) == (0, 0) and bool(last["scale"]) == (scale is not None)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("adds", ["overwrite", "accumulate", "mask"])
def test_grouped_wgrad_into_buffers(fake_gpu: FakeGpu, adds: str, listed: bool, dtype: torch.dtype) -> None:
    c = case()
    dy, mask = gradient(c), torch.tensor([e % 2 == 0 for e in range(len(SIZES))])
    flags = {"overwrite": [False] * 7, "accumulate": [True] * 7, "mask": mask.tolist()}[adds]
    options = {"accumulate": {"accumulate": True}, "mask": {"mask": mask}}.get(adds, {})
    packed = torch.randn(len(SIZES), HIDDEN, HIDDEN).to(dtype)
    out: Any = [one.clone() for one in packed] if listed else packed
    for _ in range(2):  # first by a plan made now, then by a plan found
        for one, add in zip(out, flags, strict=True):
            if not add:
                one.fill_(math.nan)
        before = [one.clone() if add else None for one, add in zip(out, flags, strict=True)]
        assert glulam.grouped_wgrad(dy, c.x, offs=c.offs, out=out, **options) is out
        check_wgrad(c, dy, c.x, out, before)
    (spec,) = fake_gpu.specs
    assert spec == GroupedWgradSpec("bfloat16", str(dtype).removeprefix("torch."), WGRAD)


@pytest.mark.parametrize("groups", ["offs", "splits"])
def test_grouped_wgrad_allocates(fake_gpu: FakeGpu, groups: str) -> None:
    c = case()
    dy, sizes = gradient(c), {groups: c.offs if groups == "offs" else c.splits(torch.int64)}
    check_wgrad(c, dy, c.x, glulam.grouped_wgrad(dy, c.x, **sizes))
    wide = glulam.grouped_wgrad(dy, c.x, out_dtype=F32, **sizes)
    assert wide.dtype == F32
    check_wgrad(c, dy, c.x, wide)


@pytest.mark.parametrize("scaled", [False, True])
def test_grouped_bias_grad(fake_gpu: FakeGpu, scaled: bool) -> None:
    c = case()
    dy, scale = gradient(c), c.row_scale if scaled else None
    check_bias_grad(c, dy, glulam.grouped_bias_grad(dy, offs=c.offs, row_scale=scale), scale)
    (spec,) = fake_gpu.specs
    assert isinstance(spec, GroupedWgradSpec) and spec.out_dtype == "float32"


def test_no_rows_launch_nothing(fake_gpu: FakeGpu) -> None:
    c = make_case([0, 0, 0], HIDDEN, INTER)
    dy = gradient(c)
    got = glulam.grouped_dglu(dy, c.w2, preactivation(c), offs=c.offs, row_scale=c.row_scale)
    assert [v.shape for v in got] == [(0, 2 * INTER), (0, INTER), (0,)]
    for out in (torch.ones(3, HIDDEN, HIDDEN, dtype=BF16), list(torch.ones(3, HIDDEN, HIDDEN, dtype=BF16))):
        options = {"offs": c.offs, "out": out}
        glulam.grouped_wgrad(dy, c.x, accumulate=True, **options)
        assert all(bool((one == 1).all()) for one in out)
        glulam.grouped_wgrad(dy, c.x, mask=torch.tensor([True, False, True]), **options)
        assert [float(one.float().mean()) for one in out] == [1.0, 0.0, 1.0]
        glulam.grouped_wgrad(dy, c.x, **options)
        assert not any(bool(one.any()) for one in out)
    assert not bool(glulam.grouped_wgrad(dy, c.x, offs=c.offs).any())
    assert not bool(glulam.grouped_bias_grad(dy, offs=c.offs, row_scale=c.row_scale).any())
    assert not fake_gpu.launches


def test_a_single_row_with_an_odd_stride(fake_gpu: FakeGpu) -> None:
    c = make_case([0, 1, 0], HIDDEN, INTER)
    dy, x, h = (t.as_strided((1, t.shape[1]), (1, 1)) for t in (gradient(c), c.x, preactivation(c)))
    check_dglu(c, dy, h, glulam.grouped_dglu(dy, c.w2, h, offs=c.offs))
    check_wgrad(c, dy, x, glulam.grouped_wgrad(dy, x, offs=c.offs))


def test_a_second_call_plans_nothing(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    c = case()
    dy, h, w2 = gradient(c), preactivation(c), list(c.w2)
    out, mask = [torch.zeros(HIDDEN, HIDDEN) for _ in SIZES], torch.ones(len(SIZES), dtype=torch.bool)

    def calls() -> None:
        glulam.grouped_dglu(dy, c.w2, h, offs=c.offs)
        glulam.grouped_dglu(dy, w2, h, splits=c.splits(), row_scale=c.row_scale)
        glulam.grouped_wgrad(dy, c.x, offs=c.offs)
        glulam.grouped_wgrad(dy, c.x, offs=c.offs, out=out, mask=mask)
        glulam.grouped_bias_grad(dy, offs=c.offs, row_scale=c.row_scale)

    calls()
    monkeypatch.setattr(glulam.calls.call.Call, "run_without_gradient", lambda *_: pytest.fail("left the fast path"))
    calls()


def test_a_list_that_was_read_is_checked_anew_where_it_is_written(fake_gpu: FakeGpu) -> None:
    """One tensor twice is a fine list of weights, and no list of results."""
    c = make_case([3, 4], HIDDEN, HIDDEN, gated=False)
    same = [torch.zeros(HIDDEN, HIDDEN, dtype=BF16)] * 2
    distinct = [torch.zeros(HIDDEN, HIDDEN, dtype=BF16) for _ in range(2)]
    glulam.grouped_mm(c.x, same, offs=c.offs)
    glulam.grouped_wgrad(c.x, c.x, offs=c.offs, out=distinct)
    with pytest.raises(ValueError, match=r"out\[1\] overlaps out\[0\]"):
        glulam.grouped_wgrad(c.x, c.x, offs=c.offs, out=same)


def test_explain(fake_gpu: FakeGpu) -> None:
    told = glulam.explain("grouped_dglu", (4096, 64), (8, 64, 128), (4096, 256), row_scale=(4096,))
    assert isinstance(told.spec, GroupedDgluSpec) and told.spec.tile == LARGE and "one kernel" in told.why
    offs = torch.zeros(8, dtype=torch.int32, device="meta")
    for rows in (8, 100_000):
        told = glulam.explain(glulam.grouped_wgrad, (rows, 64), (rows, 128), offs=offs, out_dtype=F32)
        assert isinstance(told.spec, GroupedWgradSpec)
        assert told.spec.tile == WGRAD and told.spec.out_dtype == "float32"


@pytest.mark.parametrize("rows", [64, 1100])
def test_a_large_activation_is_given_back(fake_gpu: FakeGpu, rows: int) -> None:
    """Of a forward that is trained: 1100 rows of 1024 take 2.2 MB, which no workspace keeps."""
    shapes = (rows, 8), (1, 1024, 8), (1, 8, 1024)
    x, w1, w2 = (torch.randn(shape).to(BF16).requires_grad_() for shape in shapes)
    y = glulam.grouped_mlp(x, w1, w2, splits=torch.tensor([rows]), activation="silu")
    kept = sum(buffer.nbytes for buffer in workspace.stats().buffers.values())
    assert (kept == 0) is (rows == 1100)
    y.sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (x, w1, w2))
