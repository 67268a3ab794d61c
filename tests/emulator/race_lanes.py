"""Races between lanes of one warp: two accesses to one place that no synchronisation of the lanes orders.

`race_memory` checks accesses between warps. Here each granule records the last writer and the last reader, as agent
number << NUMBER | clock << CLOCK | lane. Granules of a piece of memory are 16 bytes as long as all its accesses are
whole granules, else 4, else 1.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np

from .race_agents import SHIFT, Warp

CLOCK, NUMBER = 7, 39
LANE, SEVERAL, STRONG = 31, 32, 64
"""Bits of a granule's owner: its lane; several lanes, or all lanes of an ldmatrix; an atomic or relaxed access."""
WHOLE, COPIES, LONE = range(3)
"""A warp's agents, with consecutive numbers: its lanes, their cp.async copies, and a lane that acts alone."""
STEPS = (16, 4, 1)


class Unsynchronised(Exception):
    """Raised for a race between two lanes of a warp.

    Attributes:
        offset: the offset in the piece of memory.
        epoch: the earlier access's epoch.
        was_read: True: the earlier access was a read.
    """

    def __init__(self, offset: int, epoch: int, was_read: bool) -> None:
        super().__init__()
        self.offset, self.epoch, self.was_read = offset, epoch, was_read


class Lanes:
    """The lanes that execute an instruction.

    Args:
        warps: their warps.
        which: for each lane, its warp's index in `warps`.
        lane: for each lane, its bits in a granule's record.
    """

    def __init__(self, warps: list[Warp], which: np.ndarray, lane: np.ndarray, agent: int, is_strong: bool) -> None:
        first = np.array([warp.number for warp in warps], np.int64)[which] << NUMBER
        now = np.array([warp.copies if agent == COPIES else warp.now for warp in warps], np.int64)[which]
        self.is_strong = is_strong
        self.lane, self.first = lane[:, None], first[:, None]
        self.owner = (first + (agent << NUMBER) + (now << CLOCK) | lane | (STRONG if is_strong else 0))[:, None]
        self.ordered = np.array([warp.lanes_know for warp in warps], np.int64)[which]

    def of(self, here: Any) -> Lanes:
        """Return a subset of the lanes."""
        if isinstance(here, slice):
            return self
        some = copy(self)
        for name in ("lane", "first", "owner", "ordered"):
            setattr(some, name, getattr(self, name)[here])
        return some


class LaneShadow:
    """Last writers and readers of the granules of a piece of memory of `size` bytes."""

    def __init__(self, size: int) -> None:
        self._step = STEPS[0]
        self._wrote, self._read = (np.zeros((size + 15) // 16, np.int64) for _ in range(2))

    def access(self, lanes: Lanes, writes: bool, at: np.ndarray, size: int) -> None:
        """Check and record accesses of `size` bytes at each offset; raise Unsynchronised for a race."""
        if size % self._step:
            self._refine(4 if size % 4 == 0 else 1)
        index = at[:, None] // self._step
        if size > self._step:
            index = index + np.arange(size // self._step)
        self._check(lanes, self._wrote, index, False)
        if writes:
            self._check(lanes, self._read, index, True)
            self._wrote[index] = lanes.owner
        elif not lanes.is_strong:
            old = self._read[index]
            others = (old >> CLOCK == lanes.owner >> CLOCK) & (old != lanes.owner)
            self._read[index] = np.where(others, lanes.owner | SEVERAL, lanes.owner)
            self._read[index[(self._read[index] | SEVERAL) != (lanes.owner | SEVERAL)]] |= SEVERAL

    def _check(self, lanes: Lanes, owners: np.ndarray, index: np.ndarray, were_reads: bool) -> None:
        old = owners[index]
        agent = old - lanes.first >> NUMBER
        suspect = (agent >= WHOLE) & (agent <= LONE) & ((old & (LANE | SEVERAL)) != lanes.lane)
        if lanes.is_strong:
            suspect &= old & STRONG == 0
        if not suspect.any():
            return
        clock = old >> CLOCK & 0xFFFFFFFF
        suspect &= clock > np.take_along_axis(lanes.ordered, agent.clip(WHOLE, LONE), 1)
        if suspect.any():
            at = tuple(np.argwhere(suspect)[0])
            epoch = int(old[at] >> NUMBER) << SHIFT | int(clock[at])
            raise Unsynchronised(int(index[at]) * self._step, epoch, were_reads)

    def _refine(self, step: int) -> None:
        if step < self._step:
            self._wrote, self._read = (owners.repeat(self._step // step) for owners in (self._wrote, self._read))
            self._step = step
