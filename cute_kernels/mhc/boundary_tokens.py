"""The first kernel of the boundary's backward (boundary_backward.py). For each token, it makes the numbers that the
main kernel needs for all of the token's columns.

T tokens have n residual streams of D columns, coefficients pre [n], post [n] and comb [n, n], and a projection p of
K = n^2 + 2n numbers. streams' are the updated streams, u is their mix, x the norm of u with weight w; rms is the root
mean square of streams'_flat (a token's n updated streams as one row), and r the factor of u's norm.

    dz      the gradient of the gates' arguments, from the gradients of the new pre, post and comb, back through
            sigmoids and Sinkhorn's iterations
    dp      = dz scale / rms, the gradient of p = streams'_flat weight^T
    f       = -(sum of dp p) / (rms^2 n D); the projection's norm adds f streams' to the gradient of streams'
    factor  = r^2 mean(d_x x) = r^3 mean(g u); the mix's norm adds -factor u to the gradient of u

x = u r w, so d_x x / r = g u for g = d_x w. So the kernel reads two matrices [T, D], d_x and x, instead of the n
streams. A warp takes two tokens at a time, 16 lanes for each. Each of these lanes has an element of comb, and 8 of them
have an element of pre or post as well.
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
from ..device.select import select
from ..device.target import let_next_begin
from ..device.vectors import dtype_code, elements, floats, load_params, load_vector
from ..device.warps import WARP
from .balance import Balance
from .boundary_backward_shapes import TOKEN_WARPS, TOKENS_OF_A_WARP, block_bytes, coefficient_floats, dp_bytes
from .boundary_finish import gate_argument
from .boundary_shapes import STATS
from .dp_blocks import place_in_blocks
from .gates import sigmoid
from .shapes import TOKEN_TILE, outputs
from .split import split

HALF = WARP // TOKENS_OF_A_WARP
THREADS = TOKEN_WARPS * WARP


class TokenInputs(NamedTuple):
    """Addresses of the kernel's inputs.

    Attributes:
        d_x, x: [T, D]; d_x 0: not given.
        d_pre, d_post, d_comb: gradients of the new coefficients; 0: not given.
        pre, post, comb: the old coefficients, with which forward updated and mixed; post and comb 0: the streams were
            not updated.
        stats: float32 [T, K + 2], which forward stored (`boundary_finish.Finished.stats`).
        scale, base: the gates' parameters (`boundary_finish.gate_argument`).
        forms: the dtypes of the weight, scale and base, two bits each.
    """

    d_x: Int64
    x: Int64
    d_pre: Int64
    d_post: Int64
    d_comb: Int64
    pre: Int64
    post: Int64
    comb: Int64
    stats: Int64
    scale: Int64
    base: Int64
    forms: Int32


class LaneGates(NamedTuple):
    """A lane's numbers for its two coefficients. Element 0 belongs to a coefficient of comb, element 1 to one of pre or
    post.

    Attributes:
        scales: the factor of p / rms in the gate's argument.
        of_base, of_scale: sums over tokens, for the gradient of base and for the gradient of the factor in `scales`.
    """

    scales: cute.Tensor
    of_base: cute.Tensor
    of_scale: cute.Tensor


class BoundaryTokens(Invariant):
    """First kernel of the backward of `boundary` (boundary.py). It makes each token's dp, f and factor (formulas at the
    top of this file), and sums over tokens for the gradients of base and scale, the parameters of the gates.

    blocks, rows: the addresses of the results (`boundary_backward_shapes.BackwardWorkspace`).
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric], n: int):
        self.name = name
        self.dtype = dtype
        self.n = n
        self.outputs = outputs(n)
        self.balance = Balance(n)
        self.pitch = coefficient_floats(n)

    @cute.jit
    def launch(
        self, given: TokenInputs, blocks: Int64, rows: Int64, tokens: Int32, width: Int32, ctas: Int32, iters: Int32,
        eps: Float32, stream: cuda.CUstream,
    ):  # fmt: skip
        steps = iters * (2 * WARP * 4 * TOKEN_WARPS)
        name_kernel(self.kernel, self.name)
        self.kernel(given, blocks, rows, tokens, width, iters, eps).launch(
            grid=(ctas, 1, 1),
            block=(THREADS, 1, 1),
            smem=steps + 2 * self.outputs * TOKEN_WARPS * 4,
            # Unasked, ptxas spills 4 bytes of float16's.
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, given: TokenInputs, blocks: Int64, rows: Int64, tokens: Int32, width: Int32, iters: Int32, eps: Float32
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        let_next_begin()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        sums = cute.arch.get_dyn_smem(Float32, alignment=16)
        steps = sums + 2 * self.outputs * TOKEN_WARPS + warp * (iters * (2 * WARP))
        kept = cute.make_tensor(steps, cute.make_layout((WARP, 2, iters)))
        gates = self._lane_gates(given)
        pairs = cute.ceil_div(tokens, TOKEN_TILE) * (TOKEN_TILE // TOKENS_OF_A_WARP)
        for pair in cutlass.range(block * TOKEN_WARPS + warp, pairs, grid * TOKEN_WARPS):
            token = pair * TOKENS_OF_A_WARP + thread % WARP // HALF
            of_mix = self._product(given, pair, tokens, width)
            self._token(given, gates, blocks, token, tokens, width, of_mix, iters, eps, kept)
        self._leave_sums(gates, sums, rows)

    def _element(self) -> Int32:
        return cute.arch.lane_idx() % HALF

    def _gate(self) -> Int32:
        """Return the index, among pre and post, of the lane's second coefficient. Lanes without a second coefficient
        return the last index."""
        return cutlass.min(self._element(), 2 * self.n - 1)

    @cute.jit
    def _lane_gates(self, given: TokenInputs) -> LaneGates:
        scales, of_base, of_scale = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
        of_base.fill(0.0)
        of_scale.fill(0.0)
        code = dtype_code(given.forms, 1)
        scales[0] = load_params(given.scale, code, Int64(2), 1)[0]
        scales[1] = load_params(given.scale, code, Int64(self._gate() // self.n), 1)[0]
        return LaneGates(scales, of_base, of_scale)

    @cute.jit
    def _product(self, given: TokenInputs, pair: Int32, tokens: Int32, width: Int32) -> Float32:
        """Return the sum over columns of d_x x for the lane's token. A whole warp calls this.

        Past the last token, the last token's sum is returned.

        Args:
            pair: number of the warp's pair of tokens.
            width: D.
        """
        lane, vectors = cute.arch.lane_idx(), width // elements(self.dtype)
        sums = cute.make_rmem_tensor(TOKENS_OF_A_WARP, Float32)
        sums.fill(0.0)
        if given.d_x != 0:
            for vector in cutlass.range(lane, vectors, WARP, unroll=4):
                at = [
                    Int64(cutlass.min(pair * TOKENS_OF_A_WARP + one, tokens - 1)) * vectors + vector
                    for one in range(TOKENS_OF_A_WARP)
                ]
                d = [load_vector(self.dtype, given.d_x, place) for place in at]
                x = [load_vector(self.dtype, given.x, place) for place in at]
                for one in cutlass.range_constexpr(TOKENS_OF_A_WARP):
                    left, right = floats(d[one]), floats(x[one])
                    for e in cutlass.range_constexpr(elements(self.dtype)):
                        sums[one] += left[e] * right[e]
        totals = [cute.arch.warp_reduction_sum(sums[one]) for one in range(TOKENS_OF_A_WARP)]
        return select(lane < HALF, totals[0], totals[1])

    @cute.jit
    def _token(
        self, given: TokenInputs, gates: LaneGates, blocks: Int64, token: Int32, tokens: Int32, width: Int32,
        of_mix: Float32, iters: Int32, eps: Float32, kept: cute.Tensor,
    ):  # fmt: skip
        """Make and store the lane's elements of its token's dp and record, which the main kernel reads. Add to the sums
        over tokens in `gates`. After the last token, dp is 0 and zeros are added.

        Args:
            gates: the lane's factors and sums.
            blocks: the address of the blocks for the main kernel.
            width: D.
            of_mix: the sum over columns of d_x x.
            iters, eps: number of Sinkhorn iterations, and the number that they add to each sum.
            kept: shared memory of the warp in which the iterations' elements are kept (`steps` of `Balance.backward`).
        """
        n, element, gate = self.n, self._element(), self._gate()
        at, is_token = Int64(cutlass.min(token, tokens - 1)), token < tokens
        stats = vector_at(Float32, given.stats + at * ((self.outputs + STATS) * 4))
        p, numbers = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        p[0], p[1] = stats[2 * n + element], stats[gate]
        rms, r = stats[self.outputs], stats[self.outputs + 1]
        numbers.fill(0.0)
        if given.d_comb != 0:
            z = self._argument(given, p[0], rms, 2 * n + element)
            d = vector_at(Float32, given.d_comb)[at * (n * n) + element]
            numbers[0] = self.balance.backward(d, z, iters, eps, kept)
        source, place, slope = given.d_pre, at * n + gate, Float32(1.0)
        if gate >= n:
            source, place, slope = given.d_post, at * n + gate - n, Float32(2.0)
        if (source != 0) & (element < 2 * n):
            share = sigmoid(self._argument(given, p[1], rms, gate))
            numbers[1] = vector_at(Float32, source)[place] * slope * share * (1.0 - share)
        inverse, d_r = 1.0 / rms, Float32(0.0)
        for i in cutlass.range_constexpr(2):
            dz = select(is_token, numbers[i], Float32(0.0))
            gates.of_base[i] += dz
            gates.of_scale[i] += dz * p[i] * inverse
            numbers[i] = dz * gates.scales[i] * inverse
            d_r += numbers[i] * p[i]
        for bit in cutlass.range_constexpr(HALF.bit_length() - 1):
            d_r = d_r + cute.arch.shuffle_sync_bfly(d_r, 1 << bit)
        self._leave_dp(blocks, token, numbers)
        f = select((rms > 0.0) & is_token, -d_r * inverse * inverse / Float32(width * n), Float32(0.0))
        is_mixed = is_token & (given.d_x != 0)
        r = select(is_mixed, r, Float32(0.0))
        factor = select(is_mixed, r * r * (of_mix / Float32(width)), Float32(0.0))
        self._leave_record(given, blocks, token, at, (r, factor, f))

    def _argument(self, given: TokenInputs, p: Float32, rms: Float32, k: Int32) -> Float32:
        codes = [dtype_code(given.forms, place) for place in (1, 2)]
        return gate_argument(p, rms, given.scale, codes[0], given.base, codes[1], k, self.n)

    def _block(self, blocks: Int64, token: Int32) -> Int64:
        return blocks + Int64(token // TOKEN_TILE) * block_bytes(self.n)

    @cute.jit
    def _leave_dp(self, blocks: Int64, token: Int32, values: cute.Tensor):
        """Store the lane's two elements of dp in the block of the token's tile. One element belongs to an output of
        comb, the other to one of pre or post. Each is stored as two 16-bit numbers: the nearest, and the rest
        (`split.py`).

        Args:
            blocks: the address of all tiles' blocks.
            values: two elements of dp, float32.
        """
        row, block, element = token % TOKEN_TILE, self._block(blocks, token), self._element()
        parts = split(values, self.dtype)
        for part in cutlass.range_constexpr(2):
            numbers = cute.recast_tensor(parts[part], self.dtype)
            there = vector_at(self.dtype, block + part * dp_bytes(self.n))
            there[place_in_blocks(row, 2 * self.n + element)] = numbers[0]
            if element < 2 * self.n:
                there[place_in_blocks(row, element)] = numbers[1]

    @cute.jit
    def _leave_record(self, given: TokenInputs, blocks: Int64, token: Int32, at: Int64, last: tuple):
        """Store the token's record: comb transposed (for each updated stream j, its n coefficients comb_ij), post, pre,
        then `last` and a zero.

        If the streams were not updated, comb is the identity and post is 0.

        Args:
            blocks: the address of all tiles' blocks.
            at: the token whose coefficients are read: `token`, or the last one past the end.
            last: r, factor and f.
        """
        n, element, square = self.n, self._element(), self.n * self.n
        start = self._block(blocks, token) + 2 * dp_bytes(n) + Int64(token % TOKEN_TILE) * (self.pitch * 4)
        record = vector_at(Float32, start)
        of_comb, of_post = select(element % n == element // n, Float32(1.0), Float32(0.0)), Float32(0.0)
        if given.comb != 0:
            of_comb = vector_at(Float32, given.comb)[at * square + element % n * n + element // n]
            of_post = vector_at(Float32, given.post)[at * n + element % n]
        record[element] = of_comb
        if element < n:
            record[square + element] = of_post
            record[square + n + element] = vector_at(Float32, given.pre)[at * n + element]
        value = Float32(0.0)
        for i in cutlass.range_constexpr(3):
            value = select(element == i, last[i], value)
        if element < self.pitch - self.outputs:
            record[self.outputs + element] = value

    @cute.jit
    def _leave_sums(self, gates: LaneGates, sums: cute.Pointer, rows: Int64):
        """Store this CTA's row of `rows`: [2 K] sums over the CTA's tokens. The first K are for the gradient of base,
        the other K for the gradient of each output's factor (scale).

        sums: shared memory, in which the warps' sums are added.
        """
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp, element = thread // WARP, self._element()
        by_warp = cute.make_tensor(sums, cute.make_layout((2 * self.outputs, TOKEN_WARPS)))
        for kind in cutlass.range_constexpr(2):
            values = gates.of_scale if kind else gates.of_base
            totals = [values[i] + cute.arch.shuffle_sync_bfly(values[i], HALF) for i in range(2)]
            if thread % WARP < HALF:
                by_warp[kind * self.outputs + 2 * self.n + element, warp] = totals[0]
                if element < 2 * self.n:
                    by_warp[kind * self.outputs + element, warp] = totals[1]
        cute.arch.sync_threads()
        if thread < 2 * self.outputs:
            total = Float32(0.0)
            for w in cutlass.range_constexpr(TOKEN_WARPS):
                total += by_warp[thread, w]
            vector_at(Float32, rows + Int64(block) * (2 * self.outputs * 4))[thread] = total
