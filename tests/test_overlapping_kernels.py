"""Kernels that overlap by programmatic dependent launch, as models (support/protocol/overlap.py and calls.py): calls of
all shipped functions hold in every order of steps, each wait and each ordinary launch is needed, and kernels wait, let
the next one begin and are launched as the table of steps says.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.protocol.calls import ALWAYS, LATER, NEVER, PERSISTENT, Call, Declared, calls, declared
from support.protocol.overlap import LET, WAIT, Kernel, Stream, kernel, steps_of
from support.protocol.search import Found

import cute_kernels
from cute_kernels.architectures import ARCHS, capability
from cute_kernels.specs import Spec
from ffi_bridge.profiles import all_stages, shipped_specs

ENDS = {"all kernels have ended"}
Change = Callable[[Kernel], Kernel]


def twice(call: Call) -> Found:
    """Search two successive calls."""
    return Stream([call.kernels, call.kernels]).explore()


@pytest.mark.parametrize("call", calls(), ids=lambda call: call.name)
def test_a_call_holds_in_any_order(call: Call) -> None:
    found = twice(call)
    assert (found.faults, found.ends) == (set(), ENDS) and found.states > 50


@pytest.mark.parametrize("call", calls(), ids=lambda call: call.name)
def test_a_call_holds_before_one_whose_first_kernel_is_launched_early(call: Call) -> None:
    assert GATES.kernels[0].early
    found = Stream([call.kernels, GATES.kernels]).explore()
    assert (found.faults, found.ends) == (set(), ENDS)


def test_calls_have_chains_of_early_launches() -> None:
    chains = {tuple(one.name for one in call.kernels if one.early) for call in calls()}
    assert {
        ("BoundaryBackward", "BoundaryBackwardFinish"), ("GatesBackward", "TileGradients", "TileSums"),
        ("Permute", "GroupedGlu", "GroupedMm", "Combine"), ("GroupedMm", "FinishBackward", "Combine"),
        ("Choose", "Place"),
    } <= chains  # fmt: skip


def each_kernel() -> Iterator[tuple[Call, int, Kernel]]:
    """Yield each kernel of each call, without calls that launch the same kernels."""
    same = {tuple((one.name, one.early) for one in call.kernels): call for call in calls()}
    for call in same.values():
        for place, one in enumerate(call.kernels):
            yield call, place, one


def broken_at(call: Call, place: int, broken: Kernel) -> set[str]:
    return twice(call._replace(kernels=(*call.kernels[:place], broken, *call.kernels[place + 1 :]))).faults


@pytest.mark.parametrize(
    ("call", "place"),
    [
        pytest.param(call, place, id=f"{one.name}-{call.name}")
        for call, place, one in each_kernel()
        if one.early
    ],
)  # fmt: skip
def test_a_kernel_that_is_launched_early_must_wait(call: Call, place: int) -> None:
    one = call.kernels[place]
    assert one.has(WAIT)
    assert broken_at(call, place, one.without_wait())


@pytest.mark.parametrize(
    ("call", "place"),
    [
        pytest.param(call, place, id=f"{one.name}-{call.name}")
        for call, place, one in each_kernel()
        if not one.early and not one.has(WAIT)
    ],
)  # fmt: skip
def test_a_kernel_that_never_waits_must_not_be_launched_early(call: Call, place: int) -> None:
    assert broken_at(call, place, call.kernels[place]._replace(early=True))


def launched_early(one: Kernel) -> Kernel:
    return one._replace(early=True)


def in_other_order(text: str) -> Change:
    """Return a change to these steps of all CTAs."""
    return lambda one: kernel(one.name, text, early=one.early)


def sharing_a_counter(one: Kernel) -> Kernel:
    """Return a GEMM with the same ticket counter as all other GEMMs of the call."""
    return one.changed(
        lambda role: (step._replace(buffers=tuple(name.split(" ")[0] for name in step.buffers)) for step in role)
    )


def called(pattern: str, *kernels: str) -> Call:
    """Return the first call whose name has the pattern and which launches these kernels."""
    found = (one for one in calls() if re.match(pattern, one.name))
    return next(one for one in found if tuple(each.name for each in one.kernels) == kernels)


BACKWARD = called("mhc_boundary_backward", "BoundaryTokens", "BoundaryBackward", "BoundaryBackwardFinish")
GATES = called("mhc_project_backward", "GatesBackward", "TileGradients", "TileSums")
SORTED = called("grouped_mlp_bf16", "Place", "GroupedGlu", "GroupedMm", "Combine")
COPIED = called("grouped_mlp_mxfp8w.*sm_90a", "Place", "Permute", "GroupedGlu", "GroupedMm", "Combine")
DGLU = called("grouped_dglu_bf16.*sm_90a", "Dglu", "GroupedMm", "FinishBackward", "Combine")
OLDER = "{} touches memory while {} of a call before runs"
BROKEN: dict[str, tuple[Call, dict[str, Change], str]] = {
    "finish does not wait": (
        BACKWARD,
        {"BoundaryBackwardFinish": Kernel.without_wait},
        "BoundaryBackwardFinish reads boundary_backward.dots before BoundaryBackward has ended",
    ),
    "finish does not wait, and the main kernel lets it begin at once": (
        BACKWARD,
        {"BoundaryBackward": Kernel.letting_first, "BoundaryBackwardFinish": Kernel.without_wait},
        "BoundaryBackwardFinish reads boundary_backward.rows before BoundaryTokens has ended",
    ),
    "finish waits for a kernel that has not waited": (
        BACKWARD,
        {"BoundaryBackward": in_other_order("let; read streams; write boundary_backward.dots")},
        "BoundaryBackwardFinish reads boundary_backward.rows before BoundaryTokens has ended",
    ),
    "blocks are read before the wait": (
        BACKWARD,
        {"BoundaryBackward": in_other_order("read streams boundary_backward.blocks; wait; let; write d_streams")},
        "BoundaryBackward reads boundary_backward.blocks before BoundaryTokens has ended",
    ),
    "the next call's first kernel is launched early": (
        BACKWARD,
        {"BoundaryTokens": launched_early},
        OLDER.format("BoundaryTokens", "BoundaryBackwardFinish"),
    ),
    "the next call's first kernel overwrites what finish reads": (
        BACKWARD,
        {"BoundaryTokens": launched_early, "BoundaryBackwardFinish": Kernel.letting_first},
        OLDER.format("BoundaryTokens", "BoundaryBackwardFinish"),
    ),
    "gates let their successor begin before they have waited": (
        GATES,
        {"GatesBackward": Kernel.letting_first},
        OLDER.format("TileGradients", "a kernel before the calls"),
    ),
    "the first kernel of a call, launched early, does not wait": (
        GATES,
        {"GatesBackward": Kernel.without_wait},
        OLDER.format("GatesBackward", "a kernel before the calls"),
    ),
    "FC1 lets FC2 begin before offs are written": (
        SORTED,
        {"GroupedGlu": Kernel.letting_first},
        "GroupedMm reads groups before Place has ended",
    ),
    "a copy of rows lets FC1 begin before offs are written": (
        COPIED,
        {"Permute": Kernel.letting_first},
        "GroupedGlu reads groups before Place has ended",
    ),
    "the GEMMs of a call share a counter": (
        SORTED,
        {"GroupedGlu": sharing_a_counter, "GroupedMm": sharing_a_counter},
        "GroupedMm writes tickets before GroupedGlu has ended",
    ),
    "a kernel that needs nothing of its predecessor does not wait": (
        DGLU,
        {"FinishBackward": in_other_order("read groups; write dx:rest")},
        "Combine reads dx before GroupedMm has ended",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_without_a_rule(name: str) -> None:
    call, changes, fault = BROKEN[name]
    assert fault in twice(call.changed(changes)).faults


@pytest.mark.parametrize(
    ("kernels", "faults"),
    [
        (("let; write x", "read x"), {"1 reads x before 0 has ended"}),
        (("write x", "wait; read x"), set()),
        (("let; write x", "wait; read x"), set()),
        (("let; write x", "let; wait", "read x"), {"2 reads x before 0 has ended"}),
        (("let; write x", "wait; let", "read x"), set()),
        (("let; write x", "let; wait", "wait; read x"), set()),
        (("let; write x", "let", "wait; read x"), {"2 reads x before 0 has ended"}),
        (("let; read x", "write x; wait"), {"0 reads x after 1, a later kernel, has written it"}),
        (
            ("let; write x", "write x; wait"),
            {"1 writes x before 0 has ended", "0 writes x after 1, a later kernel, has written it"},
        ),
        (("let; read x; write y", "wait; read y; write x"), set()),
    ],
)  # fmt: skip
def test_kernels_that_are_launched_early(kernels: tuple[str, ...], faults: set[str]) -> None:
    made = [kernel(str(number), text, early=number > 0) for number, text in enumerate(kernels)]
    found = Stream([made]).explore().faults
    assert {fault for fault in found if "of a call before" not in fault} == faults


def test_a_cta_that_has_not_let_the_next_kernel_begin_holds_it_back() -> None:
    after = kernel("after", "wait; read x", early=True)
    states = {
        Stream([[kernel("first", *ctas), after]]).explore().states
        for ctas in (("let; read z", "let; read z"), ("let; read z", "read z"), ("read z", "read z"))
    }
    assert len(states) == 3


# the kernels' sources

FOLDER = Path(cute_kernels.__file__).parent
CONTROLS = {
    "wait_for_earlier": WAIT, "griddepcontrol_wait": WAIT, "let_next_begin": LET,
    "griddepcontrol_launch_dependents": LET,
}  # fmt: skip
CONTROL = re.compile(rf"\b({'|'.join(CONTROLS)})\(\)|use_pdl=")
OF_DEVICE = "device/target.py"


def table() -> set[Declared]:
    """Return all declared kernels of shipped stages on GPUs with early launches."""
    archs = [arch for arch in ARCHS if capability(arch) >= (9, 0)]
    stages: set[Spec] = set(itertools.chain.from_iterable(all_stages(shipped_specs(arch)) for arch in archs))
    return {one for stage in stages for one in declared(stage)}


TABLE = sorted({(one.source, one.early, one.ctas) for one in table() if one.source != PERSISTENT})


def class_of(source: str) -> list[ast.ClassDef]:
    """Return a class and its base classes in the same file."""
    file, name = source.split()
    classes = {one.name: one for one in ast.parse((FOLDER / file).read_text()).body if isinstance(one, ast.ClassDef)}
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name) and base.id in classes]
    return [classes[name], *(found for base in bases for found in class_of(f"{file} {base}"))]


def functions(classes: list[ast.ClassDef]) -> dict[str, ast.FunctionDef]:
    found = [one for each in reversed(classes) for one in each.body if isinstance(one, ast.FunctionDef)]
    return {one.name: one for one in found}


def controls(function: ast.FunctionDef) -> list[str]:
    """Return the waits and early launches in a function, in the order of its lines."""
    calls = [one for one in ast.walk(function) if isinstance(one, ast.Call)]
    named = [(one.lineno, ast.unparse(one.func).split(".")[-1]) for one in calls]
    return [CONTROLS[name] for _, name in sorted(named) if name in CONTROLS]


def launch_of(classes: list[ast.ClassDef]) -> str:
    """Return when the kernel of a class is launched early, according to its source."""
    calls = [one for each in classes for one in ast.walk(each) if isinstance(one, ast.Call)]
    texts = {ast.unparse(key.value) for one in calls for key in one.keywords if key.arg == "use_pdl"}
    is_first = any(ast.unparse(one.func) == "self._launch" and ast.unparse(one.args[-1]) == "Int32(0)" for one in calls)
    if not texts or is_first:
        return NEVER
    (text,) = texts
    return LATER if "position > 0" in text else ALWAYS


@pytest.mark.parametrize(("source", "early", "ctas"), TABLE, ids=[f"{each[0]}-{i}" for i, each in enumerate(TABLE)])
def test_a_kernel_waits_and_is_launched_as_declared(source: str, early: str, ctas: tuple[str, ...]) -> None:
    classes = class_of(source)
    (body,) = [
        one for one in functions(classes[:1]).values() if any("kernel" in ast.unparse(d) for d in one.decorator_list)
    ]
    by_cta = [steps_of(text) for text in ctas]
    same = os.path.commonprefix(by_cta)  # before CTAs of several kinds part
    steps = [*same, *(step for each in by_cta for step in each[len(same) :])]
    assert controls(body) == [step.action for step in steps if not step.buffers]
    assert launch_of(classes) == early


def test_roles_of_persistent_kernels_wait_as_declared() -> None:
    """All roles wait before they read rows, except the scheduler and warps that decode weights."""
    bodies = [functions(class_of(source))["kernel"] for source in (PERSISTENT, "sm100/persistent.py TensorMemoryGemm")]
    assert [controls(body) for body in bodies] == [[WAIT, LET]] * 2
    roles = functions(class_of("sm90/roles.py GemmRoles")) | functions(class_of("sm100/persistent.py TensorMemoryGemm"))
    waits = {name: set(controls(body)) for name, body in roles.items() if name.endswith("_role")}
    assert {name for name, found in waits.items() if found != {WAIT}} == {"_decode_role"} and len(waits) > 5
    assert launch_of(class_of(PERSISTENT)) == LATER


def test_the_table_has_all_kernels_that_wait_or_are_launched_early() -> None:
    files = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.py") if CONTROL.search(path.read_text())}
    known = {source.split()[0] for source, *_ in TABLE} | {PERSISTENT.split()[0]}
    assert files - known == {OF_DEVICE, "sm90/roles.py", "sm100/persistent.py"}
    classes = {
        f"{file} {one.name}"
        for file in files & known
        for one in ast.parse((FOLDER / file).read_text()).body
        if isinstance(one, ast.ClassDef) and any(controls(body) for body in functions([one]).values())
    }
    assert classes <= {source for source, *_ in TABLE} | {PERSISTENT}
