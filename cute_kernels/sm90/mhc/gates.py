"""From a projection to coefficients, a warp a token: z = p r alpha + bias, r = 1 / (rms(x) + eps); h_pre = sigmoid(z),
h_post = 2 sigmoid(z), h_res = z. And the way back, up to the gradient of p and the factor of x that the norm makes.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ...gmem import vector_at
from ...invariant import Invariant
from .shapes import GATE_WARPS, TOKEN_TILE, block_bytes, outputs
from .vectors import form_of, load_params, run_at

LANES = 32
FINISH_CTAS_PER_SM = 8
# Partial sums that a thread reads at a time.
FINISH_READS = 12


class Gates(NamedTuple):
    """alphas (one number each) and bias [K]; `forms`: of weight, the alphas and the bias."""

    alpha_pre: Int64
    alpha_post: Int64
    alpha_res: Int64
    bias: Int64
    forms: Int32
    eps: Float32


def sigmoid(z: Float32) -> Float32:
    return cute.arch.rcp_approx(1.0 + cute.math.exp(-z, fastmath=True))


@cute.jit
def alpha_of(gates: Gates, k: Int32, n: cutlass.Constexpr[int]) -> Float32:
    """The factor of row k of the weight."""
    address = gates.alpha_res
    if k < n:
        address = gates.alpha_pre
    elif k < 2 * n:
        address = gates.alpha_post
    return load_params(address, form_of(gates.forms, 1), Int64(0), 1)[0]


class LaneParams(NamedTuple):
    """For each of a lane's outputs k = lane, lane + 32, ...: alpha and bias; those past the last are zero."""

    alphas: cute.Tensor
    biases: cute.Tensor


@cute.jit
def lane_params(gates: Gates, n: cutlass.Constexpr[int]) -> LaneParams:
    rounds = cute.ceil_div(outputs(n), LANES)
    alphas, biases = cute.make_rmem_tensor(rounds, Float32), cute.make_rmem_tensor(rounds, Float32)
    alphas.fill(0.0)
    biases.fill(0.0)
    for i in cutlass.range_constexpr(rounds):
        k = cute.arch.lane_idx() + LANES * i
        if k < outputs(n):
            alphas[i] = alpha_of(gates, k, n)
            biases[i] = load_params(gates.bias, form_of(gates.forms, 2), Int64(k), 1)[0]
    return LaneParams(alphas, biases)


class ProjectFinish(Invariant):
    """Adds the slices' sums and applies norm, alpha, bias and gates. Kernel of the projection's forward."""

    def __init__(self, name: str, n: int):
        self.name = name
        self.n = n
        self.outputs = outputs(n)

    @cute.jit
    def launch(
        self, sums: tuple, gates: Gates, results: tuple, tokens: Int32, columns: Int32, num_sms: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """sums: addresses of products [slices, T, K] and squares [slices, T], and slices."""
        ctas = cutlass.min(cute.ceil_div(tokens, GATE_WARPS), num_sms * FINISH_CTAS_PER_SM)
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(sums, gates, results, tokens, columns).launch(
            grid=(ctas, 1, 1), block=(GATE_WARPS * LANES, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, sums: tuple, gates: Gates, results: tuple, tokens: Int32, columns: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        products, squares, slices = sums
        h_pre, h_post, h_res, stats = results
        n, lane = self.n, cute.arch.lane_idx()
        params = lane_params(gates, n)
        first = block * GATE_WARPS + cute.arch.make_warp_uniform(thread // LANES)
        for token in cutlass.range(first, tokens, grid * GATE_WARPS):
            square = Float32(0.0)
            for first_part in cutlass.range(0, slices, LANES):
                if first_part + lane < slices:
                    square += vector_at(Float32, squares)[Int64(first_part + lane) * tokens + token]
            p = cute.make_rmem_tensor(cute.size(params.alphas), Float32)
            p.fill(0.0)
            for first_part in cutlass.range(0, slices, FINISH_READS):
                self._add(products, slices, tokens, token, first_part, p)
            square = cute.arch.warp_reduction_sum(square)
            rms = cute.math.sqrt(square / Float32(columns))
            r = 1.0 / (rms + gates.eps)
            at = Int64(token)
            for i in cutlass.range_constexpr(cute.size(p)):
                k = lane + LANES * i
                z = p[i] * r * params.alphas[i] + params.biases[i]
                if k < n:
                    vector_at(Float32, h_pre)[at * n + k] = sigmoid(z)
                elif k < 2 * n:
                    vector_at(Float32, h_post)[at * n + k - n] = 2.0 * sigmoid(z)
                elif k < self.outputs:
                    vector_at(Float32, h_res)[at * (n * n) + k - 2 * n] = z
                if (stats != 0) & (k < self.outputs):
                    vector_at(Float32, stats)[at * (self.outputs + 1) + k] = p[i]
            if (stats != 0) & (lane == 0):
                vector_at(Float32, stats)[at * (self.outputs + 1) + self.outputs] = rms

    @cute.jit
    def _add(
        self, products: Int64, slices: Int32, tokens: Int32, token: Int32, first: Int32, p: cute.Tensor
    ):  # fmt: skip
        """Add a lane's sums of some slices, in order. All are read first; past the last slice it is read, not added."""
        raw = cute.make_rmem_tensor((cute.size(p), FINISH_READS), Float32)
        for j in cutlass.range_constexpr(FINISH_READS):
            row = (Int64(cutlass.min(first + j, slices - 1)) * tokens + token) * self.outputs
            for i in cutlass.range_constexpr(cute.size(p)):
                k = cutlass.min(cute.arch.lane_idx() + LANES * i, self.outputs - 1)
                raw[i, j] = vector_at(Float32, products)[row + k]
        for j in cutlass.range_constexpr(FINISH_READS):
            if first + j < slices:
                for i in cutlass.range_constexpr(cute.size(p)):
                    p[i] += raw[i, j]


class GateInputs(NamedTuple):
    """Gradients of the coefficients (0 where absent), and what forward left: stats [T, K + 1], p and rms."""

    d_pre: Int64
    d_post: Int64
    d_res: Int64
    stats: Int64


class GatesBackward(Invariant):
    """The gradient of p = x weight^T in two orders, the factor of x that the norm makes, and sums over tokens.

    A warp takes two tokens at a time, so that a lane holds both halves of a pair. See `shapes.backward_workspace`.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric], n: int):
        self.name = name
        self.dtype = dtype
        self.n = n
        self.outputs = outputs(n)
        self.rounds = -(-self.outputs // LANES)
        self.in_blocks = dtype.width == 16

    @cute.jit
    def launch(
        self, inputs: GateInputs, gates: Gates, places: tuple, tokens: Int32, columns: Int32, ctas: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """places: addresses of products, pairs, norms and sums."""
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(inputs, gates, places, tokens, columns).launch(
            grid=(ctas, 1, 1),
            block=(GATE_WARPS * LANES, 1, 1),
            smem=2 * self.rounds * LANES * GATE_WARPS * 4,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, inputs: GateInputs, gates: Gates, places: tuple, tokens: Int32, columns: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        # The next kernel may start: it waits for this one's end before it reads anything from here.
        cute.arch.griddepcontrol_launch_dependents()
        products, pairs, norms, sums = places
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(thread // LANES)
        params = lane_params(gates, self.n)
        of_bias, of_alpha = (cute.make_rmem_tensor(self.rounds, Float32) for _ in range(2))
        of_bias.fill(0.0)
        of_alpha.fill(0.0)
        num_pairs = cute.ceil_div(tokens, TOKEN_TILE) * (TOKEN_TILE // 2)
        for pair in cutlass.range(block * GATE_WARPS + warp, num_pairs, grid * GATE_WARPS):
            d_products = cute.make_rmem_tensor((2, self.rounds), Float32)
            for i in cutlass.range_constexpr(2):
                token = 2 * pair + i
                d_products[i, None].fill(0.0)
                norm = Float32(0.0)
                if token < tokens:
                    norm = self._token(inputs, gates, params, token, columns, d_products[i, None], of_bias, of_alpha)
                if lane == 0:
                    self._place_of_norm(products, norms, token)[0] = norm
            for i in cutlass.range_constexpr(self.rounds):
                k = lane + LANES * i
                if k < self.outputs:
                    both = cute.make_rmem_tensor(2, self.dtype)
                    both.store(d_products[None, i].load().to(self.dtype))
                    if const_expr(self.in_blocks):
                        self._to_blocks(products, pair, k, both)
                    else:
                        at = Int64(pair) * (2 * self.outputs) + k
                        vector_at(self.dtype, products)[at] = both[0]
                        vector_at(self.dtype, products)[at + self.outputs] = both[1]
                        run_at(self.dtype, pairs, (Int64(pair) * self.outputs + k) * 2, 2).store(both.load())
        self._leave_sums(of_bias, of_alpha, sums)

    def _place_of_norm(self, products: Int64, norms: Int64, token: Int32) -> cute.Tensor:
        """Where a token's factor goes: behind its tile's blocks, or among all tokens'."""
        if self.in_blocks:
            at = products + Int64(token // TOKEN_TILE) * block_bytes(self.n) + TOKEN_TILE * self.outputs * 2
            return vector_at(Float32, at + token % TOKEN_TILE * 4)
        return vector_at(Float32, norms + Int64(token) * 4)

    @cute.jit
    def _to_blocks(self, products: Int64, pair: Int32, k: Int32, both: cute.Tensor):
        """Two tokens' gradients of p_k, see `shapes.block_bytes`."""
        tile, token = pair // (TOKEN_TILE // 2), pair % (TOKEN_TILE // 2) * 2
        place = vector_at(self.dtype, products + Int64(tile) * block_bytes(self.n))
        at = (k // 8 * 2 + token // 8) * 64 + token % 8 * 8 + k % 8
        place[at], place[at + 8] = both[0], both[1]

    @cute.jit
    def _token(
        self, inputs: GateInputs, gates: Gates, params: LaneParams, token: Int32, columns: Int32,
        d_products: cute.Tensor, of_bias: cute.Tensor, of_alpha: cute.Tensor,
    ) -> Float32:  # fmt: skip
        """One token's gradient of p; adds to the sums over tokens. Returns the factor of x in the gradient of x."""
        lane, stats = cute.arch.lane_idx(), vector_at(Float32, inputs.stats)
        row = Int64(token) * (self.outputs + 1)
        rms = stats[row + self.outputs]
        r = 1.0 / (rms + gates.eps)
        d_r = Float32(0.0)
        for i in cutlass.range_constexpr(self.rounds):
            k = lane + LANES * i
            p, dz = Float32(0.0), Float32(0.0)
            if k < self.outputs:
                p = stats[row + k]
                dz = self._through_gate(inputs, Int64(token), k, p * r * params.alphas[i] + params.biases[i])
            d_products[i] = dz * r * params.alphas[i]
            d_r += dz * p * params.alphas[i]
            of_bias[i] += dz
            of_alpha[i] += dz * p * r
        d_r = cute.arch.warp_reduction_sum(d_r)
        # r = 1 / (rms + eps), and the gradient of rms by x is x / (columns rms).
        factor = Float32(0.0)
        if rms > 0.0:
            factor = -d_r * r * r / (Float32(columns) * rms)
        return factor

    @cute.jit
    def _through_gate(self, inputs: GateInputs, token: Int64, k: Int32, z: Float32) -> Float32:
        """The gradient of z from that of its gate."""
        n = self.n
        gate = sigmoid(z)
        dz = Float32(0.0)
        if k < n:
            if inputs.d_pre != 0:
                dz = vector_at(Float32, inputs.d_pre)[token * n + k] * gate * (1.0 - gate)
        elif k < 2 * n:
            if inputs.d_post != 0:
                dz = vector_at(Float32, inputs.d_post)[token * n + k - n] * 2.0 * gate * (1.0 - gate)
        else:
            if inputs.d_res != 0:
                dz = vector_at(Float32, inputs.d_res)[token * (n * n) + k - 2 * n]
        return dz

    @cute.jit
    def _leave_sums(self, of_bias: cute.Tensor, of_alpha: cute.Tensor, sums: Int64):
        """This CTA's row of sums: of the bias [K], then of the three alphas."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        n, places = self.n, self.rounds * LANES
        smem = cute.make_tensor(
            cute.arch.get_dyn_smem(Float32, alignment=16), cute.make_layout((places, GATE_WARPS, 2))
        )
        for i in cutlass.range_constexpr(self.rounds):
            at = thread % LANES + LANES * i
            smem[at, thread // LANES, 0] = of_bias[i]
            smem[at, thread // LANES, 1] = of_alpha[i]
        cute.arch.sync_threads()
        row = vector_at(Float32, sums + Int64(block) * ((self.outputs + 3) * 4))
        if thread < self.outputs:
            total = Float32(0.0)
            for warp in cutlass.range_constexpr(GATE_WARPS):
                total += smem[thread, warp, 0]
            row[thread] = total
        elif thread < self.outputs + 3:
            which = thread - self.outputs
            first, last = which * n, cutlass.min(which * n + n, 2 * n)
            if which == 2:
                last = Int32(self.outputs)
            total = Float32(0.0)
            for k in cutlass.range(first, last):
                for warp in cutlass.range_constexpr(GATE_WARPS):
                    total += smem[k, warp, 1]
            row[thread] = total
