"""Sinkhorn normalisation of n x n matrices by a warp, in DeepSeek-V4.1's order. The steps are: softmax of each row, +
eps; divide columns by their sums + eps; then rows and columns alternately.

n is a power of two with n^2 <= 32. Each lane holds one element, so each group of n^2 neighbouring lanes holds a matrix.
The groups hold either different matrices or copies of the same matrix, so that all lanes take part in the shuffles.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..device.invariant import Invariant


def total(value: Float32, distances: tuple[int, ...]) -> Float32:
    """Return the sum of `value` over a group of lanes. The group is this lane and all lanes whose index differs from
    its index only in bits of `distances` (powers of two).

    All lanes of the group get the same result, bit by bit.
    """
    for distance in distances:
        value = value + cute.arch.shuffle_sync_bfly(value, distance)
    return value


class Balance(Invariant):
    """Sinkhorn normalisation of n x n matrices that a warp holds, one element a lane: forward and backward.

    Attributes:
        rows: bits of the lane index in which the elements of one row differ.
        columns: bits of the lane index in which the elements of one column differ.
    """

    def __init__(self, n: int):
        self.n = n
        self.rows = tuple(1 << bit for bit in range(n.bit_length() - 1))
        self.columns = tuple(n * bit for bit in self.rows)

    def softmax(self, logit: Float32) -> Float32:
        """Return the softmax of the lane's logit over its row."""
        largest = logit
        for distance in self.rows:
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, distance))
        value = cute.math.exp(logit - largest, fastmath=True)
        return value * cute.arch.rcp_approx(total(value, self.rows))

    def step(self, m: Float32, distances: tuple[int, ...], eps: Float32) -> Float32:
        """Return the lane's element m, divided by eps + the sum of its row or of its column.

        distances: self.rows for rows, self.columns for columns.
        """
        return m * cute.arch.rcp_approx(total(m, distances) + eps)

    @cute.jit
    def forward(self, logit: Float32, iters: Int32, eps: Float32) -> Float32:
        """Return the lane's element of the normalised matrix, computed from its logit.

        Args:
            iters: number of times that columns are normalised.
            eps: added to each sum, and to the softmax.
        """
        m = self.step(self.softmax(logit) + eps, self.columns, eps)
        for _ in cutlass.range(iters - 1):
            m = self.step(self.step(m, self.rows, eps), self.columns, eps)
        return m

    @cute.jit
    def backward(self, d: Float32, logit: Float32, iters: Int32, eps: Float32, steps: cute.Tensor) -> Float32:
        """Return the gradient of the lane's logit.

        With H = gradient * M, elementwise, a step M' = M / (sum M + eps) of forward becomes H = H' - M' sum H' in
        backward; the sums are over a row or column.

        Args:
            d: the gradient of the lane's element of the result.
            logit: the lane's logit, as in forward.
            iters: number of times that forward normalises columns.
            eps: added to each sum, and to the softmax.
            steps: float32 [iters, 2, 32] in shared memory, for this warp alone. Backward computes forward's steps
                again, and overwrites `steps` with each lane's element after each step.
        """
        lane = cute.arch.lane_idx()
        shares = self.softmax(logit)
        begin = shares + eps
        m = self.step(begin, self.columns, eps)
        for k in cutlass.range(iters - 1):
            steps[lane, 0, k] = m
            m = self.step(m, self.rows, eps)
            steps[lane, 1, k] = m
            m = self.step(m, self.columns, eps)
        h = d * m
        for done in cutlass.range(iters - 1):
            k = iters - 2 - done
            h = h - m * total(h, self.columns)
            h = h - steps[lane, 1, k] * total(h, self.rows)
            m = steps[lane, 0, k]
        h = h - m * total(h, self.columns)
        d_shares = h / begin
        return shares * (d_shares - total(shares * d_shares, self.rows))
