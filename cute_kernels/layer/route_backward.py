"""The gradient of a router's logits from the gradient of its weights. A warp handles a token.

g is the gradient of the choices' weights times the router's scale; it is 0 for experts that were not chosen.
"Normalised" below means that `normalize` is set: weights are divided by their sum.

Softmax: d_logit_e = p_e (g_e - sum over chosen j of p_j g_j). If weights are normalised, p is the softmax over a
token's chosen experts, else over all experts.

Sigmoid: d_logit_e = d_s_e s_e (1 - s_e) with s = sigmoid(logit). If weights are normalised, d_s_e = g_e / D - (sum over
chosen j of g_j s_j) / D^2 with D = sum over chosen j of s_j, + TINY; else d_s_e = g_e.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.select import select
from ..device.vectors import load_params, store_param
from ..device.warps import WARP
from ..specs import LayerSpec
from ..tracing import Traced, traced
from .choice import LOWEST, SOFTMAX, TINY, sigmoid

WARPS = 8


class RouteBackward(Invariant):
    """Kernel that makes d_logits [N, E] from d_weights [N, k], the logits and the chosen ids [N, k]. The formulas are
    at the top of this file.

    Args:
        forms: the dtype of logits and d_logits (`dtypes.PARAM_FORMS`).
        tokens, experts: N and E.
        score, normalize, scale: the router's rule (`choice.Rule`).
    """

    def __init__(self, spec: LayerSpec):
        self.name = spec.name

    @cute.jit
    def __call__(
        self, d_weights: Int64, logits: Int64, ids: Int64, d_logits: Int64, forms: Int32, tokens: Int32, experts: Int32,
        k: Int32, score: Int32, normalize: Int32, scale: Float32, stream: cuda.CUstream,
    ):  # fmt: skip
        if tokens > 0:
            name_kernel(self.kernel, self.name)
            self.kernel(
                d_weights, logits, ids, d_logits, forms, tokens, experts, k, score, normalize, scale
            ).launch(grid=(cute.ceil_div(tokens, WARPS), 1, 1), block=(WARPS * WARP, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, d_weights: Int64, logits: Int64, ids: Int64, d_logits: Int64, forms: Int32, tokens: Int32, experts: Int32,
        k: Int32, score: Int32, normalize: Int32, scale: Float32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        token = block * WARPS + thread // WARP
        if token < tokens:
            first = Int64(token) * experts
            expert = Int32(-1)
            given = Float32(0.0)
            if lane < k:
                expert = vector_at(Int32, ids)[token * k + lane]
                given = vector_at(Float32, d_weights)[token * k + lane] * scale
            has_one = expert >= 0
            is_routed = cute.arch.vote_any_sync(has_one)
            logit = load_params(logits, forms, first + cutlass.max(expert, Int32(0)), 1)[0]
            mine = Float32(0.0)
            everywhere = Float32(0.0)
            top = Float32(0.0)
            total = Float32(1.0)
            is_dense = (score == SOFTMAX) & (normalize == 0) & is_routed
            if score == SOFTMAX:
                if normalize == 0:
                    top, total = self._of_all(logits, forms, first, experts)
                else:
                    top = cute.arch.warp_reduction_max(select(has_one, logit, Float32(LOWEST)))
                    total = cute.arch.warp_reduction_sum(select(has_one, cute.math.exp(logit - top), Float32(0.0)))
                p = select(has_one, cute.math.exp(logit - top) / total, Float32(0.0))
                everywhere = cute.arch.warp_reduction_sum(p * given)
                mine = p * (given - everywhere)
            else:
                s = select(has_one, sigmoid(logit), Float32(0.0))
                d = given
                if normalize != 0:
                    total = cute.arch.warp_reduction_sum(s) + TINY
                    d = (given - cute.arch.warp_reduction_sum(given * s) / total) / total
                mine = d * s * (1.0 - s)
            for e in cutlass.range(lane, cute.ceil_div(experts, WARP) * WARP, WARP, unroll=1):
                value = Float32(0.0)
                if is_dense:
                    there = load_params(logits, forms, first + cutlass.min(e, experts - 1), 1)[0]
                    value = -everywhere * cute.math.exp(there - top) / total
                for j in cutlass.range(k, unroll=1):
                    is_it = cute.arch.shuffle_sync(expert, j) == e
                    value = select(is_it, cute.arch.shuffle_sync(mine, j), value)
                if e < experts:
                    store_param(d_logits, forms, first + e, value)

    @cute.jit
    def _of_all(self, logits: Int64, forms: Int32, first: Int64, experts: Int32) -> tuple[Float32, Float32]:
        """Return the largest of a token's logits, and the sum of exp(logit - largest) over all experts.

        Args:
            logits: the address of the logits.
            forms: the dtype of the logits (`dtypes.PARAM_FORMS`).
            first: the index of the token's first logit among all logits.
        """
        top = Float32(LOWEST)
        lane = cute.arch.lane_idx()
        for e in cutlass.range(lane, experts, WARP, unroll=1):
            top = cutlass.max(top, load_params(logits, forms, first + e, 1)[0])
        top = cute.arch.warp_reduction_max(top)
        total = Float32(0.0)
        for e in cutlass.range(lane, experts, WARP, unroll=1):
            total += cute.math.exp(load_params(logits, forms, first + e, 1)[0] - top)
        return top, cute.arch.warp_reduction_sum(total)


def trace(spec: LayerSpec) -> Traced:
    return traced(spec, RouteBackward(spec))
