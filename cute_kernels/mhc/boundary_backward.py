"""The backward of a boundary (boundary.py) through norm, mix and Sinkhorn. The kernels of the projection's and of the
update's backward do the rest.

    u = sum over j of pre_j streams_j;  x = u r w;  r = 1 / sqrt(mean u^2 + eps);  g = d_x w
    d_mix = r g - u r^3 mean(g u);  d_pre_j = sum of d_mix streams_j;  d_w = sum over tokens of d_x u r

Here streams are the updated ones, w is the norm's weight, and d_mix the gradient of u.

A CTA takes whole tokens. One read of a token's streams makes u, which stays in shared memory, and the sums over D from
which the rest follows: of u^2, g u, g streams_j and u streams_j (the last two give d_pre_j). The CTA's sum over tokens
of w's gradient is kept in shared memory, each column owned by a thread, and finally stored as a row of a workspace,
whose rows a second kernel adds in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.vectors import (
    VECTOR_BYTES,
    dtype_code,
    elements,
    floats,
    load_params,
    load_vector,
    run_at,
    shared_at,
    store_vector,
)
from ..specs import MhcSpec
from ..tracing import DTYPES, Traced, traced
from .balance import Balance
from .boundary_finish import gate_argument
from .boundary_shapes import BACKWARD_WARPS as WARPS
from .boundary_shapes import backward_smem
from .column_sums import ColumnSums
from .gates import LANES
from .shapes import outputs
from .token_sums import TokenSums

THREADS = WARPS * LANES
WORDS = VECTOR_BYTES // 4


class Norm(NamedTuple):
    """Addresses and numbers for the backward of norm and mix.

    Attributes:
        d_x: the gradient of x; 0: not given, and no gradient of norm and mix is made.
        streams, pre: the updated streams and the coefficients that mixed them.
        weight, weight_code: the norm's weight w and its dtype.
        d_mix: the gradient of u, a result.
        d_pre: the gradient of pre, a result; 0: not wanted.
        partials: float32 [CTAs, D], each CTA's sum of w's gradient; 0: not wanted.
        eps: the norm's.
    """

    d_x: Int64
    streams: Int64
    pre: Int64
    weight: Int64
    weight_code: Int32
    d_mix: Int64
    d_pre: Int64
    partials: Int64
    eps: Float32


class Gates(NamedTuple):
    """Addresses and numbers for the backward of Sinkhorn.

    Attributes:
        d_comb: the gradient of comb; 0: not given, and no gradient of logits is made.
        stats: forward's p and root mean square [T, K + 1]. With scale and base (and their dtypes) they give the logits.
        d_logits: float32 [T, n, n], a result.
        iters, eps: Sinkhorn's iterations and eps.
    """

    d_comb: Int64
    stats: Int64
    scale: Int64
    scale_code: Int32
    base: Int64
    base_code: Int32
    d_logits: Int64
    iters: Int32
    eps: Float32


class BoundaryBackward(Invariant):
    """Kernel that makes d_mix, d_pre, d_logits and d_norm_weight. Address 0 of a gradient: not given, or not wanted.

    workspace: float32 [ctas, D]; used only if d_norm_weight is wanted.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric], n: int):
        self.name = name
        self.dtype = dtype
        self.n = n
        self.outputs = outputs(n)
        self.count = elements(dtype)
        self.sums = 2 * n + 2
        self.balance = Balance(n)
        self.column_sums = ColumnSums(f"{name}_norm")

    @cute.jit
    def __call__(
        self, d_x: Int64, d_comb: Int64, streams: Int64, pre: Int64, scale: Int64, base: Int64, norm_weight: Int64,
        stats: Int64, d_mix: Int64, d_pre: Int64, d_logits: Int64, d_norm_weight: Int64, workspace: Int64,
        forms: Int32, tokens: Int32, width: Int32, ctas: Int32, iters: Int32, eps: Float32, norm_eps: Float32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        partials = Int64(0)
        if d_norm_weight != 0:
            partials = workspace
        if tokens > 0:
            code = dtype_code(forms, 2)
            norm = Norm(d_x, streams, pre, norm_weight, code, d_mix, d_pre, partials, norm_eps)
            scale_code, base_code = dtype_code(forms, 0), dtype_code(forms, 1)
            gates = Gates(d_comb, stats, scale, scale_code, base, base_code, d_logits, iters, eps)
            self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
            self.kernel(norm, gates, tokens, width).launch(
                grid=(ctas, 1, 1),
                block=(THREADS, 1, 1),
                smem=backward_smem(self.n, width, iters),
                min_blocks_per_mp=1,
                stream=stream,
            )
            if d_norm_weight != 0:
                self.column_sums.launch(workspace, ctas, width, d_norm_weight, code, stream)

    @cute.kernel
    def kernel(self, norm: Norm, gates: Gates, tokens: Int32, width: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(thread // LANES)
        sums = TokenSums(self.sums, THREADS)
        per_warp = gates.iters * (2 * LANES)
        mixes = sums.behind + WARPS * per_warp
        of_weight = mixes + width // 2
        if gates.d_comb != 0:
            for token in cutlass.range(block * WARPS + warp, tokens, grid * WARPS):
                self._logits(gates, Int64(token), sums.behind + warp * per_warp)
        if norm.d_x != 0:
            for vector in cutlass.range(thread, width // self.count, THREADS):
                self._of_weight(of_weight, vector).fill(0.0)
            buffer = Int32(0)
            for token in cutlass.range(block, tokens, grid):
                self._token(norm, Int64(token), width, sums, buffer, mixes, of_weight)
                buffer = 1 - buffer
            if norm.partials != 0:
                for vector in cutlass.range(thread, width // self.count, THREADS):
                    first = Int64(block) * width + vector * self.count
                    run_at(Float32, norm.partials, first, self.count).store(self._of_weight(of_weight, vector).load())

    def _of_weight(self, start: cute.Pointer, vector: Int32) -> cute.Tensor:
        return shared_at(Float32, start + vector * self.count, self.count)

    @cute.jit
    def _logits(self, gates: Gates, token: Int64, steps: cute.Pointer):
        """Store the gradient of a token's logits; called by one warp. steps: the warp's shared memory for
        `Balance.backward`."""
        n, lane = self.n, cute.arch.lane_idx()
        element, row = lane % (n * n), token * (self.outputs + 1)
        k = 2 * n + element
        p, rms = vector_at(Float32, gates.stats)[row + k], vector_at(Float32, gates.stats)[row + self.outputs]
        z = gate_argument(p, rms, gates.scale, gates.scale_code, gates.base, gates.base_code, k, n)
        d = vector_at(Float32, gates.d_comb)[token * (n * n) + element]
        kept = cute.make_tensor(steps, cute.make_layout((LANES, 2, gates.iters)))
        made = self.balance.backward(d, z, gates.iters, gates.eps, kept)
        if lane < n * n:
            vector_at(Float32, gates.d_logits)[token * (n * n) + lane] = made

    @cute.jit
    def _token(
        self, norm: Norm, token: Int64, width: Int32, sums: TokenSums, buffer: Int32, mixes: cute.Pointer,
        of_weight: cute.Pointer,
    ):  # fmt: skip
        """Make a token's d_mix and d_pre, and add its part of w's gradient; called by the whole CTA.

        sums, buffer: see `TokenSums`. mixes, of_weight: u and the sum of w's gradient in shared memory.
        """
        thread, _, _ = cute.arch.thread_idx()
        n = self.n
        vectors = width // self.count
        weights = load_params(norm.pre, Int32(0), token * n, n)
        dots = cute.make_rmem_tensor(self.sums, Float32)
        dots.fill(0.0)
        for vector in cutlass.range(thread, vectors, THREADS):
            self._add(norm, token, vector, vectors, weights, mixes, dots)
        sums.leave(dots, buffer)
        cute.arch.sync_threads()
        square, of_g = sums.total(Int32(2 * n), buffer), sums.total(Int32(2 * n + 1), buffer)
        r = 1.0 / cute.math.sqrt(square / Float32(width) + norm.eps)
        factor = r * r * r * (of_g / Float32(width))
        if (norm.d_pre != 0) & (thread < n):
            d_pre = r * sums.total(thread, buffer) - factor * sums.total(thread + n, buffer)
            vector_at(Float32, norm.d_pre)[token * n + thread] = d_pre
        for vector in cutlass.range(thread, vectors, THREADS):
            u = self._mix(mixes, vector)
            d = floats(load_vector(self.dtype, norm.d_x, token * vectors + vector))
            w = load_params(norm.weight, norm.weight_code, Int64(vector) * self.count, self.count)
            d_mix, mine = cute.make_rmem_tensor(self.count, Float32), self._of_weight(of_weight, vector)
            d_mix.store(d.load() * w.load() * r - u.load() * factor)
            store_vector(self.dtype, norm.d_mix, token * vectors + vector, d_mix)
            mine.store(mine.load() + d.load() * u.load() * r)

    def _mix(self, mixes: cute.Pointer, vector: Int32) -> cute.Tensor:
        """Return u (the mix of the streams) at one vector of columns, from shared memory, as float32."""
        words = cute.make_rmem_tensor(WORDS, Int32)
        words.store(shared_at(Int32, mixes + vector * WORDS, WORDS).load())
        return floats(cute.recast_tensor(words, self.dtype))

    @cute.jit
    def _add(
        self, norm: Norm, token: Int64, vector: Int32, vectors: Int32, weights: cute.Tensor, mixes: cute.Pointer,
        dots: cute.Tensor,
    ):  # fmt: skip
        """Store u at a vector of columns in shared memory; add g streams_j, u streams_j, u^2 and g u over these columns
        to `dots`."""
        n = self.n
        first = token * (n * vectors) + vector
        raw = [load_vector(self.dtype, norm.streams, first + j * vectors) for j in range(n)]
        d = floats(load_vector(self.dtype, norm.d_x, token * vectors + vector))
        w = load_params(norm.weight, norm.weight_code, Int64(vector) * self.count, self.count)
        streams = [floats(r) for r in raw]
        mixed = cute.make_rmem_tensor(self.count, Float32)
        mixed.fill(0.0)
        for j in cutlass.range_constexpr(n):
            mixed.store(mixed.load() + streams[j].load() * weights[j])
        narrow = cute.make_rmem_tensor(self.count, self.dtype)
        narrow.store(mixed.load().to(self.dtype))
        shared_at(Int32, mixes + vector * WORDS, WORDS).store(cute.recast_tensor(narrow, Int32).load())
        u = floats(narrow)
        for e in cutlass.range_constexpr(self.count):
            g = d[e] * w[e]
            for j in cutlass.range_constexpr(n):
                dots[j] += g * streams[j][e]
                dots[n + j] += u[e] * streams[j][e]
            dots[2 * n] += u[e] * u[e]
            dots[2 * n + 1] += g * u[e]


def trace(spec: MhcSpec) -> Traced:
    return traced(spec, BoundaryBackward(spec.name, DTYPES[spec.dtype], spec.n))
