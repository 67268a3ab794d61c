"""Group sizes, from usual to extreme."""

from __future__ import annotations

import itertools
import random


def spread(rows: int, experts: int) -> list[int]:
    """Return group sizes as even as possible."""
    return [rows // experts + (e < rows % experts) for e in range(experts)]


def zipf(rows: int, experts: int, seed: int = 0) -> list[int]:
    """Return random group sizes for popularity 1/rank, with shuffled ranks."""
    chance = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(experts)]
    chance.shuffle(weights)
    picks = chance.choices(range(experts), weights, k=rows)
    return [picks.count(e) for e in range(experts)]


def one_takes_all(rows: int, experts: int, winner: int) -> list[int]:
    return [rows if e == winner else 0 for e in range(experts)]


def with_empty(rows: int, experts: int, empty: set[int]) -> list[int]:
    """Return even group sizes over all experts except those in `empty`."""
    sizes = iter(spread(rows, experts - len(empty)))
    return [0 if e in empty else next(sizes) for e in range(experts)]


def catalogue(rows: int, experts: int) -> dict[str, list[int]]:
    """Return all routings that operators must handle, by name.

    Sums of group sizes are at most `rows`; there are at least 4 experts.
    """
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


ODD_SIZES: dict[str, tuple[list[int], int, int]] = {
    "smallest": ([3, 0, 5], 8, 32),
    "narrow and deep": ([70, 3], 4096, 32),
    "wide and shallow": ([70, 200], 8, 2080),
    "one expert": ([777], 200, 352),
    "one row": ([1], 200, 352),
    "bands of row tiles, odd and short ones": ([2049, 65, 64, 4160, 128, 2400], 72, 352),
    "512 experts": (zipf(1000, 512), 72, 96),
    "512 experts, many rows": (spread(512 * 66 + 5, 512), 72, 96),
    "512 experts, one takes all": (one_takes_all(555, 512, 511), 72, 96),
    "512 experts, all empty": ([0] * 512, 72, 96),
    "no rows at all": ([0, 0, 0], 200, 352),
}
"""Group sizes with H and I that reach the edges of a kernel's tiles, by name."""
