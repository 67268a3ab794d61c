"""The gates: they turn the projection p = x weight^T (K = n^2 + 2n numbers a token) into the coefficients of n residual
streams.

    z = p r alpha + bias, r = 1 / (rms(x) + eps);  h_pre = sigmoid(z), h_post = 2 sigmoid(z), h_res = z

x are a token's n streams as one row; r is the factor of its RMS norm; alpha (a factor) and bias are learned parameters.
h_pre [n] weighs the streams in a sublayer's input, h_post [n] spreads the sublayer's output over the streams, and h_res
[n, n] mixes the streams.

An output is one of the K elements of p. Outputs k < n are for h_pre, n <= k < 2n for h_post, and the last n^2 for
h_res. Each of the three has its own alpha, one number. A warp handles a token. The gradients are in gates_backward.py.
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
from ..device.vectors import dtype_code, load_params
from ..device.warps import WARP
from .shapes import GATE_WARPS, outputs

FINISH_CTAS_PER_SM = 8
# Partial sums that a thread reads at a time.
FINISH_READS = 12


class Gates(NamedTuple):
    """Parameters of the gates.

    Attributes:
        alpha_pre, alpha_post, alpha_res: addresses of one number each, the factors of p r for h_pre, h_post and h_res.
        bias: the address of K = n^2 + 2n numbers.
        forms: dtypes of the weight, the alphas and the bias (mhc/kernels.py).
        eps: a number, added to rms(x).
    """

    alpha_pre: Int64
    alpha_post: Int64
    alpha_res: Int64
    bias: Int64
    forms: Int32
    eps: Float32


def sigmoid(z: Float32) -> Float32:
    """Return 1 / (1 + exp(-z)), by approximate instructions."""
    return cute.arch.rcp_approx(1.0 + cute.math.exp(-z, fastmath=True))


@cute.jit
def alpha_of(gates: Gates, k: Int32, n: cutlass.Constexpr[int]) -> Float32:
    """Return alpha, the factor in the gate's argument z = p r alpha + bias, for output k (element k of p): alpha_pre
    for k < n, alpha_post for n <= k < 2n, alpha_res for the last n^2 outputs."""
    address = gates.alpha_res
    if k < n:
        address = gates.alpha_pre
    elif k < 2 * n:
        address = gates.alpha_post
    return load_params(address, dtype_code(gates.forms, 1), Int64(0), 1)[0]


class LaneParams(NamedTuple):
    """The alphas and biases of the outputs that a lane handles, k = lane, lane + 32, ...; zeros for outputs past the
    last."""

    alphas: cute.Tensor
    biases: cute.Tensor


@cute.jit
def lane_params(gates: Gates, n: cutlass.Constexpr[int]) -> LaneParams:
    """Load the alpha and the bias of each output that this lane handles. An output is an element of p = x weight^T."""
    rounds = cute.ceil_div(outputs(n), WARP)
    alphas, biases = cute.make_rmem_tensor(rounds, Float32), cute.make_rmem_tensor(rounds, Float32)
    alphas.fill(0.0)
    biases.fill(0.0)
    for i in cutlass.range_constexpr(rounds):
        k = cute.arch.lane_idx() + WARP * i
        if k < outputs(n):
            alphas[i] = alpha_of(gates, k, n)
            biases[i] = load_params(gates.bias, dtype_code(gates.forms, 2), Int64(k), 1)[0]
    return LaneParams(alphas, biases)


class ProjectFinish(Invariant):
    """Second kernel of `project` (project.py: p = x weight^T, then norm and gates). It adds the partial sums of the
    slices (ranges of x's columns), and applies norm, alpha, bias and gates."""

    def __init__(self, name: str, n: int):
        self.name = name
        self.n = n
        self.outputs = outputs(n)

    @cute.jit
    def launch(
        self, sums: tuple, gates: Gates, results: tuple, tokens: Int32, columns: Int32, num_sms: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch the kernel.

        Args:
            sums: the addresses of float32 products [slices, T, K] and squares [slices, T], and the number of slices.
            gates: the gates' parameters.
            results: the addresses of float32 h_pre, h_post, h_res, and stats [T, K + 1] (p and rms; 0: not wanted).
            columns: number of columns of x: n streams times their columns.
        """
        ctas = cutlass.min(cute.ceil_div(tokens, GATE_WARPS), num_sms * FINISH_CTAS_PER_SM)
        name_kernel(self.kernel, self.name)
        self.kernel(sums, gates, results, tokens, columns).launch(
            grid=(ctas, 1, 1), block=(GATE_WARPS * WARP, 1, 1), stream=stream, use_pdl=early(True)
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
        first = block * GATE_WARPS + cute.arch.make_warp_uniform(thread // WARP)
        wait_for_earlier()
        for token in cutlass.range(first, tokens, grid * GATE_WARPS):
            square = Float32(0.0)
            for first_part in cutlass.range(0, slices, WARP):
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
                k = lane + WARP * i
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
        """Add the partial sums of FINISH_READS slices to `p`, a token's projection at this lane's outputs.

        A slice is a range of x's columns. Slices are added in their order, from slice `first` on. All loads are issued
        before the first addition. Past the last slice, the last slice is loaded again but not added.

        Args:
            products: the address of float32 partial sums [slices, T, K].
            tokens: T.
            token: the token's index.
        """
        raw = cute.make_rmem_tensor((cute.size(p), FINISH_READS), Float32)
        for j in cutlass.range_constexpr(FINISH_READS):
            row = (Int64(cutlass.min(first + j, slices - 1)) * tokens + token) * self.outputs
            for i in cutlass.range_constexpr(cute.size(p)):
                k = cutlass.min(cute.arch.lane_idx() + WARP * i, self.outputs - 1)
                raw[i, j] = vector_at(Float32, products)[row + k]
        for j in cutlass.range_constexpr(FINISH_READS):
            if first + j < slices:
                for i in cutlass.range_constexpr(cute.size(p)):
                    p[i] += raw[i, j]
