"""A GEMM's compile-time choices: order of tiles, skipped work, cache policy. Plain Python, since host code reads them,
too."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GemmPolicy:
    """A GEMM's choices at compile time.

    Attributes:
        tickets: clusters take their tiles dynamically, by an atomic counter (schedule/tickets.py), if the host passes a
            counter and the contraction has at least MIN_TICKET_DEPTH columns; otherwise each has a fixed list of tiles.
        light_rows: groups of at most this many rows are light; their tiles are spread among the tiles of heavy groups
            (schedule/light_groups.py). 0: all tiles come in the order of experts.
        evicts_weights: weights that are read once get the L2 policy evict-first.
        skips_half_tiles: the MMAs of a tile's second half are skipped if that half has no rows.
    """

    tickets: bool = False
    light_rows: int = 0
    evicts_weights: bool = False
    skips_half_tiles: bool = False
