"""Copies from global to shared memory that run while a thread goes on: bytes under way that no registers hold."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from ..device.invariant import Invariant
from ..device.vectors import VECTOR_BYTES, shared_at


class AsyncCopy(Invariant):
    """Copies of `words` 32-bit words, 2 or 4. A thread's copies form groups, closed by `commit` and done in order.

    `is_shared`: other warps of the SM read the same, so that the L1 cache should keep it.
    """

    def __init__(self, words: int, is_shared: bool = False):
        self.words = words
        # Other whole vectors pass by the L1 cache, which has no use for what is read once.
        modes = cpasync.LoadCacheMode
        mode = modes.GLOBAL if words * 4 == VECTOR_BYTES and not is_shared else modes.ALWAYS
        self.atom = cute.make_copy_atom(cpasync.CopyG2SOp(mode), Int32, num_bits_per_copy=32 * words)

    def start(self, source: cute.Tensor, target: cute.Pointer) -> None:
        """`source`: words in global memory; `target`: where in shared memory they go, aligned to their size."""
        cute.copy(self.atom, source, shared_at(Int32, target, self.words))

    @staticmethod
    def commit() -> None:
        cute.arch.cp_async_commit_group()

    @staticmethod
    def wait(pending: int) -> None:
        """Until at most so many of this thread's groups are under way."""
        cute.arch.cp_async_wait_group(pending)
