"""w1 [E, H, 2I] and w2 [E, I, H] used without copying: on the CPU reference, and in the kernels' arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.checks import Form, check_dglu, check_glu, check_mlp
from support.criterion import same_bits
from support.fake_gpu import FakeGpu
from support.gradients import INPUTS, check_gradients, transposed_back, transposed_leaves
from support.inputs import Case, gradient, make_case, poisoned, preactivation, scattered, transposed

import glulam
from cute_kernels.shipped import activation_forms
from cute_kernels.specs import ACTIVATION_FORMS, GATED, GroupedDgluSpec, GroupedMlpSpec
from glulam.ops.grouped_glu import GroupedGluCall

pytest_plugins = ["support.fixtures"]

SIZES = [5, 0, 17, 1, 0, 40, 8]
HIDDEN, INTER = 40, 64
BF16 = torch.bfloat16


def case(form: Form = ("swiglu", "interleaved"), dtype: torch.dtype = BF16) -> Case:
    return make_case(SIZES, HIDDEN, INTER, gated=form[0] in GATED, tail=6, dtype=dtype)


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("form", activation_forms(), ids="-".join)
def test_every_form(form: Form, extras: bool, anywhere: Any) -> None:
    c, named = case(form), {"activation": form[0], "glu_layout": form[1], "transpose_w": True}
    w1, w2 = transposed(c)
    options = {"b1": c.b1, "b2": c.b2, "row_scale": c.row_scale} if extras else {}
    check_mlp(c, glulam.grouped_mlp(c.x, w1, w2, offs=c.offs, **named, **options), form, **options)
    options = {"bias": c.b1, "row_scale": c.row_scale} if extras else {}
    check_glu(c, *glulam.grouped_glu(c.x, w1, offs=c.offs, return_preact=True, **named, **options), form, **options)
    check_glu(c, glulam.grouped_glu(c.x, w1, offs=c.offs, **named, **options), None, form, **options)


@pytest.mark.parametrize("form", activation_forms(), ids="-".join)
def test_both_gemms_read_weights_so(form: Form, fake_gpu: FakeGpu) -> None:
    c = case(form)
    glulam.grouped_mlp(c.x, *transposed(c), offs=c.offs, activation=form[0], glu_layout=form[1], transpose_w=True)
    (spec,) = fake_gpu.specs
    assert isinstance(spec, GroupedMlpSpec) and spec.fc1.transpose_w and spec.fc2.transpose_w
    assert form[0] in ACTIVATION_FORMS[spec.fc1.activation] and form[1] == spec.fc1.glu_layout


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_dtypes_of_the_reference(dtype: torch.dtype) -> None:
    c = case(dtype=dtype)
    y = glulam.grouped_mlp(c.x, *transposed(c), offs=c.offs, b1=c.b1, glu_layout="interleaved", transpose_w=True)
    check_mlp(c, y, ("swiglu", "interleaved"), b1=c.b1)


def test_lists_outputs_and_rows_by_index(anywhere: Any) -> None:
    c = case()
    packed, options = transposed(c), {"offs": c.offs, "glu_layout": "interleaved", "transpose_w": True}
    wanted = glulam.grouped_mlp(c.x, *packed, **options)
    for weights in (map(scattered, packed), (packed[0], scattered(packed[1]))):
        out = poisoned(c.x.shape[0], HIDDEN, c.x, 8)
        assert glulam.grouped_mlp(c.x, *weights, out=out, **options) is out
        assert same_bits(out[: c.rows].contiguous(), wanted[: c.rows]) and out[c.rows :].isnan().all()
    order = torch.arange(c.x.shape[0], dtype=torch.int32).flip(0)
    by_index = glulam.grouped_mlp(c.x.flip(0).contiguous(), *packed, rows=order, **options)
    assert same_bits(by_index[: c.rows], wanted[: c.rows])


def test_only_the_flag_tells_what_a_square_weight_is(anywhere: Any) -> None:
    c = make_case(SIZES, 64, 32)
    one, other = (glulam.grouped_glu(c.x, c.w1, offs=c.offs, transpose_w=flag) for flag in (False, True))
    check_glu(c, one, None)
    check_glu(dataclasses.replace(c, w1=c.w1.mT), other, None)
    assert not same_bits(one, other)


def test_a_new_number_of_rows_is_checked_no_more(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    check = GroupedGluCall.check
    monkeypatch.setattr(GroupedGluCall, "check", lambda call: checked.append(call.num_rows) or check(call))
    w1 = torch.randn(3, HIDDEN, 2 * INTER, dtype=BF16)
    for rows in (40, 48, 56):
        x, offs = torch.randn(rows, HIDDEN, dtype=BF16), torch.tensor([8, 8, rows], dtype=torch.int32)
        assert glulam.grouped_glu(x, w1, offs=offs, transpose_w=True).shape == (rows, INTER)
    assert checked == [40]


def test_explain_tells_of_it() -> None:
    shapes = (96, HIDDEN), (7, HIDDEN, 2 * INTER), (7, INTER, HIDDEN)
    told = glulam.explain("grouped_mlp", *shapes, glu_layout="interleaved", transpose_w=True)
    assert isinstance(told.spec, GroupedMlpSpec) and told.spec.fc1.transpose_w and "_interleaved_nn_" in told.spec.name
    with pytest.raises(ValueError, match="transpose_w reads weights in 16 bits, and recipe is 'mxfp8'"):
        glulam.explain("grouped_mlp", *shapes, transpose_w=True, recipe="mxfp8")


SHAPES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "not transposed": (
        {"w1": (7, 128, 40)}, ValueError, r"w1 has shape \[7, 128, 40\]; it must be \[7, 40, 40\].*transpose_w=False"
    ),
    "x of other columns": ({"x": (77, 48)}, ValueError, r"w1 has .*must be \[7, 48, 128\], since x has 48 columns$"),
    "w2 not transposed": (
        {"w2": (7, 40, 64)}, ValueError, r"w2 has shape \[7, 40, 64\]; it must be \[7, 64, 64\], since w1 gives"
    ),
    "blocks": (
        {"w1": (7, 40, 80), "glu_layout": "interleaved32"}, ValueError, "w1 has 2I = 80 columns an expert, so I = 40"
    ),
    "two dimensions": ({"w1": (40, 128)}, ValueError, r"w1 has shape \[40, 128\]; give \[E, H, 2I\]"),
    "bias": ({"b1": (7, 64)}, ValueError, r"b1 has shape \[7, 64\]; it must be \[7, 128\]"),
    "no flag": ({"transpose_w": "yes"}, TypeError, "transpose_w is 'yes'; give True or False"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_bad_input(name: str, fake_gpu: FakeGpu) -> None:
    changes, error, message = SHAPES[name]
    c = case()
    w1, w2 = transposed(c)
    given = {"x": c.x, "w1": w1, "w2": w2, "offs": c.offs, "transpose_w": True}
    given |= {k: torch.zeros(v, dtype=BF16) if isinstance(v, tuple) else v for k, v in changes.items()}
    with pytest.raises(error, match=f"grouped_mlp: {message}"):
        glulam.grouped_mlp(**given)
    assert not fake_gpu.launches


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_exact", "mxfp8_weight_only"])
def test_recipes_that_scale_along_rows_refuse_it(recipe: str, anywhere: Any) -> None:
    c = case()
    with pytest.raises(ValueError, match=rf"recipe is '{recipe}'; transpose them once, as w1.mT.contiguous\(\)"):
        glulam.grouped_mlp(c.x, *transposed(c), offs=c.offs, transpose_w=True, recipe=recipe)


class TestDglu:
    """Tests of grouped_dglu with w2 [E, I, H]."""

    @pytest.mark.parametrize("dtype", [BF16, torch.float16])
    @pytest.mark.parametrize("form", activation_forms(), ids="-".join)
    def test_every_form(self, form: Form, dtype: torch.dtype, anywhere: Any) -> None:
        c = case(form, dtype)
        dy, h, named = gradient(c), preactivation(c), {"activation": form[0], "glu_layout": form[1]}
        for w2 in (transposed(c)[1], scattered(transposed(c)[1])):
            got = glulam.grouped_dglu(dy, w2, h, offs=c.offs, row_scale=c.row_scale, transpose_w=True, **named)
            check_dglu(c, dy, h, got, form, row_scale=c.row_scale)
        if anywhere is not None:
            spec = anywhere.specs[-1]
            assert isinstance(spec, GroupedDgluSpec) and spec.transpose_w and "_nt_" in spec.name

    def test_rows_by_index(self, anywhere: Any) -> None:
        c = case(("swiglu", "concat"))
        dy, h, w2 = gradient(c), preactivation(c), transposed(c)[1]
        order = torch.arange(len(dy), dtype=torch.int32).flip(0)
        made = glulam.grouped_dglu(dy.flip(0).contiguous(), w2, h, offs=c.offs, rows=order, transpose_w=True)
        check_dglu(c, dy, h, made)

    def test_only_the_flag_tells_what_a_square_weight_is(self, anywhere: Any) -> None:
        c = make_case(SIZES, 64, 64)
        dy, h = gradient(c), preactivation(c)
        one, other = (glulam.grouped_dglu(dy, c.w2, h, offs=c.offs, transpose_w=flag) for flag in (False, True))
        check_dglu(c, dy, h, one)
        check_dglu(dataclasses.replace(c, w2=c.w2.mT), dy, h, other)
        assert not same_bits(one.dpreact, other.dpreact)

    def test_bad_input(self, anywhere: Any) -> None:
        c = case(("swiglu", "concat"))
        given: dict[str, Any] = {"dy": gradient(c), "w2": c.w2, "preact": preactivation(c), "offs": c.offs}
        with pytest.raises(ValueError, match=r"w2 has shape \[7, 40, 64\]; it must be \[7, 40, 40\].*dy has 40"):
            glulam.grouped_dglu(**given, transpose_w=True)
        square = {**given, "dy": gradient(c, 64), "w2": c.w2}
        with pytest.raises(ValueError, match=r"must be \[7, 64, 64\], .*or give transpose_w=True"):
            glulam.grouped_dglu(**square)
        with pytest.raises(TypeError, match="grouped_dglu: transpose_w is 1; give True or False"):
            glulam.grouped_dglu(**given, transpose_w=1)


WORK = {
    "x": ["glu", "mm", "dglu", "mm"],
    "w1": ["glu", "mm", "dglu", "wgrad"],
    "w2": ["glu", "mm", "wgrad"],
    "row_scale": ["glu", "mm", "dglu", "mm"],  # the last: the second bias' share
    "b1": ["glu", "mm", "dglu", "wgrad"],
    "b2": ["glu", "mm", "wgrad"],
}


class TestGradients:
    @pytest.mark.parametrize("recompute", [False, True])
    @pytest.mark.parametrize("form", activation_forms(), ids="-".join)
    def test_gradcheck(self, form: Form, recompute: bool) -> None:
        inter = 32 if form[1] == "interleaved32" else 4
        c = make_case([3, 0, 5, 1], 3, inter, gated=form[0] in GATED, dtype=torch.float64)
        numbers = {"limit": 0.5, "alpha": 1.3, "offset": 0.4}

        def call(*values: torch.Tensor) -> torch.Tensor:
            named = {"activation": form[0], "glu_layout": form[1], "recompute": recompute, **numbers}
            given = dict(zip(INPUTS, values, strict=True))
            return glulam.grouped_mlp(**given, offs=c.offs, transpose_w=True, **named)

        fast = form[1] == "interleaved32"
        assert torch.autograd.gradcheck(call, tuple(transposed_leaves(c).values()), fast_mode=fast)

    @pytest.mark.parametrize("recompute", [False, True])
    @pytest.mark.parametrize("form", activation_forms(), ids="-".join)
    def test_every_form(self, form: Form, recompute: bool, anywhere: Any) -> None:
        """Tails of x and dy are NaN and reach no gradient."""
        c = case(form)
        given, dy = transposed_leaves(c), gradient(c)
        named = {"activation": form[0], "glu_layout": form[1], "recompute": recompute}
        for _ in range(2):
            for value in given.values():
                value.grad = None
            glulam.grouped_mlp(**given, offs=c.offs, transpose_w=True, **named).backward(dy)
        got = {name: value.grad for name, value in given.items()}
        assert all(got[name].shape == given[name].shape for name in given)
        check_gradients(c, dy, transposed_back(got), form)

    @pytest.mark.parametrize("dtype", [BF16, torch.float16])
    def test_lists(self, dtype: torch.dtype, anywhere: Any) -> None:
        c = case(("swiglu", "concat"), dtype)
        given, dy = transposed_leaves(c), gradient(c)
        lists: dict[str, Any] = dict(given)
        for name in ("w1", "w2", "b1", "b2"):
            lists[name] = [one.detach().requires_grad_() for one in given[name]]
        glulam.grouped_mlp(**lists, offs=c.offs, transpose_w=True).backward(dy)
        got = {n: torch.stack([one.grad for one in v]) if isinstance(v, list) else v.grad for n, v in lists.items()}
        check_gradients(c, dy, transposed_back(got))

    @pytest.mark.parametrize("name", INPUTS)
    def test_only_what_is_asked_for(self, name: str, fake_gpu: FakeGpu) -> None:
        """And a kernel is given the call's weights."""
        c = case(("swiglu", "concat"))
        given, every, dy = transposed_leaves(c, (name,)), transposed_leaves(c), gradient(c)
        glulam.grouped_mlp(**given, offs=c.offs, transpose_w=True).backward(dy)
        assert fake_gpu.work == WORK[name]
        weights = {given[w].data_ptr() for w in ("w1", "w2")}
        read = {launch["w2"].data_ptr() for launch in fake_gpu.launches if "w2" in launch}
        assert read <= weights
        glulam.grouped_mlp(**every, offs=c.offs, transpose_w=True).backward(dy)
        found = {other: value.grad for other, value in given.items() if value.grad is not None}
        assert found.keys() == {name}
        if name != "w2":  # which alone gets the forward's activation
            assert same_bits(found[name], every[name].grad)

    def test_square_weights_are_not_mistaken(self, anywhere: Any) -> None:
        c = make_case(SIZES, 64, 32, tail=6)
        given, dy = transposed_leaves(c), gradient(c)
        glulam.grouped_mlp(**given, offs=c.offs, transpose_w=True).backward(dy)
        check_gradients(c, dy, transposed_back({name: value.grad for name, value in given.items()}))

    def test_no_rows(self, anywhere: Any) -> None:
        c = make_case([0, 0], 40, 64)
        given = transposed_leaves(c)
        glulam.grouped_mlp(**given, offs=c.offs, transpose_w=True).sum().backward()
        assert all(value.grad is not None and not bool(value.grad.any()) for value in given.values())
