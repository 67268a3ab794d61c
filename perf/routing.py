"""Number of rows of each expert, in plain Python with fixed seeds: the same sizes on every machine.

A routing is a name, or a name and its parameter: "zipf:1.5" is Zipf's law with the exponent 1.5.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable

from glulam.tuner.routing import apportion

from .cases import Case, LayerCase

Weights = Callable[[int, random.Random, float], list[float]]
LEAST_SHARE, MOST_SHARE = 1e-4, 0.98  # bounds of an expert's share of the tokens; nobody gets a token twice
SHARES = 10**6


def _shuffled(weights: list[float], rng: random.Random) -> list[float]:
    rng.shuffle(weights)
    return weights


def _token(experts: int, rng: random.Random, chosen: float) -> list[float]:
    return _shuffled([float(expert < chosen) for expert in range(experts)], rng)


ROUTINGS: dict[str, Weights] = {
    "uniform": lambda experts, rng, _: [1.0] * experts,
    "dirichlet": lambda experts, rng, concentration: [rng.gammavariate(concentration, 1.0) for _ in range(experts)],
    "zipf": lambda experts, rng, exponent: _shuffled([1.0 / rank**exponent for rank in range(1, experts + 1)], rng),
    "half-empty": lambda experts, rng, _: _token(experts, rng, -(-experts // 2)),
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


def routed(sizes: list[int]) -> dict[str, object]:
    """Return a record's fields: the largest group over the mean, and counts of empty and active experts."""
    mean, empty = sum(sizes) / len(sizes), sizes.count(0)
    skew = {"max_over_mean": max(sizes) / mean if mean else 0.0, "empty_experts": empty}
    return {"skew": skew, "active_experts": len(sizes) - empty}


def shares(case: LayerCase) -> list[float]:
    """Return each expert's probability of being among a token's choices, [experts]; the sum is top_k.

    The probabilities follow the routing's law, but none exceeds MOST_SHARE: the excess goes to the other experts.
    """
    weights = group_sizes(dataclasses.replace(case.mlp, rows=SHARES))
    found, rest, left = [0.0] * case.experts, set(range(case.experts)), float(case.top_k)
    while over := [e for e in rest if left * weights[e] > MOST_SHARE * sum(weights[r] for r in rest)]:
        for expert in over:
            found[expert] = MOST_SHARE
        left -= MOST_SHARE * len(over)
        rest -= set(over)
    whole = max(sum(weights[e] for e in rest), 1)
    for expert in rest:
        found[expert] = max(left * weights[expert] / whole, LEAST_SHARE)
    return found


def logit_offsets(case: LayerCase) -> list[float]:
    """Return offsets of the experts' logits (normal with scale 1) that make each expert's expected load its share.

    A token's K best logits lie above a threshold that hardly varies with the token. With the threshold at 0, a logit
    exceeds it with the probability asked for. The loads miss the shares by 1 to 5 % in sum, by less if K is large.
    """
    normal = statistics.NormalDist()
    return [normal.inv_cdf(share) for share in shares(case)]
