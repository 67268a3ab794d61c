"""Generated Python text of operators' functions and launches, compared with `tests/golden`, where it can be read.

After an intended change: GLULAM_GOLDEN=write python -m pytest tests/test_generated.py, then read the diff.
"""

from __future__ import annotations

import ast
import dataclasses
import gc
import linecache
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.criterion import same_bits
from support.fake_gpu import FakeGpu
from support.inputs import Case, apart, gradient, make_case, preactivation, transposed
from support.routes import some_logits

import glulam
from glulam import library
from glulam.backward import planned
from glulam.backward.planned import PlannedStep
from glulam.calls import launch
from glulam.calls.call import Call
from glulam.calls.launch import Plan
from glulam.formats.mxfp8.quantize import QuantizeMxfp8Call
from glulam.host import plans, tickets, workspace
from glulam.host.plans import forget_plans
from glulam.layer.moe import MoeCall
from glulam.ops.grouped_mlp import GroupedMlpCall
from glulam.ops.quantized_mlp import QuantizedMlpCall

pytest_plugins = ["support.fixtures"]

GOLDEN = Path(__file__).parent / "golden"
SIZES, TOKENS, HIDDEN, INTER = [5, 0, 17, 10], 16, 64, 128


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GLULAM_GOLDEN") == "write":
        path.write_text(f"{text}\n")
    assert text == path.read_text().rstrip("\n")


def layer(tail: int = 0) -> Case:
    return make_case(SIZES, HIDDEN, INTER, tail=tail)


def routed() -> glulam.Routing:
    return glulam.route(some_logits(TOKENS, len(SIZES)), 2)


def mlp(**changes: Any) -> Any:
    c = layer()
    return glulam.grouped_mlp(**{"x": c.x, "w1": c.w1, "w2": c.w2, "offs": c.offs, **changes})


def in_lists(**changes: Any) -> Any:
    c = layer()
    lists = {"w1": list(c.w1), "w2": list(c.w2), "b1": list(c.b1), "b2": list(c.b2)}
    return mlp(**lists, out=torch.empty_like(c.x), **changes)


def moe(**changes: Any) -> Any:
    c = layer()
    return glulam.moe(c.x[:TOKENS].contiguous(), routed(), c.w1, c.w2, **changes)


def quantize() -> Any:
    x = layer().x
    return glulam.quantize_mxfp8(x, out=glulam.quantize_mxfp8(x))


def step(kind: Callable[..., Any] = mlp, **changes: Any) -> None:
    c = layer()
    leaves = [c.w1.requires_grad_(), c.w2.requires_grad_()]
    x = (c.x[:TOKENS].clone() if kind is moe else c.x).requires_grad_()
    if kind is moe:
        y = glulam.moe(x, routed(), *leaves, **changes)
    else:
        y = glulam.grouped_mlp(x, *leaves, offs=c.offs, row_scale=c.row_scale.requires_grad_(), **changes)
    y.backward(torch.ones_like(y))
    assert all(leaf.grad is not None for leaf in (x, *leaves))


def dglu(**changes: Any) -> Any:
    c = layer()
    given = {"dy": gradient(c), "w2": c.w2, "preact": preactivation(c), "offs": c.offs, "row_scale": c.row_scale}
    return glulam.grouped_dglu(**{**given, **changes})


def mm(**changes: Any) -> Any:
    c = layer()
    return glulam.grouped_mm(**{"x": c.x, "w": c.w1, "offs": c.offs, **changes})


def glu(**changes: Any) -> Any:
    c = layer()
    return glulam.grouped_glu(**{"x": c.x, "w1": c.w1, "offs": c.offs, **changes})


def wgrad(**changes: Any) -> Any:
    c = layer()
    return glulam.grouped_wgrad(**{"dy": gradient(c), "x": c.x, "offs": c.offs, **changes})


def by_index() -> torch.Tensor:
    return torch.arange(sum(SIZES), dtype=torch.int32)


FRONTS: dict[str, Any] = {
    "grouped_mm": glulam.grouped_mm,
    "grouped_mlp": glulam.grouped_mlp,
    "grouped_mlp_quantized": QuantizedMlpCall.operator,
}


@pytest.mark.parametrize("name", FRONTS)
def test_functions_of_operators(name: str) -> None:
    check_golden(f"front-{name}", FRONTS[name].text)


LAUNCHES: dict[str, tuple[type[Call], Callable[[], Any]]] = {
    "grouped_mlp": (GroupedMlpCall, mlp),
    "grouped_mlp-lists-biases-out": (GroupedMlpCall, in_lists),
    "moe": (MoeCall, moe),
    "quantize_mxfp8-out": (QuantizeMxfp8Call, quantize),
    "mlp-mxfp8_exact": (QuantizedMlpCall, lambda: mlp(recipe="mxfp8_exact")),
}


def readable(plan: Plan) -> str:
    """Return the plan's text, then its nonzero function arguments by name as comments."""
    calls = [node for node in ast.walk(ast.parse(plan.text)) if isinstance(node, ast.Call)]
    (values,) = [call.args for call in calls if isinstance(call.func, ast.Name) and call.func.id == "function"]
    named = zip(plan.shape.arguments, map(ast.unparse, values), strict=True)
    return "\n".join([plan.text, *[f"# {argument.name}: {value}" for argument, value in named if value != "0"]])


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches(name: str, fake_gpu: FakeGpu) -> None:
    kind, call = LAUNCHES[name]
    call()
    *_, plan = kind.plans
    check_golden(f"launch-{name}", readable(plan))


def test_launches_of_a_training_step(fake_gpu: FakeGpu) -> None:
    step()
    (plan,) = GroupedMlpCall.plans
    assert isinstance(plan, PlannedStep)
    check_golden(
        "launch-training-step", "\n\n".join(f"# {name}\n{readable(part)}" for name, part in plan.parts.items())
    )


CALLS: dict[str, Callable[[], Any]] = {
    **{name: call for name, (_, call) in LAUNCHES.items()},
    "mm": mm,
    "mm by index, with biases": lambda: mm(rows=by_index(), bias=layer().b1, bias_scale=layer().row_scale),
    "mm transposed": lambda: mm(w=layer().w1.mT.contiguous(), transpose_w=True, out=mm()),
    "mm of halves": lambda: mm(x=mm(), w=glulam.GateUp(*apart(layer().w1)), transpose_w=True),
    "glu": lambda: glu(return_preact=True, bias=list(layer().b1), row_scale=layer().row_scale),
    "glu of halves, into out": lambda: glu(w1=glulam.GateUp(*apart(layer().w1)), out=glu()),
    "mlp by index": lambda: mlp(rows=by_index(), out=layer().x),
    "mlp transposed": lambda: mlp(**dict(zip(("w1", "w2"), transposed(layer()), strict=True)), transpose_w=True),
    "dglu": dglu,
    "dglu without sums": lambda: dglu(row_scale_grad=False, w2=list(layer().w2), rows=by_index()),
    "wgrad": lambda: wgrad(x_rows=by_index()),
    "wgrad into lists": lambda: wgrad(out=list(wgrad()), mask=torch.ones(len(SIZES), dtype=torch.bool)),
    "bias gradient": lambda: glulam.grouped_bias_grad(gradient(layer()), offs=layer().offs),
    "quantize both": lambda: glulam.quantize_mxfp8(layer().x, axis="both", scale_layout="swizzled"),
    "moe with a residual": lambda: moe(residual=layer().x[:TOKENS].contiguous(), b1=layer().b1),
    **{f"mlp {recipe}": lambda r=recipe: in_lists(recipe=r) for recipe in ("mxfp8", "mxfp8_weight_only")},
    **{f"moe {r}": lambda r=r: moe(recipe=r) for r in ("mxfp8", "mxfp8_weight_only", "mxfp8_exact")},
    "mlp of rows in MXFP8": lambda: mlp(x=glulam.quantize_mxfp8(layer().x, block="1x128"), recipe="mxfp8"),
    "step": step,
    "step in MXFP8": lambda: step(recipe="mxfp8"),
    "step that recomputes": lambda: step(recompute=True),
    "step of a layer": lambda: step(moe),
    "step of a layer in MXFP8": lambda: step(moe, recipe="mxfp8"),
    "step of a GEMM": lambda: mm(w=layer().w1.requires_grad_(), bias=layer().b1).sum().backward(),
}  # fmt: skip


def generated_lines(error: BaseException) -> dict[str, str]:
    """Return a traceback's lines in generated text, by file name without its number."""
    frames = traceback.extract_tb(error.__traceback__)
    return {frame.filename.split(" #")[0].strip("<>"): str(frame.line) for frame in frames if frame.filename[0] == "<"}


def test_a_traceback_shows_the_lines_of_a_front_and_of_a_launch(fake_gpu: FakeGpu) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("a function that fails")

    mlp()
    (plan,) = GroupedMlpCall.plans
    plan.constants["function"] = fail
    for _ in range(2):
        with pytest.raises(KeyError) as raised:
            mlp()
        lines = generated_lines(raised.value)
        assert lines.keys() == {"glulam front of grouped_mlp", "glulam launch of grouped_mlp"}
        assert lines["glulam front of grouped_mlp"].startswith("return plan.run(x, w1_, w2_,")
        assert lines["glulam launch of grouped_mlp"] == "function("
        linecache.checkcache()  # drops what no file has


def test_fronts_have_files_of_their_own() -> None:
    fronts = [kind.operator for kind in library.CALLS]
    names = {front.__code__.co_filename for front in fronts}
    assert len(names) == len(fronts)
    for front in fronts:
        lines, start = linecache.getlines(front.__code__.co_filename), front.__code__.co_firstlineno
        assert "".join(lines[start - 1 :]).replace("\n    ", "\n").strip().startswith(front.text)


def test_lines_of_a_launch_go_with_its_code(fake_gpu: FakeGpu) -> None:
    launch.code_of.cache_clear()
    before = set(linecache.cache)
    for residual in (None, layer().x[:TOKENS].contiguous()):
        moe(residual=residual)
    made = {name for name in set(linecache.cache) - before if name.startswith("<glulam launch of moe #")}
    assert len(made) == 2
    forget_plans()
    launch.code_of.cache_clear()
    gc.collect()
    assert made.isdisjoint(linecache.cache)


@pytest.mark.parametrize("bug", [ZeroDivisionError, KeyError, AttributeError])
@pytest.mark.parametrize("call", [mlp, mm, in_lists, quantize])
def test_a_bug_in_the_look_up_is_an_error(
    bug: type[Exception], call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, fake_gpu: FakeGpu
) -> None:
    """It does not become a call without a plan."""

    def described(_: Any) -> None:
        raise bug("in the look-up")

    monkeypatch.setattr(plans, "described", described)
    with pytest.raises(bug, match="in the look-up"):
        call()
    assert not fake_gpu.launches


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": "text"}, "grouped_mlp: x is a str"),
        ({"w1": 3}, "grouped_mlp: w1 is"),
        ({"offs": [[1]]}, "grouped_mlp: offs is a list"),
        ({"activation": ["swiglu"]}, "grouped_mlp: activation"),
    ],
)
def test_arguments_that_no_look_up_takes_are_named(wrong: dict[str, Any], message: str, fake_gpu: FakeGpu) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        mlp(**wrong)
    assert raised.value.__suppress_context__ and raised.value.__cause__ is None


def test_group_sizes_may_be_integers() -> None:
    """They have no metadata of a tensor's, and so no plan is looked up by them."""
    c = layer()
    assert same_bits(glulam.grouped_mlp(c.x, c.w1, c.w2, splits=SIZES), mlp())


def plans_made() -> Iterator[Plan]:
    for kept in (*(kind.plans for kind in library.CALLS), planned.PLANS):
        for plan in kept:
            yield from (
                [one for one, _ in plan.path.launches.plans.values()] if isinstance(plan, PlannedStep) else [plan]
            )


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_of_a_function_has_one_source(name: str, fake_gpu: FakeGpu) -> None:
    """Two sources of one argument, or none of one that is needed, are errors of the plan."""
    CALLS[name]()
    made = list(plans_made())
    assert made and fake_gpu.launches
    for plan in made:
        for argument, source in zip(plan.shape.arguments, plan.shape.values, strict=True):
            unwanted = {made.kernel for made in plan.shape.result_tensors if not made.wanted}
            may_be_absent = argument.optional or argument.name in unwanted
            assert source.kind != launch.ABSENT or may_be_absent, (plan.op, argument.name)


DECLARED: dict[str, dict[str, Any]] = {
    r"constant.*given.*give the kernel's argument 'w2'": {"constants": (lambda call: {"w2": 0},)},
    "nothing gives mid, which the function needs": {"scratch": ()},
}


@pytest.mark.parametrize("message", DECLARED)
def test_arguments_with_two_sources_or_none_are_named(
    message: str, monkeypatch: pytest.MonkeyPatch, fake_gpu: FakeGpu
) -> None:
    declared = dataclasses.replace(GroupedMlpCall.definition, **DECLARED[message])
    monkeypatch.setattr(GroupedMlpCall, "definition", declared)
    with pytest.raises(TypeError, match=message):
        mlp()
    assert not fake_gpu.launches


def test_addresses_are_read_where_they_are_used(fake_gpu: FakeGpu) -> None:
    """A launch whose arguments were checked before reads no other address."""
    step()
    (plan,) = GroupedMlpCall.plans
    for part in plan.parts.values():
        names = {node.id for node in ast.walk(ast.parse(part.text)) if isinstance(node, ast.Name)}
        assert {name for name in names if name.endswith("_at")} == {f"{name}_at" for name in part.shape.addresses()}


@pytest.mark.parametrize("listed", [False, True])
def test_a_buffer_for_rows_is_none_for_tokens(listed: bool, fake_gpu: FakeGpu) -> None:
    """A chain's argument `out` is where the sums of tokens go, and grouped_mlp's the rows."""
    out = torch.empty_like(layer().x)
    if listed:
        in_lists()
    else:
        assert mlp(out=out) is out
    (launched,) = fake_gpu.launches
    assert (launched["out"], launched["tokens"]) == (0, 0)


def test_sums_want_tokens_to_go_to(fake_gpu: FakeGpu) -> None:
    """The stand-in of a GPU refuses what such a mistake would pass."""
    mlp()
    (launched,) = fake_gpu.launches
    kernel = fake_gpu.find(fake_gpu.specs[-1])
    with pytest.raises(ValueError, match="out is given, and no tokens"):
        kernel.function(*{**launched, "out": launched["y"].data_ptr()}.values())


def test_a_bare_launch_is_the_call_in_memory_of_its_own(fake_gpu: FakeGpu) -> None:
    c = layer()
    wanted = mlp(out=torch.empty_like(c.x))
    (plan,) = GroupedMlpCall.plans
    workspace.forget()
    tickets.forget()
    out = torch.full_like(c.x, torch.nan)
    bare = plan.bare(c.x, c.w1, c.w2, None, None, None, None, c.offs, out)
    assert out.isnan().all() and not workspace.stats().buffers and not tickets.stats().streams
    fake_gpu.launches.clear()
    for _ in range(2):
        out.fill_(torch.nan)
        bare.function(*bare.values)
        assert bare.results[0] is out and same_bits(out, wanted)
    first, second = ({**launched, "mid": launched["mid"].data_ptr()} for launched in fake_gpu.launches)
    assert first["mid"] == second["mid"] and first["tickets"] == second["tickets"] != 0
