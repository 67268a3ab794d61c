"""CUDA graphs: a stack of MLP calls, launched one by one or replayed, in wall time a layer.

Before anything is timed, a graph captured under one routing is replayed under others and must equal the
eager call bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..cases import Case, graph_cases, select
from ..contest import make_record, records_of
from ..contestants import Library, check, libraries
from ..options import Options
from ..problem import Buffers, make_problem, offsets
from ..results import Record
from ..routing import ROUTINGS, group_sizes
from ..timing import Summary, host_sampler, interleave

LAYERS = 32
COMPETING = ("glulam", "torch")
CALLS_PER_SAMPLE = 2


def _stack(library: Library, sets: list[Buffers]) -> Callable[[], None]:
    """LAYERS calls one after another, each on the next set of buffers."""

    def run() -> None:
        for layer in range(LAYERS):
            library.mlp(sets[layer % len(sets)])

    return run


def capture(run: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """The run as a graph, captured after one warm-up on a side stream as torch asks.

    pool: memory shared by graphs that are replayed one after the other and whose results nobody keeps.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph


def _check_replays(library: Library, case: Case, b: Buffers) -> int:
    """Replays one captured call under every routing; how many were compared. Raises RuntimeError on a difference."""
    graph = capture(lambda: library.mlp(b))
    kept = b.offs.clone()
    for routing in ROUTINGS:
        b.offs.copy_(offsets(group_sizes(dataclasses.replace(case, routing=routing)), "cuda"))
        expected = library.mlp(b).clone()
        b.y.fill_(float("nan"))
        graph.replay()
        if not torch.equal(b.y, expected):
            raise RuntimeError(f"{case.label}: a replay under {routing} routing differs from the eager call")
    b.offs.copy_(kept)
    return len(ROUTINGS)


def _samplers(library: Library, sets: list[Buffers]) -> dict[str, Callable[[], float]]:
    run = _stack(library, sets)
    graph = capture(run)
    return {
        f"{library.name} eager": host_sampler(run, CALLS_PER_SAMPLE, drain=True),
        f"{library.name} replay": host_sampler(graph.replay, CALLS_PER_SAMPLE, drain=True),
    }


def of_each(summary: Summary, count: int) -> Summary:
    """The times of one of `count` calls that were timed together."""
    return Summary(summary.median_us / count, summary.low_us / count, summary.high_us / count, summary.samples)


def _measure(case: Case, contestants: list[Library], budget_s: float) -> Iterator[Record]:
    problem = make_problem(case)
    for library in contestants:
        check(library, "mlp", problem.sets[0])
    replays = _check_replays(contestants[0], case, problem.sets[0])
    samplers = {name: s for library in contestants for name, s in _samplers(library, problem.sets).items()}
    times = {name: of_each(summary, LAYERS) for name, summary in interleave(samplers, budget_s).items()}
    yield make_record(case, times, problem.sizes, op="mlp", layers=LAYERS, replays_equal_to_eager=replays)


def run_graph(options: Options) -> list[Record]:
    """One record a case; times are wall time a layer."""
    cases = select(graph_cases(), options.case)
    contestants = [library for library in libraries("off") if library.name in COMPETING]
    share = options.budget_s / 2 / len(cases)
    return records_of("graph", cases, lambda case: _measure(case, contestants, share))
