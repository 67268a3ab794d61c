"""Group sizes (rows of each expert) of the two routings under which the tuner measures kernels.

The sizes are the same on every machine.
"""

from __future__ import annotations

import random

UNIFORM, DIRICHLET = "uniform", "dirichlet:0.5"
ROUTINGS = (UNIFORM, DIRICHLET)


def apportion(rows: int, weights: list[float]) -> list[int]:
    """Return whole numbers in proportion to `weights` that sum to `rows` (largest remainders first)."""
    total = sum(weights)
    shares = [rows * weight / total for weight in weights]
    sizes = [int(share) for share in shares]
    by_remainder = sorted(range(len(sizes)), key=lambda e: (sizes[e] - shares[e], e))
    for expert in by_remainder[: rows - sum(sizes)]:
        sizes[expert] += 1
    return sizes


def group_sizes(rows: int, experts: int, routing: str) -> list[int]:
    """Return the number of rows of each expert; they sum to `rows`. `routing`: one of ROUTINGS, else ValueError."""
    name, _, concentration = routing.partition(":")
    if name not in ("uniform", "dirichlet"):
        raise ValueError(f"tune: routing is {routing!r}; choose 'uniform' or 'dirichlet:0.5'")
    if name == "uniform":
        return apportion(rows, [1.0] * experts)
    rng = random.Random(f"{routing}-{experts}")
    return apportion(rows, [rng.gammavariate(float(concentration or 0.5), 1.0) for _ in range(experts)])
