"""Sinkhorn normalisation of small n x n matrices and its gradient; each thread handles one matrix.

l are the logits, and M0 = exp(l - rowmax). The matrix after every step is M = diag(u) M0 diag(v), so the 2n factors u
and v describe a step completely. Backward computes the factors of all iterations again and keeps them in shared memory
(in registers, 20 iterations would be 160 numbers). Then it goes through the steps in reverse.

A line is a row in one step, a column in the next. Let H = gradient * M, elementwise. Then a step M' = M / (sum M + eps)
of forward becomes H = H' - M' sum H' in backward, with sums over a line. Backward does not keep H but Q, where H = Q M0
elementwise. In terms of Q, a step subtracts from each line of Q the same line of u v^T times the sum of M0 Q' over the
line. This takes 9 operations for a line of 4. It uses the factors as they are, so rounding errors do not add up, and no
matrix is stored.

If all logits of a column lie far below their rows' maxima, the column would underflow in float32. So each column of M0
is divided by its largest element, exp(peak), and its factor in v begins at exp(peak) instead of at 1. If the peak is
below DEEPEST, float32 cannot hold this factor either. While a column is that small, its sum is negligible beside eps,
so each iteration multiplies the column by 1 / eps. Such a column "sleeps", with factor 0, until enough iterations have
raised it above DEEPEST.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.gmem import UNBOUNDED
from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.select import select
from ..device.vectors import load_params, store_params
from ..specs import MhcSpec
from ..tracing import DTYPES, Traced, traced

# One warp a CTA: 32768 matrices are 8 CTAs an SM, and a CTA's factors are small enough for all of them at once.
THREADS = 32
DEEPEST = -80.0
"""Natural logarithm of the least factor with which a column takes part. The factor is 2e-35; products with it still fit
into float32."""
LEAST_EPS = 1e-30
"""The least eps with which columns sleep (see above). A smaller eps would not exceed the sum of a sleeping column; with
such an eps, peaks below DEEPEST are raised to DEEPEST instead."""
LOWEST = -3e38
"""The peak that a column of -inf gets instead of -inf, so that its elements stay 0."""
NEVER = 1e6
"""A number of iterations that no call reaches."""


class Start(NamedTuple):
    """A thread's matrix before the first iteration: m0 diag(first). Columns that sleep (see above) have factor 0
    instead of `first`.

    Attributes:
        m0: [n, n] row-major; the largest element of each row and of each column is 1.
        first: [n], the factor of each column when it begins to take part.
        sleep: Int32 [n], the iterations after which a column begins to take part; 0: at once.
    """

    m0: cute.Tensor
    first: cute.Tensor
    sleep: cute.Tensor

    def factors(self, n: int) -> tuple[cute.Tensor, cute.Tensor]:
        """Return the factors u and v before the first iteration."""
        u, v = (cute.make_rmem_tensor(n, Float32) for _ in range(2))
        u.fill(1.0)
        for j in range(n):
            v[j] = select(self.sleep[j] == 0, self.first[j], Float32(0.0))
        return u, v

    def longest_sleep(self, n: int) -> Int32:
        """Return the number of iterations after which all columns take part."""
        longest = self.sleep[0]
        for j in range(1, n):
            longest = cutlass.max(longest, self.sleep[j])
        return longest


def _start(logits: cute.Tensor, eps: Float32, n: int) -> Start:
    """Return the state before the first iteration: exp(logits - rowmax), with each column divided by its largest
    element. Columns that are too small are put to sleep."""
    m0, first = cute.make_rmem_tensor(n * n, Float32), cute.make_rmem_tensor(n, Float32)
    sleep = cute.make_rmem_tensor(n, Int32)
    for i in range(n):
        largest = logits[i * n]
        for j in range(1, n):
            largest = cute.arch.fmax(largest, logits[i * n + j])
        for j in range(n):
            m0[i * n + j] = logits[i * n + j] - largest
    peaks, lowest = cute.make_rmem_tensor(n, Float32), Float32(0.0)
    for j in range(n):
        peak = m0[j]
        for i in range(1, n):
            peak = cute.arch.fmax(peak, m0[i * n + j])
        peaks[j] = cute.arch.fmax(peak, Float32(LOWEST))
        lowest = cute.arch.fmin(lowest, peaks[j])
        for i in range(n):
            m0[i * n + j] = cute.math.exp(m0[i * n + j] - peaks[j], fastmath=True)
        first[j] = cute.math.exp(cute.arch.fmax(peaks[j], Float32(DEEPEST)), fastmath=True)
    sleep.fill(0)
    _put_to_sleep(first, sleep, peaks, lowest, eps, n)
    return Start(m0, first, sleep)


@cute.jit
def _put_to_sleep(
    first: cute.Tensor, sleep: cute.Tensor, peaks: cute.Tensor, lowest: Float32, eps: Float32, n: cutlass.Constexpr[int]
):
    """Put columns to sleep whose peak (the log of the column's largest element) is below DEEPEST.

    Such a column has factor 0 at first. `sleep` becomes the number of iterations after which the column exceeds
    DEEPEST, and `first` its factor at that time. If eps < LEAST_EPS, nothing is changed.

    lowest: the lowest of `peaks`.
    """
    if (lowest < DEEPEST) & (eps >= LEAST_EPS):
        growth = -cute.math.log(eps, fastmath=True)
        for j in cutlass.range_constexpr(n):
            rounds = (DEEPEST - peaks[j]) / cute.arch.fmax(growth, Float32(1 / NEVER))
            rounds = cute.arch.fmin(cute.arch.fmax(rounds, Float32(-1.0)), Float32(NEVER)).to(Int32) + 1
            sleep[j] = select(peaks[j] < DEEPEST, rounds, Int32(0))
            awake = cute.math.exp(peaks[j] + Float32(sleep[j]) * growth, fastmath=True)
            first[j] = select(sleep[j] > 0, awake, first[j])


def _balance(m0: cute.Tensor, ours: cute.Tensor, theirs: cute.Tensor, strides: tuple[int, int], n: int, eps: Float32):
    """Divide each line (row or column) of diag(u) M0 diag(v) by its sum + eps. Only the lines' factors `ours` change,
    M0 does not.

    Args:
        ours: u for rows, v for columns.
        theirs: the factors of the other kind of line.
        strides: distance in m0 from line to line, and from element to element of a line.
    """
    for i in range(n):
        total = m0[i * strides[0]] * theirs[0]
        for j in range(1, n):
            total += m0[i * strides[0] + j * strides[1]] * theirs[j]
        ours[i] = ours[i] * cute.arch.rcp_approx(ours[i] * total + eps)


@cute.jit
def balance(m0: cute.Tensor, u: cute.Tensor, v: cute.Tensor, eps: Float32, n: cutlass.Constexpr[int]):
    """Do one iteration: normalise first the rows, then the columns, of diag(u) M0 diag(v) by changing the factors u and
    v.

    Args:
        m0: M0, [n, n] row-major.
        u, v: the factors of rows and of columns.
    """
    _balance(m0, u, v, (n, 1), n, eps)
    _balance(m0, v, u, (1, n), n, eps)


def _wake(start: Start, v: cute.Tensor, done: Int32, n: int):
    """Wake each column that has slept for exactly `done` iterations: set its factor, so that the column takes part from
    now on."""
    for j in range(n):
        v[j] = select(start.sleep[j] == done, start.first[j], v[j])


@cute.jit
def doubly_stochastic(logits: cute.Tensor, iters: Int32, eps: Float32, n: cutlass.Constexpr[int]) -> cute.Tensor:
    """Return the normalised matrix of this thread's logits [n, n], float32, after `iters` iterations."""
    start = _start(logits, eps, n)
    m0, (u, v) = start.m0, start.factors(n)
    asleep = cutlass.min(start.longest_sleep(n), iters)
    for k in cutlass.range(asleep):
        balance(m0, u, v, eps, n)
        _wake(start, v, k + 1, n)
    for _ in cutlass.range(iters - asleep):
        balance(m0, u, v, eps, n)
    for i in cutlass.range_constexpr(n * n):
        m0[i] = m0[i] * u[i // n] * v[i % n]
    return m0


def _step_back(m0: cute.Tensor, q: cute.Tensor, ours: cute.Tensor, theirs: cute.Tensor, strides: tuple, n: int):
    """Go back one step: replace Q after the step, in place, by Q before it (see the top of this file).

    Args:
        m0: M0, [n, n] row-major.
        q: Q, [n, n] row-major.
        ours: the factors, after the step, of the lines (rows or columns) that the step normalised.
        theirs: the factors of the other kind of line.
        strides: distance in m0 from line to line, and from element to element of a line.
    """
    for i in range(n):
        at = [i * strides[0] + j * strides[1] for j in range(n)]
        total = m0[at[0]] * q[at[0]]
        for j in range(1, n):
            total += m0[at[j]] * q[at[j]]
        total = total * ours[i]
        for j in range(n):
            q[at[j]] = q[at[j]] - theirs[j] * total


def _through_maximum(start: Start, h: cute.Tensor, n: int):
    """Replace H, in place, by the gradient of the logits.

    M0 = exp(l - rowmax), so the row's sum of H is subtracted from H at the row's maximum. If several elements tie for
    the maximum, each takes an equal share.
    """
    for i in range(n):
        total, ties = h[i * n], Float32(0.0)
        is_largest = [Float32((start.m0[i * n + j] == 1.0) & (start.first[j] == 1.0)) for j in range(n)]
        for j in range(1, n):
            total += h[i * n + j]
        for j in range(n):
            ties += is_largest[j]
        share = total * cute.arch.rcp_approx(ties)
        for j in range(n):
            h[i * n + j] = h[i * n + j] - share * is_largest[j]


def _keep(factors: cute.Tensor, u: cute.Tensor, v: cute.Tensor, k: Int32, n: int):
    """Store the factors u and v after iteration k in shared memory (`factors`), for backward."""
    for i in range(n):
        factors[((2 * k) * n + i) * THREADS] = u[i]
        factors[((2 * k + 1) * n + i) * THREADS] = v[i]


class Sinkhorn(Invariant):
    """Forward kernel of Sinkhorn normalisation of n x n matrices; each thread handles one matrix.

    forms: code of the dtype of logits and results (`dtypes.PARAM_FORMS`).
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric], n: int):
        self.name = name
        self.n = n

    @cute.jit
    def __call__(
        self, logits: Int64, out: Int64, forms: Int32, matrices: Int32, iters: Int32, eps: Float32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        if matrices > 0:
            name_kernel(self.kernel, self.name)
            self.kernel(logits, out, forms, matrices, iters, eps).launch(
                grid=(cute.ceil_div(matrices, THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream
            )

    @cute.kernel
    def kernel(self, logits: Int64, out: Int64, forms: Int32, matrices: Int32, iters: Int32, eps: Float32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        matrix = Int64(block) * THREADS + thread
        if matrix < matrices:
            size = self.n * self.n
            values = load_params(logits, forms, matrix * size, size)
            store_params(out, forms, matrix * size, doubly_stochastic(values, iters, eps, self.n))


class SinkhornBackward(Invariant):
    """Backward kernel of Sinkhorn normalisation of n x n matrices: makes d_logits from d_out and logits.

    Each thread handles one matrix. It computes all iterations again, and keeps in shared memory, for each iteration,
    the matrix's 2n factors: u for its rows and v for its columns (see the module's docstring).
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric], n: int):
        self.name = name
        self.n = n

    @cute.jit
    def __call__(
        self, d_out: Int64, logits: Int64, d_logits: Int64, forms: Int32, matrices: Int32, iters: Int32, eps: Float32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        if matrices > 0:
            name_kernel(self.kernel, self.name)
            self.kernel(d_out, logits, d_logits, forms, matrices, iters, eps).launch(
                grid=(cute.ceil_div(matrices, THREADS), 1, 1),
                block=(THREADS, 1, 1),
                smem=iters * (2 * self.n * THREADS * Float32.width // 8),
                stream=stream,
            )

    @cute.kernel
    def kernel(
        self, d_out: Int64, logits: Int64, d_logits: Int64, forms: Int32, matrices: Int32, iters: Int32, eps: Float32
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        matrix = Int64(block) * THREADS + thread
        if matrix < matrices:
            size = self.n * self.n
            values = load_params(logits, forms, matrix * size, size)
            q = load_params(d_out, forms, matrix * size, size)
            start = _start(values, eps, self.n)
            m0, (u, v), (_, begin) = start.m0, start.factors(self.n), start.factors(self.n)
            factors = cute.make_tensor(cute.arch.get_dyn_smem(Float32, 16) + thread, cute.make_layout(UNBOUNDED))
            asleep = cutlass.min(start.longest_sleep(self.n), iters)
            for k in cutlass.range(asleep):
                balance(m0, u, v, eps, self.n)
                _wake(start, v, k + 1, self.n)
                _keep(factors, u, v, k, self.n)
            for k in cutlass.range(asleep, iters):
                balance(m0, u, v, eps, self.n)
                _keep(factors, u, v, k, self.n)
            for i in cutlass.range_constexpr(size):
                q[i] = q[i] * (u[i // self.n] * v[i % self.n])
            for done in cutlass.range(iters):
                before = iters - 2 - done
                _step_back(m0, q, v, u, (1, self.n), self.n)
                for i in cutlass.range_constexpr(self.n):
                    v[i] = begin[i]
                if before >= 0:
                    for i in cutlass.range_constexpr(self.n):
                        v[i] = factors[((2 * before + 1) * self.n + i) * THREADS]
                _step_back(m0, q, u, v, (self.n, 1), self.n)
                if before >= 0:
                    for i in cutlass.range_constexpr(self.n):
                        u[i] = factors[(2 * before * self.n + i) * THREADS]
            for i in cutlass.range_constexpr(size):
                q[i] = q[i] * m0[i]
            _through_maximum(start, q, self.n)
            store_params(d_logits, forms, matrix * size, q)


KERNELS = {"sinkhorn": Sinkhorn, "sinkhorn_backward": SinkhornBackward}


def trace(spec: MhcSpec) -> Traced:
    return traced(spec, KERNELS[spec.kernel](spec.name, DTYPES[spec.dtype], spec.n))
