"""Sums over the columns of one token, which the threads of a CTA share. The order of additions is fixed."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..device.invariant import Invariant
from ..device.warps import WARP

BUFFERS = 2
ALIGNMENT = 16


class TokenSums(Invariant):
    """`count` sums over all threads of a CTA, for one token after the other.

    For each token, call `leave`, a barrier (sync_threads), then `total`. Use buffers 0 and 1 alternately. With two
    buffers, one barrier a token is enough: a thread writes to a buffer again only after the next barrier, and by then
    all threads have read the buffer.

    Attributes:
        smem: [count, warps, 2], at the start of dynamic shared memory.
        behind: the first free address after `smem`, aligned to 16 bytes.
    """

    def __init__(self, count: int, threads: int):
        self.count = count
        self.warps = threads // WARP
        smem = cute.arch.get_dyn_smem(Float32, alignment=ALIGNMENT)
        self.smem = cute.make_tensor(smem, cute.make_layout((count, self.warps, BUFFERS)))
        self.behind = (smem + self.num_bytes(count, threads) // 4).align(ALIGNMENT)

    @staticmethod
    def num_bytes(count: int, threads: int) -> int:
        """Return the bytes that the sums take at the start of shared memory."""
        return -(-count * (threads // WARP) * BUFFERS * 4 // ALIGNMENT) * ALIGNMENT

    @cute.jit
    def leave(self, values: cute.Tensor, buffer: Int32):
        """Sum each of the `count` values over the threads of a warp, and write the sums to shared memory.

        buffer: index of the buffer, 0 or 1.
        """
        thread, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(self.count):
            total = cute.arch.warp_reduction_sum(values[i])
            if thread % WARP == 0:
                self.smem[i, thread // WARP, buffer] = total

    @cute.jit
    def total(self, index: Int32, buffer: Int32) -> Float32:
        """Return sum number `index` over the CTA. Call it after the barrier that follows `leave`.

        buffer: index of the buffer, 0 or 1.
        """
        result = Float32(0.0)
        for warp in cutlass.range_constexpr(self.warps):
            result += self.smem[index, warp, buffer]
        return result
