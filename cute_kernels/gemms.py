"""The order of a GEMM's tiles, the work that it skips, and its cache policy. Plain Python, since the host asks, too."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GemmPolicy:
    """A GEMM's choices at compile time.

    tickets: clusters draw tickets for their tiles (schedule/tickets.py) if the host gives a counter and the contraction
        has at least MIN_TICKET_DEPTH columns; otherwise tiles come in a fixed order.
    light_rows: groups of at most this many rows are light, and their tiles come between the tiles of heavy groups
        (schedule/light_groups.py). 0: all tiles come in the order of experts.
    evicts_weights: weights that are read once are the first to leave L2.
    skips_half_tiles: the MMAs of a tile's second half are skipped if that half has no rows.
    """

    tickets: bool = False
    light_rows: int = 0
    evicts_weights: bool = False
    skips_half_tiles: bool = False
