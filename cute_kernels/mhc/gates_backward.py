"""The backward of the gates (gates.py). It makes dp, the gradient of p = x weight^T, and for each token the factor f of
the term f x that the RMS norm adds to the gradient of x.

x [T, n C] are T tokens' n residual streams of C columns; p has K = n^2 + 2n outputs a token.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.select import select
from ..device.target import early, let_next_begin, wait_for_earlier
from ..device.warps import WARP
from .gates import Gates, LaneParams, lane_params, sigmoid
from .shapes import GATE_BACKWARD_WARPS, GATE_BATCH, GATE_CTAS_PER_SM, TOKEN_TILE, block_bytes, outputs
from .split import split

# Shared memory's percentage of an SM's memory: enough for the sums of the CTAs of this kernel.
CARVEOUT = 16


class GateInputs(NamedTuple):
    """Addresses of the gradients of the coefficients h_pre, h_post and h_res (0: absent), and of forward's stats.

    stats are float32 [T, K + 1], K = n^2 + 2n: each token's p, then the root mean square of the token's x.
    """

    d_pre: Int64
    d_post: Int64
    d_res: Int64
    stats: Int64


class LaneGradients(NamedTuple):
    """Places of the gradients of the coefficients that a lane handles. Each attribute is a list with one item for
    each of the lane's outputs k = lane, lane + 32, ...

    Attributes:
        addresses: the address of the gradient for token 0; 0: absent.
        strides: bytes from token to token.
        factors: the factor of the sigmoid in the gate: 1 for h_pre, 2 for h_post. 0 for h_res, whose gate is z itself.
    """

    addresses: list
    strides: list
    factors: list


class Batch(NamedTuple):
    """A lane's registers for a batch of GATE_BATCH tokens. A lane has `rounds` outputs (elements of p) of each token:
    k = lane, lane + 32, ...

    Attributes:
        p: [GATE_BATCH, rounds], p of the lane's outputs.
        d: [GATE_BATCH, rounds], the gradients of the gates, later replaced by the gradients of p.
        rms: the root mean square of one token, number lane % GATE_BATCH of the batch.
    """

    p: cute.Tensor
    d: cute.Tensor
    rms: cute.Tensor


class GatesBackward(Invariant):
    """Kernel that makes, from the coefficients' gradients:

    - dp, the gradient of p = x weight^T: for 16-bit streams in blocks (`shapes.block_bytes`); for float32 streams
      twice, by token (products) and by pairs of tokens (pairs);
    - for each token the factor f of the term f x that the RMS norm adds to d_x (norms);
    - each CTA's sums over tokens for the gradients of the bias and the alphas (sums).

    `shapes.backward_workspace` says where these lie. A warp takes `GATE_BATCH` tokens at a time and issues all their
    loads before it uses the first. An earlier version had a pair of tokens at a time and a branch around each read; it
    took 18 us, of which memory traffic accounts for 2.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric], n: int, carveout: int = CARVEOUT):
        """Set up the kernel for n streams of a dtype.

        carveout: the percentage of an SM's memory that becomes shared memory (the rest is L1 cache). If it equals the
        next kernel's percentage, the next kernel need not wait until the SM's memory is divided anew.
        """
        self.name = name
        self.dtype = dtype
        self.n = n
        self.carveout = carveout
        # 8 streams' batch needs more registers than two CTAs have.
        self.ctas_per_sm = GATE_CTAS_PER_SM if n < 8 else 1
        self.outputs = outputs(n)
        self.rounds = -(-self.outputs // WARP)
        self.in_blocks = dtype.width == 16

    @cute.jit
    def launch(
        self, inputs: GateInputs, gates: Gates, places: tuple, parts: Int32, tokens: Int32, columns: Int32,
        ctas: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch the kernel.

        Args:
            inputs: gradients of the coefficients, and forward's stats.
            places: the addresses to which results are written: products, pairs, norms and sums (see the class).
            parts: for 16-bit streams, how many numbers represent an element of dp: 1, or 2 (the nearest number and the
                rest, `split.py`).
            columns: number of columns of x: n streams times their columns.
            ctas: number of CTAs (`shapes.gate_ctas`).
        """
        name_kernel(self.kernel, self.name)
        self.kernel(inputs, gates, places, parts, tokens, columns).launch(
            grid=(ctas, 1, 1),
            block=(GATE_BACKWARD_WARPS * WARP, 1, 1),
            smem=2 * self.rounds * WARP * GATE_BACKWARD_WARPS * 4,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=self.carveout,
            stream=stream,
            use_pdl=early(True),
        )

    @cute.kernel
    def kernel(
        self, inputs: GateInputs, gates: Gates, places: tuple, parts: Int32, tokens: Int32, columns: Int32
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        # The next kernel reads results of this kernel's predecessors before it waits for this kernel. So it may start
        # only after these predecessors have ended.
        wait_for_earlier()
        let_next_begin()
        products, pairs, norms, sums = places
        warp = cute.arch.make_warp_uniform(thread // WARP)
        first, step = block * GATE_BACKWARD_WARPS + warp, grid * GATE_BACKWARD_WARPS
        batches = cute.ceil_div(tokens, TOKEN_TILE) * (TOKEN_TILE // GATE_BATCH)
        p, d = (cute.make_rmem_tensor((GATE_BATCH, self.rounds), Float32) for _ in range(2))
        batch = Batch(p, d, cute.make_rmem_tensor(1, Float32))
        gradients = self._gradients(inputs)
        self._read(inputs.stats, gradients, first, tokens, batch)
        params = lane_params(gates, self.n)
        of_bias, of_alpha = (cute.make_rmem_tensor(self.rounds, Float32) for _ in range(2))
        of_bias.fill(0.0)
        of_alpha.fill(0.0)
        for index in cutlass.range(first, batches, step):
            d_r = self._through_gates(params, gradients, gates.eps, index, tokens, batch, of_bias, of_alpha)
            norm = self._norm(batch.rms[0], gates.eps, d_r, columns)
            self._leave(products, pairs, norms, parts, index, d, norm)
            if index + step < batches:
                self._read(inputs.stats, gradients, index + step, tokens, batch)
        self._leave_sums(of_bias, of_alpha, sums)

    def _gradients(self, inputs: GateInputs) -> LaneGradients:
        n, lane, made = self.n, cute.arch.lane_idx(), []
        for i in range(self.rounds):
            k = lane + WARP * i
            is_pre, is_post = k < n, k < 2 * n
            source = select(is_pre, inputs.d_pre, select(is_post, inputs.d_post, inputs.d_res))
            place = select(is_pre, k, select(is_post, k - n, k - 2 * n))
            stride = select(is_post, Int32(n * 4), Int32(n * n * 4))
            factor = select(is_pre, Float32(1.0), select(is_post, Float32(2.0), Float32(0.0)))
            is_there = (source != 0) & (k < self.outputs)
            made.append((select(is_there, source + Int64(place) * 4, Int64(0)), stride, factor))
        return LaneGradients(*(list(column) for column in zip(*made, strict=True)))

    @cute.jit
    def _read(self, stats: Int64, gradients: LaneGradients, index: Int32, tokens: Int32, batch: Batch):
        """Load p, rms and the coefficients' gradients of batch number `index` (GATE_BATCH tokens) to `batch`.

        Past the last token, the last token is loaded again.

        stats: the address of forward's stats (`GateInputs`).
        """
        lane, row_bytes = cute.arch.lane_idx(), (self.outputs + 1) * 4
        mine = cutlass.min(index * GATE_BATCH + lane % GATE_BATCH, tokens - 1)
        batch.rms[0] = vector_at(Float32, stats + Int64(mine) * row_bytes)[self.outputs]
        for j in cutlass.range_constexpr(GATE_BATCH):
            token = Int64(cutlass.min(index * GATE_BATCH + j, tokens - 1))
            row = stats + token * row_bytes
            for i in cutlass.range_constexpr(self.rounds):
                k = cutlass.min(lane + WARP * i, self.outputs - 1)
                batch.p[j, i] = vector_at(Float32, row)[k]
                # For an absent gradient, load the row of stats and ignore it: a branch around the load would delay the
                # other loads.
                first = gradients.addresses[i]
                source = select(first != 0, first + token * Int64(gradients.strides[i]), row)
                batch.d[j, i] = vector_at(Float32, source)[0]

    @cute.jit
    def _through_gates(
        self, params: LaneParams, gradients: LaneGradients, eps: Float32, index: Int32, tokens: Int32, batch: Batch,
        of_bias: cute.Tensor, of_alpha: cute.Tensor,
    ) -> Float32:  # fmt: skip
        """Replace the gradients of the gates' outputs in `batch.d` by the gradients of p, and add to the lane's sums
        over tokens.

        Returns the gradient of r = 1 / (rms + eps) for the token whose rms this lane has (`Batch.rms`).

        Args:
            params: alphas and biases of the lane's outputs.
            eps: added to rms.
            index: number of the batch.
            of_bias, of_alpha: the lane's sums over tokens for the gradients of bias and alphas.
        """
        mine = cute.arch.lane_idx() % GATE_BATCH
        r_mine = select(index * GATE_BATCH + mine < tokens, 1.0 / (batch.rms[0] + eps), Float32(0.0))
        d_r_mine = Float32(0.0)
        for j in cutlass.range_constexpr(GATE_BATCH):
            r, d_r = cute.arch.shuffle_sync(r_mine, j), Float32(0.0)
            is_token = index * GATE_BATCH + j < tokens
            for i in cutlass.range_constexpr(self.rounds):
                p, alpha, factor = batch.p[j, i], params.alphas[i], gradients.factors[i]
                gate = sigmoid(p * r * alpha + params.biases[i])
                slope = select(factor != 0.0, factor * gate * (1.0 - gate), Float32(1.0))
                is_there = (gradients.addresses[i] != 0) & is_token
                dz = select(is_there, batch.d[j, i], Float32(0.0)) * slope
                batch.d[j, i] = dz * r * alpha
                d_r += dz * p * alpha
                of_bias[i] += dz
                of_alpha[i] += dz * p * r
            d_r = cute.arch.warp_reduction_sum(d_r)
            d_r_mine = select(mine == j, d_r, d_r_mine)
        return d_r_mine

    def _norm(self, rms: Float32, eps: Float32, d_r: Float32, columns: Int32) -> Float32:
        """Return the factor f of a token, where f x is the norm's term in the gradient of x.

        The gates use r = 1 / (rms + eps), so the gradient of rms is -d_r r^2. The derivative of rms by x is x /
        (columns rms). So f = -d_r r^2 / (columns rms); 0 if rms is 0.

        Args:
            rms: the root mean square of the token's row of x.
            eps: added to rms.
            d_r: the gradient of r (`_through_gates`).
            columns: number of columns of x.
        """
        r = 1.0 / (rms + eps)
        return select(rms > 0.0, -d_r * r * r / (Float32(columns) * rms), Float32(0.0))

    @cute.jit
    def _leave(
        self, products: Int64, pairs: Int64, norms: Int64, parts: Int32, index: Int32, d: cute.Tensor, norm: Float32
    ):  # fmt: skip
        """Store a batch's gradients of p (`d`) and its tokens' factors f (`norm`) in the workspace.

        The factors of 16-bit streams follow the dp of their token tile, in the tile's block. The factors of float32
        streams are in the array `norms` of all tokens.

        Args:
            products: the address of the blocks of all token tiles (16-bit streams), or of dp by token (float32).
            pairs, norms: the addresses of dp by pairs of tokens, and of the factors f; only for float32 streams.
            parts: for 16-bit streams, how many numbers represent an element of dp, 1 or 2.
            index: number of the batch.
        """
        lane, token = cute.arch.lane_idx(), index * GATE_BATCH
        block = products + Int64(token // TOKEN_TILE) * block_bytes(self.n, parts)
        part_bytes = TOKEN_TILE * self.outputs * 2
        if lane < GATE_BATCH:
            place = norms + Int64(token) * 4
            if const_expr(self.in_blocks):
                place = block + parts * part_bytes + token % TOKEN_TILE * 4
            vector_at(Float32, place)[lane] = norm
        for i in cutlass.range_constexpr(self.rounds):
            k = lane + WARP * i
            if k < self.outputs:
                if const_expr(self.in_blocks):
                    near, rest = split(d[None, i], self.dtype)
                    # See `shapes.block_bytes`.
                    at = (k // 8 * 2 + token % TOKEN_TILE // 8) * 64 + k % 8
                    self._leave_in_block(block, at, near)
                    if parts > 1:
                        self._leave_in_block(block + part_bytes, at, rest)
                else:
                    for j in cutlass.range_constexpr(GATE_BATCH):
                        row = Int64(token + j)
                        vector_at(self.dtype, products)[row * self.outputs + k] = d[j, i]
                        vector_at(self.dtype, pairs)[(row // 2 * self.outputs + k) * 2 + j % 2] = d[j, i]

    def _leave_in_block(self, block: Int64, at: Int32, words: cute.Tensor) -> None:
        """Store a batch's gradients of one output in a column of an 8 x 8 block.

        Args:
            block: the address of the token tile's block.
            at: the index, in the block, of the first token's element.
            words: the gradients as 16-bit numbers, two in a word.
        """
        narrow = cute.recast_tensor(words, self.dtype)
        for j in range(GATE_BATCH):
            vector_at(self.dtype, block)[at + 8 * j] = narrow[j]

    @cute.jit
    def _leave_sums(self, of_bias: cute.Tensor, of_alpha: cute.Tensor, sums: Int64):
        """Add the sums of the CTA's lanes over its warps, and store them as one row of `sums`.

        The row has K sums (one for each of a token's projections) for the gradient of the bias, then K for the
        gradients of the alphas.

        Args:
            of_bias, of_alpha: the lane's sums over the warp's tokens (`_through_gates`).
            sums: the address of float32 [CTAs, 2 K].
        """
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        places = self.rounds * WARP
        smem = cute.make_tensor(
            cute.arch.get_dyn_smem(Float32, alignment=16), cute.make_layout((2 * places, GATE_BACKWARD_WARPS))
        )
        for i in cutlass.range_constexpr(self.rounds):
            at = thread % WARP + WARP * i
            smem[at, thread // WARP] = of_bias[i]
            smem[at + places, thread // WARP] = of_alpha[i]
        cute.arch.sync_threads()
        if thread < 2 * self.outputs:
            at = thread
            if thread >= self.outputs:
                at = thread - self.outputs + places
            total = Float32(0.0)
            for warp in cutlass.range_constexpr(GATE_BACKWARD_WARPS):
                total += smem[at, warp]
            vector_at(Float32, sums + Int64(block) * (2 * self.outputs * 4))[thread] = total


class GateRows(NamedTuple):
    """Addresses of the partial sums for the gradients of the gates' parameters, and of these gradients (`GateSums`).

    Attributes:
        rows: the address of float32 [count, 2 K]. A row has the sums over tokens that one CTA of `GatesBackward`
            stored.
        count: number of these CTAs.
        out: the address of float32 [K + 3], the gradients of the bias and of the three alphas.
    """

    rows: Int64
    count: Int32
    out: Int64


class GateSums(Invariant):
    """Device code that makes the gradients of the bias [K] and of the three alphas, by adding the CTAs' sums in a fixed
    order. One CTA of another kernel runs this code, while the other CTAs do that kernel's work."""

    READS = 16

    def __init__(self, n: int, warps: int):
        self.n = n
        self.outputs = outputs(n)
        self.warps = warps
        self.rounds = -(-2 * self.outputs // WARP)

    @property
    def smem_bytes(self) -> int:
        return self.rounds * WARP * self.warps * 4

    @cute.jit
    def add(self, given: GateRows):
        """Add the CTAs' sums and store the gradients. All threads of a CTA call this, with `smem_bytes` of shared
        memory."""
        rows, count, out = given
        thread, _, _ = cute.arch.thread_idx()
        lane, warp, width = thread % WARP, thread // WARP, 2 * self.outputs
        totals = cute.make_rmem_tensor(self.rounds, Float32)
        totals.fill(0.0)
        raw = cute.make_rmem_tensor((self.READS, self.rounds), Float32)
        for first in cutlass.range(warp, count, self.warps * self.READS):
            # Past the last row, that row is read again, so that all READS reads are under way together.
            for read in cutlass.range_constexpr(self.READS):
                row = cutlass.min(first + read * self.warps, count - 1)
                for i in cutlass.range_constexpr(self.rounds):
                    k = cutlass.min(lane + WARP * i, width - 1)
                    raw[read, i] = vector_at(Float32, rows)[Int64(row) * width + k]
            for read in cutlass.range_constexpr(self.READS):
                if first + read * self.warps < count:
                    for i in cutlass.range_constexpr(self.rounds):
                        totals[i] += raw[read, i]
        smem = cute.make_tensor(
            cute.arch.get_dyn_smem(Float32, alignment=16), cute.make_layout((self.rounds * WARP, self.warps))
        )
        for i in cutlass.range_constexpr(self.rounds):
            smem[lane + WARP * i, warp] = totals[i]
        cute.arch.sync_threads()
        if warp == 0:
            for i in cutlass.range_constexpr(self.rounds):
                k, total = lane + WARP * i, Float32(0.0)
                for w in cutlass.range_constexpr(self.warps):
                    total += smem[k, w]
                smem[k, 0] = total
                if k < self.outputs:
                    vector_at(Float32, out)[k] = total
            cute.arch.sync_warp()
            if lane < 3:
                first, last = self.outputs + lane * self.n, self.outputs + lane * self.n + self.n
                if lane == 2:
                    last = Int32(2 * self.outputs)
                total = Float32(0.0)
                for k in cutlass.range(first, last):
                    total += smem[k, 0]
                vector_at(Float32, out)[self.outputs + lane] = total
