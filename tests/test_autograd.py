"""Differentiation: gradcheck in float64, no more work than requested, and torch's ways to call a backward."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.checks import torch_arguments
from support.criterion import same_bits
from support.fake_gpu import FakeGpu
from support.gradients import INPUTS, check_gradients, grads, leaves
from support.inputs import Case, gradient, make_case
from torch.utils.checkpoint import checkpoint

import glulam
from cute_kernels.chains import signature_of
from cute_kernels.shipped import activation_forms
from cute_kernels.specs import GATED
from glulam.backward import planned
from glulam.backward.path import Path
from glulam.ops.grouped_mlp import GroupedMlpCall

pytest_plugins = ["support.fixtures"]

F64, BF16 = torch.float64, torch.bfloat16
SIZES = [3, 0, 5, 1]
TAIL = 2


def small(form: tuple[str, str] = ("swiglu", "concat"), inter: int = 4, hidden: int = 5, **options: Any) -> Case:
    return make_case(SIZES, hidden, inter, gated=form[0] in GATED, **{"dtype": F64, **options})


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and one
    for name, value in one.items():
        assert same_bits(value, other[name]), name


class TestGradcheck:
    @pytest.mark.parametrize("recompute", [False, True])
    @pytest.mark.parametrize("form", activation_forms(), ids="-".join)
    def test_grouped_mlp(self, form: tuple[str, str], recompute: bool) -> None:
        c = small(form, inter=32 if form[1] == "interleaved32" else 4, hidden=3)
        names = {"activation": form[0], "glu_layout": form[1], "limit": 0.5, "alpha": 1.3, "offset": 0.4}

        def call(*values: torch.Tensor) -> torch.Tensor:
            given = dict(zip(INPUTS, values, strict=True))
            return glulam.grouped_mlp(**given, offs=c.offs, recompute=recompute, **names)

        fast = form[1] == "interleaved32"
        assert torch.autograd.gradcheck(call, tuple(leaves(c).values()), fast_mode=fast)

    @pytest.mark.parametrize("wanted", [w for n in (1, 2) for w in itertools.combinations(INPUTS, n)], ids="-".join)
    def test_any_inputs(self, wanted: tuple[str, ...]) -> None:
        """Also without the optional arguments that need no gradient."""
        c = small(inter=3, hidden=2)
        given = leaves(c, wanted)
        for rest in (given, {k: v for k, v in given.items() if k in wanted or k in ("x", "w1", "w2")}):
            for recompute in (False, True):

                def call(*_: torch.Tensor, given: Any = rest, recompute: bool = recompute) -> torch.Tensor:
                    return glulam.grouped_mlp(**given, splits=SIZES, recompute=recompute)

                assert torch.autograd.gradcheck(call, tuple(v for v in rest.values() if v.requires_grad))

    @pytest.mark.parametrize("transpose_w", [False, True])
    @pytest.mark.parametrize("listed", [False, True])
    def test_grouped_mm(self, transpose_w: bool, listed: bool) -> None:
        c = small(hidden=4)
        x, scale = (t.detach().clone().requires_grad_() for t in (c.x, c.row_scale.double()))
        packed = (c.w2.mT.contiguous() if transpose_w else c.w2).detach()
        w = [one.clone().requires_grad_() for one in packed] if listed else packed.clone().requires_grad_()
        b = [one.clone().requires_grad_() for one in c.b2] if listed else c.b2.clone().requires_grad_()

        def call(*_: torch.Tensor) -> torch.Tensor:
            return glulam.grouped_mm(x, w, offs=c.offs, bias=b, bias_scale=scale, transpose_w=transpose_w)

        assert torch.autograd.gradcheck(call, (x, scale, *([*w, *b] if listed else [w, b])))

    def test_lists(self) -> None:
        c = small()
        given = leaves(c)
        lists = {n: [one.detach().clone().requires_grad_() for one in given[n]] for n in ("w1", "w2", "b1", "b2")}
        lists["w1"][2].requires_grad_(False)

        def call(*_: torch.Tensor) -> torch.Tensor:
            return glulam.grouped_mlp(given["x"], **lists, row_scale=given["row_scale"], splits=c.splits())

        tensors = [given["x"], given["row_scale"], *itertools.chain(*lists.values())]
        assert torch.autograd.gradcheck(call, tuple(t for t in tensors if t.requires_grad))
        assert lists["w1"][2].grad is None

    def test_no_rows(self) -> None:
        c = make_case([0, 0], 5, 4, dtype=F64)
        given = leaves(c)
        glulam.grouped_mlp(**given, offs=c.offs).sum().backward()
        assert all(value.shape == given[name].shape and not bool(value.any()) for name, value in grads(given).items())
        assert grads(given).keys() == given.keys()


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_narrow_gradients_on_the_host_path(
    fake_gpu: FakeGpu, dtype: torch.dtype, listed: bool, recompute: bool
) -> None:
    """Through plans, addresses and tables; tails of x and dy are NaN and reach no gradient."""
    c = make_case([5, 0, 17, 1, 40], 40, 64, tail=6, dtype=dtype)
    dy = gradient(c)
    given = leaves(c)
    arguments: dict[str, Any] = dict(given)
    if listed:
        for name in ("w1", "w2", "b1", "b2"):
            arguments[name] = [one.detach().requires_grad_() for one in given[name]]
    for _ in range(2):
        for value in itertools.chain.from_iterable(v if isinstance(v, list) else [v] for v in arguments.values()):
            value.grad = None
        glulam.grouped_mlp(**arguments, offs=c.offs, recompute=recompute).backward(dy)
    got = {n: torch.stack([one.grad for one in v]) if isinstance(v, list) else v.grad for n, v in arguments.items()}
    check_gradients(c, dy, got)


WORK = {
    "x": ["glu, mm", "dglu, mm"],
    "w1": ["glu, mm", "dglu", "wgrad"],
    "w2": ["glu", "mm", "wgrad"],
    "row_scale": ["glu, mm", "dglu", "mm"],  # the last: the second bias' share
    "b1": ["glu, mm", "dglu", "wgrad"],
    "b2": ["glu", "mm", "wgrad"],
}
SAVED = {  # besides group sizes
    "x": {"preact", "w1", "w2", "row_scale"},
    "w1": {"preact", "x", "w2", "row_scale"},
    "w2": {"act", "row_scale"},
    "row_scale": {"preact", "w2", "row_scale", "b2"},
    "b1": {"preact", "w2", "row_scale"},
    "b2": {"row_scale"},
}


class TestWork:
    """Kernels that a backward launches and tensors that a forward saves, if only one input requires a gradient."""

    @pytest.mark.parametrize("name", INPUTS)
    def test_kernels(self, fake_gpu: FakeGpu, name: str) -> None:
        c = small(dtype=BF16, hidden=16, inter=32)
        y = glulam.grouped_mlp(**leaves(c, (name,)), offs=c.offs)
        y.backward(torch.ones_like(y))
        assert fake_gpu.work == WORK[name]
        for work, launch in zip(fake_gpu.work, fake_gpu.launches, strict=True):
            if work.startswith("dglu"):
                assert bool(launch["d_scale"]) == (name == "row_scale"), "the row scale's reduction"

    @pytest.mark.parametrize("name", INPUTS)
    def test_saved(self, name: str) -> None:
        c = small(dtype=BF16, hidden=16, inter=32)
        given = leaves(c, (name,))
        assert saved_by(given, lambda: glulam.grouped_mlp(**given, offs=c.offs)) == SAVED[name]

    def test_everything_saves_x_h_and_the_row_scale(self) -> None:
        c = small(dtype=BF16, hidden=16, inter=32)
        given = leaves(c)
        weights = {"w1", "w2", "b2"}
        assert saved_by(given, lambda: glulam.grouped_mlp(**given, offs=c.offs)) - weights == {
            "x", "preact", "row_scale",
        }  # fmt: skip
        weights.add("b1")
        again = saved_by(given, lambda: glulam.grouped_mlp(**given, offs=c.offs, recompute=True))
        assert again - weights == {"x", "row_scale"}

    def test_without_a_gradient_it_stays_one_call(self, fake_gpu: FakeGpu) -> None:
        c = small(dtype=BF16, hidden=16, inter=32)
        given = leaves(c)
        with torch.no_grad():
            glulam.grouped_mlp(**given, offs=c.offs)
        glulam.grouped_mlp(**{name: value.detach() for name, value in given.items()}, offs=c.offs)
        assert len(fake_gpu.launches) == 2 and {spec.op for spec in fake_gpu.specs} == {"grouped_mlp"}


def saved_by(given: dict[str, torch.Tensor], call: Callable[[], torch.Tensor]) -> set[str]:
    """Return the names of inputs that autograd saves, and names of other saved tensors by their width, without group
    sizes.
    """
    kept: set[str] = set()
    by_address = {value.data_ptr(): name for name, value in given.items()}
    widths = {given["w1"].shape[1]: "preact", given["w2"].shape[2]: "act"}

    def pack(value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point():
            kept.add(by_address.get(value.data_ptr()) or widths[value.shape[1]])
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        call()
    return kept


PLANNED = ("x", "w1", "w2", "row_scale")


class TestPlanned:
    """Tests of common calls on a GPU, whose forward and backward follow a plan."""

    def layer(self, wanted: tuple[str, ...] = PLANNED, **options: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        c = small(**{"dtype": BF16, "hidden": 16, "inter": 32, "tail": TAIL, **options})
        given = {name: value for name, value in leaves(c, wanted).items() if name in PLANNED}
        return given, c.offs

    def test_two_calls_and_one_for_each_weight(self, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
        given, offs = self.layer()
        for _ in range(2):
            fake_gpu.work.clear()
            layer(given, offs).backward(torch.ones_like(given["x"]))
            assert fake_gpu.work == ["glu, mm", "dglu, mm", "wgrad", "wgrad"]
            monkeypatch.setattr(glulam.calls.call.Call, "differentiate", lambda *_: pytest.fail("left the fast path"))
            monkeypatch.setattr(
                glulam.calls.call.Call, "run_without_gradient", lambda *_: pytest.fail("left the fast path")
            )

    def test_h_goes_before_weights_are_made_and_its_gradient_before_the_last(
        self, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given, offs = self.layer()
        alive: dict[str, weakref.ref[torch.Tensor]] = {}
        seen: list[dict[str, bool]] = []
        find = glulam.choose.kernels.find

        def watched(spec: Any) -> Any:
            function = find(spec).function

            def call(*arguments: Any) -> None:
                function(*arguments)
                fake_gpu.launches.clear()
                taken = dict(zip(signature_of(spec).names, arguments, strict=True))
                if spec.op == "grouped_mlp":
                    alive["h"] = weakref.ref(taken["preact"].untyped_storage())
                elif spec.op == "grouped_dglu":
                    alive["dh"] = weakref.ref(taken["dpreact"].untyped_storage())
                else:
                    seen.append({name: storage() is not None for name, storage in alive.items()})

            return glulam.choose.kernels.Kernel(call, "shipped")

        monkeypatch.setattr(glulam.choose.kernels, "find", watched)
        y = layer(given, offs)
        y.backward(torch.ones_like(y))
        assert seen == [{"h": False, "dh": True}, {"h": False, "dh": False}]
        seen.clear()
        y = layer(given, offs)
        for _ in range(2):
            y.backward(torch.ones_like(y), retain_graph=True)
        assert [now["h"] for now in seen] == [True] * 4, "kept for the next backward"

    @pytest.mark.parametrize("wanted", [w for n in (1, 2, 3) for w in itertools.combinations(PLANNED, n)], ids="-".join)
    def test_frozen_inputs(self, fake_gpu: FakeGpu, wanted: tuple[str, ...]) -> None:
        """The bits of a backward of everything; but w2 alone gets the forward's activation."""
        (every, offs), (given, _) = self.layer(), self.layer(wanted)
        for one in (every, given):
            dy = torch.ones_like(one["x"])
            layer(one, offs).backward(dy)
        assert grads(given).keys() == set(wanted)
        for name, value in grads(given).items():
            assert wanted == ("w2",) or same_bits(value, grads(every)[name]), name
        last = fake_gpu.work[fake_gpu.work.index("wgrad") + 3 :] if wanted == ("w2",) else fake_gpu.work[4:]
        assert last.count("wgrad") == len({"w1", "w2"} & set(wanted)) or wanted == ("w2",)
        assert ("dglu, mm" in last) == ("x" in wanted)

    def test_saved(self, fake_gpu: FakeGpu) -> None:
        for wanted, names in (
            (PLANNED, {"x", "w1", "w2", "row_scale", "h", "offs"}),
            (("x",), {"w1", "w2", "row_scale", "h", "offs"}),
            (("w1",), {"x", "w2", "row_scale", "h", "offs"}),
        ):
            given, offs = self.layer(wanted)
            known = {value.data_ptr(): name for name, value in {**given, "offs": offs}.items()}
            saved: Any = layer(given, offs).grad_fn
            assert {known.get(t.data_ptr(), "h") for t in saved.saved_tensors if t is not None} == names

    def test_some_of_the_gradients(self, fake_gpu: FakeGpu) -> None:
        given, offs = self.layer()
        y = layer(given, offs)
        dy = torch.ones_like(y)
        y.backward(dy, retain_graph=True)
        for names in (("x",), ("w2", "row_scale"), PLANNED):
            found = torch.autograd.grad(y, [given[name] for name in names], dy, retain_graph=True)
            assert_same(dict(zip(names, found, strict=True)), {name: grads(given)[name] for name in names})

    def test_a_second_derivative_is_refused(self, fake_gpu: FakeGpu) -> None:
        given, offs = self.layer()
        y = layer(given, offs)
        (dx,) = torch.autograd.grad(y, given["x"], torch.ones_like(y), create_graph=True)
        with pytest.raises(glulam.GradientNotSupported, match="differentiable once"):
            dx.sum().backward()

    def test_hooks_and_checkpoints(self, fake_gpu: FakeGpu) -> None:
        """Hooks may give back tensors that lie otherwise; then the operators look at them anew."""
        (given, offs), (plain, _), (again, _) = self.layer(), self.layer(), self.layer()
        dy, keys = torch.ones_like(plain["x"]), list(again)
        layer(plain, offs).backward(dy)

        def strided(value: torch.Tensor) -> torch.Tensor:
            if value.dim() != 1:
                return value
            wide = value.new_zeros(len(value), 2)
            wide[:, 0] = value
            return wide[:, 0]

        with torch.autograd.graph.saved_tensors_hooks(lambda value: value, strided):
            y = layer(given, offs)
        with pytest.raises(ValueError, match="contiguous"):
            y.backward(dy)
        fake_gpu.work.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda value: value.clone(), lambda value: value):
            layer(given, offs).backward(dy)
        checkpoint(
            lambda *values: layer(dict(zip(keys, values, strict=True)), offs), *again.values(), use_reentrant=False
        ).backward(dy)
        step = ["glu, mm", "dglu, mm", "wgrad", "wgrad"]
        assert fake_gpu.work == [*step, step[0], *step]
        assert_same(grads(plain), grads(given))
        assert_same(grads(plain), grads(again))

    def test_bad_arguments_after_good_ones(self, fake_gpu: FakeGpu) -> None:
        given, offs = self.layer()
        layer(given, offs)
        flat = torch.zeros(given["x"].numel() + 1, dtype=BF16)
        for change, words in (
            ({"x": flat[1:].view_as(given["x"]).requires_grad_()}, "x starts 2 bytes after"),
            ({"w1": given["w1"].detach()[:, :32].contiguous()}, r"w2 has shape"),
            ({"w2": given["w2"].detach().mT}, "w2"),
        ):
            with pytest.raises(ValueError, match=f"^grouped_mlp: .*{words}"):
                layer({**given, **change}, offs)

    def test_no_plan_for_what_is_rare(self, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(planned.PlannedStep, "run_into", lambda *_: pytest.fail("planned"))
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        given, offs = self.layer()
        one_row = {**given, "x": given["x"][:1], "row_scale": given["row_scale"][:1]}
        layer(one_row, offs.clamp(max=1)).sum().backward()
        alone = {name: value for name, value in given.items() if name != "row_scale"}
        glulam.grouped_mlp(**alone, splits=SIZES).sum().backward()
        monkeypatch.setenv("GLULAM_CHECK", "1")
        with pytest.raises(ValueError, match="offs"):
            layer(given, offs * 100)

    def test_tensors_are_looked_at_once_without_a_plan(
        self, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks: list[Any] = []
        look = GroupedMlpCall.check_plain
        monkeypatch.setattr(GroupedMlpCall, "check_plain", lambda call: looks.append(call) or look(call))
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        given, _ = self.layer()
        for calls in (1, 2):
            glulam.grouped_mlp(**given, splits=[*SIZES]).sum().backward()
            assert len(looks) == calls

    @pytest.mark.parametrize("how", ["recompute", "lists", "tuples", "GateUp", "transposed"])
    def test_a_second_step_looks_at_nothing(self, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
        """Weights however they lie have a step that is kept: the second is checked no more, and has the same bits."""
        given, offs = self.layer()
        every: dict[str, Any] = dict(given)
        if how == "lists":
            every.update({n: [one.detach().requires_grad_() for one in given[n]] for n in ("w1", "w2")})
        elif how == "tuples":
            every.update({n: tuple(one.detach().requires_grad_() for one in given[n]) for n in ("w1", "w2")})
        elif how == "GateUp":
            every["w1"] = glulam.GateUp(*(h.detach().clone().requires_grad_() for h in given["w1"].chunk(2, 1)))
        elif how == "transposed":
            every.update({n: given[n].detach().mT.contiguous().requires_grad_() for n in ("w1", "w2")})
        options = {"recompute": how == "recompute", "transpose_w": how == "transposed"}
        trained = [t for v in every.values() for t in (v if isinstance(v, (list, tuple)) else [v]) if t.requires_grad]

        def gradients() -> list[torch.Tensor]:
            y = glulam.grouped_mlp(**every, offs=offs, **options)
            return list(torch.autograd.grad(y, trained, torch.full_like(y, 0.5)))

        first = [gradients() for _ in range(2)]  # lists are known from the second call on
        monkeypatch.setattr(GroupedMlpCall, "check", lambda _: pytest.fail("checked"))
        monkeypatch.setattr(GroupedMlpCall, "handle_miss", lambda *_: pytest.fail("left the fast path"))
        for one, *others in zip(gradients(), *first, strict=True):
            assert all(same_bits(one, other) for other in others)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mxfp4_weight_only"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("wanted", [INPUTS, ("x",), ("w2",), ("row_scale", "b2")], ids="-".join)
def test_a_part_of_a_step_is_launched_in_one_way(
    fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, recipe: str, recompute: bool, wanted: tuple[str, ...]
) -> None:
    """A part is planned once: whatever launches it later gives the very arguments that its plan passes on."""
    part_of, parts = Path.part, []

    def watched(self: Path, name: str, declared: Any) -> Any:
        part = part_of(self, name, declared)

        def run(**tensors: Any) -> Any:
            made = part(**tensors)
            assert self.launches is not None
            plan, _ = self.launches.plans[name]
            assert {one for one, value in tensors.items() if value is not None} - {"out"} == plan.shape.present, name
            parts.append(name)
            return made

        return run

    monkeypatch.setattr(Path, "part", watched)
    c = make_case(SIZES, 64, 64, tail=TAIL)
    given: dict[str, Any] = leaves(c, wanted)
    if recipe == "mxfp4_weight_only":
        given.update({name: glulam.quantize_mxfp4(given[name].detach()) for name in ("w1", "w2")})
    trained = [value for value in given.values() if getattr(value, "requires_grad", False)]
    for _ in range(2):
        parts.clear()
        if trained:
            y = glulam.grouped_mlp(**given, offs=c.offs, recipe=recipe, recompute=recompute)
            torch.autograd.grad(y, trained, gradient(c))
            assert parts


class TestPlannedMm:
    """Tests of planned grouped_mm calls."""

    def given(self, transpose_w: bool, wanted: tuple[str, ...] = ("x", "w", "bias")) -> tuple[dict[str, Any], Any]:
        c = small(dtype=BF16, hidden=16, inter=32, tail=TAIL)
        w = c.w1.mT.contiguous() if transpose_w else c.w1
        values = {"x": c.x, "w": w, "bias": c.b1, "bias_scale": c.row_scale}
        return {n: v.detach().clone().requires_grad_(n in wanted) for n, v in values.items()}, c.offs

    @pytest.mark.parametrize("transpose_w", [False, True])
    def test_against_the_general_path(
        self, fake_gpu: FakeGpu, transpose_w: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (given, offs), (want, _) = self.given(transpose_w), self.given(transpose_w)
        dy = torch.full((len(given["x"]), 64), 0.5, dtype=BF16)
        dy[-TAIL:] = math.nan

        def step() -> torch.Tensor:
            for value in given.values():
                value.grad = None
            fake_gpu.work.clear()
            y = glulam.grouped_mm(**given, offs=offs, transpose_w=transpose_w)
            y.backward(dy)
            assert fake_gpu.work == ["mm", "mm", "wgrad", "wgrad"], "the last for the bias"
            return y

        step()
        with monkeypatch.context() as second:
            second.setattr(glulam.calls.call.Call, "differentiate", lambda *_: pytest.fail("left the fast path"))
            y = step()
        lists = {**want, "bias": [one.detach().requires_grad_() for one in want["bias"]]}
        expected = glulam.grouped_mm(**lists, offs=offs, transpose_w=transpose_w)
        expected.backward(dy)
        rows = len(dy) - TAIL
        assert same_bits(y[:rows].detach(), expected[:rows].detach())
        assert same_bits(given["x"].grad, want["x"].grad) and same_bits(given["w"].grad, want["w"].grad)
        assert same_bits(given["bias"].grad, torch.stack([one.grad for one in lists["bias"]]))

    @pytest.mark.parametrize("wanted", [("x",), ("w",), ("bias",), ("bias_scale", "x")], ids="-".join)
    def test_frozen_inputs(self, fake_gpu: FakeGpu, wanted: tuple[str, ...]) -> None:
        (every, offs), (given, _) = self.given(False, ("x", "w", "bias", "bias_scale")), self.given(False, wanted)
        for one in (every, given):
            y = glulam.grouped_mm(**one, offs=offs)
            y.backward(torch.ones_like(y))
        assert grads(given).keys() == set(wanted)
        assert all(same_bits(value, grads(every)[name]) for name, value in grads(given).items())

    def test_an_unusual_backward(self, fake_gpu: FakeGpu) -> None:
        (given, offs), (want, _) = self.given(False), self.given(False)
        glulam.grouped_mm(**want, offs=offs).backward(torch.ones(len(given["x"]), 64, dtype=BF16))
        y = glulam.grouped_mm(**given, offs=offs)
        y.sum().backward(retain_graph=True)
        assert_same(grads(given), grads(want))
        (dx,) = torch.autograd.grad(y.sum(), given["x"], create_graph=True)
        with pytest.raises(glulam.GradientNotSupported, match="^grouped_mm is differentiable once"):
            dx.sum().backward()


class TestTorchsWays:
    def test_a_second_derivative_is_refused(self) -> None:
        c = small()
        for call in (
            lambda g: glulam.grouped_mlp(g["x"], g["w1"], g["w2"], offs=c.offs),
            lambda g: glulam.grouped_mm(g["x"], g["w1"], offs=c.offs),
        ):
            given = leaves(c)
            (dx,) = torch.autograd.grad(call(given).sum(), given["x"], create_graph=True)
            assert dx.requires_grad
            with pytest.raises(glulam.GradientNotSupported, match="differentiable once.*create_graph"):
                dx.sum().backward()

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpoint(self, reentrant: bool) -> None:
        c = small()
        plain, again = leaves(c), leaves(c)
        layer(plain, c.offs).sum().backward()
        keys = list(again)
        checkpoint(
            lambda *values: layer(dict(zip(keys, values, strict=True)), c.offs),
            *again.values(),
            use_reentrant=reentrant,
        ).sum().backward()
        assert_same(grads(plain), grads(again))

    def test_gradients_accumulate(self) -> None:
        """Over backward passes, and over two calls in one graph."""
        c = small()
        once, twice, both = leaves(c), leaves(c), leaves(c)
        layer(once, c.offs).sum().backward()
        for _ in range(2):
            layer(twice, c.offs).sum().backward()
        (layer(both, c.offs) + layer(both, c.offs)).sum().backward()
        for name, value in grads(once).items():
            torch.testing.assert_close(grads(twice)[name], 2 * value)
            torch.testing.assert_close(grads(both)[name], 2 * value)

    def test_one_layer_after_another(self) -> None:
        c = small()
        given = leaves(c)

        def call(*_: torch.Tensor) -> torch.Tensor:
            return layer({**given, "x": layer(given, c.offs)}, c.offs)

        assert torch.autograd.gradcheck(call, tuple(given.values()))

    def test_retained_graph(self) -> None:
        c = small()
        given = leaves(c)
        loss = layer(given, c.offs).sum()
        loss.backward(retain_graph=True)
        first = {name: value.clone() for name, value in grads(given).items()}
        for value in given.values():
            value.grad = None
        loss.backward()
        assert_same(first, grads(given))
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()

    def test_autocast_changes_nothing(self) -> None:
        """Inputs are used in the dtypes that they have: bits are the same with autocast, in both directions."""
        c = small(dtype=BF16, hidden=16, inter=32)
        plain, cast = leaves(c), leaves(c)
        layer(plain, c.offs).float().sum().backward()
        with torch.autocast("cpu", dtype=BF16):
            y = layer(cast, c.offs)
            y.float().sum().backward()
        assert y.dtype == BF16
        assert_same(grads(plain), grads(cast))
        with torch.autocast("cpu", dtype=BF16), pytest.raises(TypeError, match="w1 is torch.float32 but x is"):
            glulam.grouped_mlp(c.x.requires_grad_(), c.w1.float(), c.w2.float(), offs=c.offs)

    def test_gradients_that_are_views(self, fake_gpu: FakeGpu) -> None:
        """An expanded, a strided and a misaligned dy."""
        c = small(dtype=BF16, hidden=16, inter=32)
        rows, width = c.x.shape
        flat = torch.ones(rows * width + 1, dtype=BF16)
        for dy in (
            torch.ones(1, dtype=BF16).expand(rows, width),
            torch.ones(width, rows, dtype=BF16).T,
            flat[1:].view(rows, width),
        ):
            given, want = leaves(c), leaves(c)
            layer(given, c.offs).backward(dy)
            layer(want, c.offs).backward(torch.ones(rows, width, dtype=BF16))
            assert_same(grads(given), grads(want))

    def test_inputs_changed_before_backward_are_noticed(self) -> None:
        c = small()
        for changed in ("w1", "x", "offs"):
            given, offs = leaves(c), c.offs
            y = layer(given, offs)
            with torch.no_grad():
                {**given, "offs": offs}[changed].zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()

    def test_hidden_tails(self) -> None:
        """NaN after the last group in x, row_scale and dy."""
        c = small(tail=TAIL)
        given, clean = leaves(c), leaves(small())
        clean = {name: value.detach()[: c.rows] if name in ("x", "row_scale") else value.detach()
                 for name, value in given.items()}  # fmt: skip
        clean = {name: value.clone().requires_grad_() for name, value in clean.items()}
        dy = gradient(c)
        layer(given, c.offs).backward(dy)
        layer(clean, c.offs).backward(dy[: c.rows])
        for name, value in grads(clean).items():
            torch.testing.assert_close(grads(given)[name][: len(value)], value)
            assert not bool(grads(given)[name][len(value) :].any())


def layer(given: dict[str, Any], offs: torch.Tensor) -> torch.Tensor:
    return glulam.grouped_mlp(**given, offs=offs)


class TestRefusals:
    def test_out(self) -> None:
        c = small()
        out = torch.zeros(c.rows, 5, dtype=F64)
        for call in (
            lambda: glulam.grouped_mlp(**leaves(c), offs=c.offs, out=out),
            lambda: glulam.grouped_mm(leaves(c)["x"], c.w1, offs=c.offs, out=torch.zeros(c.rows, 8, dtype=F64)),
            lambda: torch.ops.glulam.grouped_mm_out(
                leaves(c)["x"], [c.w1], c.offs, None, None, None, None, False, torch.zeros(c.rows, 8, dtype=F64)
            ),
        ):
            with pytest.raises(glulam.GradientNotSupported, match="out is given"):
                call()

    def test_operators_without_a_gradient(self) -> None:
        c = small()
        given = leaves(c)
        for arguments in ({"dy": given["x"], "x": c.x}, {"dy": c.x, "x": given["x"]}):
            with pytest.raises(glulam.GradientNotSupported, match="grouped_wgrad has no gradient"):
                glulam.grouped_wgrad(**arguments, offs=c.offs)

    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            ({"w2": torch.zeros(4, 5, 8, dtype=F64)}, ValueError, r"w2 has shape \[4, 5, 8\]"),
            ({"recompute": 1}, TypeError, "recompute is 1"),
            ({"recipe": "fp8"}, ValueError, "recipe is 'fp8'"),
            ({"x": torch.zeros(9, 5, requires_grad=True)}, TypeError, "w1 is torch.float64 but x is torch.float32"),
            ({"offs": None, "splits": [1, 2, 3]}, ValueError, r"splits has shape \[3\]"),
            ({"offs": None, "splits": [9, 9, 9, 9]}, ValueError, "splits sum to 36"),
            ({"offs": None, "splits": "many"}, TypeError, "splits is a str"),
            ({"offs": None}, ValueError, "got neither offs nor splits"),
            ({"splits": SIZES}, ValueError, "got both offs and splits"),
            ({"activation": "relu"}, ValueError, "activation is 'relu'"),
        ],
    )
    def test_errors_are_those_of_the_operator(self, changes: Any, error: Any, words: str) -> None:
        c = small()
        with pytest.raises(error, match=f"^grouped_mlp: {words}"):
            glulam.grouped_mlp(**{**leaves(c), "offs": c.offs, **changes})


COMPILED: dict[str, Callable[[dict[str, Any], torch.Tensor], torch.Tensor]] = {
    "mlp": layer,
    "mlp, recompute": lambda g, offs: glulam.grouped_mlp(**g, splits=SIZES, recompute=True),
    "mlp, lists": lambda g, offs: glulam.grouped_mlp(
        g["x"] * 2, list(g["w1"].unbind()), list(g["w2"].unbind()), offs=offs, b2=list(g["b2"].unbind())
    ),
    "mlp, x and w2 only": lambda g, offs: glulam.grouped_mlp(g["x"], g["w1"].detach(), g["w2"], offs=offs),
    "mlp, transposed": lambda g, offs: glulam.grouped_mlp(
        g["x"], g["w1"].mT.contiguous(), g["w2"].mT.contiguous(), offs=offs, transpose_w=True
    ),
    "mm": lambda g, offs: glulam.grouped_mm(g["x"], g["w1"], offs=offs, bias=g["b1"], bias_scale=g["row_scale"]),
    "mm, transposed": lambda g, offs: glulam.grouped_mm(g["x"], g["w2"], offs=offs, transpose_w=True),
}


class TestCompile:
    @pytest.fixture(autouse=True)
    def fresh_compiler(self) -> Iterator[None]:
        torch.compiler.reset()
        yield

    @pytest.mark.parametrize("dynamic", [False, True])
    @pytest.mark.parametrize("name", COMPILED)
    def test_fullgraph(self, name: str, dynamic: bool) -> None:
        c = small()
        eager, compiled = leaves(c), leaves(c)
        COMPILED[name](eager, c.offs).square().sum().backward()
        call = torch.compile(COMPILED[name], backend="aot_eager", fullgraph=True, dynamic=dynamic)
        call(compiled, c.offs).square().sum().backward()
        for grad, value in grads(eager).items():
            torch.testing.assert_close(grads(compiled)[grad], value)
        assert grads(eager).keys() == grads(compiled).keys()

    def test_frozen_inputs_are_frozen_in_the_graph(self) -> None:
        """The backward graph has no weight gradient where weights are frozen."""
        c = small()
        graphs: list[str] = []

        def note(module: Any, _: Any) -> Any:
            graphs.append(module.print_readable(print_output=False))
            return torch._functorch.aot_autograd.make_boxed_func(module.forward)

        from torch._dynamo.backends.common import aot_autograd

        given = leaves(c, ("x",))
        call = torch.compile(layer, backend=aot_autograd(fw_compiler=note, bw_compiler=note), fullgraph=True)
        call(given, c.offs).sum().backward()
        forward, backward = graphs
        assert "grouped_glu_preact" in forward and "grouped_dglu" in backward and "grouped_wgrad" not in backward


@pytest.mark.parametrize("name", ["x", "w2"])
def test_the_registered_operator_is_differentiable(name: str) -> None:
    c = small()
    given, want = leaves(c, (name,)), leaves(c, (name,))
    lists = {"x": given["x"], "w1": [given["w1"]], "w2": [given["w2"]], "offs": c.offs}
    torch.ops.glulam.grouped_mlp(*torch_arguments("grouped_mlp", **lists)).sum().backward()
    glulam.grouped_mlp(want["x"], want["w1"], want["w2"], offs=c.offs).sum().backward()
    assert_same(grads(given), grads(want))


def test_gradients_are_finite_where_numbers_are_large() -> None:
    """Saturated sigmoids and exponentials that overflow do not turn into NaN."""
    for form in activation_forms():
        h = torch.tensor([[-300.0, -20.0, 20.0, 300.0] * 16], requires_grad=True)
        w2 = torch.eye(64 if form[0] not in GATED else 32)[None]
        got = glulam.grouped_dglu(
            torch.ones(1, w2.shape[2]), w2, h.detach(), splits=[1], activation=form[0], glu_layout=form[1]
        )
        assert math.isfinite(float(got.dpreact.sum())), form
