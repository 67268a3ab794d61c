"""Several threads of one process: simultaneous first calls, weight lists that evict each other's pointer tables, and
concurrent weight preparation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.criterion import same_bits
from torch import Tensor

import glulam
from glulam.formats.prepared import PREPARED
from glulam.host import experts

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
EXPERTS, HIDDEN, INTER, ROWS, THREADS = 8, 256, 128, 512, 8


def randn(*shape: int, seed: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda") / 8).to(BF16)


def weights(seed: int) -> tuple[Tensor, Tensor]:
    """Return packed w1 and w2; experts differ in scale, so that mixing them up shows."""
    scale = torch.arange(1, EXPERTS + 1, device="cuda").view(-1, 1, 1)
    return (randn(EXPERTS, 2 * INTER, HIDDEN, seed=seed) * scale).to(BF16), randn(EXPERTS, HIDDEN, INTER, seed=seed + 1)


def in_threads(work: Callable[[int], Any], busy: bool = True) -> list[Any]:
    """Run `work` in THREADS threads that start together, and return their results. busy: keep the GPU busy at the
    start.
    """
    start = threading.Barrier(THREADS, timeout=60)
    torch.cuda.synchronize()
    if busy:
        torch.cuda._sleep(20_000_000)

    def begin(place: int) -> Any:
        with torch.no_grad():
            start.wait()
            return work(place)

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(begin, range(THREADS)))


@pytest.mark.parametrize("streams", ["one stream", "a stream each"])
def test_first_calls_with_one_list(streams: str) -> None:
    x, offs = randn(ROWS, HIDDEN, seed=0), torch.arange(1, EXPERTS + 1, device="cuda").int() * (ROWS // EXPERTS)
    for seed in range(10):
        w1, w2 = weights(seed)
        wanted = glulam.grouped_mlp(x, w1, w2, offs=offs)
        lists = [one.clone() for one in w1], [one.clone() for one in w2]
        torch.cuda.synchronize()

        def call(place: int, lists: Any = lists) -> Tensor:
            stream = torch.cuda.current_stream() if streams == "one stream" else torch.cuda.Stream()
            with torch.cuda.stream(stream):
                y = glulam.grouped_mlp(x, *lists, offs=offs)
                torch.full((EXPERTS,), -1, device="cuda")  # takes the place of what was freed
                return y

        results = in_threads(call)
        torch.cuda.synchronize()
        assert all(same_bits(y, wanted) for y in results)


def test_lists_that_drop_each_others_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "MAX_TABLES", 2)
    x, offs = randn(ROWS, HIDDEN, seed=0), torch.arange(1, EXPERTS + 1, device="cuda").int() * (ROWS // EXPERTS)
    packed = [weights(3 * seed) for seed in range(THREADS)]
    wanted = [glulam.grouped_mlp(x, *one, offs=offs) for one in packed]
    lists = [tuple([expert.clone() for expert in w] for w in one) for one in packed]

    def call(place: int) -> list[Tensor]:
        return [glulam.grouped_mlp(x, *lists[place], offs=offs) for _ in range(30)]

    for results, one in zip(in_threads(call), wanted, strict=True):
        assert all(same_bits(y, one) for y in results)


@pytest.mark.parametrize("recipe", ["mxfp8_exact", "mxfp4_weight_only"])
def test_first_calls_under_a_recipe(recipe: str) -> None:
    """Each thread may prepare a copy; all of them compute the same, also where another thread forgets what is kept."""
    x, offs = randn(ROWS, HIDDEN, seed=0), torch.arange(1, EXPERTS + 1, device="cuda").int() * (ROWS // EXPERTS)
    for seed in range(3):
        w1, w2 = weights(seed)
        wanted = glulam.grouped_mlp(x, w1, w2, offs=offs, recipe=recipe)
        PREPARED.clear()

        def call(place: int, given: Any = (w1, w2)) -> list[Tensor]:
            made = []
            for _ in range(5):
                made.append(glulam.grouped_mlp(x, *given, offs=offs, recipe=recipe))
                if place % 2:
                    PREPARED.clear()
            return made

        assert all(same_bits(y, wanted) for results in in_threads(call) for y in results)
    PREPARED.clear()


def test_streams_of_threads_that_take_turns() -> None:
    """Workspaces, tickets and results of calls of many sizes, each thread on a stream of its own."""
    w1, w2 = weights(0)
    xs = [randn(64 + 8 * n, HIDDEN, seed=n) for n in range(40)]
    offs = [torch.arange(1, EXPERTS + 1, device="cuda").int() * (len(x) // EXPERTS) for x in xs]
    wanted = [glulam.grouped_mlp(x, w1, w2, offs=o) for x, o in zip(xs, offs, strict=True)]

    def call(place: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            order = [(place * 7 + n) % len(xs) for n in range(len(xs))]
            made = [(n, glulam.grouped_mlp(xs[n], w1, w2, offs=offs[n])) for n in order]
            torch.cuda.current_stream().synchronize()
            return all(same_bits(y[: int(offs[n][-1])], wanted[n][: int(offs[n][-1])]) for n, y in made)

    assert all(in_threads(call, busy=False))
