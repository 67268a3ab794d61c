"""A GEMM's compile-time choices: order of tiles, skipped work, cache policy. Plain Python, since host code also reads
them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GemmPolicy:
    """A GEMM's choices at compile time.

    Attributes:
        tickets: True: clusters take their tiles dynamically, by an atomic counter (schedule/tickets.py), if the host
            passes a counter and the contraction has at least MIN_TICKET_DEPTH columns. Otherwise each cluster has a
            fixed list of tiles.
        light_rows: groups of at most this many rows are light; their tiles are spread among the tiles of heavy groups
            (schedule/light_groups.py). 0: all tiles come in the order of experts.
        evicts_weights: True: weights that are read once get the L2 policy evict-first.
        skips_half_tiles: True: if the second half of a tile has no rows, its MMAs are skipped.
    """

    tickets: bool = False
    light_rows: int = 0
    evicts_weights: bool = False
    skips_half_tiles: bool = False
