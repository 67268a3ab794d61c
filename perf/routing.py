"""How many rows each expert gets. Plain Python with fixed seeds: the same sizes on every machine."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from .cases import Case

DIRICHLET_CONCENTRATION = 0.5
ZIPF_EXPONENT = 1.0


def _uniform(experts: int, rng: random.Random) -> list[float]:
    return [1.0] * experts


def _dirichlet(experts: int, rng: random.Random) -> list[float]:
    return [rng.gammavariate(DIRICHLET_CONCENTRATION, 1.0) for _ in range(experts)]


def _zipf(experts: int, rng: random.Random) -> list[float]:
    weights = [1.0 / rank**ZIPF_EXPONENT for rank in range(1, experts + 1)]
    rng.shuffle(weights)
    return weights


def _one_expert(experts: int, rng: random.Random) -> list[float]:
    weights = [0.0] * experts
    weights[rng.randrange(experts)] = 1.0
    return weights


ROUTINGS: dict[str, Callable[[int, random.Random], list[float]]] = {
    "uniform": _uniform,
    "dirichlet": _dirichlet,
    "zipf": _zipf,
    "one": _one_expert,
}


def apportion(rows: int, weights: list[float]) -> list[int]:
    """Whole numbers in proportion to `weights` that sum to `rows` (largest remainders first)."""
    total = sum(weights)
    shares = [rows * weight / total for weight in weights]
    sizes = [int(share) for share in shares]
    by_remainder = sorted(range(len(sizes)), key=lambda e: (sizes[e] - shares[e], e))
    for expert in by_remainder[: rows - sum(sizes)]:
        sizes[expert] += 1
    return sizes


def group_sizes(case: Case) -> list[int]:
    """Rows of each expert, [experts]; they sum to `case.rows`. Raises ValueError on an unknown routing."""
    if case.routing not in ROUTINGS:
        raise ValueError(f"routing {case.routing!r} is not known; choose one of: {', '.join(ROUTINGS)}")
    rng = random.Random(f"{case.routing}-{case.experts}-{case.seed}")
    return apportion(case.rows, ROUTINGS[case.routing](case.experts, rng))


@dataclasses.dataclass(frozen=True)
class Skew:
    """How far a routing is from even: the largest group over the mean, and how many experts got no row."""

    max_over_mean: float
    empty_experts: int


def skew(sizes: list[int]) -> Skew:
    mean = sum(sizes) / len(sizes)
    return Skew(max(sizes) / mean if mean else 0.0, sizes.count(0))
