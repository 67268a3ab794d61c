"""How a GEMM goes through its tiles, and what it leaves out or lets go of. Plain Python: the host asks, too."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GemmPolicy:
    """
    tickets: clusters draw tickets for their tiles (schedule/tickets.py), where the host gives a counter and the
        contraction has at least MIN_TICKET_DEPTH columns; else tiles come in a fixed order.
    light_rows: groups of at most as many rows are light, and their tiles come between heavy ones (light_groups.py): two
        walks among the groups. 0: one walk, in the order of experts.
    evicts_weights: weights that are read once are the first to leave L2.
    skips_half_tiles: the MMAs of a tile's second half are left out where that has no rows.
    """

    tickets: bool = False
    light_rows: int = 0
    evicts_weights: bool = False
    skips_half_tiles: bool = False
