"""The seam for a race check: one object that hears of every access and of every synchronisation."""

from __future__ import annotations

from typing import Any

import numpy as np


class Observer:
    """Hears of accesses and synchronisation; does nothing by itself.

    Agents: a Unit (its warps' generic proxy; `unit.acting`: its lanes that act, one for each place); a _Copy (cp.async,
    told when it is issued; likewise); or an Operation (one asynchronous copy or multiplication: async proxy).
    Spaces: "global", where places are addresses and `cta` is None; "shared", where places are offsets in the CTA's
    shared memory; "tensor", where places are lane * 512 + column, counted in words of 4 bytes.
    Things that are released and acquired: ("mbarrier", mbarrier, phase); a NamedBarrier, one object for each time
    that threads meet there; ("cluster", cluster, phase); an Operation, released by its issuer, acquired by itself,
    released when it is done and acquired by who waits for its group; ("grid", machine), the launches before this one,
    released to let the next one begin; ("init", mbarrier), released only; ("copies",), released to close a group of
    cp.async, and ("copies", n), acquired to wait until n are under way, n None for all copies.
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
        """Called when what `agent` did becomes known through `thing`."""

    def acquire(self, agent: Any, thing: Any) -> None:
        """Called when `agent` has waited for `thing`."""

    def fence(self, agent: Any, kind: str) -> None:
        """Called for fences and memory barriers; `kind` is the instruction with its modifiers."""

    def end(self, cta: Any) -> None:
        """Called when all threads of a cluster have exited, for each of its CTAs."""
