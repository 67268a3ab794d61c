"""A call with another row count than an earlier call: the checks, lookups, plans and allocations made for it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.criterion import same_bits
from support.fake_gpu import FakeGpu
from torch import Tensor

import glulam
from glulam import mhc
from glulam.backward.planned import PlannedStep
from glulam.calls import call
from glulam.calls.launch import Plan
from glulam.choose import Chooser, choose, kernels, known, shipped
from glulam.choose.problem import Problem
from glulam.host import plans, workspace
from glulam.ops.grouped_mm import GroupedMmCall

pytest_plugins = ["support.fixtures"]

EXPERTS, HIDDEN, INTER, STREAMS = 4, 64, 32, 4
MOST = 64
BF16 = torch.bfloat16

Call = Callable[[int], Any]


def numbers(seed: int, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 4).to(dtype)


class Layer:
    """Arguments of a layer with up to MOST rows; a call uses the first `rows`."""

    def __init__(self) -> None:
        f32 = torch.float32
        self.x, self.dy, self.h = numbers(0, MOST, HIDDEN), numbers(1, MOST, HIDDEN), numbers(2, MOST, 2 * INTER)
        self.w1, self.w2 = numbers(3, EXPERTS, 2 * INTER, HIDDEN), numbers(4, EXPERTS, HIDDEN, INTER)
        self.lists = list(self.w1.clone()), list(self.w2.clone())
        self.grads = [torch.zeros(HIDDEN, HIDDEN, dtype=f32) for _ in range(EXPERTS)]
        self.scale, self.b2 = numbers(5, MOST, dtype=f32).abs() + 0.5, numbers(6, EXPERTS, HIDDEN)
        self.streams = numbers(7, MOST, STREAMS, HIDDEN)
        self.mix, self.gate = numbers(8, MOST, STREAMS, STREAMS, dtype=f32), numbers(9, MOST, STREAMS, dtype=f32)
        self.weight = numbers(10, STREAMS * (STREAMS + 2), STREAMS * HIDDEN, dtype=f32)
        self.alpha, self.bias = torch.ones(1), numbers(11, STREAMS * (STREAMS + 2), dtype=f32)

    def offs(self, rows: int) -> Tensor:
        return torch.tensor([rows // 4, rows // 2, rows // 2, rows], dtype=torch.int32)

    def mlp(self, rows: int, recipe: str = "bf16", **options: Any) -> Any:
        scale = self.scale[:rows]
        return glulam.grouped_mlp(
            self.x[:rows], self.w1, self.w2, offs=self.offs(rows), row_scale=scale, recipe=recipe, **options
        )

    def train(self, rows: int, recipe: str = "bf16") -> Any:
        given = [t.clone().requires_grad_() for t in (self.x[:rows], self.scale[:rows])]
        trained = [self.w1.requires_grad_(), self.w2.requires_grad_()]
        with torch.enable_grad():
            y = glulam.grouped_mlp(
                given[0], *trained, offs=self.offs(rows), row_scale=given[1], b2=self.b2, recipe=recipe
            )
            return y, *torch.autograd.grad(y, (*given, *trained), self.dy[:rows])

    def train_mm(self, rows: int) -> Any:
        x, w = self.x[:rows].clone().requires_grad_(), self.w1.requires_grad_()
        with torch.enable_grad():
            y = glulam.grouped_mm(x, w, offs=self.offs(rows))
            return y, *torch.autograd.grad(y, (x, w), self.h[:rows])

    def train_pre(self, rows: int) -> Any:
        x, weight = self.streams[:rows].clone().requires_grad_(), self.weight.requires_grad_()
        with torch.enable_grad():
            results = mhc.pre(x, weight, self.alpha, self.alpha, self.alpha, self.bias)
            return *results, *torch.autograd.grad([r.sum() for r in results], (x, weight))

    def calls(self) -> dict[str, Call]:
        """Return functions of a row count that call an operator, by name."""
        out = torch.empty(MOST, HIDDEN + 8, dtype=BF16)[:, :HIDDEN]
        lists = {"w1": self.lists[0], "w2": self.lists[1]}
        inference: dict[str, Call] = {
            "mm": lambda t: glulam.grouped_mm(self.x[:t], self.w1, offs=self.offs(t)),
            "glu": lambda t: glulam.grouped_glu(self.x[:t], self.w1, offs=self.offs(t), return_preact=True),
            "mlp": lambda t: self.mlp(t),
            "mlp into out": lambda t: self.mlp(t, out=out[:t]).clone(),
            "mlp of lists": lambda t: glulam.grouped_mlp(self.x[:t], **lists, offs=self.offs(t)),
            "dglu": lambda t: glulam.grouped_dglu(
                self.dy[:t], self.w2, self.h[:t], offs=self.offs(t), row_scale=self.scale[:t]
            ),
            "wgrad": lambda t: glulam.grouped_wgrad(self.dy[:t], self.x[:t], offs=self.offs(t)),
            "wgrad into a list": lambda t: [
                g.clone() for g in glulam.grouped_wgrad(self.dy[:t], self.x[:t], offs=self.offs(t), out=self.grads)
            ],
            **{
                recipe: functools.partial(self.mlp, recipe=recipe)
                for recipe in ("mxfp8", "mxfp8_exact", "mxfp8_weight_only")
            },
            "quantize": lambda t: [
                part for copy in glulam.quantize_mxfp8(self.x[:t], axis="both") for part in (copy.data, copy.scale)
            ],
            "sinkhorn": lambda t: mhc.sinkhorn(self.mix[:t]),
            "aggregate": lambda t: mhc.aggregate(self.streams[:t], self.gate[:t]),
            "post_mix": lambda t: mhc.post_mix(self.streams[:t], self.mix[:t], self.gate[:t], self.x[:t]),
            "pre": lambda t: mhc.pre(self.streams[:t], self.weight, *[self.alpha] * 3, self.bias),
        }
        without_grad = {name: torch.no_grad()(one) for name, one in inference.items()}
        return {
            **without_grad,
            "train": self.train,
            "train mm": self.train_mm,
            "train mxfp8": functools.partial(self.train, recipe="mxfp8"),
            "train pre": self.train_pre,
        }


NAMES = tuple(Layer().calls())
each_call = pytest.mark.parametrize("name", NAMES)


def flat(result: Any) -> list[Tensor]:
    if isinstance(result, (tuple, list)):
        return [tensor for one in result if one is not None for tensor in flat(one)]
    result = result.detach()
    return [result.view(torch.uint8).short() if result.dtype.itemsize == 1 else result]


def check_same(got: Any, wanted: Any) -> None:
    for one, other in zip(flat(got), flat(wanted), strict=True):
        assert same_bits(one.contiguous(), other.contiguous())


def anew(one: Call, rows: int) -> Any:
    """Return the result of a call after forgetting all plans; forget its plan too."""
    plans.forget_plans()
    result = one(rows)
    plans.forget_plans()
    return result


def forbid_checks(patch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("checked again")

    for kind in (call.Call, *call.Call.__subclasses__()):
        for name in ("check", "check_plain", "check_addresses", "execute"):
            patch.setattr(kind, name, fail)


@each_call
@pytest.mark.parametrize("first", [EXPERTS, 40], ids=["as many as experts", "40 rows"])
def test_nothing_is_checked_or_found_again(
    name: str, first: int, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are asked for on other tiles alone, and results equal the results of calls that were the first of all."""
    one = Layer().calls()[name]
    right = {rows: anew(one, rows) for rows in (EXPERTS, 41)}
    one(first)
    one(40)
    with monkeypatch.context() as patch:
        forbid_checks(patch)
        found = len(fake_gpu.specs)
        for rows, result in right.items():
            check_same(one(rows), result)
        assert len(fake_gpu.specs) == found


@each_call
def test_one_row_and_none_are_calls_of_their_own(name: str, fake_gpu: FakeGpu) -> None:
    one = Layer().calls()[name]
    right = {rows: anew(one, rows) for rows in (1, 0)}
    one(40)
    for rows, result in right.items():
        check_same(one(rows), result)


def test_a_module_with_main_grads_checks_once(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of weights that go into buffers have plans of their own."""
    layer = glulam.nn.GroupedLinear(EXPERTS, HIDDEN, HIDDEN, bias=False, packed=True, dtype=BF16)
    weight: Any = layer.weight
    weight.main_grad = torch.zeros(weight.shape)
    checked: list[int] = []
    check = GroupedMmCall.check
    monkeypatch.setattr(GroupedMmCall, "check", lambda self: checked.append(len(self.x)) or check(self))
    given = Layer()
    for rows in (40, 24, 41):
        x = given.x[:rows].clone().requires_grad_()
        weight.main_grad.zero_()
        layer(x, offs=given.offs(rows)).backward(given.dy[:rows])
        right = glulam.grouped_wgrad(given.dy[:rows], x.detach(), offs=given.offs(rows), out_dtype=torch.float32)
        assert same_bits(weight.main_grad, right) and x.grad is not None
    assert set(checked) == {40}


def fields(plan: Any) -> dict[str, Any]:
    """Return a plan's fields in a form that `==` compares."""

    def told(value: Any) -> Any:
        if isinstance(value, workspace.MatrixLayouts):
            return [told(part) for part in value.parts]
        if isinstance(value, workspace.MatrixLayout):
            return value.shape, value.dtype, value.device
        if isinstance(value, dict):
            return {name: told(one) for name, one in value.items()}
        return fields(value) if isinstance(value, Plan) else value

    if isinstance(plan, Plan):  # of what its text calls by name, which is all that it sees
        used = set(plan.run.__code__.co_names) - {"seen", "check_unseen", "run"}
        constants = {name: told(plan.constants[name]) for name in used & plan.constants.keys()}
        return {"shape": plan.shape, "extents": (plan.extents, plan.out_extents), "constants": constants}

    launches = {part: fields(launch) for part, launch in plan.parts.items()}
    own = {
        name: value
        for name, value in vars(plan).items()
        if name not in ("seen", "path", "general", "layout", "saved_layout")
    }
    path = {name: value for name, value in vars(plan.path).items() if name != "launches"}
    return {**own, **path, "layouts": (plan.layout.slices, plan.saved_layout.slices), "launches": launches}


@each_call
def test_a_resized_plan_is_one_that_is_made_anew(name: str, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every field: rows, sizes, extents, memory, functions."""
    monkeypatch.setattr(kernels, "find", functools.cache(fake_gpu.find))
    kept: list[Any] = []
    keep = plans.Plans.keep
    monkeypatch.setattr(plans.Plans, "keep", lambda self, key, plan: kept.append(plan) or keep(self, key, plan))
    one = Layer().calls()[name]
    anew(one, 41)
    made = [fields(plan) for plan in kept if isinstance(plan, (Plan, PlannedStep))]
    one(40)
    kept.clear()
    one(41)
    resized = [plan for plan in kept if isinstance(plan, (Plan, PlannedStep))]
    assert resized and [fields(plan) for plan in resized] == made[-len(resized) :]
    assert all(plan.seen is not other.seen for plan in resized for other in resized if plan is not other)


@pytest.mark.parametrize("name", ["mm", "mlp", "train", "pre"])
def test_what_is_kept_is_bounded(name: str, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_PLANS", 4)
    one = Layer().calls()[name]
    for rows in range(2, 12):
        one(rows)
    assert max(map(len, plans._all_kept)) <= 4


def test_group_sizes_are_checked_once_that_is_asked_for(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    glulam.grouped_mm(layer.x[:40], layer.w1, offs=layer.offs(40))
    monkeypatch.setenv("GLULAM_CHECK", "1")
    with pytest.raises(ValueError, match="offs end at 40, but x has 24 rows"):
        glulam.grouped_mm(layer.x[:24], layer.w1, offs=layer.offs(40))


def test_gradients_that_are_refused_are_refused(fake_gpu: FakeGpu) -> None:
    """A buffer that requires a gradient may be written without grad mode, and not with it, whatever was called."""
    layer = Layer()
    out = torch.empty(MOST, HIDDEN, dtype=BF16, requires_grad=True)
    for rows in (40, 24):
        with torch.no_grad():
            layer.mlp(rows, out=out.detach()[:rows].requires_grad_())
            mhc.aggregate(layer.streams[:rows], layer.gate[:rows], out=out.detach()[:rows].requires_grad_())
    for rows in (16, 8):
        with pytest.raises(glulam.GradientNotSupported, match="out"):
            layer.mlp(rows, out=out[:rows])
        with pytest.raises(glulam.GradientNotSupported, match="out requires a gradient"):
            mhc.aggregate(layer.streams[:rows], layer.gate[:rows], out=out.detach()[:rows].requires_grad_())


def test_a_kernel_that_fails_is_not_launched_again(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, launches = Layer(), []

    def fail(*_: Any) -> None:
        launches.append(1)
        if len(launches) > 1:
            raise RuntimeError("out of lunch")

    monkeypatch.setattr(kernels, "find", lambda spec: kernels.Kernel(fail, "shipped"))
    with torch.no_grad():
        layer.mlp(40)
        with pytest.raises(RuntimeError, match="out of lunch"):
            layer.mlp(24)
    assert len(launches) == 2


SIZES = [0, 1, 2, 3, 5, 12, 13, 48, 49, 100, 240, 241, 255, 256, 257, 1000, 4097, 100_000]
FORMS: dict[str, dict[str, Any]] = {
    "mm": {"op": "grouped_mm", "out_features": 2048},
    "measured": {"op": "grouped_glu", "experts": 8, "in_features": 4096, "intermediate": 14336},
    "mlp": {"op": "grouped_mlp", "intermediate": 512, "out_features": 1024},
    "training": {"op": "grouped_glu", "intermediate": 512, "out_features": 1024, "save_preact": True},
    "dglu": {"op": "grouped_dglu", "intermediate": 512},
    "wgrad": {"op": "grouped_wgrad", "out_features": 1024, "out_dtype": "float32", "activation": "none"},
    "mxfp8": {"op": "grouped_mlp", "intermediate": 512, "out_features": 1024, "operands": "mxfp8"},
    "weight only": {"op": "grouped_mlp", "intermediate": 512, "out_features": 1024, "operands": "mxfp8_weight_only"},
    "training mxfp8": {"op": "grouped_glu", "intermediate": 512, "save_preact": True, "operands": "mxfp8"},
}


def problem_of(form: str) -> Problem:
    activation = "none" if form in ("mm", "wgrad") else "swiglu"
    given = {"dtype": "bfloat16", "rows": 7, "experts": 4, "in_features": 1024, "activation": activation}
    operands = FORMS[form].get("operands", "16bit")
    return Problem(**{**given, "fc2_operands": operands, **FORMS[form]})


class TestChooser:
    @pytest.mark.parametrize("form", FORMS)
    def test_gives_what_choose_gives(self, form: str) -> None:
        problem = problem_of(form)
        chooser = Chooser(problem, "sm_90a")
        for rows in SIZES:
            assert chooser.spec(rows) == choose(dataclasses.replace(problem, rows=rows), "sm_90a").spec

    @pytest.mark.parametrize("form", FORMS)
    def test_estimates_no_size_twice(self, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """From 1 to 1024 rows an expert, each number of rows: at most 16 sizes an octave."""
        asked: list[Problem] = []
        chosen = shipped.shipped_choice
        monkeypatch.setattr(shipped, "shipped_choice", lambda p, arch: asked.append(p) or chosen(p, arch))
        chooser = Chooser(problem_of(form), "sm_90a")
        for rows in range(problem_of(form).experts, 1024 * problem_of(form).experts):
            chooser.spec(rows)
        assert len(asked) <= 10 * shipped.SIZES_AN_OCTAVE + 2

    def test_powers_of_two_an_expert_are_compared_as_they_are(self) -> None:
        """Those were measured."""
        for experts in (1, 3, 8, 60, 256):
            problem = dataclasses.replace(problem_of("mm"), experts=experts)
            for rows in (experts << d for d in range(13)):
                assert shipped.estimated_rows(dataclasses.replace(problem, rows=rows)) == rows
            for rows in range(1, 9999, 7):
                near = shipped.estimated_rows(dataclasses.replace(problem, rows=rows))
                assert abs(near - rows) < 0.022 * rows + 0.5

    def test_asks_a_table_for_each_number_of_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """But for its layer once."""
        asked: list[Any] = []
        layer = (object(), "a file")
        monkeypatch.setattr(known, "tuned", lambda problem, gpu: asked.append(gpu) or layer)
        monkeypatch.setattr(known, "fastest", lambda told, problem, shipped: asked.append(problem.rows))
        chooser = Chooser(problem_of("dglu"), "sm_90a", "a GPU")
        specs = {chooser.spec(rows) for rows in (1, 2, 3)}
        assert asked == ["a GPU", 1, 2, 3] and specs == {shipped.shipped_choice(problem_of("dglu"), "sm_90a").spec}
