"""Several threads: memory that a launch reads lives until it is enqueued, even if other threads clear the caches."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.fake_gpu import FakeGpu
from torch import Tensor

import glulam
from glulam.choose import kernels
from glulam.choose.kernels import Kernel
from glulam.formats.prepared import PREPARED
from glulam.host import experts
from glulam.host.plans import forget_plans

pytest_plugins = ["support.fixtures"]

SIZES = [5, 0, 17, 10]
ROWS, EXPERTS, WIDTH = sum(SIZES), len(SIZES), 64


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


X = randn(ROWS, WIDTH)
OFFS = torch.tensor(SIZES).cumsum(0).int()


def lists(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return w1 and w2 of separate experts, scaled differently so that mixing them up shows."""
    scale = torch.arange(1, EXPERTS + 1).view(-1, 1, 1)
    w1, w2 = randn(EXPERTS, 2 * WIDTH, WIDTH, seed=seed) * scale / 16, randn(EXPERTS, WIDTH, WIDTH, seed=seed + 1) / 8
    return [one.clone() for one in w1.bfloat16()], [one.clone() for one in w2]


def mlp(w1: Any, w2: Any, **options: Any) -> Tensor:
    return glulam.grouped_mlp(X, w1, w2, offs=OFFS, **options)


def packed(weights: tuple[list[Tensor], list[Tensor]]) -> Tensor:
    return mlp(*(torch.stack(one) for one in weights))


def at_each_launch(monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> None:
    """Run `do` in another thread at each launch, after its arguments are made and before its kernels are enqueued."""
    find = kernels.find

    def found(spec: Any) -> Kernel:
        kernel = find(spec)

        def launch(*arguments: Any) -> None:
            thread = threading.Thread(target=do)
            thread.start()
            thread.join()
            gc.collect()
            kernel.function(*arguments)

        return kernel._replace(function=launch)

    monkeypatch.setattr(kernels, "find", found)
    forget_plans()


class Poisoned(experts.Table):
    """A pointer table that points all experts at one expert once it is garbage-collected."""

    def __del__(self) -> None:
        self.values.zero_()


def test_a_poisoned_table_would_be_seen(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "Table", Poisoned)
    weights = lists(1)
    mlp(*weights)
    for table in experts._tables.values():
        table.values.zero_()
    assert not torch.equal(mlp(*weights), packed(weights))


def test_tables_live_until_the_launch(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "Table", Poisoned)
    weights = lists(1)
    wanted = packed(weights)
    at_each_launch(monkeypatch, experts._tables.clear)
    for _ in range(3):  # a new table, then known ones
        assert torch.equal(mlp(*weights), wanted)


def test_gradients_tables_live_until_the_launch(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "Table", Poisoned)
    dy, out = randn(ROWS, WIDTH, seed=3), [torch.zeros(WIDTH, WIDTH).bfloat16() for _ in SIZES]
    wanted = glulam.grouped_wgrad(dy, X, offs=OFFS)
    at_each_launch(monkeypatch, experts._tables.clear)
    for _ in range(2):
        assert torch.equal(torch.stack(glulam.grouped_wgrad(dy, X, offs=OFFS, out=out)), wanted)


def test_threads_that_miss_a_list_together(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both make a table for the same addresses; the cache keeps one, and the other lives as long as its call."""
    monkeypatch.setattr(experts, "Table", Poisoned)
    weights = lists(1)
    wanted, both, make = packed(weights), threading.Barrier(2, timeout=30), experts.gpus.on_own_thread

    def together(made: Callable[[], Any], device: torch.device) -> Any:
        both.wait()
        return make(made, device)

    monkeypatch.setattr(experts.gpus, "on_own_thread", together)
    with ThreadPoolExecutor(2) as threads:
        for result in [threads.submit(glulam.grouped_mm, X, weights[1], offs=OFFS) for _ in range(2)]:
            assert torch.equal(result.result(), glulam.grouped_mm(X, torch.stack(weights[1]), offs=OFFS))
    monkeypatch.setattr(experts.gpus, "on_own_thread", make)
    assert torch.equal(mlp(*weights), wanted)


def test_eviction_by_other_lists(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "Table", Poisoned)
    monkeypatch.setattr(experts, "MAX_TABLES", 2)
    given = [lists(seed) for seed in range(6)]
    wanted = [packed(weights) for weights in given]
    start = threading.Barrier(len(given), timeout=30)

    def work(place: int) -> bool:
        start.wait()
        return all(torch.equal(mlp(*given[place]), wanted[place]) for _ in range(20))

    with ThreadPoolExecutor(len(given)) as threads:
        assert all(threads.map(work, range(len(given))))


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_exact", "mxfp4_weight_only"])
def test_prepared_weights_live_until_the_launch(
    recipe: str, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    PREPARED.clear()  # other tests' weights may go at any time
    w1, w2 = (torch.stack(one) for one in lists(1))
    wanted = mlp(w1, w2, recipe=recipe)
    lost: list[Any] = []

    def forget() -> None:
        entries = [entry for weight in PREPARED._weights.values() for entry in weight.entries.values()]
        parts = [weakref.ref(part) for entry in entries for part in entry.prepared if part is not None]
        del entries
        PREPARED.clear()
        gc.collect()
        lost.extend(part for part in parts if part() is None)

    at_each_launch(monkeypatch, forget)
    for _ in range(3):
        assert torch.equal(mlp(w1, w2, recipe=recipe), wanted)
    assert not lost


def test_calls_while_another_thread_forgets(fake_gpu: FakeGpu) -> None:
    """Plans, choices, tables and prepared weights may go at any time: calls find or make them again."""
    weights = lists(1)
    w1, w2 = (torch.stack(one) for one in weights)

    def first_expert(rows: int) -> Tensor:
        return glulam.grouped_mm(X[:rows], w2, offs=torch.full((EXPERTS,), rows).int())

    wanted = {rows: first_expert(rows) for rows in range(1, ROWS)}
    by_recipe, listed = mlp(w1, w2, recipe="mxfp8"), mlp(*weights)
    done = threading.Event()

    def forget() -> None:
        while not done.is_set():
            kernels.forget_choices()
            experts._tables.clear()
            PREPARED.clear()

    def call(seed: int) -> bool:
        right = [torch.equal(first_expert(rows), y) for rows, y in wanted.items()]
        right += [torch.equal(mlp(w1, w2, recipe="mxfp8"), by_recipe) for _ in range(10)]
        return all(right) and all(torch.equal(mlp(*weights), listed) for _ in range(10))

    with ThreadPoolExecutor(5) as threads:
        forgetting = threads.submit(forget)
        try:
            assert all(threads.map(call, range(4)))
        finally:
            done.set()
        forgetting.result()
