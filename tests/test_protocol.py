"""The protocol of the symmetric transport as a model (support/protocol): correct for every order of events of small
cases, and broken without any one of its rules.

With three ranks, only one dispatch and combine is explored with stores that arrive in any order, or with time-outs.
More of both, crashes in other op lists and four ranks are left to `python -m tests.support.protocol`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.protocol.ctas import Launches, LaunchRules
from support.protocol.ops import Rules, ops_of
from support.protocol.ranks import Model

LAYERS = "D1 C1 D2 C2 D3 C3"
TRAINING = "D1 C1 D2 C2 B2 C2 B1 C1"
TWO_AT_ONCE = "D1 D2 C1 C2"

TOO_EARLY = "rows are read before they are here"
OVERWRITTEN = "rows are overwritten before they are read"
OTHER_WORD = "a word of another op is taken for this one's"
OTHER_COUNT = "the count of another op is read"


@pytest.mark.parametrize(
    ("ops", "entering"),
    [
        (LAYERS, ""),
        (TRAINING, ""),
        ("D1 D2", "D2"),
        ("D1 C1 C1 D2", "C1"),
        (TWO_AT_ONCE, "D2 C2"),
        ("D1 D2 C1 D3", "D2 D3"),
        ("D1 D2 C2 D3", "D2"),
        ("D1 C1 D2 B1 C1 D3", "B1"),
        ("D2 C2 D1 B2 C1 D3", "B2 D3"),
    ],
)
def test_ops_that_need_the_exchange_of_enter(ops: str, entering: str) -> None:
    assert " ".join(f"{op.kind}{op.handle}" for op in ops_of(ops, Rules()) if op.enters) == entering


@pytest.mark.parametrize(
    "ops",
    [
        pytest.param(LAYERS, id="layers"),
        pytest.param(TRAINING, id="a training step"),
        pytest.param("D1 D2 C1 D3 C2 C3 D4 C4", id="combined in the order of dispatches"),
        pytest.param("D1 D2 C2 C1 D3 C3", id="combined in the other order"),
        pytest.param("D1 D2 D3 C3 C3 C1 C3 D1", id="handles combined again, or never"),
        pytest.param("D1 C1 D2 C2 B1 C1 D3 C3 B2 C2", id="backward between forwards"),
        pytest.param("D1 C1 D2 B1 C1 D3 C3", id="a recomputation that stops early"),
        pytest.param("D1 C1 D2 C2 B2 B1 C1 D3", id="a backward without combine"),
        pytest.param("D2 C2 D1 B2 C1 D3 C2 C3", id="a forward's combine within a backward"),
    ],
)
def test_two_ranks_in_any_order(ops: str) -> None:
    found = Model(2, ops, rows=2).explore()
    assert (found.faults, found.ends) == (set(), {"ok, ok"}) and found.states > 200


@pytest.mark.parametrize(("epochs", "faults"), [(8, set()), (4, set()), (2, {OTHER_WORD})])
def test_epochs_wrap(epochs: int, faults: set[str]) -> None:
    assert Model(2, "D1 C1 D2 C2 D3 C3 D4 C4 D5 C5 D6 C6", epochs=epochs).explore().faults == faults


def test_three_ranks_in_any_order() -> None:
    found = Model(3, "D1 C1").explore()
    assert (found.faults, found.ends) == (set(), {"ok, ok, ok"}) and found.states > 10_000


@pytest.mark.parametrize("landing", ["early", "late"])
@pytest.mark.parametrize("ops", [LAYERS, TRAINING, "D1 D2 C1 C2 D3", "D2 C2 D1 B2 C1 D3"])
def test_three_ranks(ops: str, landing: str) -> None:
    found = Model(3, ops, rows=2, landing=landing).explore()
    assert (found.faults, found.ends) == (set(), {"ok, ok, ok"}) and found.states > 1000


CRASHES = {"ok, ok", "crashed, ok", "crashed, error"}


@pytest.mark.parametrize("ops", [LAYERS, TRAINING, TWO_AT_ONCE])
def test_after_a_crash_all_others_end_and_name_it(ops: str) -> None:
    found = Model(2, ops, rows=2, crash=True).explore()
    assert (found.faults, found.ends) == (set(), CRASHES)


@pytest.mark.parametrize("landing", ["early", "late"])
def test_after_a_crash_all_others_of_three_end_and_name_it(landing: str) -> None:
    found = Model(3, "D1 C1 D2 C2", rows=2, landing=landing, crash=True).explore()
    ends = {"ok, ok, ok", "crashed, ok, ok", "crashed, error, ok", "crashed, error, error"}
    assert (found.faults, found.ends) == (set(), ends)


@pytest.mark.parametrize("ops", [LAYERS, TRAINING, TWO_AT_ONCE])
def test_time_outs_without_a_crash_spoil_no_rows(ops: str) -> None:
    found = Model(2, ops, rows=2, impatient=True).explore()
    assert (found.faults, found.ends) == (set(), {"ok, ok", "error, ok", "error, error"})


def test_time_outs_without_a_crash_spoil_no_rows_of_three() -> None:
    found = Model(3, "D1 C1", rows=2, landing="late", impatient=True).explore()
    assert not found.faults and {"ok, ok, ok", "error, error, error"} < found.ends


BROKEN: list[tuple[str, str, dict[str, Any]]] = [
    ("release", TOO_EARLY, {}),
    ("wait_then_read", TOO_EARLY, {}),
    ("count_in_word", OTHER_COUNT, {}),
    ("count_in_handle", OTHER_COUNT, {"ops": TWO_AT_ONCE}),
    ("tokens_in_handle", TOO_EARLY, {"ops": TRAINING}),
    ("wait_for_sums", OVERWRITTEN, {}),
    ("empty_sums", OVERWRITTEN, {}),
    ("enter", OVERWRITTEN, {"ops": "D1 D2"}),
    ("enter", OVERWRITTEN, {"ops": "D1 C1 C1"}),
    ("enter_after_older", OVERWRITTEN, {"ops": "D1 D2 C1 D3"}),
    ("backward_is_latest", OVERWRITTEN, {"ops": "D2 C2 D1 B2 C1 D3"}),
    ("read_before_combine", OVERWRITTEN, {}),
    ("epochs_go_on", OTHER_WORD, {}),
    ("long_enter", OTHER_WORD, {"ops": "D1 C1 C1 D2 C2 D3 C3 D4 D5", "epochs": 8}),
    ("time_out", "a live rank waits for ever", {"crash": True}),
    ("sticky", "a rank stores after its error", {"crash": True}),
    ("abort_words", "an error names a live rank", {"ranks": 3, "ops": "D1 C1", "landing": "early", "crash": True}),
]


@pytest.mark.parametrize(("rule", "fault", "case"), BROKEN, ids=[f"{rule}-{i}" for i, (rule, *_) in enumerate(BROKEN)])
def test_without_a_rule(rule: str, fault: str, case: dict[str, Any]) -> None:
    case = {"ranks": 2, "ops": LAYERS, "rows": 2, **case}
    assert not Model(**case).explore().faults
    assert fault in Model(**case, rules=Rules(**{rule: False})).explore().faults


def test_every_rule_is_tried() -> None:
    assert {rule for rule, *_ in BROKEN} == {each.name for each in dataclasses.fields(Rules)}
    assert {rule for rule, *_ in BROKEN_LAUNCHES} == {each.name for each in dataclasses.fields(LaunchRules)}


@pytest.mark.parametrize(("may_give_up", "ends"), [(False, {"ok"}), (True, {"ok", "error"})])
def test_launches(may_give_up: bool, ends: set[str]) -> None:
    found = Launches(may_give_up=may_give_up).explore()
    assert (found.faults, found.ends) == (set(), ends) and found.states > 50


BROKEN_LAUNCHES = [
    ("last_advances", "CTAs of one launch read two epochs", False),
    ("last_publishes", "a word is published before all rows are stored", False),
    ("whole_tickets", "a word is published before all rows are stored", False),
    ("error_then_ticket", "a word is published before all rows are stored", True),
]


@pytest.mark.parametrize(("rule", "fault", "may_give_up"), BROKEN_LAUNCHES)
def test_launches_without_a_rule(rule: str, fault: str, may_give_up: bool) -> None:
    rules = LaunchRules(**{rule: False})
    assert Launches(may_give_up=may_give_up, rules=rules).explore().faults == {fault}
