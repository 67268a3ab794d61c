"""Choose the specs to measure for a problem: the shipped ones, and of all others the fastest in the cost model.

A spec has one tile configuration (`TileConfig`) for each GEMM kernel that it launches. A grouped_mlp has two, for FC1
and FC2. A grouped_dglu has one, or two if the data gradient follows. A grouped_wgrad has one, which serves the
gradients of all weights of the problem. A spec's time is the sum of the times of all these GEMMs.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from cute_kernels.arch import Gemm, policy_of
from cute_kernels.specs import GroupedDgluSpec, GroupedMlpSpec, Spec
from cute_kernels.tiles import SpecError, TileConfig

from ..choose import specs
from ..choose.problem import Problem
from ..choose.shipped import shipped_specs, spec_on

DEFAULT_COUNT = 8
ALIKE = 2
"""Largest number of candidates that differ only in cluster and schedule: the model distinguishes those least."""

Model = Callable[[Gemm, TileConfig], float]


class Work(NamedTuple):
    """The GEMMs that run on one of a spec's tiles, and the cost model for their time."""

    gemms: tuple[Gemm, ...]
    model: Model

    def us(self, tile: TileConfig) -> float:
        return sum(self.model(gemm, tile) for gemm in self.gemms)


def works(problem: Problem, arch: str) -> tuple[Work, ...]:
    """Return one Work for each tile that a spec for this problem has, in the order of `tiles_of`."""
    here, rows, experts, inner = policy_of(arch), problem.rows, problem.experts, problem.intermediate
    if problem.op == "grouped_wgrad":  # groups have N rows each; the contraction is ragged
        depth = max(rows // experts, 1)
        return (Work(tuple(Gemm(experts * n, experts, k, depth, k) for n, k in problem.weights), here.even_us),)
    if problem.op == "grouped_dglu":
        dm = Gemm(rows, experts, inner, problem.in_features, inner + 2 * problem.w1_rows)
        dx = Gemm(rows, experts, problem.out_features, problem.w1_rows, problem.out_features)
        return tuple(Work((gemm,), here.time_us) for gemm in ((dm, dx) if problem.out_features else (dm,)))
    return tuple(Work((part.gemm,), here.time_us) for part in problem.parts)


def ranked(problem: Problem, arch: str) -> Iterator[Spec]:
    """Yield every valid spec for a problem, the fastest in the cost model first."""
    if problem.operands != "16bit":  # kernels that decode weights exist only with shipped tiles
        return
    timed = [[(work.us(tile), tile) for tile in policy_of(arch).all_tiles(16)] for work in works(problem, arch)]
    for chosen in sorted(itertools.product(*timed), key=lambda chosen: sum(us for us, _ in chosen)):
        try:
            spec = spec_on(problem, arch, *(tile for _, tile in chosen))
            specs.check(spec)
        except SpecError:
            continue
        yield spec


def tiles_of(spec: Spec) -> list[TileConfig]:
    """Return the tiles of a spec, in the order of `works`."""
    if isinstance(spec, GroupedMlpSpec):
        return [spec.fc1.tile, spec.fc2.tile]
    if isinstance(spec, GroupedDgluSpec) and spec.dgrad:
        return [spec.tile, spec.dgrad]
    return [spec.tile]  # type: ignore[union-attr]


@functools.lru_cache(maxsize=256)
def candidates(problem: Problem, arch: str, count: int = DEFAULT_COUNT) -> tuple[Spec, ...]:
    """Return the specs to measure: first the shipped ones, the default choice leading, then others by modelled time.

    Args:
        count: largest number of specs besides the shipped ones.
    """
    known = shipped_specs(problem, arch)
    alike: Counter[tuple[tuple[int, int], ...]] = Counter()
    chosen: list[Spec] = []
    for spec in ranked(problem, arch) if count else ():
        shape = tuple((tile.m, tile.n) for tile in tiles_of(spec))
        if spec not in known and alike[shape] < ALIKE:
            alike[shape] += 1
            chosen.append(spec)
        if len(chosen) == count:
            break
    return *known, *chosen


def rough_us(problem: Problem, arch: str) -> float:
    """Return the modelled time, in microseconds, of the kernel that is shipped for a problem."""
    tiles = tiles_of(candidates(problem, arch, 0)[0])
    return sum(work.us(tile) for work, tile in zip(works(problem, arch), tiles, strict=True))
