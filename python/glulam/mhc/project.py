"""project: from the residual streams to the coefficients of their mixing, with the streams' norm in the same pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.mhc import shapes

from ..addressed import Layout, Tensors, empty_like_param, forms, recorded
from ..backward.parts import once_differentiable, usable, without_graph
from ..signature import check_plain, is_transformed
from . import reference
from .checks import check_eps, check_param, check_streams
from .operator import MhcOperator

ADDENDS = ("d_aggregate", "h_pre", "d_residual")
ALPHAS = ("alpha_pre", "alpha_post", "alpha_res")


class Coefficients(NamedTuple):
    """What project returns, float32 (float64 of float64 streams).

    Attributes:
        h_pre: [..., n], in (0, 1).
        h_post: [..., n], in (0, 2).
        h_res: [..., n, n], logits for `sinkhorn`.
    """

    h_pre: Tensor
    h_post: Tensor
    h_res: Tensor


def project(
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    eps: float = 1e-6,
    *,
    norm_weight: Tensor | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Coefficients:
    """p = x_flat weight^T, r = 1 / (||x_flat|| / sqrt(nC) + eps), z = r p alpha + bias, where x_flat is x as [..., nC];
    h_pre = sigmoid(z_pre), h_post = 2 sigmoid(z_post), h_res = z_res. Differentiable in all but eps.

    A float32 weight keeps its precision, whatever x is: products are summed in float32, with an error of some 1e-6 of
    their size. A 16-bit weight is multiplied in x's dtype (float32: TF32), and rounded to it where it is of another.

    Args:
        x: streams [..., n, C], contiguous; bfloat16, float16 or float32, on the CPU also float64. On a GPU n is 2, 4 or
            8 and C a multiple of 8.
        weight: [n n + 2n, n C], rows for h_pre, h_post and h_res (row-major) in this order; float32 or 16-bit.
        alpha_pre, alpha_post, alpha_res: tensors of one element and of one dtype; float32 or 16-bit.
        bias: [n n + 2n], float32 or 16-bit.
        eps: keeps a token of zeros from dividing by zero.
        norm_weight: [n C], float32 or 16-bit, an RMSNorm's weight: weight * norm_weight, a float32 product by columns,
            takes weight's place, whatever weight's dtype.
        out: buffers for the three results; only where no gradient is recorded.

    Raises:
        ValueError, TypeError: an argument that does not fit; nothing was launched.
        GradientNotSupported: `out` is given and an argument requires a gradient.
        UnsupportedDevice, BundleError (RuntimeErrors): no kernel for this GPU, or no usable bundle.
    """
    tensors = (x, weight, alpha_pre, alpha_post, alpha_res, bias)
    if norm_weight is not None:
        tensors = (x, scaled_weight("project", tensors, norm_weight), *tensors[2:])
    if recorded("project", out, *tensors):
        return Coefficients(*Project.apply(*tensors, eps))  # type: ignore[no-untyped-call]
    if out is not None:
        out = tuple(out)  # type: ignore[assignment]
    return Coefficients(*PROJECT(tensors, (eps, False), out)[:3])


def accumulator(x: Tensor) -> torch.dtype:
    """The dtype of sums over x."""
    return torch.promote_types(x.dtype, torch.float32)


def check_parameters(op: str, tensors: Any) -> None:
    """weight, the alphas and bias, for streams x that were checked."""
    x, weight, *alphas, bias = tensors
    n, width = x.shape[-2:]
    rows = shapes.outputs(n)
    check_param(op, "weight", weight, (rows, n * width), x, f"it makes {rows} coefficients of x's {n} streams")
    for name, alpha in zip(ALPHAS, alphas, strict=True):
        given = tuple(getattr(alpha, "shape", ()))
        check_param(op, name, alpha, given if given in ((), (1,)) else (), x, "it is one number")
        if alpha.dtype != alphas[0].dtype:
            raise TypeError(f"{op}: {name} is {alpha.dtype} and alpha_pre {alphas[0].dtype}; give them one dtype")
    check_param(op, "bias", bias, (rows,), x, "it is added to each coefficient")


def scaled_weight(op: str, tensors: tuple[Tensor, ...], norm_weight: Tensor) -> Tensor:
    """weight * norm_weight in float32, of `tensors`: x, weight, the alphas and bias.

    By torch, whose autograd also makes both gradients from the product's, which is float32: 24 rows of some 10^4
    columns take a few us beside streams that take hundreds. Kernels that multiplied would read one more address each,
    and backward needed a kernel more for the sums over rows.
    """
    x, weight = tensors[:2]
    _, n, width = check_streams(op, "x", x)
    check_parameters(op, tensors)
    check_param(op, "norm_weight", norm_weight, (n * width,), x, "it scales each column of weight")
    named = {"weight": weight, "norm_weight": norm_weight}  # torch's own operators read them first
    if is_transformed(*tensors, norm_weight):  # and what they make belongs to the transform, whichever argument does
        named |= dict(zip(ProjectForward.inputs, tensors, strict=True))
    for name, tensor in named.items():
        check_plain(op, name, tensor)
    return reference.wide(weight) * reference.wide(norm_weight)


def project_cut(x: Tensor, weight: Tensor, tokens: int, sm_count: int) -> shapes.Slices:
    """How kernels cut the columns; the weight's dtype decides between them."""
    cut = shapes.exact_slices if weight.dtype is torch.float32 else shapes.project_slices
    return cut(x.shape[-2], x.element_size(), weight.shape[1], max(tokens, 1), sm_count)


class ProjectForward(MhcOperator):
    """Options: eps, and whether to keep what backward needs (the fourth result)."""

    op = kernel = "project"
    inputs, outputs = ("x", "weight", *ALPHAS, "bias"), ("h_pre", "h_post", "h_res", "stats")
    loose = ALPHAS
    schema = (
        "(Tensor x, Tensor weight, Tensor alpha_pre, Tensor alpha_post, Tensor alpha_res, Tensor bias, float eps, "
        "bool keep_stats) -> Tensor[]"
    )

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> None:
        check_streams(self.op, "x", tensors[0])
        check_parameters(self.op, tensors)
        check_eps(self.op, options[0])

    def wanted(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[bool, ...]:
        return (True, True, True, options[1])

    def results(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        x = tensors[0]
        *lead, n, _ = x.shape
        shapes_of = (n,), (n,), (n, n), (shapes.outputs(n) + 1,)
        made = [x.new_empty(*lead, *shape, dtype=accumulator(x)) for shape in shapes_of[: 3 + options[1]]]
        return (*made, *[None] * (4 - len(made)))

    def completed(self, given: Any, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
        return (*given, None)

    def reference(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        x, weight, *alphas, bias = tensors
        eps, keep_stats = options
        *made, stats = reference.project(x, weight, tuple(alphas), bias, eps)
        return (*made, stats if keep_stats else None)

    def layout(self, tensors: Any, options: Any, sm_count: int) -> Layout:
        x, weight, alpha, _, _, bias = tensors
        n, width = x.shape[-2:]
        tokens = x.numel() // (n * width)
        cut = project_cut(x, weight, tokens, sm_count)
        return Layout(
            x, self.kernel, n,
            {
                "forms": forms(weight, alpha, bias), "tokens": tokens, "width": width, **cut._asdict(),
                "eps": float(options[0]),
            },
            tokens > 0, shapes.project_workspace(n, cut.slices, tokens),
        )  # fmt: skip

    def differentiable(self, tensors: Any, options: Any) -> tuple[Any, ...]:
        return tuple(Project.apply(*tensors, options[0]))  # type: ignore[no-untyped-call]


class ProjectBackward(MhcOperator):
    """Gradients of x and weight, and of bias and the alphas side by side, in the accumulators' dtype.

    The gradient of x also gets h_pre d_aggregate, that of `aggregate`, and d_residual, where these are given: a layer's
    streams have three uses, and adding their gradients up costs passes of its own.
    Options: eps, and whether the gradients of x and weight are wanted.
    """

    op = "project"
    kernel = "project_backward"
    inputs: tuple[str, ...] = ("d_pre", "d_post", "d_res", *ProjectForward.inputs, "stats", *ADDENDS)
    outputs = ("d_x", "d_weight", "d_sums")
    loose = ALPHAS
    schema = (
        "(Tensor? d_pre, Tensor? d_post, Tensor? d_res, Tensor x, Tensor weight, Tensor alpha_pre, Tensor alpha_post, "
        "Tensor alpha_res, Tensor bias, Tensor stats, Tensor? d_aggregate, Tensor? h_pre, Tensor? d_residual, "
        "float eps, bool of_x, bool of_weight) -> Tensor[]"
    )

    def wanted(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[bool, ...]:
        return (*options[1:], True)

    def results(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        x, weight = tensors[3:5]
        sums = x.new_empty(shapes.outputs(x.shape[-2]) + len(ALPHAS), dtype=accumulator(x))
        return (*map(empty_like_param, (x, weight), options[1:]), sums)

    def reference(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        d_pre, d_post, d_res, x, weight, *alphas, bias, stats, d_aggregate, h_pre, d_residual = tensors
        eps, of_x, of_weight = options
        d_x, d_weight, sums = reference.project_backward(
            d_pre, d_post, d_res, x, weight, tuple(alphas), bias, stats, eps
        )  # fmt: skip
        if of_x and d_aggregate is not None:
            d_x = reference.add_uses(d_x, d_aggregate, h_pre, d_residual)
        return d_x if of_x else None, d_weight if of_weight else None, sums

    def layout(self, tensors: Any, options: Any, sm_count: int) -> Layout:
        x, weight, alpha, _, _, bias = tensors[3:9]
        n, width = x.shape[-2:]
        tokens, itemsize = x.numel() // (n * width), x.element_size()
        ctas = shapes.gate_ctas(tokens, sm_count)
        parts = shapes.spread_splits(n, itemsize, width, tokens, sm_count, weight.dtype is torch.float32)
        end = shapes.backward_workspace(n, itemsize, width, tokens, ctas, parts).end
        kernel = self.kernel if tensors[-2] is None else "pre_backward"
        return Layout(
            x, kernel, n,
            {
                "forms": forms(weight, alpha, bias), "tokens": tokens, "width": width, "ctas": ctas, "parts": parts,
                "eps": float(options[0]),
            },
            tokens > 0, end // 4,
        )  # fmt: skip


PROJECT, PROJECT_BACKWARD = ProjectForward(), ProjectBackward()


def parameter_gradients(sums: Tensor, alphas: Any, bias: Tensor, wanted: Any) -> list[Tensor | None]:
    """Of the three alphas and bias, each in its own dtype and shape."""
    count = bias.numel()
    made: list[Tensor | None] = [
        sums[count + i].to(alpha.dtype).view(alpha.shape) if want else None
        for i, (alpha, want) in enumerate(zip(alphas, wanted[:3], strict=True))
    ]
    return [*made, sums[:count].to(bias.dtype) if wanted[3] else None]


def usable_or_none(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else usable(gradient)


class Project(torch.autograd.Function):
    """Saves its arguments, p and the streams' root mean square."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *tensors, eps = arguments
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        *made, stats = PROJECT(tensors, (eps, True))
        ctx.save_for_backward(*tensors, stats)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        needed = ctx.needs_input_grad
        saved = ctx.saved_tensors
        with without_graph():
            given = (*map(usable_or_none, gradients), *saved, None, None, None)
            d_x, d_weight, sums = PROJECT_BACKWARD(given, (ctx.eps, *needed[:2]))
            rest = parameter_gradients(sums, saved[2:5], saved[5], needed[2:6])
        return *once_differentiable("project", [d_x, d_weight, *rest]), None
