"""The second kernel of a boundary's forward (boundary.py). It adds the slices' partial sums, makes the coefficients
(norm, gates, Sinkhorn), and turns the mix u into x by the RMS norm of u.

A slice is a range of the streams' D columns, for which a CTA of the first kernel stored sums. p is the projection of a
token's n streams: K = n^2 + 2n numbers, from which the coefficients pre [n], post [n] and comb [n, n] are made. u is
the mix of the streams, [T, D].

Each CTA handles one token. Each of its warps adds the sums of some slices, in a fixed order. Then the first warp makes
the coefficients, and all warps scale u.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.target import early, wait_for_earlier
from ..device.vectors import elements, floats, load_params, load_vector, store_vector
from ..device.warps import WARP
from .balance import Balance
from .boundary_shapes import STATS, tile_sums, tiles_of
from .gates import sigmoid
from .shapes import TOKEN_TILE, outputs

THREADS = 128
FINISH_WARPS = THREADS // WARP
READS = 8
"""Number of slices whose sums a warp loads before it adds the first."""


class Partials(NamedTuple):
    """The partial sums that the first kernel stored.

    Attributes:
        address: the address of float32 [slices, token tiles, `boundary_shapes.tile_sums`].
        slices: number of slices of the columns.
    """

    address: Int64
    slices: Int32


class Finished(NamedTuple):
    """Addresses of the mix u, of the norm's weight, and of the results of `boundary` (boundary.py). 0: the result is
    not wanted.

    Attributes:
        u: [T, D].
        x: [T, D]; may be u's address.
        x_data, x_scale, x_block: x in MXFP8, its scales, and the number of columns that share a scale, 32 or 128
            (boundary_mxfp8.py).
        norm_weight, norm_code: the norm's weight and its dtype.
        pre, post, comb: the new coefficients, float32.
        stats: float32 [T, K + 2]: p, the root mean square of the streams, and the factor of u's norm; 0: not wanted.
    """

    u: Int64
    x: Int64
    x_data: Int64
    x_scale: Int64
    x_block: Int32
    norm_weight: Int64
    norm_code: Int32
    pre: Int64
    post: Int64
    comb: Int64
    stats: Int64


@cute.jit
def gate_argument(
    p: Float32, rms: Float32, scale: Int64, scale_code: Int32, base: Int64, base_code: Int32, k: Int32,
    n: cutlass.Constexpr[int],
) -> Float32:  # fmt: skip
    """Return z = p / rms * scale + base. z is the argument of coefficient k's gate, which is a sigmoid (pre, post) or
    Sinkhorn normalisation (comb).

    Args:
        p: element k of the token's projection.
        rms: the root mean square of the token's updated streams.
        scale: the address of [3]: the factors of pre (k < n), of post (k < 2n) and of comb.
        base: the address of [n^2 + 2n].
        scale_code, base_code: their dtypes.
    """
    part = Int32(2)
    if k < n:
        part = Int32(0)
    elif k < 2 * n:
        part = Int32(1)
    factor = load_params(scale, scale_code, Int64(part), 1)[0]
    return p * (1.0 / rms) * factor + load_params(base, base_code, Int64(k), 1)[0]


class BoundaryFinish(Invariant):
    """Second kernel of `boundary`, forward (boundary.py: the step from one sublayer's output to the next one's input).

    It adds the partial sums that the first kernel stored. From the projection p it makes the coefficients pre, post and
    comb of the next boundary. By the RMS norm of the mix u it makes x, the next sublayer's input, in 16 bits.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric], n: int):
        self.name = name
        self.dtype = dtype
        self.n = n
        self.outputs = outputs(n)
        self.balance = Balance(n)

    def smem_bytes(self, width: Int32) -> int | Int32:
        """Return a CTA's bytes of shared memory, which hold each warp's sums. width: D."""
        return FINISH_WARPS * WARP * 4

    @cute.jit
    def launch(
        self, partials: Partials, gates: tuple, finished: Finished, tokens: Int32, width: Int32, iters: Int32,
        epsilons: tuple, stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch one CTA for each token.

        Args:
            partials: the partial sums that the first kernel stored.
            gates: scale and base, each followed by its dtype.
            finished: the addresses of u and of the results.
            iters: number of Sinkhorn iterations that make comb.
            epsilons: rms_eps, eps and norm_eps.
            width: D.
        """
        name_kernel(self.kernel, self.name)
        self.kernel(partials, gates, finished, tokens, width, iters, epsilons).launch(
            grid=(tokens, 1, 1),
            block=(THREADS, 1, 1),
            smem=self.smem_bytes(width),
            stream=stream,
            use_pdl=early(True),
        )

    @cute.kernel
    def kernel(
        self, partials: Partials, gates: tuple, finished: Finished, tokens: Int32, width: Int32, iters: Int32,
        epsilons: tuple,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        token, _, _ = cute.arch.block_idx()
        lane, warp = thread % WARP, cute.arch.make_warp_uniform(thread // WARP)
        rms_eps, eps, norm_eps = epsilons
        wait_for_earlier()
        sums = cute.make_tensor(cute.arch.get_dyn_smem(Float32, alignment=16), cute.make_layout((WARP, FINISH_WARPS)))
        sums[lane, warp] = self._sum(partials, tokens, token, warp, lane)
        cute.arch.sync_threads()
        total = Float32(0.0)
        for w in cutlass.range_constexpr(FINISH_WARPS):
            total += sums[lane, w]
        square = cute.arch.shuffle_sync(total, self.outputs)
        of_u = cute.arch.shuffle_sync(total, self.outputs + 1)
        r = 1.0 / cute.math.sqrt(of_u / Float32(width) + norm_eps)
        if warp == 0:
            rms = cute.math.sqrt(square / Float32(width * self.n) + rms_eps)
            self._coefficients(gates, finished, token, total, rms, eps, iters)
            if (finished.stats != 0) & (lane == self.outputs + 1):
                vector_at(Float32, finished.stats)[Int64(token) * (self.outputs + STATS) + lane] = r
        self._norm(finished, token, width, r)

    @cute.jit
    def _sum(self, partials: Partials, tokens: Int32, token: Int32, warp: Int32, lane: Int32) -> Float32:
        """Return one of a token's sums, number `lane`, over the slices of this warp: every FINISH_WARPS-th slice, from
        slice number `warp` on.

        A token's sums are the n^2 + 2n elements of p, the updated streams' squares, and u's squares.
        """
        row, number = token % TOKEN_TILE, cutlass.min(lane, self.outputs + 1)
        place = row * self.outputs + number
        if number >= self.outputs:
            place = TOKEN_TILE * self.outputs + row * 2 + number - self.outputs
        tiles, total = tiles_of(tokens), Float32(0.0)
        values = vector_at(Float32, partials.address)
        raw = cute.make_rmem_tensor(READS, Float32)
        for first in cutlass.range(warp, partials.slices, FINISH_WARPS * READS):
            for i in cutlass.range_constexpr(READS):
                index = cutlass.min(first + i * FINISH_WARPS, partials.slices - 1)
                raw[i] = values[(Int64(index) * tiles + token // TOKEN_TILE) * tile_sums(self.n) + place]
            for i in cutlass.range_constexpr(READS):
                if first + i * FINISH_WARPS < partials.slices:
                    total += raw[i]
        return total

    @cute.jit
    def _coefficients(
        self, gates: tuple, finished: Finished, token: Int32, total: Float32, rms: Float32, eps: Float32, iters: Int32
    ):  # fmt: skip
        """Make and store a token's coefficients and stats. One warp calls this.

        Args:
            gates: scale and base, each followed by its dtype.
            total: in lane k < n^2 + 2n, element k of the projection p; other lanes have none.
            rms: the root mean square of the token's updated streams.
            eps, iters: for the Sinkhorn normalisation that makes comb; eps is also added to pre.
        """
        n, lane, at = self.n, cute.arch.lane_idx(), Int64(token)
        scale, scale_code, base, base_code = gates
        k = cutlass.min(lane, self.outputs - 1)
        z = gate_argument(total, rms, scale, scale_code, base, base_code, k, n)
        if lane < n:
            vector_at(Float32, finished.pre)[at * n + lane] = sigmoid(z) + eps
        elif lane < 2 * n:
            vector_at(Float32, finished.post)[at * n + lane - n] = 2.0 * sigmoid(z)
        if finished.stats != 0:
            if lane < self.outputs:
                vector_at(Float32, finished.stats)[at * (self.outputs + STATS) + lane] = total
            elif lane == self.outputs:
                vector_at(Float32, finished.stats)[at * (self.outputs + STATS) + lane] = rms
        element = lane % (n * n)
        m = self.balance.forward(cute.arch.shuffle_sync(z, 2 * n + element), iters, eps)
        if lane < n * n:
            vector_at(Float32, finished.comb)[at * (n * n) + lane] = m

    @cute.jit
    def _norm(self, finished: Finished, token: Int32, width: Int32, r: Float32):
        """Replace the token's u in memory by x = u r norm_weight.

        Args:
            width: D.
            r: the factor of the norm, 1 / (root mean square of u).
        """
        thread, _, _ = cute.arch.thread_idx()
        count = elements(self.dtype)
        vectors = width // count
        for vector in cutlass.range(thread, vectors, THREADS, unroll=4):
            at = Int64(token) * vectors + vector
            u = floats(load_vector(self.dtype, finished.u, at))
            weight = load_params(finished.norm_weight, finished.norm_code, Int64(vector) * count, count)
            made = cute.make_rmem_tensor(count, Float32)
            made.store(u.load() * r * weight.load())
            store_vector(self.dtype, finished.u, at, made)
