"""`make soak` for a few seconds on the CPU: threads pass together, and growing memory is reported."""

from __future__ import annotations

import math
import os
import threading

import pytest
import soak
import torch
from fuzz import check
from fuzz.problem import Problem
from soak import Reading

CPU = torch.device("cpu")


def test_threads_pass_together_and_hold_nothing_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a few seconds a process still fills its caches, so its memory may grow; longer runs judge that."""
    monkeypatch.setitem(soak.MOST_GROWTH, "host MiB", math.inf)
    before = threading.active_count()
    assert soak.main(["0.1", "--device", "cpu", "--threads", "3"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "problems by 3 threads" in said and "descriptors" in said and int(said.split()[0]) > 20
    assert threading.active_count() <= before + 1


def test_a_failure_ends_it_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def fail(problem: Problem, device: torch.device) -> str:
        raise check.Wrong("it is wrong")

    monkeypatch.setattr(check, "check", fail)
    assert soak.soak(CPU, 60.0, 2, pause_s=0.05, say=said.append) == 1
    assert said[0].startswith(
        "Wrong: it is wrong\n    PYTHONPATH=tests .venv/bin/python -m fuzz --device cpu --problem"
    )


def readings(name: str, values: list[float]) -> list[Reading]:
    return [Reading(float(at), {name: value}) for at, value in enumerate(values)]


@pytest.mark.parametrize(
    ("name", "values", "grows"),
    [
        ("host MiB", [500, 900, 905, 910, 908, 912], False),
        ("host MiB", [500, 600, 700, 800, 900, 1000], True),
        ("host MiB", [500, 900, 905, 2000, 910, 1990], False),
        ("device MiB", [0, 10, 100, 100, 200, 200], True),
        ("descriptors", [9, 9, 9, 9, 20, 20], True),
        ("threads", [5, 5, 5, 5, 5, 6], False),
        ("threads", [5, 5], False),
    ],
)
def test_growth_is_told_from_a_start(name: str, values: list[float], grows: bool) -> None:
    lines = soak.growth(readings(name, values))
    assert bool(lines) == grows
    if grows:
        assert lines[0].startswith(f"{name} grew from ")


def test_something_that_is_kept_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leak of descriptors, one a problem."""
    kept: list[int] = []

    def leak(problem: Problem, device: torch.device) -> str:
        kept.append(os.open("/dev/null", os.O_RDONLY))
        return check.OK

    said: list[str] = []
    monkeypatch.setattr(check, "check", leak)
    try:
        assert soak.soak(CPU, 3.0, 1, pause_s=0.2, say=said.append) == 1
    finally:
        for file in kept:
            os.close(file)
    assert any(line.startswith("descriptors grew from ") for line in said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--device", "cuda"]) == 2 and "there is no GPU" in capsys.readouterr().err
