"""Group sizes as life and malice make them."""

from __future__ import annotations

import itertools
import random


def spread(rows: int, experts: int) -> list[int]:
    """As even as it goes."""
    return [rows // experts + (e < rows % experts) for e in range(experts)]


def zipf(rows: int, experts: int, seed: int = 0) -> list[int]:
    """Popularity 1/rank, ranks shuffled."""
    chance = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(experts)]
    chance.shuffle(weights)
    picks = chance.choices(range(experts), weights, k=rows)
    return [picks.count(e) for e in range(experts)]


def one_takes_all(rows: int, experts: int, winner: int) -> list[int]:
    return [rows if e == winner else 0 for e in range(experts)]


def with_empty(rows: int, experts: int, empty: set[int]) -> list[int]:
    """Even over all but the `empty` experts."""
    sizes = iter(spread(rows, experts - len(empty)))
    return [0 if e in empty else next(sizes) for e in range(experts)]


def catalogue(rows: int, experts: int) -> dict[str, list[int]]:
    """Every routing that an operator must survive, by name. At least 4 experts. Sums are at most `rows`."""
    return {
        "uniform": spread(rows, experts),
        "zipf": zipf(rows, experts),
        "one_takes_all": one_takes_all(rows, experts, experts // 2),
        "empty_first": with_empty(rows, experts, {0}),
        "empty_middle": with_empty(rows, experts, {1, 2}),
        "empty_last": with_empty(rows, experts, {experts - 1}),
        "all_empty": [0] * experts,
        "one_row": one_takes_all(1, experts, experts - 1),
        "ragged": [min(1 + 37 * e, rows // experts) for e in range(experts)],
    }


def ends(sizes: list[int]) -> list[int]:
    return list(itertools.accumulate(sizes))
