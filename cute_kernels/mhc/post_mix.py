"""The update of a token's n residual streams after a sublayer, and its gradients:

    out[t, i, c] = sum over j of h_res[t, i, j] residual[t, j, c], + h_post[t, i] (x[t, c] + bias[c])

residual [T, n, C] are the streams before the update, x [T, C] is the sublayer's output. With `transpose`, h_res[t, j,
i] is read instead of h_res[t, i, j].

Forward spreads pairs (token, vector of 16 bytes) evenly over threads.

Backward reads every byte once. A CTA takes whole tokens, so that no sum over C (n^2 + n sums a token) spans several
CTAs. The bias' gradient is a sum over tokens: each CTA adds up its own tokens in shared memory, where each element is
owned by one thread. These sums go to a workspace, and a second kernel adds them in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..device.gmem import UNBOUNDED, vector_at
from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.target import has_float_pairs, is_for_hopper_alone
from ..device.vectors import (
    dtype_code,
    elements,
    floats,
    load_params,
    load_vector,
    shared_at,
    store_param,
    store_vector,
)
from ..specs import MhcSpec
from ..tracing import DTYPES, Traced, traced
from .column_sums import ColumnSums
from .shapes import CTAS_PER_SM
from .token_sums import TokenSums

FORWARD_THREADS = 256
BACKWARD_THREADS = 128


@cute.jit
def with_bias(x: cute.Tensor, bias: Int64, code: Int32, column: Int32, count: cutlass.Constexpr[int]) -> cute.Tensor:
    """Load a vector of x as float32, and add the bias at its columns. If `bias` is 0, nothing is added.

    Args:
        code: the dtype of the bias (`dtypes.PARAM_FORMS`).
        column: the vector's index in the row.
        count: elements of the vector.
    """
    values = cute.make_rmem_tensor(count, Float32)
    values.store(floats(x).load())
    if bias != 0:
        values.store(values.load() + load_params(bias, code, Int64(column) * count, count).load())
    return values


@cute.jit
def mixing(h_res: Int64, code: Int32, token: Int64, transpose: Int32, n: cutlass.Constexpr[int]) -> cute.Tensor:
    """Return a token's matrix h_res [n, n], whose row i has the coefficients of output stream i. It is transposed if
    `transpose` is not 0.

    code: the dtype of h_res (`dtypes.PARAM_FORMS`).
    """
    matrix = load_params(h_res, code, token * (n * n), n * n)
    if transpose != 0:
        for i in cutlass.range_constexpr(n):
            for j in cutlass.range_constexpr(i):
                matrix[i * n + j], matrix[j * n + i] = matrix[j * n + i], matrix[i * n + j]
    return matrix


class PostMix(Invariant):
    """Forward kernel of `post_mix`, the update of n streams of `dtype` (formula at the top of this file).

    Args:
        residual, x: the addresses of the streams [T, n, C] and of the sublayer's output [T, C].
        h_res, h_post: the addresses of the coefficients [T, n, n] and [T, n].
        bias: the address of [C]; 0: there is no bias.
        forms: dtypes of h_res, h_post and bias (mhc/kernels.py).
        transpose: not 0: h_res is read transposed.
        width: C.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric], n: int):
        self.name = name
        self.dtype = dtype
        self.n = n

    @cute.jit
    def __call__(
        self, residual: Int64, h_res: Int64, h_post: Int64, x: Int64, bias: Int64, out: Int64, forms: Int32,
        transpose: Int32, tokens: Int32, width: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if tokens > 0:
            vectors = width // elements(self.dtype)
            total = Int64(tokens) * vectors
            name_kernel(self.kernel, self.name)
            self.kernel(residual, h_res, h_post, x, bias, out, forms, transpose, total, vectors).launch(
                grid=(cute.ceil_div(total, FORWARD_THREADS), 1, 1), block=(FORWARD_THREADS, 1, 1), stream=stream
            )

    @cute.kernel
    def kernel(
        self, residual: Int64, h_res: Int64, h_post: Int64, x: Int64, bias: Int64, out: Int64, forms: Int32,
        transpose: Int32, total: Int64, vectors: Int32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = Int64(block) * FORWARD_THREADS + thread
        if index < total:
            token = index // vectors
            column = Int32(index - token * vectors)
            first = token * self.n * vectors + column
            raw = [load_vector(self.dtype, residual, first + j * vectors) for j in range(self.n)]
            raw_x = load_vector(self.dtype, x, index)
            matrix = mixing(h_res, dtype_code(forms, 0), token, transpose, self.n)
            posts = load_params(h_post, dtype_code(forms, 1), token * self.n, self.n)
            added = with_bias(raw_x, bias, dtype_code(forms, 2), column, elements(self.dtype)).load()
            streams = [floats(r).load() for r in raw]
            for i in cutlass.range_constexpr(self.n):
                mixed = cute.make_rmem_tensor(elements(self.dtype), Float32)
                mixed.store(added * posts[i])
                for j in cutlass.range_constexpr(self.n):
                    mixed.store(mixed.load() + streams[j] * matrix[i * self.n + j])
                store_vector(self.dtype, out, first + i * vectors, mixed)


class Coefficients(Invariant):
    """A token's h_res and h_post in shared memory. They are not in registers, which are needed for sums.

    Two buffers, used alternately, hold the coefficients of the current and of the next token. Element j n + i is the
    factor of stream j in output i, so that the factors of one stream are neighbours; the n elements of h_post follow.
    """

    def __init__(self, h_res: Int64, h_post: Int64, forms: Int32, transpose: Int32, n: int, smem: cute.Pointer):
        self.h_res = h_res
        self.h_post = h_post
        self.forms = forms
        self.transpose = transpose
        self.n = n
        self.count = n * n + n
        self.smem = smem

    @cute.jit
    def load(self, token: Int64, index: Int32) -> Float32:
        """Load coefficient number `index` of a token from global memory. Past the last coefficient, return zero."""
        n = self.n
        value = Float32(0.0)
        if index < n * n:
            at = index % n * n + index // n
            if self.transpose != 0:
                at = index
            value = load_params(self.h_res, dtype_code(self.forms, 0), token * (n * n) + at, 1)[0]
        elif index < self.count:
            value = load_params(self.h_post, dtype_code(self.forms, 1), token * n + index - n * n, 1)[0]
        return value

    @cute.jit
    def keep(self, index: Int32, value: Float32, buffer: Int32):
        """Store a coefficient (`value`) in one of the two buffers in shared memory. Threads past the last coefficient
        call this, too; they store nothing.

        Args:
            index: the coefficient's number: j n + i for the factor of stream j in output i, n^2 + i for h_post[i].
            value: the coefficient, which `load` read.
            buffer: index of the buffer, 0 or 1.
        """
        if index < self.count:
            cute.make_tensor(self.smem, cute.make_layout(2 * self.count))[buffer * self.count + index] = value

    def of_stream(self, j: int, buffer: Int32) -> cute.Tensor:
        """Return the n factors of stream j, one for each output; for j = n, the n elements of h_post.

        buffer: index of the buffer, 0 or 1.
        """
        values = cute.make_rmem_tensor(self.n, Float32)
        values.store(shared_at(Float32, self.smem + (buffer * self.count + j * self.n), self.n).load())
        return values


class Gradients(NamedTuple):
    """Addresses to which gradients are written; 0: not wanted.

    partials: the address of float32 [CTAs, C], each CTA's sum over its tokens for the bias' gradient.
    """

    residual: Int64
    h_res: Int64
    h_post: Int64
    x: Int64
    partials: Int64


class PostMixBackward(Invariant):
    """Backward kernel of `post_mix`: makes the gradients of residual, h_res, h_post, x and bias. Address 0 of a
    gradient: not wanted.

    workspace: float32 [min(tokens, CTAS_PER_SM num_sms), C]; used only if d_bias is wanted.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric], n: int):
        self.name = name
        self.dtype = dtype
        self.n = n
        # Streams of the residual that are loaded before the first is used. With all 8 at once, sm_100 spills 212 bytes.
        self.streams_at_once = 4 if has_float_pairs() and n == 8 and dtype is not Float32 else n
        self.column_sums = ColumnSums(f"{name}_bias")

    @cute.jit
    def __call__(
        self, d_out: Int64, residual: Int64, h_res: Int64, h_post: Int64, x: Int64, bias: Int64, d_residual: Int64,
        d_h_res: Int64, d_h_post: Int64, d_x: Int64, d_bias: Int64, workspace: Int64, forms: Int32, transpose: Int32,
        tokens: Int32, width: Int32, num_sms: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        partials, smem = Int64(0), Int32(0)
        if d_bias != 0:
            partials, smem = workspace, width * (Float32.width // 8)
        ctas = cutlass.min(tokens, num_sms * CTAS_PER_SM)
        if tokens > 0:
            name_kernel(self.kernel, self.name)
            self.kernel(
                d_out, residual, h_res, h_post, x, bias, Gradients(d_residual, d_h_res, d_h_post, d_x, partials),
                forms, transpose, tokens, width // elements(self.dtype),
            ).launch(
                grid=(ctas, 1, 1),
                block=(BACKWARD_THREADS, 1, 1),
                smem=smem + (self.sums_bytes + self.coefficients_bytes),
                # Without this bound, ptxas spills 8 bytes of 4 float32 streams on sm_86.
                min_blocks_per_mp=0 if is_for_hopper_alone() else 1,
                stream=stream,
            )  # fmt: skip
            if d_bias != 0:
                self.column_sums.launch(workspace, ctas, width, d_bias, dtype_code(forms, 2), stream)

    @property
    def sums_bytes(self) -> int:
        return TokenSums.num_bytes(self.n * self.n + self.n, BACKWARD_THREADS)

    @property
    def coefficients_bytes(self) -> int:
        return -(-2 * (self.n * self.n + self.n) * 4 // 16) * 16

    @cute.kernel
    def kernel(
        self, d_out: Int64, residual: Int64, h_res: Int64, h_post: Int64, x: Int64, bias: Int64, gradients: Gradients,
        forms: Int32, transpose: Int32, tokens: Int32, vectors: Int32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        n, count = self.n, elements(self.dtype)
        sums = TokenSums(n * n + n, BACKWARD_THREADS)
        coefficients = Coefficients(h_res, h_post, forms, transpose, n, sums.behind)
        bias_sums = cute.make_tensor(
            (sums.behind + self.coefficients_bytes // 4).align(16), cute.make_layout(UNBOUNDED)
        )
        if gradients.partials != 0:
            for i in cutlass.range(thread, vectors * count, BACKWARD_THREADS):
                bias_sums[i] = Float32(0.0)
        coefficients.keep(thread, coefficients.load(Int64(block), thread), Int32(0))
        cute.arch.sync_threads()
        buffer = Int32(0)
        for token in cutlass.range(block, tokens, grid):
            # The next token's coefficients are loaded while this token is processed.
            upcoming = coefficients.load(Int64(cutlass.min(token + grid, tokens - 1)), thread)
            dots = cute.make_rmem_tensor(n * n + n, Float32)
            dots.fill(0.0)
            for column in cutlass.range(thread, vectors, BACKWARD_THREADS):
                self._vector(
                    d_out, residual, x, bias, dtype_code(forms, 2), gradients, Int64(token), column, vectors,
                    coefficients, buffer, dots, bias_sums,
                )  # fmt: skip
            coefficients.keep(thread, upcoming, 1 - buffer)
            sums.leave(dots, buffer)
            cute.arch.sync_threads()
            if thread < n * n + n:
                self._store(gradients, forms, transpose, Int64(token), thread, sums.total(thread, buffer))
            buffer = 1 - buffer
        if gradients.partials != 0:
            cute.arch.sync_threads()
            partials = vector_at(Float32, gradients.partials + Int64(block) * (vectors * count) * 4)
            for i in cutlass.range(thread, vectors * count, BACKWARD_THREADS):
                partials[i] = bias_sums[i]

    @cute.jit
    def _vector(
        self, d_out: Int64, residual: Int64, x: Int64, bias: Int64, bias_code: Int32, gradients: Gradients,
        token: Int64, column: Int32, vectors: Int32, coefficients: Coefficients, buffer: Int32, dots: cute.Tensor,
        bias_sums: cute.Tensor,
    ):  # fmt: skip
        """Process one vector (16 bytes) of each stream of a token. Store the gradients of residual and x at these
        columns, and add to the token's sums (`dots`) for h_res and h_post, and to the bias' sums.

        Args:
            bias_code: the dtype of the bias.
            column: number of the vector in the row.
            vectors: number of vectors of a row.
            coefficients, buffer: the token's coefficients, and the index of their buffer.
            bias_sums: the CTA's sums in shared memory, one for each column.
        """
        n, count = self.n, elements(self.dtype)
        first = token * n * vectors + column
        raw_d = [load_vector(self.dtype, d_out, first + i * vectors) for i in range(n)]
        raw = [load_vector(self.dtype, residual, first + j * vectors) for j in range(self.streams_at_once)]
        raw_x = load_vector(self.dtype, x, token * vectors + column)
        d = [floats(r) for r in raw_d]
        added = with_bias(raw_x, bias, bias_code, column, count)
        d_added = cute.make_rmem_tensor(count, Float32)
        d_added.fill(0.0)
        posts = coefficients.of_stream(n, buffer)
        for i in cutlass.range_constexpr(n):
            d_added.store(d_added.load() + d[i].load() * posts[i])
            for e in cutlass.range_constexpr(count):
                dots[n * n + i] += d[i][e] * added[e]
        for j in cutlass.range_constexpr(n):
            if const_expr(j == len(raw)):
                more = range(j, j + self.streams_at_once)
                raw += [load_vector(self.dtype, residual, first + k * vectors) for k in more]
            stream, mixed_by = floats(raw[j]), coefficients.of_stream(j, buffer)
            d_stream = cute.make_rmem_tensor(count, Float32)
            d_stream.fill(0.0)
            for i in cutlass.range_constexpr(n):
                d_stream.store(d_stream.load() + d[i].load() * mixed_by[i])
                for e in cutlass.range_constexpr(count):
                    dots[i * n + j] += d[i][e] * stream[e]
            if gradients.residual != 0:
                store_vector(self.dtype, gradients.residual, first + j * vectors, d_stream)
        if gradients.x != 0:
            store_vector(self.dtype, gradients.x, token * vectors + column, d_added)
        if gradients.partials != 0:
            mine = shared_at(Float32, bias_sums.iterator + column * count, count)
            mine.store(mine.load() + d_added.load())

    @cute.jit
    def _store(self, gradients: Gradients, forms: Int32, transpose: Int32, token: Int64, index: Int32, value: Float32):
        """Store one of a token's sums as a gradient. Sum number i n + j is the gradient of h_res[i, j]; sum number n^2
        + i is the gradient of h_post[i].

        Args:
            forms: dtypes of h_res, h_post and bias, two bits each.
            transpose: not 0: the gradient of h_res is stored transposed.
            index, value: the sum's number, and the sum.
        """
        n = self.n
        if index < n * n:
            at = index
            if transpose != 0:
                at = index % n * n + index // n
            if gradients.h_res != 0:
                store_param(gradients.h_res, dtype_code(forms, 0), token * (n * n) + at, value)
        else:
            if gradients.h_post != 0:
                store_param(gradients.h_post, dtype_code(forms, 1), token * n + index - n * n, value)


KERNELS = {"post_mix": PostMix, "post_mix_backward": PostMixBackward}


def trace(spec: MhcSpec) -> Traced:
    return traced(spec, KERNELS[spec.kernel](spec.name, DTYPES[spec.dtype], spec.n))
