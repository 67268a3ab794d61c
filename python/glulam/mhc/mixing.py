"""Sums of residual streams: `aggregate` makes a sublayer's input, and `post_mix` adds its output to the streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cute_kernels.mhc.shapes import CTAS_PER_SM

from ..calls.addressed import Gradients, Like, check_like, like
from ..calls.checks import check_flag
from ..calls.front import operator
from . import reference
from .call import MhcCall, check_param, check_streams, sms_to_cut_by


class AggregateCall(MhcCall):
    op = kernel = "aggregate"
    formed = ("h_pre",)
    differentiable = True
    saves = ("x", "h_pre")
    on_cpu = staticmethod(reference.aggregate)

    def check_inputs(self) -> None:
        lead, n, _ = check_streams(self.op, "x", self.x)
        check_param(self.op, "h_pre", self.h_pre, (*lead, n), self.x, "it weighs each of x's streams")

    def likes(self) -> Sequence[Like | None]:
        *lead, _, width = self.x.shape
        return [((*lead, width), self.x.dtype)]

    @staticmethod
    def backward(saved: Any, options: Any, needed: Any, *gradients: Any) -> Gradients:
        made: Gradients = aggregate_backward(*gradients, *saved, *needed)
        return made


class AggregateBackwardCall(MhcCall):
    op, kernel = "aggregate", "aggregate_backward"
    returns = ("d_x", "d_h_pre")
    formed = ("h_pre",)
    on_cpu = staticmethod(reference.aggregate_backward)


class _Mixing(MhcCall):
    """Base of the calls of post_mix's forward and backward."""

    op = "post_mix"
    leads = "residual"
    formed = ("h_res", "h_post", "bias")
    definition = MhcCall.definition.extended(constants=(lambda call: {"transpose": int(call.transpose_res)},))


class PostMixCall(_Mixing):
    kernel = "post_mix"
    differentiable = True
    saves = ("residual", "h_res", "h_post", "x", "bias")
    on_cpu = staticmethod(reference.post_mix)

    def check_inputs(self) -> None:
        residual = self.residual
        lead, n, width = check_streams(self.op, "residual", residual)
        check_param(self.op, "h_res", self.h_res, (*lead, n, n), residual, "it mixes residual's streams")
        check_param(self.op, "h_post", self.h_post, (*lead, n), residual, "it weighs x in each of residual's streams")
        check_like(self.op, "x", self.x, (*lead, width), residual, "it is added to residual's streams")
        if self.bias is not None:
            check_param(self.op, "bias", self.bias, (width,), residual, "it is added to x")
        check_flag(self.op, "transpose_res", self.transpose_res)

    def likes(self) -> Sequence[Like | None]:
        return [like(self.residual)]

    @staticmethod
    def backward(saved: Any, options: Any, needed: Any, *gradients: Any) -> Gradients:
        made: Gradients = post_mix_backward(*gradients, *saved, *options, *needed)
        return made


def _partial_sums(call: Any) -> dict[str, int]:
    sms = sms_to_cut_by(call)
    partials = min(call.num_rows, CTAS_PER_SM * sms) * call.residual.shape[-1]
    return {"workspace": partials if call.of_bias else 0, "num_sms": sms}


class PostMixBackwardCall(_Mixing):
    kernel = "post_mix_backward"
    returns = ("d_residual", "d_h_res", "d_h_post", "d_x", "d_bias")
    on_cpu = staticmethod(reference.post_mix_backward)
    definition = _Mixing.definition.extended(
        of_rows=(_partial_sums,),
        overrides=("num_sms",),  # batch-invariant calls are cut for a usual number of SMs
        cuts="tokens, for the bias's gradient, into parts, by the number of SMs",
    )


@operator(AggregateCall)
def aggregate(x: Tensor, h_pre: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute out = sum over j of h_pre[..., j] x[..., j, :]. Differentiable in x and h_pre.

    Args:
        x: streams [..., n, C], contiguous; bfloat16, float16 or float32, on the CPU also float64. On a GPU n is 2, 4 or
            8 and C a multiple of 8.
        h_pre: [..., n], float32 or 16-bit.
        out: buffer for the result; only if no gradient is recorded. None: a new tensor.

    Returns:
        [..., C] in x's dtype, summed in float32.

    Raises:
        ValueError, TypeError: an argument does not fit; nothing was launched.
        GradientNotSupported: `out` is given and an argument requires a gradient.
        UnsupportedDevice, BundleError (RuntimeErrors): there is no kernel for this GPU, or no usable bundle.
    """
    raise NotImplementedError  # `front` writes the body


@operator(AggregateBackwardCall)
def aggregate_backward(d_out: Tensor, x: Tensor, h_pre: Tensor, of_x: bool, of_h_pre: bool) -> Any:
    """Return the gradients of x and h_pre from d_out, the gradient of aggregate's result.

    None is returned for each gradient whose flag `of_...` is False.
    """


@operator(PostMixCall)
def post_mix(
    residual: Tensor,
    h_res: Tensor,
    h_post: Tensor,
    x: Tensor,
    bias: Tensor | None = None,
    *,
    transpose_res: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Mix the residual streams and add a sublayer's output x to each. Differentiable in every tensor.

        out[..., i, :] = sum over j of h_res[..., i, j] residual[..., j, :] + h_post[..., i] (x + bias)

    Args:
        residual: streams [..., n, C], contiguous; bfloat16, float16 or float32, on the CPU also float64. On a GPU n is
            2, 4 or 8 and C a multiple of 8.
        h_res: [..., n, n], float32 or 16-bit.
        h_post: [..., n], float32 or 16-bit.
        x: a sublayer's output [..., C], residual's dtype.
        bias: [C], float32 or 16-bit: the bias of the sublayer's last linear layer, added here. None: no bias.
        transpose_res: True: use h_res[..., j, i] in place of h_res[..., i, j].
        out: buffer for the result; only if no gradient is recorded. None: a new tensor.

    Returns:
        A tensor like residual; summed in float32.

    Raises:
        ValueError, TypeError: an argument does not fit; nothing was launched.
        GradientNotSupported: `out` is given and an argument requires a gradient.
        UnsupportedDevice, BundleError (RuntimeErrors): there is no kernel for this GPU, or no usable bundle.
    """
    raise NotImplementedError  # `front` writes the body


@operator(PostMixBackwardCall)
def post_mix_backward(
    d_out: Tensor, residual: Tensor, h_res: Tensor, h_post: Tensor, x: Tensor, bias: Tensor | None,
    transpose_res: bool, of_residual: bool, of_h_res: bool, of_h_post: bool, of_x: bool, of_bias: bool,
) -> Any:  # fmt: skip
    """Return the gradients of residual, h_res, h_post, x and bias from d_out, the gradient of post_mix's result.

    None is returned for each gradient whose flag `of_...` is False.
    """
