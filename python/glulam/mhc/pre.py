"""pre: a hyper-connection's work before a sub-layer in one call: project, sinkhorn and aggregate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from cute_kernels.mhc import shapes

from ..calls.addressed import Gradients, Like
from ..calls.front import operator
from ..host import device as gpus
from . import reference
from .call import check_eps, check_iters
from .mixing import aggregate, aggregate_backward
from .project import PARAMETERS, Projecting, parameter_gradients, project, scaled_weight
from .sinkhorn import MAX_ITERS, sinkhorn, sinkhorn_backward


class PreResults(NamedTuple):
    """Results of pre, for n residual streams of C columns.

    Attributes:
        out: [..., C] in the streams' dtype, the sub-layer's input.
        residual: the streams x, to be passed to post_mix instead of x. Then the kernel that computes x's gradient also
            adds the gradient that comes from post_mix, without a separate pass.
        h_post: [..., n], float32, the weight with which post_mix adds the sub-layer's output to each stream.
        h_res: [..., n, n], float32, doubly stochastic, the matrix by which post_mix mixes the streams.
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
    """Compute h_pre, h_post, logits = project(x, ...); h_res = sinkhorn(logits); out = aggregate(x, h_pre).

    Differentiable. In a trace the three operators are recorded one by one.

    Args:
        x: streams [..., n, C], contiguous; bfloat16, float16 or float32, on the CPU also float64. On a GPU n is 2, 4 or
            8 and C a multiple of 8.
        weight: [n n + 2n, n C], float32 or 16-bit; see `project`.
        alpha_pre, alpha_post, alpha_res: tensors of one element and of one dtype; float32 or 16-bit.
        bias: [n n + 2n], float32 or 16-bit.
        eps: `eps` of `project`.
        iters, sinkhorn_eps: `iters` and `eps` of `sinkhorn`.
        norm_weight: [n C], float32 or 16-bit; see `project`. None: no RMSNorm weight.

    Returns:
        PreResults(out, residual, h_post, h_res).

    Raises:
        The errors of `project` and `sinkhorn`.
    """
    tensors = (x, weight, alpha_pre, alpha_post, alpha_res, bias)
    if norm_weight is not None:
        tensors = (x, scaled_weight("pre", tensors, norm_weight), *tensors[2:])
    if is_dynamo_compiling() or gpus.is_watched() or any(map(gpus.is_traced, tensors)):
        h_pre, h_post, logits = project(*tensors, eps)
        return PreResults(aggregate(x, h_pre), x, h_post, sinkhorn(logits, iters, sinkhorn_eps))
    out, h_post, h_res, *others = prepare_streams(*tensors, eps, iters, sinkhorn_eps)
    return PreResults(out, others[0] if len(others) == 1 else x, h_post, h_res)


class PreCall(Projecting):
    """A call of pre.

    If a gradient is recorded, the call returns (out, h_post, h_res, x), and keeps the other results for backward.
    """

    op = kernel = "pre"
    is_torch_op = False  # torch sees project, sinkhorn and aggregate
    returns = ("out", "h_post", "h_res", "h_pre", "logits", "stats")
    differentiable = True
    saves = (*PARAMETERS, "stats", "h_pre", "logits")

    def check_inputs(self) -> None:
        super().check_inputs()
        check_iters(self.op, self.iters, MAX_ITERS.get(int(self.x.shape[-2])))
        check_eps(self.op, self.sinkhorn_eps, "sinkhorn_eps")

    def likes(self) -> Sequence[Like | None]:
        n, width = self.x.shape[-2:]
        out = ((*self.lead_sizes, width), self.x.dtype)
        return [out, *self.of_each_token((n,), (n, n), (n,), (n, n), (shapes.outputs(n) + 1,))]

    def compute(self) -> Any:
        h_pre, h_post, logits, stats = reference.project(self.x, self.weight, self.alphas, self.bias, self.eps)
        h_res = reference.sinkhorn(logits, self.iters, self.sinkhorn_eps)
        return reference.aggregate(self.x, h_pre), h_post, h_res, h_pre, logits, stats

    @classmethod
    def recorded(cls, held: dict[str, Any]) -> tuple[Any, ...]:
        return held["out"], held["h_post"], held["h_res"], held["x"].view_as(held["x"])

    @staticmethod
    def backward(saved: Any, options: Any, needed: Any, *gradients: Any) -> Gradients:
        d_out, d_post, d_res, d_residual = gradients
        *saved, h_pre, logits = saved
        eps, *of_sinkhorn = options
        d_pre = d_logits = None
        if d_out is not None:
            d_pre = aggregate_backward(d_out, saved[0], h_pre, of_x=False, of_h_pre=True)[1]
        elif d_residual is not None:
            d_out = d_residual.new_zeros(*d_residual.shape[:-2], d_residual.shape[-1])
        if d_res is not None:
            d_logits = sinkhorn_backward(d_res, logits, *of_sinkhorn)
        addends = (d_out, None if d_out is None else h_pre, d_residual)
        return parameter_gradients(saved, eps, needed, d_pre, d_post, d_logits, *addends)


@operator(PreCall)
def prepare_streams(
    x: Tensor, weight: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor, bias: Tensor, eps: float,
    iters: int, sinkhorn_eps: float,
) -> Any:  # fmt: skip
    """Return the results that `PreCall.returns` names; if a gradient is recorded, (out, h_post, h_res, x) instead."""
