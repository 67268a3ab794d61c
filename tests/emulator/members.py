"""Warp instructions with a membermask, where each lane works with the lanes of its own mask.

PTX ISA, sections vote.sync, match.sync, redux.sync: a lane waits for all lanes of its mask, and must be one of them.
"""

from __future__ import annotations

import numpy as np

from .engines import EngineFault

LANES = np.arange(32, dtype=np.uint32)


def _by_warp(u, x):
    return np.broadcast_to(x, u.n).reshape(u.warps, 32)


def _bits(flags):
    """Convert bool [warps, ..., 32] to 32-bit words."""
    return (flags.astype(np.uint64) << LANES.astype(np.uint64)).sum(-1).astype(np.uint32)


def _named(u, mask):
    """Return bool [warps, lane, other lane]: True if the lane's mask contains the other lane."""
    return (_by_warp(u, mask)[:, :, None] >> LANES & np.uint32(1)).astype(bool)


def check(u, mask, m, op):
    """Raise EngineFault if a lane is not in its own mask, or if a mask names an inactive lane.

    Hardware would wait for the inactive lane.
    """
    here = _by_warp(u, True if m is True else m)
    mask = _by_warp(u, mask)
    missing = mask & ~_bits(here)[:, None]
    own = mask >> LANES & np.uint32(1)
    if (missing[here] != 0).any():
        raise EngineFault(f"{op}: lanes {hex(int(missing[here].max()))} of the membermask are not here")
    if not own[here].all():
        raise EngineFault(f"{op}: a lane that its own membermask does not name")


def vote(u, mode, p, mask):
    named, p = _named(u, mask), _by_warp(u, p)[:, None, :]
    if mode == "ballot":
        return _bits(named & p).reshape(-1)
    return ((named & p).any(2) if mode == "any" else (~named | p).all(2)).reshape(-1)


def match_any(u, a, mask):
    a = _by_warp(u, a)
    return _bits(_named(u, mask) & (a[:, :, None] == a[:, None, :])).reshape(-1)


_REDUCE = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
           "xor": np.bitwise_xor}  # fmt: skip


def redux(u, operation, a, mask):
    """Reduce over the lanes of each lane's mask; sums wrap around."""
    a = _by_warp(u, a)
    others = np.broadcast_to(a[:, None, :], (u.warps, 32, 32))
    limit = np.iinfo(a.dtype)
    neutral = {"add": 0, "or": 0, "xor": 0, "min": limit.max, "max": limit.min, "and": limit.max}[operation]
    chosen = np.where(_named(u, mask), others, a.dtype.type(neutral))
    return _REDUCE[operation].reduce(chosen, axis=2, dtype=a.dtype).reshape(-1)
