"""post_mix: the residual streams mixed among themselves, plus a sub-layer's output spread over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from cute_kernels.mhc.shapes import CTAS_PER_SM

from ..addressed import Layout, Tensors, empty_like_param, forms, recorded
from ..backward.parts import once_differentiable, usable, without_graph
from ..signature import check_flag
from . import reference
from .checks import check_like, check_param, check_streams
from .operator import MhcOperator


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
    """out[..., i, :] = sum over j of h_res[..., i, j] residual[..., j, :], + h_post[..., i] (x + bias). Differentiable.

    Args:
        residual: streams [..., n, C], contiguous; bfloat16, float16 or float32, on the CPU also float64. On a GPU n is
            2, 4 or 8 and C a multiple of 8.
        h_res: [..., n, n], float32 or 16-bit.
        h_post: [..., n], float32 or 16-bit.
        x: a sub-layer's output [..., C], residual's dtype.
        bias: [C], float32 or 16-bit: that of the sub-layer's last linear layer, added here.
        transpose_res: use h_res[..., j, i] in place of h_res[..., i, j].
        out: the result's buffer; only where no gradient is recorded.

    Returns:
        Like residual; summed in float32.

    Raises:
        ValueError, TypeError: an argument that does not fit; nothing was launched.
        GradientNotSupported: `out` is given and an argument requires a gradient.
        UnsupportedDevice, BundleError (RuntimeErrors): no kernel for this GPU, or no usable bundle.
    """
    tensors = (residual, h_res, h_post, x, bias)
    if is_grad_enabled() and recorded("post_mix", out, *tensors):
        return PostMix.apply(*tensors, transpose_res)  # type: ignore[no-untyped-call]
    return POST_MIX(tensors, (transpose_res,), None if out is None else (out,))[0]


def _numbers(residual: Tensor, params: tuple[Tensor | None, ...], transpose: bool, tokens: int) -> dict[str, float]:
    return {"forms": forms(*params), "transpose": int(transpose), "tokens": tokens, "width": residual.shape[-1]}


class PostMixForward(MhcOperator):
    op = kernel = "post_mix"
    inputs, outputs = ("residual", "h_res", "h_post", "x", "bias"), ("out",)
    streams = "residual"
    schema = "(Tensor residual, Tensor h_res, Tensor h_post, Tensor x, Tensor? bias, bool transpose_res) -> Tensor[]"

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> None:
        residual, h_res, h_post, x, bias = tensors
        lead, n, width = check_streams(self.op, "residual", residual)
        streams: Any = residual
        check_param(self.op, "h_res", h_res, (*lead, n, n), streams, "it mixes residual's streams")
        check_param(self.op, "h_post", h_post, (*lead, n), streams, "it weighs x in each of residual's streams")
        check_like(self.op, "x", x, (*lead, width), streams, "it is added to residual's streams")
        if bias is not None:
            check_param(self.op, "bias", bias, (width,), streams, "it is added to x")
        check_flag(self.op, "transpose_res", options[0])

    def results(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        return (torch.empty_like(tensors[0]),)

    def reference(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        return (reference.post_mix(*tensors, *options),)

    def layout(self, tensors: Any, options: Any, sm_count: int) -> Layout:
        residual, h_res, h_post, _, bias = tensors
        tokens, n = h_post.numel() // h_post.shape[-1], residual.shape[-2]
        numbers = _numbers(residual, (h_res, h_post, bias), options[0], tokens)
        return Layout(residual, self.kernel, n, numbers, work=tokens > 0)

    def differentiable(self, tensors: Any, options: Any) -> tuple[Any, ...]:
        return (PostMix.apply(*tensors, *options),)  # type: ignore[no-untyped-call]


class PostMixBackward(MhcOperator):
    """Options: transpose_res, and which gradients are wanted."""

    op = "post_mix"
    kernel = "post_mix_backward"
    inputs = ("d_out", "residual", "h_res", "h_post", "x", "bias")
    streams = "residual"
    outputs = ("d_residual", "d_h_res", "d_h_post", "d_x", "d_bias")
    schema = (
        "(Tensor d_out, Tensor residual, Tensor h_res, Tensor h_post, Tensor x, Tensor? bias, bool transpose_res, "
        "bool of_residual, bool of_h_res, bool of_h_post, bool of_x, bool of_bias) -> Tensor[]"
    )

    def wanted(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[bool, ...]:
        return options[1:]

    def results(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        return tuple(map(empty_like_param, tensors[1:], options[1:]))

    def reference(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        everything = reference.post_mix_backward(*tensors, *options[:1])
        return tuple(d if wanted else None for d, wanted in zip(everything, options[1:], strict=True))

    def layout(self, tensors: Any, options: Any, sm_count: int) -> Layout:
        _, residual, h_res, h_post, _, bias = tensors
        tokens, n, width = h_post.numel() // h_post.shape[-1], residual.shape[-2], residual.shape[-1]
        numbers = _numbers(residual, (h_res, h_post, bias), options[0], tokens)
        partials = min(tokens, CTAS_PER_SM * sm_count) * width if options[-1] else 0
        return Layout(residual, self.kernel, n, numbers, work=tokens > 0, workspace=partials)


POST_MIX, POST_MIX_BACKWARD = PostMixForward(), PostMixBackward()


class PostMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, h_res: Tensor, h_post: Tensor, x: Tensor, bias: Any, flag: bool) -> Tensor:
        ctx.transpose_res = flag
        ctx.save_for_backward(residual, h_res, h_post, x, bias)
        return POST_MIX((residual, h_res, h_post, x, bias), (flag,))[0]

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        with without_graph():
            options = (ctx.transpose_res, *ctx.needs_input_grad[:5])
            gradients = POST_MIX_BACKWARD((usable(d_out), *ctx.saved_tensors), options)
        return *once_differentiable("post_mix", gradients), None
