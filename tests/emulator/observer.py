"""The interface through which a race check is told of every access and every synchronisation."""

from __future__ import annotations

from typing import Any

import numpy as np


class Observer:
    """Interface of observers; this class does nothing.

    Agents, which access memory:
        Unit: its warps' generic proxy. `unit.acting` are its active lanes, one for each place.
        _Copy: a cp.async, reported at its issue; its lanes likewise.
        Operation: one asynchronous copy or multiplication, of the async proxy.

    Spaces, in which places lie:
        "global": places are addresses, and `cta` is None.
        "shared": places are offsets in the CTA's shared memory.
        "tensor": places are lane * 512 + column, counted in words of 4 bytes.

    Things that are released and acquired:
        ("mbarrier", mbarrier, phase).
        NamedBarrier: a new object for each time that threads meet there.
        ("cluster", cluster, phase).
        Operation: released by its issuer, and acquired by itself when it begins; released when it is done, and acquired
            by the threads that wait for its group.
        ("grid", machine): all previous launches; released to let the next launch begin.
        ("init", mbarrier): only released.
        ("copies",): released to close a group of cp.async. ("copies", n): acquired to wait until n groups are pending
            (n None: no copies).
    """

    def read(self, space: str, cta: Any, places: np.ndarray, size: int, agent: Any) -> None:
        """Called before `agent` reads `size` bytes at each of `places`."""

    def write(self, space: str, cta: Any, places: np.ndarray, size: int, agent: Any) -> None:
        """Called before `agent` writes `size` bytes at each of `places`."""

    def atomic(self, space: str, cta: Any, places: np.ndarray, size: int, agent: Any) -> None:
        """Called before `agent` reads and writes each of `places` atomically."""

    def overwritten(self, agent: Any) -> None:
        """Called when lanes of `agent` stored different values to one place by one instruction."""

    def release(self, agent: Any, thing: Any) -> None:
        """Called when the earlier accesses of `agent` become visible to those that acquire `thing`."""

    def acquire(self, agent: Any, thing: Any) -> None:
        """Called when `agent` has waited for `thing`."""

    def fence(self, agent: Any, kind: str) -> None:
        """Called for fences and memory barriers; `kind` is the instruction with its modifiers."""

    def end(self, cta: Any) -> None:
        """Called when all threads of a cluster have exited, for each of its CTAs."""
