"""Sums over a token's columns, across the threads of its CTA, in a fixed order."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..device.invariant import Invariant

WARP = 32
BUFFERS = 2
ALIGNMENT = 16


class TokenSums(Invariant):
    """`count` sums of a CTA's threads. Two buffers in turns, so that one barrier a token is enough: `leave`, a barrier,
    `total`; by the time that a buffer is written again, all have passed the next barrier, and so have read it.
    """

    def __init__(self, count: int, threads: int):
        self.count = count
        self.warps = threads // WARP
        smem = cute.arch.get_dyn_smem(Float32, alignment=ALIGNMENT)
        self.smem = cute.make_tensor(smem, cute.make_layout((count, self.warps, BUFFERS)))
        self.behind = (smem + self.num_bytes(count, threads) // 4).align(ALIGNMENT)

    @staticmethod
    def num_bytes(count: int, threads: int) -> int:
        """Of shared memory, from its start; what is `behind` is free, and aligned."""
        return -(-count * (threads // WARP) * BUFFERS * 4 // ALIGNMENT) * ALIGNMENT

    @cute.jit
    def leave(self, values: cute.Tensor, buffer: Int32):
        """Each thread's values, summed over its warp, for the others to see."""
        thread, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(self.count):
            total = cute.arch.warp_reduction_sum(values[i])
            if thread % WARP == 0:
                self.smem[i, thread // WARP, buffer] = total

    @cute.jit
    def total(self, index: Int32, buffer: Int32) -> Float32:
        """One sum over the CTA's warps."""
        result = Float32(0.0)
        for warp in cutlass.range_constexpr(self.warps):
            result += self.smem[index, warp, buffer]
        return result
