"""A router's logits x W^T + b for few tokens. Each CTA computes one expert's logits of four tokens.

For one token, bytes do not bound the time: 128 experts of 2880 columns are 0.7 MB, which an H200's memory reads in 0.2
us. The latency of dependent loads does. So there is a CTA for each expert, which loads the whole row of the expert's
weight at once. The next kernel of the same call, which chooses experts, starts early. cuBLAS takes two kernels for the
same, and for a float32 router of 16-bit tokens one or two more kernels that widen the tokens.

Products of 16-bit numbers are exact in float32. Sums are float32, in an order that depends only on the width. Only the
result is rounded, to the dtype of logits.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.target import let_next_begin
from ..device.vectors import elements, floats, load_params, load_vector, store_param
from ..device.warps import WARP
from ..specs import PARAM_FORMS, LayerSpec
from ..tracing import DTYPES, Traced, traced

WARPS = 4
THREADS = WARPS * WARP
TOKENS = 4  # tokens of a CTA
UNROLL = 4  # vectors of 16 bytes of an expert's row that a thread loads at once: in 16 bits all of them at H = 4096


class Logits(Invariant):
    """Kernel for logits[n, e] = bias[e] + sum over h of x[n, h] weight[e, h].

    x has the spec's dtype; the weight has the same dtype or float32 (`weight_form`). width: H.
    """

    def __init__(self, spec: LayerSpec):
        self.name = spec.name
        self.dtype = DTYPES[spec.dtype]

    @cute.jit
    def __call__(
        self, x: Int64, weight: Int64, weight_bias: Int64, logits: Int64, forms: Int32, weight_form: Int32,
        bias_form: Int32, tokens: Int32, width: Int32, experts: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if tokens > 0:
            name_kernel(self.kernel, self.name)
            self.kernel(x, weight, weight_bias, logits, forms, weight_form, bias_form, tokens, width).launch(
                grid=(experts, cute.ceil_div(tokens, TOKENS), 1), block=(THREADS, 1, 1), stream=stream
            )

    @cute.kernel
    def kernel(
        self, x: Int64, weight: Int64, weight_bias: Int64, logits: Int64, forms: Int32, weight_form: Int32,
        bias_form: Int32, tokens: Int32, width: Int32,
    ):  # fmt: skip
        let_next_begin()
        thread, _, _ = cute.arch.thread_idx()
        expert, part, _ = cute.arch.block_idx()
        first = part * TOKENS
        sums = cute.make_rmem_tensor(TOKENS, Float32)
        sums.fill(0.0)
        if weight_form == PARAM_FORMS["float32"]:
            self._multiply(sums, Float32, x, weight, expert, first, tokens, width)
        else:
            self._multiply(sums, self.dtype, x, weight, expert, first, tokens, width)
        parts = cutlass.utils.SmemAllocator().allocate_tensor(Float32, cute.make_layout((WARPS, TOKENS)), 16)
        for t in cutlass.range_constexpr(TOKENS):
            total = cute.arch.warp_reduction_sum(sums[t])
            if thread % WARP == 0:
                parts[thread // WARP, t] = total
        cute.arch.sync_threads()
        token = first + thread
        if (thread < TOKENS) & (token < tokens):
            total = Float32(0.0)
            if weight_bias != 0:
                total = load_params(weight_bias, bias_form, Int64(expert), 1)[0]
            for warp in cutlass.range_constexpr(WARPS):
                total += parts[warp, thread]
            experts, _, _ = cute.arch.grid_dim()
            store_param(logits, forms, Int64(token) * experts + expert, total)

    @cute.jit
    def _multiply(
        self, sums: cute.Tensor, dtype: cutlass.Constexpr, x: Int64, weight: Int64, expert: Int32, first: Int32,
        tokens: Int32, width: Int32,
    ):  # fmt: skip
        """Add to sums[t], for t < TOKENS, this thread's part of the dot product of token first + t and an expert's
        weight row.

        Past the last token, the last token is read again. dtype: the dtype of the weight.

        Args:
            x, weight: addresses.
            expert: the expert's index.
            tokens, width: number of tokens N, and H.
        """
        thread, _, _ = cute.arch.thread_idx()
        count = elements(self.dtype)
        vectors, of_weight = width // count, count // elements(dtype)
        row = Int64(expert) * vectors
        for vector in cutlass.range(thread, vectors, THREADS, unroll=UNROLL // of_weight):
            pieces = [load_vector(dtype, weight, (row + vector) * of_weight + piece) for piece in range(of_weight)]
            columns = [
                load_vector(self.dtype, x, Int64(cutlass.min(first + t, tokens - 1)) * vectors + vector)
                for t in range(TOKENS)
            ]
            w = [floats(piece)[i] for piece in pieces for i in range(elements(dtype))]
            for t in cutlass.range_constexpr(TOKENS):
                wide = floats(columns[t])
                for i in cutlass.range_constexpr(count):
                    sums[t] += wide[i] * w[i]


def trace(spec: LayerSpec) -> Traced:
    return traced(spec, Logits(spec))
