"""The fuzzer draws every declared option, passes on the CPU, and finds and shrinks planted bugs."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fuzz import __main__ as command
from fuzz import check, declared, draw, loop
from fuzz.problem import Problem, parse
from hypothesis import HealthCheck, Phase, given, seed, settings

import glulam
from cute_kernels.formulas import FORMULAS, NUMBERS
from cute_kernels.specs import GATED
from glulam import reference
from glulam.calls import front
from glulam.calls.call import Call
from glulam.recipes import RECIPES

CPU = torch.device("cpu")
DRAWN = (60, 9)
"""Problems of each function without recipe and activation, and of each stratum of the others."""
PER_ROUND = 3

NOT_ON_THE_CPU = {
    "moe_of_choices": "a GPU's: on the CPU it is from_topk and moe",
    "moe_of_choices_mxfp8": "a GPU's: on the CPU it is from_topk and moe",
    "layer_router": "few tokens of nn.MoE",
    "moe_rows": "of several ranks",
    "moe_rows_mxfp8": "of several ranks, and of layers whose residual alone is trained",
    "grouped_mlp_mxfp8_preact": "part of a step whose weights are trained in MXFP8",
    "adapted_moe": "a GPU's: on the CPU adapters are products apart",
    "adapted_mlp": "a GPU's: on the CPU adapters are products apart",
}
"""Operators that problems may not reach on the CPU, each with its reason."""


@functools.cache
def drawn() -> list[Problem]:
    """Drawn problems of each function and recipe."""
    found: list[Problem] = []
    for number, stratum in enumerate(itertools.islice(draw.strata(), draw.in_a_turn())):

        @seed(number)
        @settings(
            max_examples=DRAWN[bool(stratum.fixed)], database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(draw.problems(stratum))
        def note(problem: Problem) -> None:
            found.append(problem)

        note()
    return found


def test_every_parameter_of_every_function_is_drawn_or_a_reason_is_given() -> None:
    assert not declared.undrawn()
    assert set(glulam.__all__) & set(dir(declared)) == set()


@pytest.mark.parametrize("name", ["a_new_flag", "unknown"])
def test_a_new_flag_is_drawn_and_a_parameter_of_no_known_kind_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def new(x: torch.Tensor, *, a_new_flag: bool = False) -> None: ...

    def unlike(x: torch.Tensor, *, unknown: str = "") -> None: ...

    monkeypatch.setitem(declared.FUNCTIONS, "new", new if name == "a_new_flag" else unlike)
    assert declared.undrawn() == ([] if name == "a_new_flag" else ["new: unknown"])
    if name == "a_new_flag":
        assert declared.options_of("new") == {"a_new_flag": (False, True)}


def test_everything_declared_is_drawn() -> None:
    """Functions, their options with each value, optional tensors, forms of weights, recipes, ways to give groups."""
    by_call: dict[str, list[Problem]] = {}
    for problem in drawn():
        by_call.setdefault(problem.call, []).append(problem)
    assert set(by_call) == set(declared.FUNCTIONS)
    for call, found in by_call.items():
        for name in declared.optional_of(call):
            made = {name in problem.given for problem in found}
            is_drawn = True in made or call in ("quantize_mxfp8", "quantize_mxfp4")
            assert is_drawn and False in made, (call, name)
        for name, values in declared.options_of(call).items():
            if name in NUMBERS or (call == "grouped_wgrad" and name == "recipe"):
                continue
            default = declared.parameters(call)[name].default
            got = {problem.options.get(name, default) for problem in found}
            assert got >= set(values) - {declared.parameters(call)[name].empty}, (call, name, got)
        assert {problem.groups for problem in found} == set(declared.groups_of(call)), call
    everything = drawn()
    assert {problem.recipe for problem in everything} == set(RECIPES)
    assert {problem.options.get("activation", "swiglu") for problem in everything} == set(FORMULAS)
    for name, one in FORMULAS.items():
        for number in one.numbers:
            told = [p.options.get(number) for p in everything if p.options.get("activation") == name]
            assert len(set(told)) > 1, (name, number)
    for recipe in RECIPES:
        forms = {p.form for p in everything if p.recipe == recipe and p.call == "grouped_mlp"}
        assert forms == set(declared.forms_of("grouped_mlp", recipe)), recipe
    assert all(p.options.get("glu_layout", "concat") == "concat" for p in everything if not declared.is_gated(p))
    assert {True, False} == {p.train for p in everything} == {p.padded for p in everything}
    assert 0 in {p.rows for p in everything} and any(p.experts > 1 and p.sizes.count(0) == p.experts - 1
                                                      for p in everything)  # fmt: skip
    assert {p.options.get("activation", "swiglu") for p in everything if p.train} >= set(GATED)


def kinds_run(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Set that gets the operator classes of computed calls."""
    found: set[str] = set()
    for kind in {one for each in front.OPERATORS for one in each.__mro__ if "reference" in vars(one)}:
        if not issubclass(kind, Call):
            continue
        right = kind.reference

        def told(self: Any, problem: Any, right: Callable[..., Any] = right) -> Any:
            found.add(type(self).torch_op)
            return right(self, problem)

        monkeypatch.setattr(kind, "reference", told)
    return found


def test_problems_pass_on_the_cpu_and_reach_every_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred; `make fuzz` tries many more."""
    found, failed = kinds_run(monkeypatch), []
    count = PER_ROUND * draw.in_a_turn()
    report = loop.run(loop.rounds(2, count, "cpu", size=PER_ROUND), say=failed.append)
    assert not report.failures, "\n".join(failed)
    assert 200 < report.count == count and report.states["refused"] + report.states["undecided"] < count / 20
    assert f"{count} problems in" in report.text() and "an hour): " in report.text() and "0 failed" in report.text()
    wanted = {kind.torch_op for kind in front.OPERATORS} - set(NOT_ON_THE_CPU)
    assert found >= wanted, sorted(wanted - found)


def a_tail_row_is_read(x: Any, w: Any, ends: Any, bias: Any, scale: Any, transposed: Any, out: torch.Tensor) -> None:
    """Planted bug: the last group includes one row too many."""
    last = max((e for e in range(len(ends)) if ends[e] > ([0, *ends][e])), default=0)
    far = [min(end + 1, len(x)) if expert >= last else end for expert, end in enumerate(ends)]
    RIGHT["grouped_mm"](x, w, far, bias, scale, transposed, out)


def an_option_is_dropped(*arguments: Any) -> None:
    """Planted bug: bias_scale is ignored."""
    x, w, ends, bias, _, transposed, out = arguments
    RIGHT["grouped_mm"](x, w, ends, bias, None, transposed, out)


def unused_weights_are_read(*arguments: Any) -> None:
    """Planted bug: NaN in the weights of an expert without rows reaches all results."""
    x, w, ends, bias, scale, transposed, out = arguments
    RIGHT["grouped_mm"](*arguments)
    if isinstance(w, torch.Tensor) and ends and ends[-1]:
        out[: ends[-1]] += (w.sum() * 0).to(out.dtype)


def the_first_expert_is_all(*arguments: Any) -> None:
    x, w, ends, *others = arguments
    RIGHT["grouped_mm"](x, [w[0]] * len(w) if isinstance(w, list) else w, ends, *others)


def a_little_is_added(*arguments: Any) -> None:
    """Planted bug: one column has an error of a few roundings."""
    RIGHT["grouped_mm"](*arguments)
    out = arguments[-1]
    out[:, -1] *= 1 + 8 * torch.finfo(out.dtype).eps


RIGHT = {"grouped_mm": reference.grouped_mm}
SIMPLEST: dict[str, Callable[[Problem], bool]] = {
    "a_tail_row_is_read": lambda p: p.tail == 1 and p.rows <= 1 and (p.train or "out" in p.given),
    "an_option_is_dropped": lambda p: {"bias", "bias_scale"} <= set(p.given) and p.sizes == (1,),
    "unused_weights_are_read": lambda p: p.experts == 2 and p.rows == 1 and p.form == "packed",
    "the_first_expert_is_all": lambda p: p.experts == 2 and p.form == "list",
    "a_little_is_added": lambda p: p.sizes == (1,) and not p.given,
}
"""Bugs, and which problem each is shrunk to."""


@pytest.mark.parametrize("bug", SIMPLEST)
def test_a_planted_bug_is_found_and_shrunk(
    bug: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "grouped_mm", globals()[bug])
    said: list[str] = []
    report = loop.run(loop.rounds(3, 200, "cpu", ("grouped_mm",), 100), say=said.append)
    outcome = report.failures[0]
    assert outcome.problem is not None and SIMPLEST[bug](outcome.problem), outcome.problem.text()
    line = re.search(r"--problem '(.*)'$", said[0])
    assert line is not None and parse(line[1]) == outcome.problem
    with pytest.raises(check.Wrong, match=re.escape(outcome.wrong.removeprefix("Wrong: "))):
        command.main(["--problem", line[1]])
    monkeypatch.undo()
    assert command.main(["--problem", line[1]]) == 0 and capsys.readouterr().out == "passed\n"


def test_an_option_of_an_mlp_that_is_dropped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of an activation."""
    right = reference.activate
    monkeypatch.setattr(reference, "activate", lambda h, name, layout, numbers: right(
        h, name, layout, tuple(one.default for one in FORMULAS[name].numbers.values())))  # fmt: skip
    outcome = loop.run(loop.rounds(4, 180, "cpu", ("grouped_glu",), 20), say=lambda line: None).failures[0]
    assert outcome.problem is not None and outcome.problem.options.keys() & NUMBERS.keys()


def test_a_crash_is_a_failure_and_says_what(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(reference, "grouped_wgrad", crash)
    outcome = loop.run_round(0, 20, "cpu", draw.Stratum("grouped_wgrad"))
    assert outcome.wrong == "KeyError: 'a bug'" and outcome.problem == Problem("grouped_wgrad", hidden=1, inter=1)


@pytest.mark.parametrize(
    "text",
    [
        '{"call": "moe", "sizes": [1, 1], "dtype": "float16", "options": {"activation": "geglu", "recipe": "mxfp8"}, '
        '"train": true}',
        '{"call": "grouped_mlp", "sizes": [1, 1], "dtype": "float16", "given": ["row_scale"], '
        '"options": {"activation": "reglu", "recipe": "mxfp8"}, "train": true}',
    ],
)
def test_a_gradient_in_fp8_that_cancels_passes(text: str) -> None:
    """The gradient of a weight of a row is one sum, which may be smaller than the rounding of its terms."""
    assert check.check(parse(text), torch.device("cpu")) == check.OK


def test_a_seed_gives_the_same_problems_in_any_number_of_processes() -> None:
    reports = [loop.run(loop.rounds(5, 20, "cpu", ("permute", "combine")), jobs) for jobs in (1, 2)]
    assert reports[0].states == reports[1].states and reports[0].count == 20
    assert not reports[0].failures and not reports[1].failures


@pytest.fixture
def text() -> Iterator[str]:
    yield Problem("grouped_mm", (3, 0), 2, given=("bias",), options={"transpose_w": True}, padded=True).text()


def test_a_problem_survives_its_line(text: str) -> None:
    assert parse(text).text() == text and "inter" not in text
    for broken in ("{", "[]", '{"call": "x", "size": 3}', "3"):
        with pytest.raises(ValueError, match="is no problem.*give a line that fuzz printed"):
            parse(broken)


def test_the_command(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--problem", text]) == 0
    assert command.main(["--problem", "{"]) == 2
    assert "is no problem" in capsys.readouterr().err
    assert command.main(["--count", "20", "--call", "permute", "--seed", "1"]) == 0
    assert "20 problems in" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_kernels_are_not_fuzzed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err == (
        "fuzz: there is no GPU for --device cuda; run it where there is one, or with --device cpu\n"
    )


def test_adapted_operators_name_a_weight_in_halves() -> None:
    """Found by fuzzing: the reference failed in torch.cat."""
    halves = glulam.GateUp(*[torch.zeros(2, 8, 16).bfloat16() for _ in range(2)])
    low, low_w = torch.zeros(3, 8).bfloat16(), torch.zeros(2, 16, 8).bfloat16()
    with pytest.raises(TypeError, match=r"adapted_glu: w1 is a GateUp; give one weight, as torch\.cat\(w1, dim=1\)"):
        declared.INNER["adapted_glu"](
            torch.zeros(3, 16).bfloat16(), halves, low=low, low_w=low_w, offs=torch.tensor([1, 3], dtype=torch.int32)
        )
