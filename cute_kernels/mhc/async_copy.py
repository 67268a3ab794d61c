"""Asynchronous copies (cp.async) from global to shared memory. They need no registers, and the thread continues while
they run."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from ..device.invariant import Invariant
from ..device.vectors import VECTOR_BYTES, shared_at


class AsyncCopy(Invariant):
    """Asynchronous copies of 2 or 4 32-bit words each. `start` starts a copy; `commit` closes a group of the thread's
    copies. Groups complete in order.

    Args:
        words: 32-bit words of a copy, 2 or 4.
        is_shared: True if other warps of the SM read the same words, so that the L1 cache should keep them.
    """

    def __init__(self, words: int, is_shared: bool = False):
        self.words = words
        # Whole vectors that are read only once bypass the L1 cache.
        modes = cpasync.LoadCacheMode
        mode = modes.GLOBAL if words * 4 == VECTOR_BYTES and not is_shared else modes.ALWAYS
        self.atom = cute.make_copy_atom(cpasync.CopyG2SOp(mode), Int32, num_bits_per_copy=32 * words)

    def start(self, source: cute.Tensor, target: cute.Pointer) -> None:
        """Start a copy of `words` 32-bit words from `source` in global memory to `target` in shared memory. `target` is
        aligned to the size of the copy."""
        cute.copy(self.atom, source, shared_at(Int32, target, self.words))

    @staticmethod
    def commit() -> None:
        cute.arch.cp_async_commit_group()

    @staticmethod
    def wait(pending: int) -> None:
        """Wait until at most `pending` of this thread's groups are still being copied."""
        cute.arch.cp_async_wait_group(pending)


@cute.jit
def stage_before(stage: Int32, stages: cutlass.Constexpr[int]) -> Int32:
    """Return the index of the stage before `stage` in a ring of `stages` stages. Pipelines fill this stage while
    `stage` is used."""
    before = stage - 1
    if stage == 0:
        before = Int32(stages - 1)
    return before


@cute.jit
def stage_after(stage: Int32, stages: cutlass.Constexpr[int]) -> Int32:
    """Return the index of the stage after `stage` in a ring of `stages` stages."""
    after = stage + 1
    if after == stages:
        after = Int32(0)
    return after
