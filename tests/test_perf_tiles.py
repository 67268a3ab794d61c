"""`python -m perf tiles`: the cases measured, checks before timing, and the time budget."""

from __future__ import annotations

import dataclasses
import itertools
import types

import pytest
from support import fake_gpu
from test_perf_compare import FakeBundle

from cute_kernels.sm90.configs import LARGE, SMALL
from cute_kernels.specs import GroupedGluSpec, GroupedMmSpec
from perf.cases import Case
from perf.suites import compare, tiles

SPECS = [spec for tile in (LARGE, SMALL) for spec in (
    GroupedGluSpec(tile=tile), GroupedMmSpec(tile=tile), GroupedMmSpec(transpose_w=True, tile=tile)
)]  # fmt: skip
MODELS = [Case(name, experts, 64, 128, 0) for name, experts in (("a", 2), ("b", 3))]


def cases(*_):
    rows = (1, 2, 4)
    return [
        dataclasses.replace(m, rows=m.experts * r, routing=t) for m in MODELS for r in rows for t in ("uniform", "zipf")
    ]


@pytest.fixture
def cpu(monkeypatch):
    """Small models on the CPU, with made-up call times of 7 us less the length of the queue."""
    fake_gpu.install(monkeypatch)
    make_sets = tiles.make_sets
    monkeypatch.setattr(tiles, "sweep", cases)
    monkeypatch.setattr(tiles, "make_sets", lambda *given: make_sets(*given, device="cpu"))
    monkeypatch.setattr(tiles, "device_us", lambda call, calls, enqueue: (call(calls - 1), 7.0)[1])


def waiting(bundle, ops=(), options=None):
    chosen = compare.candidates({"one": bundle}, tiles.SPECS)
    return tiles.todo(chosen, options or tiles.Options(ops=ops))


def test_every_model_operation_routing_and_size_is_measured(cpu):
    todo = waiting(FakeBundle(SPECS))
    records = list(tiles.measure_all(todo, 60.0))
    seen = {(r["model"], r["op"], r["routing"], r["rows_per_expert"]) for r in records}
    assert len(records) == len(seen) == 2 * 3 * 2 * 3
    assert all(record["us"] == {LARGE.name: 7.0, SMALL.name: 7.0} for record in records)
    fc1 = next(r for r in records if r["op"] == "fc1" and r["model"] == "b" and r["rows_per_expert"] == 4)
    assert (fc1["experts"], fc1["n"], fc1["k"], fc1["flop"]) == (3, 256, 64, 2 * 12 * 256 * 64)
    assert {(r["n"], r["k"]) for r in records if r["op"] == "fc2"} == {(64, 128)}
    assert {(r["n"], r["k"]) for r in records if r["op"] == "dgrad"} == {(64, 256)}


def test_the_budget_ends_a_sweep_whose_coarse_half_comes_first(cpu, monkeypatch):
    todo = waiting(FakeBundle(SPECS))
    sizes = [case.rows // case.experts for case, _ in todo]
    assert sizes[:24].count(2) == 0 and set(sizes[24:]) == {2}
    clock = itertools.count()
    monkeypatch.setattr(tiles, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    with pytest.warns(UserWarning, match="--budget ended with 31 of 36 cases to go"):
        assert len(list(tiles.measure_all(todo, 6))) == 5


def test_a_wrong_kernel_is_left_out_of_its_operation(cpu):
    wrong = GroupedMmSpec(tile=SMALL).name
    with pytest.warns(UserWarning, match=f"fc2: {SMALL.name} is left out"):
        records = list(tiles.measure_all(waiting(FakeBundle(SPECS, wrong=[wrong])), 60.0))
    assert all((SMALL.name in record["us"]) == (record["op"] != "fc2") for record in records)


def test_what_was_measured_before_a_failure_is_kept(cpu, monkeypatch):
    measure, numbers = tiles.measure, itertools.count()

    def fails(*arguments):
        if next(numbers) == 3:
            raise RuntimeError("an illegal memory access")
        return measure(*arguments)

    monkeypatch.setattr(tiles, "measure", fails)
    with pytest.warns(UserWarning, match="ended the sweep with 33 cases to go: an illegal"):
        assert len(list(tiles.measure_all(waiting(FakeBundle(SPECS)), 60.0))) == 3


def test_the_sweep_covers_the_models_and_leaves_out_what_is_too_large():
    todo = waiting(FakeBundle(SPECS))
    assert len({case.name for case, _ in todo}) == 10
    assert {case.rows // case.experts for case, _ in todo} == {1 << d for d in range(13)}
    for case, contest in todo:
        assert case.bytes(contest.op, case.experts) <= tiles.MAX_BYTES and len(contest.competing) == 2
        assert tiles.rough_us(case, contest.op) <= tiles.MAX_US
