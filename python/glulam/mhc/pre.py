"""pre: all that comes before a sub-layer, in one call: project, sinkhorn, aggregate; and their gradients, fused."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from cute_kernels.mhc import shapes

from .. import device as gpus
from ..addressed import Layout, Tensors, forms, recorded
from ..backward.parts import once_differentiable, without_graph
from . import reference
from .aggregate import AGGREGATE_BACKWARD, aggregate
from .checks import check_eps, check_iters, check_streams
from .operator import MhcOperator
from .project import (
    ALPHAS,
    PROJECT_BACKWARD,
    accumulator,
    check_parameters,
    parameter_gradients,
    project,
    project_cut,
    scaled_weight,
    usable_or_none,
)
from .sinkhorn import MAX_ITERS, SINKHORN_BACKWARD, sinkhorn


class PreResults(NamedTuple):
    """What pre returns.

    Attributes:
        out: [..., C] in the streams' dtype, the sub-layer's input.
        residual: the streams, for post_mix. Take these rather than x: then their gradient is added up where that of x
            is made, not in a pass of its own.
        h_post: [..., n], float32.
        h_res: [..., n, n], float32, doubly stochastic.
    """

    out: Tensor
    residual: Tensor
    h_post: Tensor
    h_res: Tensor


def pre(
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    eps: float = 1e-6,
    iters: int = 20,
    sinkhorn_eps: float = 1e-6,
    *,
    norm_weight: Tensor | None = None,
) -> PreResults:
    """h_pre, h_post, logits = project(x, ...); h_res = sinkhorn(logits); out = aggregate(x, h_pre). Differentiable.

    Arguments and errors are those of `project` and `sinkhorn`. In a trace it is these operators, one by one.
    """
    tensors = (x, weight, alpha_pre, alpha_post, alpha_res, bias)
    if norm_weight is not None:
        tensors = (x, scaled_weight("pre", tensors, norm_weight), *tensors[2:])
    options = (eps, iters, sinkhorn_eps)
    if is_dynamo_compiling() or any(map(gpus.is_traced, tensors)):
        h_pre, h_post, logits = project(*tensors, eps)
        return PreResults(aggregate(x, h_pre), x, h_post, sinkhorn(logits, iters, sinkhorn_eps))
    if recorded("pre", None, *tensors):
        return PreResults(*Pre.apply(*tensors, *options))  # type: ignore[no-untyped-call]
    out, h_post, h_res, *_ = PRE(tensors, options)
    return PreResults(out, x, h_post, h_res)


class PreForward(MhcOperator):
    """Options: eps of the projection, iterations and eps of Sinkhorn."""

    op = kernel = "pre"
    inputs = ("x", "weight", *ALPHAS, "bias")
    outputs = ("out", "h_post", "h_res", "h_pre", "logits", "stats")
    loose = ALPHAS

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> None:
        _, n, _ = check_streams(self.op, "x", tensors[0])
        check_parameters(self.op, tensors)
        eps, iters, sinkhorn_eps = options
        check_eps(self.op, eps)
        check_iters(self.op, iters, MAX_ITERS.get(n))
        check_eps(self.op, sinkhorn_eps)

    def results(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        x = tensors[0]
        *lead, n, width = x.shape
        wide = [x.new_empty(*lead, *shape, dtype=accumulator(x)) for shape in ((n,), (n, n), (n,), (n, n))]
        return (x.new_empty(*lead, width), *wide, x.new_empty(*lead, shapes.outputs(n) + 1, dtype=accumulator(x)))

    def reference(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        x, weight, *alphas, bias = tensors
        eps, iters, sinkhorn_eps = options
        h_pre, h_post, logits, stats = reference.project(x, weight, tuple(alphas), bias, eps)
        return (
            reference.aggregate(x, h_pre),
            h_post,
            reference.sinkhorn(logits, iters, sinkhorn_eps),
            h_pre,
            logits,
            stats,
        )

    def layout(self, tensors: Any, options: Any, sm_count: int) -> Layout:
        x, weight, alpha, _, _, bias = tensors
        eps, iters, sinkhorn_eps = options
        n, width = x.shape[-2:]
        tokens = x.numel() // (n * width)
        cut = project_cut(x, weight, tokens, sm_count)
        return Layout(
            x, self.kernel, n,
            {
                "forms": forms(weight, alpha, bias), "tokens": tokens, "width": width, **cut._asdict(),
                "iters": iters, "eps": float(eps), "sinkhorn_eps": float(sinkhorn_eps),
            },
            tokens > 0, shapes.project_workspace(n, cut.slices, tokens),
        )  # fmt: skip


PRE = PreForward()


class Pre(torch.autograd.Function):
    """Saves its arguments and what is small: h_pre, the logits, p and the streams' root mean square."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *tensors, eps, iters, sinkhorn_eps = arguments
        ctx.options = (eps, iters, sinkhorn_eps)
        ctx.set_materialize_grads(False)
        out, h_post, h_res, h_pre, logits, stats = PRE(tensors, ctx.options)
        ctx.save_for_backward(*tensors, stats, h_pre, logits)
        x = tensors[0]
        return out, x.view_as(x), h_post, h_res

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        needed = ctx.needs_input_grad
        *tensors, stats, h_pre, logits = ctx.saved_tensors
        with without_graph():
            d_out, d_residual, d_post, d_res = map(usable_or_none, gradients)
            d_pre = d_logits = None
            if d_out is not None:
                d_pre = AGGREGATE_BACKWARD((d_out, tensors[0], h_pre), (False, True))[1]
            elif d_residual is not None:
                d_out = d_residual.new_zeros(*d_residual.shape[:-2], d_residual.shape[-1])
            if d_res is not None:
                d_logits = SINKHORN_BACKWARD((d_res, logits), ctx.options[1:])[0]
            addends = (d_out, None if d_out is None else h_pre, d_residual)
            given = (d_pre, d_post, d_logits, *tensors, stats, *addends)
            d_x, d_weight, sums = PROJECT_BACKWARD(given, (ctx.options[0], *needed[:2]))
            rest = parameter_gradients(sums, tensors[2:5], tensors[5], needed[2:6])
        return *once_differentiable("pre", [d_x, d_weight, *rest]), None, None, None
