"""boundary: from one sublayer's output to the next sublayer's input, with hyper-connections as DeepSeek-V4.1 has them.

A boundary lies between two sublayers. It updates the n streams with the output y of the first, and makes the input x of
the second: the mix (weighted sum) u of the updated streams, normalised.

The mix uses coefficients that the previous boundary computed, so it need not wait for new ones. Therefore one pass over
the streams serves all four steps: their update, the mix, the mix's norm, and the projection that makes the next
coefficients.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from cute_kernels.mhc import boundary_shapes, shapes

from ..calls.addressed import Gradients, Like, check_like, like
from ..calls.checks import check_tensor, runs_kernels, shape_text
from ..calls.front import operator
from ..names import Block
from . import boundary_mxfp8 as mxfp8
from . import boundary_reference as reference
from .boundary_backward import boundary_backward
from .boundary_mxfp8 import QuantizedBoundaryResults
from .call import MhcCall, check_eps, check_iters, check_param, check_streams
from .project import accumulator

MAX_ITERS = 100
"""Largest `iters`: backward keeps the matrix after each step in shared memory."""
STREAM_DTYPES = (torch.bfloat16, torch.float16)
COEFFICIENTS = ("pre", "post", "comb")


class BoundaryResults(NamedTuple):
    """Results of `boundary`. The coefficients pre, post and comb are float32 (float64 if the streams are float64).

    Attributes:
        streams: [..., n, D], the updated streams; without an update the streams that were passed in.
        x: [..., D] in the streams' dtype, the next sublayer's input.
        pre: [..., n], in (eps, 1 + eps), weights for the mix of the next boundary.
        post: [..., n], in (0, 2): factors of the next sublayer's output, for the next boundary's update.
        comb: [..., n, n], the matrix that mixes the streams in the next boundary's update.
    """

    streams: Tensor
    x: Tensor
    pre: Tensor
    post: Tensor
    comb: Tensor


@overload
def boundary(
    y: Tensor | None, streams: Tensor, pre: Tensor, post: Tensor | None, comb: Tensor | None, weight: Tensor,
    scale: Tensor, base: Tensor, norm_weight: Tensor, rms_eps: float = 1e-6, eps: float = 1e-6, norm_eps: float = 1e-6,
    iters: int = 20, *, x_block: None = None, return_x: bool = False,
) -> BoundaryResults: ...  # fmt: skip
@overload
def boundary(
    y: Tensor | None, streams: Tensor, pre: Tensor, post: Tensor | None, comb: Tensor | None, weight: Tensor,
    scale: Tensor, base: Tensor, norm_weight: Tensor, rms_eps: float = 1e-6, eps: float = 1e-6, norm_eps: float = 1e-6,
    iters: int = 20, *, x_block: Block, return_x: bool = False,
) -> QuantizedBoundaryResults: ...  # fmt: skip
def boundary(
    y: Tensor | None,
    streams: Tensor,
    pre: Tensor,
    post: Tensor | None,
    comb: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor,
    rms_eps: float = 1e-6,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
    iters: int = 20,
    *,
    x_block: Block | None = None,
    return_x: bool = False,
) -> BoundaryResults | QuantizedBoundaryResults:
    """Update the streams, mix the next sublayer's input, and make the coefficients for the boundary after this one.

        streams'_j = post_j y + sum over i of comb_ij streams_i          rounded to the streams' dtype
        u = sum over j of pre_j streams'_j                               rounded to the streams' dtype
        x = u / sqrt(mean u^2 + norm_eps) norm_weight
        z = (streams'_flat weight^T) / sqrt(mean streams'_flat^2 + rms_eps) scale + base
        pre' = sigmoid(z_pre) + eps;  post' = 2 sigmoid(z_post)
        comb' = softmax of z_comb's rows + eps; columns / (their sum + eps); then `iters` - 1 times rows and columns

    streams'_flat is streams' as [..., n D]. Differentiable in every tensor. A token's results depend neither on the
    other tokens nor on their number.

    Args:
        y: the sublayer's output [..., D], the streams' dtype. None: no update; then post and comb are None, too.
        streams: [..., n, D], contiguous; bfloat16 or float16, on the CPU also float32 and float64. On a GPU n is 4
            and D a multiple of 8.
        pre, post, comb: [..., n], [..., n] and [..., n, n], from the previous boundary's results; float32 (float64 if
            the streams are float64).
        weight: [n n + 2n, n D], rows for pre, post and comb (row-major) in this order; float32 or 16-bit. A float32
            weight keeps its precision.
        scale: [3], one factor each for pre, post and comb; float32 or 16-bit.
        base: [n n + 2n], added to each coefficient's z; float32 or 16-bit.
        norm_weight: [D], the RMSNorm's weight; float32 or 16-bit.
        rms_eps, norm_eps: added under the square roots of z and of x.
        eps: added to `pre` and to Sinkhorn's sums.
        iters: number of Sinkhorn iterations, 1 to 100.
        x_block: "1x32" or "1x128": return x in MXFP8, with the bytes of `quantize_mxfp8(x, block=x_block)`, instead of
            in 16 bits. D must be a multiple of 32. Not differentiable. None: x is not quantised.
        return_x: True: with x_block, return x in 16 bits besides x in MXFP8. Without x_block x is always returned.

    Returns:
        BoundaryResults; with x_block QuantizedBoundaryResults.

    Raises:
        ValueError, TypeError: an argument does not fit; nothing was launched.
        GradientNotSupported: grad mode is on, x_block is given, and a tensor requires a gradient.
        UnsupportedDevice, BundleError (RuntimeErrors): there is no kernel for this GPU, or no usable bundle.
    """
    columns = mxfp8.columns_of("boundary", x_block, return_x)
    made = boundary_streams(
        y, streams, pre, post, comb, weight, scale, base, norm_weight, rms_eps, eps, norm_eps, iters,
        of_x=return_x or not columns, x_block=columns,
    )  # fmt: skip
    updated, *others = made[:5]
    results = BoundaryResults(streams if updated is None else updated, *others)
    return QuantizedBoundaryResults(*results, mxfp8.in_mxfp8(made[6], made[7], x_block)) if columns else results


def _cut(call: Any) -> dict[str, Any]:
    n, width = call.streams.shape[-2:]
    cta = boundary_shapes.cta_of(call.gpu.arch, n)
    parts = boundary_shapes.cut(cta, width, call.num_rows, call.gpu.sm_count)
    slices, in_workspace = boundary_shapes.slices_of(cta, width), 0 if call.of_x else width
    return {"parts": parts, "workspace": boundary_shapes.workspace(n, slices, call.num_rows, in_workspace)}


class BoundaryCall(MhcCall):
    """A call of boundary.

    Attributes:
        of_stats: True: return `stats` (norms and projections of each token), which backward needs.
        of_x: True: return x in 16 bits.
        x_block: number of columns of x in MXFP8 that share a scale, for the results `x_data` and `x_scale`; 0: x is not
            quantised.
    """

    op = kernel = "boundary"
    leads = "streams"
    shared = frozenset(("weight", "scale", "base", "norm_weight"))
    unaligned = frozenset(("scale",))
    formed = ("weight", "scale", "base", "norm_weight")
    returns = ("new_streams", "x", "new_pre", "new_post", "new_comb", "stats", "x_data", "x_scale")
    differentiable = True
    saves = ("y", "streams", "pre", "post", "comb", "weight", "scale", "base", "norm_weight", "x", "stats")
    when_recorded = {"of_stats": True}
    on_cpu = staticmethod(reference.boundary)
    definition = MhcCall.definition.extended(of_rows=(_cut,))

    @staticmethod
    def with_backward(call: Any, key: Hashable = None) -> Any:
        if call.x_block:
            mxfp8.refuse_gradients(call)
        return MhcCall.with_backward(call, key)

    def check_inputs(self) -> None:
        op, streams = self.op, self.streams
        lead, n, width = check_streams(op, "streams", streams, boundary_shapes.COUNTS)
        if self.x_block:
            mxfp8.check_quantised(op, streams)
        if runs_kernels(streams) and streams.dtype not in STREAM_DTYPES:
            names = " or ".join(map(str, STREAM_DTYPES))
            raise TypeError(f"{op}: streams is {streams.dtype}; kernels exist for {names}, so cast it")
        self._check_update(lead, n, width)
        rows = shapes.outputs(n)
        why = f"it makes {rows} coefficients of {n} streams"
        check_param(op, "weight", self.weight, (rows, n * width), streams, why)
        check_param(op, "scale", self.scale, (3,), streams, "it has a number each for pre, post and comb")
        check_param(op, "base", self.base, (rows,), streams, "it is added to each coefficient")
        check_param(op, "norm_weight", self.norm_weight, (width,), streams, "it scales each column of the mix")
        for name in ("rms_eps", "eps", "norm_eps"):
            check_eps(op, getattr(self, name), name)
        check_iters(op, self.iters, MAX_ITERS)
        if self.iters < 1:
            raise ValueError(f"{op}: iters is {self.iters}; it must be 1 or more, since the first only divides columns")

    def _check_update(self, lead: tuple[int, ...], n: int, width: int) -> None:
        """Check y and the coefficients pre, post and comb.

        Args:
            lead: the streams' dimensions before n.
            n, width: number of streams, and their width D.
        """
        op, streams, ends = self.op, self.streams, {"pre": (n,), "post": (n,), "comb": (n, n)}
        if self.y is not None:
            check_like(op, "y", self.y, (*lead, width), streams, "it is added to the streams")
        for name in COEFFICIENTS:
            value, shape = getattr(self, name), (*lead, *ends[name])
            if name != "pre" and self.y is None:
                if value is not None:
                    raise ValueError(f"{op}: {name} is given without y; give y as well, or neither for no update")
                continue
            what, why = f"a tensor {shape_text(shape)}", "it has a token's coefficients of the streams"
            dtypes = (accumulator(streams),)
            check_tensor(op, name, value, what, streams, dtypes=dtypes, shape=shape, why=why)

    def likes(self) -> Sequence[Like | None]:
        (n, width), tokens, dtype = self.streams.shape[-2:], self.lead_sizes, accumulator(self.streams)
        ends = ((n,), (n,), (n, n), (shapes.outputs(n) + boundary_shapes.STATS,))
        of_tokens: list[Like] = [((*tokens, *end), dtype) for end in ends]
        x: Like = ((*tokens, width), self.streams.dtype)
        return [like(self.streams), x, *of_tokens, *mxfp8.likes(tokens, width)]

    def wanted(self) -> tuple[bool, ...]:
        in_mxfp8 = bool(self.x_block)
        return (self.y is not None, bool(self.of_x), True, True, True, bool(self.of_stats), in_mxfp8, in_mxfp8)

    @classmethod
    def recorded(cls, held: dict[str, Any]) -> tuple[Any, ...]:
        return super().recorded(held)[:5]

    @staticmethod
    def backward(saved: Any, options: Any, needed: Any, *gradients: Any) -> Gradients:
        y, scale, base = saved[0], saved[6], saved[7]
        _, eps, _, iters, *_ = options
        is_updated, is_mixed = y is not None, gradients[1] is not None
        of_coefficients = (is_mixed and needed[2], is_updated and needed[3], is_updated and needed[4])
        *made, d_norm_weight, sums = boundary_backward(
            *gradients, *saved, eps, iters, is_updated and needed[0], needed[1], *of_coefficients, needed[5],
            is_mixed and needed[8],
        )  # type: ignore[call-arg]  # fmt: skip
        count = base.numel()
        d_scale = sums[count:].to(scale.dtype) if needed[6] else None
        return [*made, d_scale, sums[:count].to(base.dtype) if needed[7] else None, d_norm_weight]


@operator(BoundaryCall)
def boundary_streams(
    y: Tensor | None, streams: Tensor, pre: Tensor, post: Tensor | None, comb: Tensor | None, weight: Tensor,
    scale: Tensor, base: Tensor, norm_weight: Tensor, rms_eps: float, eps: float, norm_eps: float, iters: int,
    of_stats: bool = False, of_x: bool = True, x_block: int = 0,
) -> Any:  # fmt: skip
    """Return the eight results that `BoundaryCall.returns` names; None for each result that is not wanted.

    The updated streams are None if there is no update (y is None).

    Args:
        of_stats, of_x: True: return stats (which backward needs), x in 16 bits. False: None.
        x_block: number of columns of x in MXFP8 that share a scale; 0: x is not quantised.
        Others: see `boundary`.
    """
