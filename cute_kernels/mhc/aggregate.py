"""The weighted sum of a token's n residual streams of C columns, out[t, c] = sum over j of h_pre[t, j] x[t, j, c], and
its gradients, for T tokens.

Memory bounds both kernels. A thread handles 16 bytes (a vector) of each of the n streams. Forward spreads all pairs
(token, vector) evenly over threads, since a token's vectors do not depend on each other. Backward gives a whole token
to a CTA, so that no sum over C spans several CTAs.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.target import is_for_hopper_alone
from ..device.vectors import elements, floats, load_params, load_vector, store_param, store_vector
from ..specs import MhcSpec
from ..tracing import DTYPES, Traced, traced
from .token_sums import TokenSums

FORWARD_THREADS = 256
VECTORS_PER_THREAD = 2
BACKWARD_THREADS = 128


class Aggregate(Invariant):
    """Forward kernel of `aggregate`: the weighted sum [T, C] of n streams x [T, n, C] of `dtype`.

    Args:
        h_pre: the address of the weights [T, n].
        forms: the dtype of h_pre (`dtypes.PARAM_FORMS`).
        width: C.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric], n: int):
        self.name = name
        self.dtype = dtype
        self.n = n

    @cute.jit
    def __call__(
        self, x: Int64, h_pre: Int64, out: Int64, forms: Int32, tokens: Int32, width: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        if tokens > 0:
            vectors = width // elements(self.dtype)
            name_kernel(self.kernel, self.name)
            self.kernel(x, h_pre, out, forms, Int64(tokens) * vectors, vectors).launch(
                grid=(cute.ceil_div(Int64(tokens) * vectors, FORWARD_THREADS * VECTORS_PER_THREAD), 1, 1),
                block=(FORWARD_THREADS, 1, 1),
                # Without this bound, ptxas gives 4 float32 streams 48 registers on sm_80, and spills 2.
                min_blocks_per_mp=0 if is_for_hopper_alone() else 1,
                stream=stream,
            )

    @cute.kernel
    def kernel(self, x: Int64, h_pre: Int64, out: Int64, forms: Int32, total: Int64, vectors: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        first = Int64(block) * (FORWARD_THREADS * VECTORS_PER_THREAD) + thread
        raw, weights, at = [], [], []
        for i in cutlass.range_constexpr(VECTORS_PER_THREAD):
            # Past the end, load the last vector again, so that all loads are issued before the first result is used.
            index = cutlass.min(first + i * FORWARD_THREADS, total - 1)
            token = index // vectors
            column = index - token * vectors
            source = token * self.n * vectors + column
            raw.append([load_vector(self.dtype, x, source + j * vectors) for j in range(self.n)])
            weights.append(load_params(h_pre, forms, token * self.n, self.n))
            at.append(first + i * FORWARD_THREADS)
        for i in cutlass.range_constexpr(VECTORS_PER_THREAD):
            total_of_streams = cute.make_rmem_tensor(elements(self.dtype), Float32)
            total_of_streams.fill(0.0)
            for j in cutlass.range_constexpr(self.n):
                total_of_streams.store(total_of_streams.load() + floats(raw[i][j]).load() * weights[i][j])
            if at[i] < total:
                store_vector(self.dtype, out, at[i], total_of_streams)


class AggregateBackward(Invariant):
    """Backward kernel of `aggregate`: makes d_x[t, j, c] = h_pre[t, j] d_out[t, c] and d_h_pre[t, j] = sum over c of
    d_out[t, c] x[t, j, c].

    Address 0 for d_x or d_h_pre: this gradient is not wanted.

    Args:
        forms: the dtype of h_pre and d_h_pre (`dtypes.PARAM_FORMS`).
        width: C.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric], n: int):
        self.name = name
        self.dtype = dtype
        self.n = n

    @cute.jit
    def __call__(
        self, d_out: Int64, x: Int64, h_pre: Int64, d_x: Int64, d_h_pre: Int64, forms: Int32, tokens: Int32,
        width: Int32, num_sms: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if tokens > 0:
            name_kernel(self.kernel, self.name)
            self.kernel(d_out, x, h_pre, d_x, d_h_pre, forms, width // elements(self.dtype)).launch(
                grid=(tokens, 1, 1),
                block=(BACKWARD_THREADS, 1, 1),
                smem=TokenSums.num_bytes(self.n, BACKWARD_THREADS),
                stream=stream,
            )

    @cute.kernel
    def kernel(self, d_out: Int64, x: Int64, h_pre: Int64, d_x: Int64, d_h_pre: Int64, forms: Int32, vectors: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        token = Int64(block)
        sums = TokenSums(self.n, BACKWARD_THREADS)
        weights = load_params(h_pre, forms, token * self.n, self.n)
        dots = cute.make_rmem_tensor(self.n, Float32)
        dots.fill(0.0)
        for column in cutlass.range(thread, vectors, BACKWARD_THREADS):
            here = token * self.n * vectors + column
            raw = [load_vector(self.dtype, x, here + j * vectors) for j in range(self.n)]
            d = floats(load_vector(self.dtype, d_out, token * vectors + column))
            if d_x != 0:
                for j in cutlass.range_constexpr(self.n):
                    scaled = cute.make_rmem_tensor(elements(self.dtype), Float32)
                    scaled.store(d.load() * weights[j])
                    store_vector(self.dtype, d_x, here + j * vectors, scaled)
            for j in cutlass.range_constexpr(self.n):
                values = floats(raw[j])
                for e in cutlass.range_constexpr(elements(self.dtype)):
                    dots[j] += d[e] * values[e]
        if d_h_pre != 0:
            sums.leave(dots, 0)
            cute.arch.sync_threads()
            if thread < self.n:
                store_param(d_h_pre, forms, token * self.n + thread, sums.total(thread, 0))


KERNELS = {"aggregate": Aggregate, "aggregate_backward": AggregateBackward}


def trace(spec: MhcSpec) -> Traced:
    return traced(spec, KERNELS[spec.kernel](spec.name, DTYPES[spec.dtype], spec.n))
