"""aggregate: the residual streams' weighted sum, which a sub-layer reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from ..addressed import Layout, Tensors, empty_like_param, forms, recorded
from ..backward.parts import once_differentiable, usable, without_graph
from . import reference
from .checks import check_param, check_streams
from .operator import MhcOperator


def aggregate(x: Tensor, h_pre: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out = sum over j of h_pre[..., j] x[..., j, :]. Differentiable in both.

    Args:
        x: streams [..., n, C], contiguous; bfloat16, float16 or float32, on the CPU also float64. On a GPU n is 2, 4 or
            8 and C a multiple of 8.
        h_pre: [..., n], float32 or 16-bit.
        out: the result's buffer; only where no gradient is recorded.

    Returns:
        [..., C] in x's dtype, summed in float32.

    Raises:
        ValueError, TypeError: an argument that does not fit; nothing was launched.
        GradientNotSupported: `out` is given and an argument requires a gradient.
        UnsupportedDevice, BundleError (RuntimeErrors): no kernel for this GPU, or no usable bundle.
    """
    if is_grad_enabled() and recorded("aggregate", out, x, h_pre):
        return Aggregate.apply(x, h_pre)  # type: ignore[no-untyped-call]
    return AGGREGATE((x, h_pre), (), None if out is None else (out,))[0]


def _numbers(x: Tensor, h_pre: Tensor, tokens: int) -> dict[str, float]:
    return {"forms": forms(h_pre), "tokens": tokens, "width": x.shape[-1]}


class AggregateForward(MhcOperator):
    op = kernel = "aggregate"
    inputs, outputs = ("x", "h_pre"), ("out",)
    schema = "(Tensor x, Tensor h_pre) -> Tensor[]"

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> None:
        x: Any = tensors[0]
        lead, n, _ = check_streams(self.op, "x", x)
        check_param(self.op, "h_pre", tensors[1], (*lead, n), x, "it weighs each of x's streams")

    def results(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        x = tensors[0]
        return (x.new_empty(x.shape[:-2] + x.shape[-1:]),)

    def reference(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        return (reference.aggregate(*tensors),)

    def layout(self, tensors: Any, options: Any, sm_count: int) -> Layout:
        x, h_pre = tensors
        tokens = h_pre.numel() // h_pre.shape[-1]
        return Layout(x, self.kernel, x.shape[-2], _numbers(x, h_pre, tokens), work=tokens > 0)

    def differentiable(self, tensors: Any, options: Any) -> tuple[Any, ...]:
        return (Aggregate.apply(*tensors),)  # type: ignore[no-untyped-call]


class AggregateBackward(MhcOperator):
    op = "aggregate"
    kernel = "aggregate_backward"
    inputs, outputs = ("d_out", "x", "h_pre"), ("d_x", "d_h_pre")
    schema = "(Tensor d_out, Tensor x, Tensor h_pre, bool of_x, bool of_h_pre) -> Tensor[]"

    def wanted(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[bool, ...]:
        return options

    def results(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        return tuple(map(empty_like_param, tensors[1:], options))

    def reference(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        both = reference.aggregate_backward(*tensors)
        return tuple(d if wanted else None for d, wanted in zip(both, options, strict=True))

    def layout(self, tensors: Any, options: Any, sm_count: int) -> Layout:
        _, x, h_pre = tensors
        tokens = h_pre.numel() // h_pre.shape[-1]
        return Layout(x, self.kernel, x.shape[-2], _numbers(x, h_pre, tokens), work=tokens > 0)


AGGREGATE, AGGREGATE_BACKWARD = AggregateForward(), AggregateBackward()


class Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, h_pre: Tensor) -> Tensor:
        ctx.save_for_backward(x, h_pre)
        return AGGREGATE((x, h_pre))[0]

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        with without_graph():
            gradients = AGGREGATE_BACKWARD((usable(d_out), *ctx.saved_tensors), tuple(ctx.needs_input_grad))
        return once_differentiable("aggregate", gradients)
