"""Turn: a lock with which only one thread at a time runs operations of an ExpertParallel."""

from __future__ import annotations

import threading

SHARED = (
    "ExpertParallel: two threads used one object at once, and other ranks may have served theirs in another order; "
    "make an object for each thread, and new ones on all ranks"
)


class Turn:
    """A re-entrant lock as a context. A thread that enters while another thread holds it gets a RuntimeError.

    Attributes:
        was_shared: True after a second thread has tried to enter; the ExpertParallel is then unusable.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.was_shared = False

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.was_shared = True
            raise RuntimeError(SHARED)

    def __exit__(self, *_: object) -> None:
        self._lock.release()
