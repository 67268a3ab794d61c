"""How many rows each expert gets. Plain Python with fixed seeds: the same sizes on every machine.

A routing is a name, or a name and its parameter: "zipf:1.5" is Zipf's law with the exponent 1.5.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from glulam.tuner.routing import apportion as apportion

from .cases import Case

Weights = Callable[[int, random.Random, float], list[float]]


def _uniform(experts: int, rng: random.Random, _: float) -> list[float]:
    return [1.0] * experts


def _dirichlet(experts: int, rng: random.Random, concentration: float) -> list[float]:
    return [rng.gammavariate(concentration, 1.0) for _ in range(experts)]


def _zipf(experts: int, rng: random.Random, exponent: float) -> list[float]:
    weights = [1.0 / rank**exponent for rank in range(1, experts + 1)]
    rng.shuffle(weights)
    return weights


def _one_expert(experts: int, rng: random.Random, _: float) -> list[float]:
    weights = [0.0] * experts
    weights[rng.randrange(experts)] = 1.0
    return weights


def _token(experts: int, rng: random.Random, chosen: float) -> list[float]:
    weights = [float(expert < chosen) for expert in range(experts)]
    rng.shuffle(weights)
    return weights


def _half_empty(experts: int, rng: random.Random, _: float) -> list[float]:
    return _token(experts, rng, -(-experts // 2))


ROUTINGS: dict[str, Weights] = {
    "uniform": _uniform,
    "dirichlet": _dirichlet,
    "zipf": _zipf,
    "one": _one_expert,
    "half-empty": _half_empty,
    "token": _token,
}
PARAMETERS = {"dirichlet": 0.5, "zipf": 1.0, "token": 8.0}  # where a routing names none


def _parameter(routing: str, name: str, text: str) -> float:
    if not text:
        return PARAMETERS.get(name, 0.0)
    if name not in PARAMETERS:
        raise ValueError(f"routing {routing!r}: {name} has no parameter; leave it at {name!r}")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"routing {routing!r}: {text!r} is not a number, as in '{name}:{PARAMETERS[name]}'") from None


def group_sizes(case: Case) -> list[int]:
    """Rows of each expert, [experts]; they sum to `case.rows`. Raises ValueError on an unknown routing."""
    name, _, text = case.routing.partition(":")
    if name not in ROUTINGS:
        raise ValueError(f"routing {case.routing!r} is not known; choose one of: {', '.join(ROUTINGS)}")
    rng = random.Random(f"{name}-{case.experts}-{case.seed}")
    return apportion(case.rows, ROUTINGS[name](case.experts, rng, _parameter(case.routing, name, text)))


@dataclasses.dataclass(frozen=True)
class Skew:
    """How far a routing is from even: the largest group over the mean, and how many experts got no row."""

    max_over_mean: float
    empty_experts: int


def skew(sizes: list[int]) -> Skew:
    mean = sum(sizes) / len(sizes)
    return Skew(max(sizes) / mean if mean else 0.0, sizes.count(0))
