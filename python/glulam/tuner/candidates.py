"""Which kernels are worth measuring for a problem: of all that can exist, those that the model of `cost` has fastest.

A spec has one tile or two (those of a grouped_mlp's GEMMs; those of a grouped_dglu and the data gradient behind it).
Each tile does the work of one or several GEMMs, and a spec's time is the sum.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from cute_kernels.specs import GroupedDgluSpec, GroupedMlpSpec, Spec
from cute_kernels.tiles import SpecError, TileConfig

from .. import shipped_kernels, validity
from ..cost import EVEN, Gemm, routed_us, time_us
from ..problem import Problem

DEFAULT_COUNT = 8
ALIKE = 2
"""Candidates that differ in cluster and schedule alone, which the model tells apart least."""

Model = Callable[[Gemm, TileConfig], float]


class Work(NamedTuple):
    """The GEMMs of one of a spec's tiles, and what models them."""

    gemms: tuple[Gemm, ...]
    model: Model = time_us

    def us(self, tile: TileConfig) -> float:
        return sum(self.model(gemm, tile) for gemm in self.gemms)


def _even(gemm: Gemm, tile: TileConfig) -> float:
    return routed_us(gemm, tile, EVEN)


def works(problem: Problem) -> tuple[Work, ...]:
    """What each tile of a problem's spec does."""
    rows, experts, inner = problem.rows, problem.experts, problem.intermediate
    if problem.op == "grouped_wgrad":  # groups of N rows; the contraction is what is ragged
        depth = max(rows // experts, 1)
        return (Work(tuple(Gemm(experts * n, experts, k, depth, k) for n, k in problem.weights), _even),)
    if problem.op == "grouped_dglu":
        dm = Gemm(rows, experts, inner, problem.in_features, inner + 2 * problem.w1_rows)
        dx = Gemm(rows, experts, problem.out_features, problem.w1_rows, problem.out_features)
        return (Work((dm,)), Work((dx,))) if problem.out_features else (Work((dm,)),)
    return tuple(Work((part.gemm,)) for part in problem.parts)


def spec_on(problem: Problem, tiles: tuple[TileConfig, ...], arch: str) -> Spec:
    """The problem's spec on its tiles. Raises SpecError."""
    spec = shipped_kernels.SPEC_OF[problem.op](problem, tiles[0], arch)
    if len(tiles) > 1 and isinstance(spec, GroupedMlpSpec):
        spec = dataclasses.replace(spec, fc2=dataclasses.replace(spec.fc2, tile=tiles[1]))
    elif len(tiles) > 1 and isinstance(spec, GroupedDgluSpec):
        spec = dataclasses.replace(spec, dgrad=tiles[1])
    validity.check(spec)
    return spec


def shipped(problem: Problem, arch: str) -> list[Spec]:
    """What ships for a problem, the dispatcher's choice first."""
    chosen = shipped_kernels.shipped_choice(problem, arch).spec
    if problem.op in shipped_kernels.ONE_TILE:
        return [chosen]
    configs = shipped_kernels.CONFIGS[arch]
    tiles = configs.WGRAD_TILES if problem.op == "grouped_wgrad" else configs.TILES
    others = (shipped_kernels.SPEC_OF[problem.op](problem, tile, arch) for tile in tiles)
    return list(dict.fromkeys([chosen, *others]))


def ranked(problem: Problem, arch: str) -> Iterator[Spec]:
    """Every valid spec of a problem, by its modelled time, the fastest first."""
    sorted_tiles = [
        sorted(((work.us(tile), tile) for tile in validity.all_tiles()), key=lambda timed: timed[0])
        for work in works(problem)
    ]
    for _, tiles in sorted(_combined(sorted_tiles), key=lambda timed: timed[0]):
        try:
            yield spec_on(problem, tiles, arch)
        except SpecError:
            continue


def _combined(tiles: list[list[tuple[float, TileConfig]]]) -> Iterable[tuple[float, tuple[TileConfig, ...]]]:
    for chosen in itertools.product(*tiles):
        yield sum(us for us, _ in chosen), tuple(tile for _, tile in chosen)


def _shape(spec: Spec) -> tuple[tuple[int, int], ...]:
    tiles = {GroupedMlpSpec: ("fc1", "fc2"), GroupedDgluSpec: ("tile", "dgrad")}.get(type(spec), ("tile",))
    found = [getattr(spec, name) for name in tiles if getattr(spec, name)]
    return tuple((tile.m, tile.n) for tile in (getattr(part, "tile", part) for part in found))


@functools.lru_cache(maxsize=256)
def candidates(problem: Problem, arch: str, count: int = DEFAULT_COUNT) -> tuple[Spec, ...]:
    """What ships, the dispatcher's choice first, then the `count` best others."""
    known = shipped(problem, arch)
    alike: Counter[tuple[tuple[int, int], ...]] = Counter()
    chosen: list[Spec] = []
    for spec in ranked(problem, arch):
        if len(chosen) == count:
            break
        if spec not in known and alike[_shape(spec)] < ALIKE:
            alike[_shape(spec)] += 1
            chosen.append(spec)
    return *known, *chosen
