"""The ring of stages that cp.async fills (in the portable mainloop and the boundary's kernels).

Two warps each copy a part of every k-tile, and both read all parts.
"""

from __future__ import annotations

from .barriers import Machine

WARP = "warp"


def copies(n: int = 4, slots: int = 2, broken: str = "") -> Machine:
    """Model the ring.

    For each k-tile a warp waits for its own copies, meets the other warp at the barrier, fills the stage that was read
    before, and reads.

    broken: the fault to build in. "no wait": a warp does not wait for its own copies; "no barrier": it does not meet
    the other warp; "filled early": it fills the stage before the barrier.
    """
    made = Machine()
    landed = [made.pipeline("group", slots, full=1, empty=1, parts=2) for _ in range(2)]
    landed = [one._replace(first_cell=landed[0].first_cell) for one in landed]
    both = made.named("barrier")
    for part, mine in enumerate(landed):
        warp = made.role(WARP)
        for number in range(slots - 1):
            warp.send(mine, number, part)
        for number in range(n):
            upcoming = number + slots - 1
            if broken != "no wait":
                warp.await_full(mine, number)
            if broken == "filled early" and upcoming < n:
                warp.send(mine, upcoming, part)
            if broken != "no barrier":
                warp.sync(both)
            if broken != "filled early" and upcoming < n:
                warp.send(mine, upcoming, part)
            warp.use(mine, number)
    return made
