"""FC1's weights as two tensors (GateUp): on the CPU reference, and in the kernels' arguments."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.checks import check_glu, check_mlp, check_mm, torch_arguments
from support.criterion import same_bits
from support.fake_gpu import FakeGpu
from support.gradients import INPUTS, check_gradients, leaves
from support.inputs import Case, apart, gradient, make_case, poisoned
from torch import Tensor

import glulam
from cute_kernels.specs import GATED, GroupedMmSpec
from glulam import GateUp

pytest_plugins = ["support.fixtures"]

SIZES = [5, 0, 17, 1, 0, 40, 8]
HIDDEN, INTER = 40, 72
BF16, F64 = torch.bfloat16, torch.float64


def case(dtype: torch.dtype = BF16, inter: int = INTER) -> Case:
    return make_case(SIZES, HIDDEN, inter, tail=6, dtype=dtype)


def trained(c: Case, wanted: tuple[str, ...] = INPUTS) -> dict[str, Any]:
    """Return fresh inputs of a grouped_mlp, with w1 as two tensors."""
    given: dict[str, Any] = leaves(c, wanted)
    halves = given["w1"].detach().chunk(2, dim=1)
    given["w1"] = GateUp(*(half.contiguous().requires_grad_("w1" in wanted) for half in halves))
    return given


def found(given: dict[str, Any]) -> dict[str, Tensor]:
    """Return gradients by name; the gradients of w1's halves are concatenated."""
    w1 = [half.grad for half in given["w1"]]
    others = {name: value.grad for name, value in given.items() if name != "w1" and value.grad is not None}
    return others if None in w1 else {**others, "w1": torch.cat(w1, dim=1)}


@pytest.mark.parametrize("upside_down", [False, True])
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("activation", GATED)
def test_every_activation(activation: str, extras: bool, upside_down: bool, anywhere: Any) -> None:
    c, form = case(), (activation, "concat")
    w1 = GateUp(*apart(c.w1, upside_down))
    assert (w1.up.data_ptr() < w1.gate.data_ptr()) is upside_down
    options = {"b1": c.b1, "b2": c.b2, "row_scale": c.row_scale} if extras else {}
    check_mlp(c, glulam.grouped_mlp(c.x, w1, c.w2, offs=c.offs, activation=activation, **options), form, **options)
    options = {"bias": c.b1, "row_scale": c.row_scale} if extras else {}
    both = glulam.grouped_glu(c.x, w1, offs=c.offs, return_preact=True, activation=activation, **options)
    check_glu(c, *both, form, **options)
    check_glu(
        c, glulam.grouped_glu(c.x, w1, offs=c.offs, activation=activation, **options), None, form, **options
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, F64])
def test_other_dtypes_of_the_reference(dtype: torch.dtype) -> None:
    c = case(dtype)
    check_mlp(c, glulam.grouped_mlp(c.x, GateUp(*apart(c.w1)), c.w2, offs=c.offs, b1=c.b1), b1=c.b1)


def test_kernels_are_given_both_addresses_and_no_copy(fake_gpu: FakeGpu) -> None:
    c = case()
    w1, whole = GateUp(*apart(c.w1)), c.w1
    for _ in range(3):
        y = glulam.grouped_mlp(c.x, w1, c.w2, offs=c.offs)
        launch = fake_gpu.launches[-1]
        assert launch["w1"].data_ptr() == w1.gate.data_ptr() and launch["w1_up"] == w1.up.data_ptr()
    wanted = glulam.grouped_mlp(c.x, whole, c.w2, offs=c.offs)
    assert same_bits(y[: c.rows], wanted[: c.rows])
    assert fake_gpu.launches[-1]["w1_up"] == 0 and len(set(fake_gpu.specs)) == 1
    moved = GateUp(w1.gate.clone(), w1.up)  # other addresses, the same plan
    glulam.grouped_mlp(c.x, moved, c.w2, offs=c.offs)
    assert fake_gpu.launches[-1]["w1"].data_ptr() == moved.gate.data_ptr()


def test_outputs_rows_by_index_and_other_rows(anywhere: Any) -> None:
    c = case()
    w1 = GateUp(*apart(c.w1))
    wanted = glulam.grouped_mlp(c.x, w1, c.w2, offs=c.offs)
    for _ in range(2):
        out = poisoned(c.x.shape[0], HIDDEN, c.x, 8)
        assert glulam.grouped_mlp(c.x, w1, c.w2, offs=c.offs, out=out) is out
        assert same_bits(out[: c.rows].contiguous(), wanted[: c.rows]) and out[c.rows :].isnan().all()
    order = torch.arange(c.x.shape[0], dtype=torch.int32).flip(0)
    by_index = glulam.grouped_mlp(c.x.flip(0).contiguous(), w1, c.w2, rows=order, offs=c.offs)
    assert same_bits(by_index[: c.rows], wanted[: c.rows])
    fewer = glulam.grouped_mlp(c.x[: c.rows], w1, c.w2, offs=c.offs)
    assert same_bits(fewer, wanted[: c.rows])


def test_an_output_over_either_half_is_refused(anywhere: Any) -> None:
    c = case()
    gate, up = apart(c.w1)
    for name, half in (("gate", gate), ("up", up)):
        memory = torch.zeros(half.numel() + c.x.numel(), dtype=BF16)
        read = memory[: half.numel()].view(half.shape).copy_(half)
        out = memory[half.numel() - 8 :][: c.x.numel()].view(c.x.shape)
        w1 = GateUp(gate, up)._replace(**{name: read})
        for _ in range(2):
            glulam.grouped_mlp(c.x, w1, c.w2, offs=c.offs)
            with pytest.raises(ValueError, match=rf"out overlaps w1\.{name} in memory"):
                glulam.grouped_mlp(c.x, w1, c.w2, offs=c.offs, out=out)


def test_memory_that_is_gone(anywhere: Any) -> None:
    c = case()
    w1 = GateUp(*(half.clone() for half in apart(c.w1)))
    for _ in range(2):
        glulam.grouped_mlp(c.x, w1, c.w2, offs=c.offs)
    w1.up.untyped_storage().resize_(0)
    for out in (None, torch.empty_like(c.x)):
        with pytest.raises(ValueError, match=r"w1\.up needs .* it was freed"):
            glulam.grouped_mlp(c.x, w1, c.w2, offs=c.offs, out=out)


def test_explain() -> None:
    shape = (7, INTER, HIDDEN)
    told = glulam.explain("grouped_mlp", (96, HIDDEN), GateUp(shape, shape), (7, HIDDEN, INTER))  # type: ignore[arg-type]
    assert told.spec == glulam.explain("grouped_mlp", (96, HIDDEN), (7, 2 * INTER, HIDDEN), (7, HIDDEN, INTER)).spec


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


HALF = (7, INTER, HIDDEN)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unequal": (
        {"w1": GateUp(zeros(*HALF), zeros(7, 64, HIDDEN))}, ValueError,
        r"w1\.up has shape \[7, 64, 40\]; it must be \[7, 72, 40\], since that is the shape of w1\.gate",
    ),
    "x of other columns": (
        {"x": zeros(77, 48)}, ValueError, r"w1\.gate has shape \[7, 72, 40\]; it must be \[7, 72, 48\]"
    ),
    "two dimensions": (
        {"w1": GateUp(zeros(INTER, HIDDEN), zeros(*HALF))}, ValueError, r"w1\.gate has shape .*give \[E, I, H\]"
    ),
    "lists": ({"w1": GateUp([zeros(INTER, HIDDEN)] * 7, zeros(*HALF))}, TypeError, r"w1\.gate is a list"),  # type: ignore[arg-type]
    "dtype": ({"w1": GateUp(zeros(*HALF), zeros(*HALF, dtype=torch.float16))}, TypeError, r"w1\.up is torch\.float16"),
    "views": (
        {"w1": GateUp(zeros(*HALF), zeros(7, 2 * INTER, HIDDEN)[:, :INTER])}, ValueError, r"w1\.up is not contiguous"
    ),
    "no gate": ({"activation": "silu"}, ValueError, "w1 is a GateUp, but activation 'silu' has no gate"),
    "layout": ({"glu_layout": "interleaved"}, ValueError, "w1 is a GateUp, .*is 'interleaved'; leave it out"),
    "transposed": ({"transpose_w": True}, ValueError, "w1 is a GateUp, which is not transposed; leave out"),
    "w2": ({"w2": GateUp(zeros(*HALF), zeros(*HALF))}, ValueError, r"w2\[0\] has shape"),
    "w2 does not fit": ({"w2": zeros(7, HIDDEN, 64)}, ValueError, r"w2 has shape .*since w1 gives E = 7, I = 72"),
    "bias": ({"b1": zeros(7, INTER)}, ValueError, r"b1 has shape \[7, 72\]; it must be \[7, 144\]"),
    "recipe": ({"recipe": "mxfp8"}, ValueError, r"w1 is a GateUp, and recipe 'mxfp8' .*torch\.cat\(w1, dim=1\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, fake_gpu: FakeGpu) -> None:
    changes, error, message = BAD[name]
    c = case()
    given: dict[str, Any] = {"x": c.x, "w1": GateUp(*apart(c.w1)), "w2": c.w2, "offs": c.offs}
    for _ in range(2):
        with pytest.raises(error, match=f"grouped_mlp: {message}"):
            glulam.grouped_mlp(**{**given, **changes})
        assert not fake_gpu.launches
        glulam.grouped_mlp(**given)
        fake_gpu.launches.clear()


class TestMm:
    """Tests of grouped_mm whose weight is in two tensors."""

    def test_both_halves_are_contracted(self, anywhere: Any) -> None:
        c = case()
        h = torch.randn(c.x.shape[0], 2 * INTER, dtype=torch.float32).to(BF16)
        for upside_down in (False, True):
            w = GateUp(*apart(c.w1, upside_down))
            for _ in range(2):
                y = glulam.grouped_mm(h, w, offs=c.offs, transpose_w=True)
            check_mm(make_like(c, h), c.w1, y, transpose_w=True)
            out = poisoned(len(h), HIDDEN, h, 8)
            assert glulam.grouped_mm(h, w, offs=c.offs, transpose_w=True, out=out) is out
            assert same_bits(out[: c.rows].contiguous(), y[: c.rows]) and out[c.rows :].isnan().all()
        if anywhere is not None:
            assert all(isinstance(spec, GroupedMmSpec) and spec.in_halves for spec in anywhere.specs)

    def test_what_it_is_not_there_for(self, anywhere: Any) -> None:
        c = case()
        w, h = GateUp(*apart(c.w1)), torch.zeros(c.x.shape[0], 2 * INTER, dtype=BF16)
        given: dict[str, Any] = {"x": h, "w": w, "offs": c.offs, "transpose_w": True}
        indices = torch.zeros(len(h), dtype=torch.int32)
        for change, message in (
            ({"x": c.x, "transpose_w": False}, "w is a GateUp, of which transpose_w=True alone is there"),
            ({"bias": c.b2}, "bias is given beside a GateUp"),
            ({"rows": indices}, "rows is given beside a GateUp"),
            ({"x": h[:, :INTER].contiguous()}, r"w has shape \[7, 144, 40\]; it must be \[7, 72, 40\]"),
        ):
            with pytest.raises(ValueError, match=f"grouped_mm: {message}"):
                glulam.grouped_mm(**{**given, **change})
        with pytest.raises(glulam.GradientNotSupported, match="a GateUp has none here"):
            glulam.grouped_mm(**{**given, "x": h.requires_grad_()})


def make_like(c: Case, x: Tensor) -> Case:
    return Case(**{**vars(c), "x": x})


WORK = {
    "x": ["glu, mm", "dglu", "mm"],
    "w1": ["glu, mm", "dglu", "wgrad", "wgrad"],
    "w2": ["glu", "mm", "wgrad"],
    "row_scale": ["glu, mm", "dglu", "mm"],  # the last: the second bias' share
    "b1": ["glu, mm", "dglu", "wgrad"],
    "b2": ["glu", "mm", "wgrad"],
}


class TestGradients:
    @pytest.mark.parametrize("recompute", [False, True])
    @pytest.mark.parametrize("activation", GATED)
    def test_gradcheck(self, activation: str, recompute: bool) -> None:
        c = make_case([3, 0, 5, 1], 3, 4, dtype=F64)
        form = {"activation": activation, "limit": 0.5, "alpha": 1.3, "offset": 0.4, "recompute": recompute}
        given = trained(c)

        def call(*_: Tensor) -> Tensor:
            return glulam.grouped_mlp(**given, offs=c.offs, **form)

        tensors = [*given["w1"], *(value for name, value in given.items() if name != "w1")]
        assert torch.autograd.gradcheck(call, tuple(tensors))

    @pytest.mark.parametrize("recompute", [False, True])
    @pytest.mark.parametrize("activation", GATED)
    def test_every_activation(self, activation: str, recompute: bool, anywhere: Any) -> None:
        """Tails of x and dy are NaN and reach no gradient."""
        c = case()
        given, dy = trained(c), gradient(c)
        for _ in range(2):
            for value in itertools.chain(given["w1"], (v for n, v in given.items() if n != "w1")):
                value.grad = None
            glulam.grouped_mlp(**given, offs=c.offs, activation=activation, recompute=recompute).backward(dy)
        assert given["w1"].gate.grad.shape == given["w1"].gate.shape
        check_gradients(c, dy, found(given), (activation, "concat"))

    @pytest.mark.parametrize("name", INPUTS)
    def test_only_what_is_asked_for(self, name: str, fake_gpu: FakeGpu) -> None:
        c = case()
        given, every, dy = trained(c, (name,)), trained(c), gradient(c)
        glulam.grouped_mlp(**given, offs=c.offs).backward(dy)
        assert fake_gpu.work == WORK[name]
        glulam.grouped_mlp(**every, offs=c.offs).backward(dy)
        assert found(given).keys() == {name}
        if name != "w2":  # which alone gets the forward's activation
            assert same_bits(found(given)[name], found(every)[name])

    @pytest.mark.parametrize("part", ["gate", "up"])
    def test_a_frozen_half(self, part: str, anywhere: Any) -> None:
        c = case()
        given, every, dy = trained(c, ("x",)), trained(c), gradient(c)
        getattr(given["w1"], part).requires_grad_()
        for one in (given, every):
            glulam.grouped_mlp(**one, offs=c.offs).backward(dy)
        for half, other in zip(given["w1"], every["w1"], strict=True):
            assert half.grad is None if half is not getattr(given["w1"], part) else same_bits(half.grad, other.grad)
        assert same_bits(given["x"].grad, every["x"].grad)

    def test_no_rows(self, anywhere: Any) -> None:
        c = make_case([0, 0], HIDDEN, INTER)
        given = trained(c)
        glulam.grouped_mlp(**given, offs=c.offs).sum().backward()
        assert found(given).keys() == given.keys() and not any(bool(value.any()) for value in found(given).values())

    @pytest.mark.parametrize("recompute", [False, True])
    def test_moe(self, recompute: bool, anywhere: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        c = make_case([4, 4, 4], HIDDEN, INTER)
        ids = torch.randint(-1, 3, (20, 2), generator=torch.Generator().manual_seed(4))
        tokens = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(5)).to(BF16)

        def gradients(w1: Any) -> list[Tensor]:
            x, w2 = (t.clone().requires_grad_() for t in (tokens, c.w2))
            weights = torch.ones(20, 2).requires_grad_()
            made = glulam.Routing.from_topk(ids, weights, 3)
            out = glulam.moe(x, made, w1, w2, b1=c.b1, residual=x, recompute=recompute)
            parts = list(w1) if isinstance(w1, GateUp) else [w1]
            found = torch.autograd.grad(out.float().square().sum(), [x, w2, weights, *parts])
            return [*found[:3], torch.cat(found[3:], dim=1)]

        made = gradients(GateUp(*(half.requires_grad_() for half in apart(c.w1))))
        for one, other in zip(made, gradients(c.w1.clone().requires_grad_()), strict=True):
            assert other.abs().max() > 1e-2
            assert (one - other).double().norm() < 0.02 * other.double().norm()


class TestTraces:
    @pytest.fixture(autouse=True)
    def fresh_compiler(self) -> None:
        torch.compiler.reset()

    @pytest.mark.parametrize("recompute", [False, True])
    def test_fullgraph(self, recompute: bool) -> None:
        c = make_case([3, 0, 5, 1], 5, 4, dtype=F64)
        eager, compiled = trained(c), trained(c)

        def layer(given: dict[str, Any]) -> Tensor:
            w1 = GateUp(given["gate"], given["up"])
            return glulam.grouped_mlp(given["x"], w1, given["w2"], offs=c.offs, b1=given["b1"], recompute=recompute)

        for given, call in (
            (eager, layer), (compiled, torch.compile(layer, backend="aot_eager", fullgraph=True))
        ):  # fmt: skip
            flat = {"gate": given["w1"].gate, "up": given["w1"].up, **given}
            del flat["w1"]
            call(flat).square().sum().backward()
        one, other = found(compiled), found(eager)
        assert one.keys() == other.keys() >= {"x", "w1", "w2", "b1"}
        for name, value in other.items():
            torch.testing.assert_close(one[name], value)

    @torch.no_grad()
    def test_opcheck(self) -> None:
        c = make_case([5, 0, 17], HIDDEN, INTER)
        halves = list(apart(c.w1))
        mlp = torch_arguments("grouped_mlp", x=c.x, w1=halves, w2=[c.w2], offs=c.offs)
        torch.library.opcheck(torch.ops.glulam.grouped_mlp.default, mlp)
        h = torch.randn(c.x.shape[0], 2 * INTER).to(BF16)
        mm = torch_arguments("grouped_mm", x=h, w=halves, offs=c.offs, transpose_w=True)
        torch.library.opcheck(torch.ops.glulam.grouped_mm.default, mm)
