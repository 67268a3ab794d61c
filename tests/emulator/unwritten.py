"""Reads of memory that nobody has written, by kernels in the emulator.

They are the reads that initcheck reports on a GPU, and TMA's.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from glulam.validate.guards import of_new_memory

from .machine import Machine
from .observer import Observer


class Unwritten(Observer):
    """Observer of the memory that torch.empty and similar functions make in the context `watching`.

    It takes the place of an emulator's `races`. A byte is unwritten until a kernel writes it, or torch writes any byte
    of its tensor.

    Attributes:
        found: numbers of bytes read before anybody wrote them, by (the kernel's name, the kind of reader). The kinds
            are Unit (the kernel's threads), _Copy (cp.async) and Operation (TMA).
    """

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str]] = Counter()
        self._kernel = ""
        self._starts: list[int] = []
        self._made: list[tuple[Tensor, np.ndarray]] = []  # for each start: the tensor, and which bytes are unwritten

    def watching(self) -> contextlib.AbstractContextManager[None]:
        return of_new_memory(self._watched)

    def _watched(self, made: Tensor) -> Tensor:
        if made.device.type == "cpu" and made.numel():
            storage = made.untyped_storage()
            at = bisect_right(self._starts, storage.data_ptr())
            self._starts.insert(at, storage.data_ptr())
            self._made.insert(at, (made.detach(), np.ones(storage.nbytes(), bool)))
        return made

    def launch(self, run: Machine, early: bool) -> None:
        """Take the name of a kernel that is about to run."""
        self._kernel = run.kernel.name

    def _touched(self, places: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (which bytes of a tensor are unwritten, indices of the accessed ones)."""
        owners = np.searchsorted(np.array(self._starts, np.uint64), places, "right").reshape(-1) - 1
        for owner in np.unique(owners[owners >= 0]).tolist():
            made, mask = self._made[owner]
            if made._version:
                mask[:] = False
            at = places.reshape(-1)[owners == owner].astype(np.int64) - self._starts[owner]
            yield mask, (at[at < mask.size, None] + np.arange(size)).reshape(-1)

    def read(self, space: str, cta: Any, places: np.ndarray, size: int, agent: Any) -> None:
        for mask, at in self._touched(places, size) if space == "global" else ():
            if count := int(mask[at].sum()):
                self.found[self._kernel, type(agent).__name__] += count

    def write(self, space: str, cta: Any, places: np.ndarray, size: int, agent: Any) -> None:
        for mask, at in self._touched(places, size) if space == "global" else ():
            mask[at] = False

    def atomic(self, space: str, cta: Any, places: np.ndarray, size: int, agent: Any) -> None:
        self.read(space, cta, places, size, agent)
        self.write(space, cta, places, size, agent)
