"""Operators in traces: torch.compile, fake tensors, torch.library's own checks."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from support.checks import torch_arguments
from support.criterion import same_bits
from support.inputs import Case, gradient, make_case, preactivation
from torch._subclasses.fake_tensor import FakeTensorMode

import glulam
from glulam.nn import GroupedLinear, GroupedMLP

SIZES = [5, 0, 17, 1, 8]
HIDDEN, INTER = 24, 32


@pytest.fixture(scope="module")
def c() -> Case:
    return make_case(SIZES, HIDDEN, INTER, tail=3)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


CALLS: dict[str, Callable[[Case], Any]] = {
    "mm": lambda c: glulam.grouped_mm(c.x, c.w1, offs=c.offs),
    "mm, transposed, bias": lambda c: glulam.grouped_mm(
        c.x, c.w2, offs=c.offs, transpose_w=True, bias=c.b1[:, :INTER].contiguous(), bias_scale=c.row_scale
    ),
    "glu": lambda c: glulam.grouped_glu(c.x, c.w1, offs=c.offs, activation="clamped_swiglu", limit=1.0),
    "glu, preact, lists": lambda c: glulam.grouped_glu(
        c.x, list(c.w1), splits=c.splits(), bias=list(c.b1), return_preact=True, glu_layout="interleaved32"
    ),
    "mlp": lambda c: glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs),
    "glu, transposed": lambda c: glulam.grouped_glu(
        c.x, c.w1.mT.contiguous(), offs=c.offs, bias=c.b1, transpose_w=True, return_preact=True
    ),
    "mlp, transposed": lambda c: glulam.grouped_mlp(
        c.x, c.w1.mT.contiguous(), list(c.w2.mT.contiguous()), offs=c.offs, b2=c.b2, transpose_w=True
    ),
    "mlp, everything": lambda c: glulam.grouped_mlp(
        c.x, c.w1, list(c.w2), splits=SIZES, glu_layout="interleaved", **c.addends
    ),
}


def preact(c: Case) -> torch.Tensor:
    return glulam.grouped_mm(c.x, c.w1, offs=c.offs)


CALLS_OF_GRADIENTS: dict[str, Callable[[Case], Any]] = {
    "dglu": lambda c: glulam.grouped_dglu(c.x, c.w2, preact(c), offs=c.offs),
    "dglu, lists": lambda c: glulam.grouped_dglu(
        c.x, list(c.w2), preact(c), splits=c.splits(), row_scale=c.row_scale, activation="geglu"
    ),
    "dglu, transposed": lambda c: glulam.grouped_dglu(
        c.x, c.w2.mT.contiguous(), preact(c), offs=c.offs, row_scale=c.row_scale, transpose_w=True
    ),
    "wgrad": lambda c: glulam.grouped_wgrad(c.x, c.x, splits=SIZES),
    "dglu, rows by index": lambda c: glulam.grouped_dglu(c.x, c.w2, preact(c), offs=c.offs, rows=indices(c)),
    "wgrad, rows by index": lambda c: glulam.grouped_wgrad(c.x, c.x, offs=c.offs, x_rows=indices(c)),
    "wgrad, wide": lambda c: glulam.grouped_wgrad(c.x, c.x, offs=c.offs, out_dtype=torch.float32),
    "bias_grad": lambda c: glulam.grouped_bias_grad(c.x, offs=c.offs, row_scale=c.row_scale),
}
CALLS.update(CALLS_OF_GRADIENTS)


def results(value: Any) -> list[torch.Tensor]:
    return [v for v in value if v is not None] if isinstance(value, tuple) else [value]


def valid_rows(c: Case, value: Any) -> list[torch.Tensor]:
    return [result[: c.rows] if result.shape[0] == c.x.shape[0] else result for result in results(value)]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager(c: Case, name: str, dynamic: bool) -> None:
    compiled = torch.compile(CALLS[name], backend="aot_eager", fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for got, want in zip(valid_rows(c, compiled(c)), valid_rows(c, CALLS[name](c)), strict=True):
            assert same_bits(got, want)


@pytest.mark.parametrize("preact", [False, True])
@torch.no_grad()
def test_compiled_with_out(c: Case, preact: bool) -> None:
    """The given buffer is written, its tail is not, and work before and after it stays in order."""

    def call(out: torch.Tensor) -> Any:
        result = glulam.grouped_glu(c.x * 2, c.w1, offs=c.offs, return_preact=preact, out=out.mul_(1))
        return result, out.sum(dim=1)

    def fresh() -> torch.Tensor:
        return torch.full((c.x.shape[0], INTER), 3.0, dtype=c.x.dtype)

    eager_out, compiled_out = fresh(), fresh()
    (eager, eager_sums), (compiled, compiled_sums) = (
        call(eager_out),
        torch.compile(call, backend="aot_eager", fullgraph=True)(compiled_out),
    )
    assert same_bits(eager_out, compiled_out) and same_bits(eager_sums, compiled_sums)
    assert bool((compiled_out[c.rows :] == 3).all()) and bool((compiled_out[: c.rows] != 3).any())
    for got, want in zip(valid_rows(c, compiled), valid_rows(c, eager), strict=True):
        assert same_bits(got, want)


@pytest.mark.parametrize("listed", [False, True])
@torch.no_grad()
def test_compiled_accumulation(c: Case, listed: bool) -> None:
    """Buffers of weight gradients are written in a graph as they are outside of one."""

    def call(out: Any) -> Any:
        mask = torch.tensor([True, False, True, True, False])
        glulam.grouped_wgrad(c.x, c.x * 2, offs=c.offs, out=out)
        glulam.grouped_wgrad(c.x, c.x, offs=c.offs, out=out, accumulate=True)
        glulam.grouped_wgrad(c.x, c.x, offs=c.offs, out=out, mask=mask)
        return [one * 2 for one in out]

    def fresh() -> Any:
        packed = torch.ones(len(SIZES), HIDDEN, HIDDEN)
        return [one.clone() for one in packed] if listed else packed

    eager_out, compiled_out = fresh(), fresh()
    eager, compiled = call(eager_out), torch.compile(call, backend="aot_eager", fullgraph=True)(compiled_out)
    for one, other in zip((*eager, *eager_out), (*compiled, *compiled_out), strict=True):
        assert same_bits(one, other)


@torch.no_grad()
def test_a_new_number_of_rows_compiles_once_more_at_most(c: Case) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: glulam.grouped_mm(x, c.w1, offs=c.offs), backend=counter, fullgraph=True)
    for rows in (40, 41, 57, 64, 99):
        x = torch.zeros(rows, HIDDEN, dtype=c.x.dtype)
        assert compiled(x).shape == (rows, 2 * INTER)
    assert counter.frame_count <= 2


def indices(c: Case) -> torch.Tensor:
    return torch.arange(c.x.shape[0], dtype=torch.int32, device=c.x.device).flip(0)


def arguments_of(name: str, c: Case) -> dict[str, Any]:
    """Return arguments of torch.ops.glulam.`name`, without `out`."""
    dy, preact = gradient(c), preactivation(c)
    return {
        "grouped_mm": {
            "x": c.x, "w": [c.w1], "offs": c.offs, "bias": [c.b1], "bias_scale": c.row_scale, "rows": indices(c)
        },
        "grouped_glu": {
            "x": c.x, "w1": list(c.w1), "splits": c.splits(), "row_scale": c.row_scale, "rows": indices(c)
        },
        "grouped_glu_preact": {
            "x": c.x, "w1": [c.w1.mT.contiguous()], "offs": c.offs, "bias": list(c.b1), "transpose_w": True
        },
        "grouped_dglu": {"dy": dy, "w2": [c.w2], "preact": preact, "offs": c.offs, "row_scale": c.row_scale},
        "grouped_dglu_scale": {
            "dy": dy, "w2": list(c.w2.mT.contiguous()), "preact": preact, "splits": c.splits(),
            "row_scale": c.row_scale, "rows": indices(c), "transpose_w": True,
        },
        "grouped_wgrad": {"dy": dy, "x": c.x, "offs": c.offs, "dy_rows": indices(c), "out_dtype": torch.float32},
        "grouped_mlp": {
            "x": c.x, "w1": [c.w1], "w2": list(c.w2), "offs": c.offs, "row_scale": c.row_scale, "b1": [c.b1],
            "rows": indices(c),
        },
    }[name]  # fmt: skip


OPS = ("grouped_mm", "grouped_glu", "grouped_glu_preact", "grouped_mlp")


@pytest.mark.parametrize(
    ("name", "has_out"),
    [*product(OPS, (False, True)), ("grouped_dglu", False), ("grouped_dglu_scale", False), ("grouped_wgrad", False)],
)
def test_opcheck(name: str, has_out: bool) -> None:
    """Without a tail: opcheck compares whole results, and those are uninitialised there."""
    c = make_case(SIZES, HIDDEN, INTER)
    arguments = arguments_of(name, c)
    if has_out:
        width = {"grouped_mm": 2 * INTER, "grouped_mlp": HIDDEN}.get(name, INTER)
        arguments["out"] = torch.zeros(c.x.shape[0], width, dtype=c.x.dtype)
        name += "_out"
    torch.library.opcheck(getattr(torch.ops.glulam, name).default, torch_arguments(name, **arguments))


def converted(c: Case, convert: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    return Case(*(convert(t) for t in (c.x, c.w1, c.w2, c.b1, c.b2, c.row_scale)), sizes=c.sizes)


def assert_same_metadata(c: Case, name: str, traced: Any) -> None:
    for got, want in zip(results(traced), results(CALLS[name](c)), strict=True):
        assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_traced_results_have_the_real_shapes(c: Case, name: str) -> None:
    with FakeTensorMode() as mode:
        fake = CALLS[name](converted(c, mode.from_tensor))
    assert_same_metadata(c, name, fake)
    assert_same_metadata(c, name, CALLS[name](converted(c, lambda t: t.to("meta"))))


def test_a_trace_refuses_what_a_call_refuses(c: Case) -> None:
    with pytest.raises(Exception, match=r"w2 has shape \[5, 24, 32\]"), torch.no_grad():
        torch.compile(
            lambda: glulam.grouped_mlp(c.x, c.w1[:, :32].contiguous(), c.w2, offs=c.offs),
            backend="aot_eager",
            fullgraph=True,
        )()


def test_gradients_are_refused_in_a_trace(c: Case) -> None:
    x = c.x.detach().requires_grad_()
    compiled = torch.compile(lambda x: glulam.grouped_wgrad(x, c.x, offs=c.offs), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="has no gradient"):
        compiled(x)
    with pytest.raises(glulam.GradientNotSupported):
        torch.ops.glulam.grouped_wgrad(x, c.x, c.offs, None, None, None, None, "bf16")


def test_other_tensor_classes_go_through_the_dispatcher(c: Case) -> None:
    class Named(torch.Tensor):
        pass

    x = c.x.as_subclass(Named)
    with torch.no_grad():
        got = glulam.grouped_mm(x, c.w1, offs=c.offs)
        assert same_bits(got.as_subclass(torch.Tensor)[: c.rows], glulam.grouped_mm(c.x, c.w1, offs=c.offs)[: c.rows])
        parameter = torch.nn.Parameter(c.x)
        assert same_bits(
            glulam.grouped_mm(parameter, c.w1, offs=c.offs)[: c.rows], got.as_subclass(torch.Tensor)[: c.rows]
        )
    assert not math.isnan(float(got[: c.rows].sum()))


class Grouped(torch.nn.Module):
    """Wrapper of a grouped module that takes `offs` as a positional input."""

    def __init__(self, inner: torch.nn.Module, **named: Any) -> None:
        super().__init__()
        self.inner, self.named = inner, named

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x, offs=offs, **self.named)
        return result


MODULES: dict[str, Callable[..., torch.nn.Module]] = {
    "mlp": lambda **options: GroupedMLP(3, INTER, INTER, bias=True, **options),
    "mlp, recompute": lambda **options: GroupedMLP(3, INTER, INTER, activation="silu", recompute=True, **options),
    "mlp, mxfp8": lambda **options: GroupedMLP(3, INTER, INTER, recipe="mxfp8", **options),
    "linear": lambda **options: GroupedLinear(3, INTER, HIDDEN, bias=True, **options),
}


def rows_of(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, INTER, generator=torch.Generator().manual_seed(count))
    return x, torch.tensor([count // 3, count // 2, count], dtype=torch.int32)


def assert_trains_alike(program: torch.nn.Module, module: torch.nn.Module, rows: int) -> None:
    grads = []
    for one in (program, module):
        one.zero_grad()
        y = one(*rows_of(rows))
        y.square().sum().backward()
        grads.append((y, {name: parameter.grad.clone() for name, parameter in one.named_parameters()}))
    (got, got_grads), (want, want_grads) = grads
    assert same_bits(got, want) and got_grads.keys() == want_grads.keys()
    assert all(same_bits(got_grads[name], value) for name, value in want_grads.items())


class TestExport:
    """Tests of torch.export on modules whose parameters require gradients."""

    @pytest.mark.parametrize("kind", MODULES)
    @pytest.mark.parametrize("packed", [True, False])
    @pytest.mark.parametrize("strict", [True, False])
    def test_any_number_of_rows(self, kind: str, packed: bool, strict: bool) -> None:
        module = Grouped(MODULES[kind](packed=packed))
        shapes = ({0: torch.export.Dim("T", min=0)}, None)
        exported = torch.export.export(module, rows_of(12), dynamic_shapes=shapes, strict=strict)
        assert sum(node.op == "call_function" for node in exported.graph.nodes) == 1, "the operator"
        for rows in (20, 1, 0):
            assert_trains_alike(exported.module(), module, rows)

    @pytest.mark.parametrize("kind", MODULES)
    def test_one_number_of_rows(self, kind: str) -> None:
        module = Grouped(MODULES[kind]())
        file = io.BytesIO()
        torch.export.save(torch.export.export(module, rows_of(12)), file)
        file.seek(0)
        assert_trains_alike(torch.export.load(file).module(), module, 12)

    @pytest.mark.parametrize("dim", [torch.export.Dim("T"), torch.export.Dim.AUTO, torch.export.Dim.DYNAMIC])
    def test_the_operator_itself(self, dim: Any) -> None:
        w = torch.nn.Parameter(torch.randn(3, HIDDEN, INTER))

        class Mm(torch.nn.Module):
            def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
                return glulam.grouped_mm(x, w, offs=offs)

        exported = torch.export.export(Mm(), rows_of(12), dynamic_shapes=({0: dim}, None))
        assert same_bits(exported.module()(*rows_of(30)), Mm()(*rows_of(30)))

    def test_rows_are_still_counted_when_it_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = Grouped(MODULES["linear"]())
        exported = torch.export.export(module, rows_of(12), dynamic_shapes=({0: torch.export.Dim("T")}, None))
        monkeypatch.setattr(glulam.calls.checks, "MAX_ROWS", 64)
        with pytest.raises(ValueError, match="x has 64 rows; at most"):
            exported.module()(*rows_of(64))

    @pytest.mark.parametrize("strict", [True, False])
    @pytest.mark.parametrize("kind", ["mlp", "linear"])
    def test_what_writes_outside_of_a_graph_is_refused(self, kind: str, strict: bool) -> None:
        x, offs = rows_of(12)
        delayed, module = (MODULES[kind](delay_wgrad=delay) for delay in (True, False))
        width = module(x, offs=offs).shape[1]
        for refused in (Grouped(delayed), Grouped(module, out=torch.zeros(12, width))):
            with pytest.raises(Exception, match="torch.export traces no main_grad.* export under torch.no_grad()"):
                torch.export.export(refused, (x, offs), strict=strict)
        with torch.no_grad():
            exported = torch.export.export(Grouped(delayed), (x, offs), strict=strict)
            assert same_bits(exported.module()(x, offs), delayed(x, offs=offs))
        with pytest.raises(RuntimeError, match="no weight gradient is pending"):
            delayed.backward_dw()  # type: ignore[operator]

    def test_a_buffer_beside_a_gradient_is_refused(self) -> None:
        w = torch.nn.Parameter(torch.randn(3, HIDDEN, INTER))

        class Mm(torch.nn.Module):
            def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
                return glulam.grouped_mm(x, w, offs=offs, out=torch.zeros(12, HIDDEN))

        with pytest.raises(glulam.GradientNotSupported, match="leave out out"):
            torch.export.export(Mm(), rows_of(12))


def test_fake_tensors_that_require_gradients(c: Case) -> None:
    """Training under FakeTensorMode, as tools that plan memory do it."""
    with FakeTensorMode() as mode:
        fake = converted(c, lambda t: mode.from_tensor(t).requires_grad_())
        offs = mode.from_tensor(c.offs)
        y = glulam.grouped_mlp(fake.x, fake.w1, fake.w2, offs=offs, b1=fake.b1, b2=fake.b2, row_scale=fake.row_scale)
        y.sum().backward()
    for name in ("x", "w1", "w2", "b1", "b2", "row_scale"):
        assert getattr(fake, name).grad.shape == getattr(c, name).shape
