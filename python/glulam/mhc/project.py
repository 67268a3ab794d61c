"""project: from the residual streams to the coefficients of their mixing, with the streams' norm in the same pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.mhc import shapes
from cute_kernels.specs import MhcSpec

from ..calls.addressed import Gradients, Like, like
from ..calls.checks import check_plain, is_transformed
from ..calls.front import operator
from ..host.device import Gpu
from ..reference import wide
from . import reference
from .call import USUAL_SMS, MhcCall, check_eps, check_param, check_streams, sms_to_cut_by

ALPHAS = ("alpha_pre", "alpha_post", "alpha_res")
PARAMETERS = ("x", "weight", *ALPHAS, "bias")
USUAL_TOKENS = 4096
"""By which columns are cut where the number of tokens must not."""


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
    h_pre, h_post, h_res = (None, None, None) if out is None else _three(out)
    return Coefficients(*project_streams(*tensors, eps, h_pre=h_pre, h_post=h_post, h_res=h_res)[:3])


def _three(out: Any) -> tuple[Any, ...]:
    buffers = tuple(out)
    if len(buffers) != 3 or any(buffer is None for buffer in buffers):
        raise ValueError("project: out must be three tensors, for h_pre, h_post and h_res")
    return buffers


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
        named |= dict(zip(ProjectCall.reads, tensors, strict=True))
    for name, tensor in named.items():
        check_plain(op, name, tensor)
    return wide(weight) * wide(norm_weight)


def project_cut(x: Tensor, weight: Tensor, tokens: int, gpu: Gpu, invariant: bool = False) -> shapes.Slices:
    """How kernels cut the columns; the weight's dtype decides between them.

    Args:
        invariant: whether slices depend on the columns alone, as a usual number of tokens has them on a usual GPU.
    """
    is_exact = weight.dtype is torch.float32
    cut = functools.partial(
        shapes.exact_slices if is_exact else shapes.project_slices, shapes.project_cta(gpu.arch), x.shape[-2],
        x.element_size(), weight.shape[1],
    )  # fmt: skip
    here = cut(max(tokens, 1), gpu.sm_count)
    if not invariant:
        return here
    usual = cut(USUAL_TOKENS, USUAL_SMS)
    return usual._replace(groups=here.groups if is_exact else max(gpu.sm_count // usual.slices, 1))


def _cut(call: Any) -> dict[str, Any]:
    cut = project_cut(call.x, call.weight, call.num_rows, call.gpu, call.invariant)
    workspace = shapes.project_workspace(call.x.shape[-2], cut.slices, call.num_rows)
    return {**cut._asdict(), "workspace": workspace}


def _cut_of_backward(call: Any) -> dict[str, Any]:
    (n, width), tokens, itemsize, sms = call.x.shape[-2:], call.num_rows, call.x.element_size(), sms_to_cut_by(call)
    ctas = shapes.gate_ctas(tokens, sms)
    parts = shapes.spread_splits(n, itemsize, width, tokens, sms, call.weight.dtype is torch.float32)
    end = shapes.backward_workspace(n, itemsize, width, tokens, ctas, parts).end
    return {"ctas": ctas, "parts": parts, "workspace": end // 4}


class Projecting(MhcCall):
    """What project, its backward and pre have in common."""

    formed = ("weight", "alpha_pre", "bias")
    unaligned = frozenset(ALPHAS)
    definition = MhcCall.definition.extended(
        of_rows=(_cut,), cuts="columns into slices, by the numbers of tokens and of SMs"
    )

    @property
    def alphas(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.alpha_pre, self.alpha_post, self.alpha_res

    def check_inputs(self) -> None:
        check_streams(self.op, "x", self.x)
        check_parameters(self.op, [getattr(self, name) for name in PARAMETERS])
        check_eps(self.op, self.eps)

    def of_each_token(self, *ends: tuple[int, ...]) -> list[Like | None]:
        """Results with these dimensions behind those of tokens, as precise as sums over x."""
        tokens, dtype = self.lead_sizes, accumulator(self.x)
        return [((*tokens, *end), dtype) for end in ends]


class ProjectCall(Projecting):
    """`of_stats`: whether to make what backward needs, the fourth result."""

    op = kernel = "project"
    returns = ("h_pre", "h_post", "h_res", "stats")
    differentiable = True
    saves = (*PARAMETERS, "stats")
    when_recorded = {"of_stats": True}

    def likes(self) -> Sequence[Like | None]:
        n = self.x.shape[-2]
        return self.of_each_token((n,), (n,), (n, n), (shapes.outputs(n) + 1,))

    def compute(self) -> Any:
        return reference.project(self.x, self.weight, self.alphas, self.bias, self.eps)

    @classmethod
    def recorded(cls, held: dict[str, Any]) -> tuple[Any, ...]:
        return super().recorded(held)[:3]

    @staticmethod
    def backward(saved: Any, options: Any, needed: Any, *gradients: Any) -> Gradients:
        return parameter_gradients(saved, options[0], needed, *gradients, None, None, None)


class ProjectBackwardCall(Projecting):
    """The gradient of x also gets h_pre d_aggregate, that of `aggregate`, and d_residual, where these are given: a
    layer's streams have three uses, and adding their gradients up costs passes of its own.
    """

    op, kernel = "project", "project_backward"
    returns = ("d_x", "d_weight", "d_sums")
    definition = MhcCall.definition.extended(
        of_rows=(_cut_of_backward,), cuts="tokens, for parameters' gradients, into parts, by the number of SMs"
    )

    def check_inputs(self) -> None:
        """Nothing, as in other backward operators."""

    def likes(self) -> Sequence[Like | None]:
        sums = ((shapes.outputs(self.x.shape[-2]) + len(ALPHAS),), accumulator(self.x))
        return [like(self.x), like(self.weight), sums]

    def compute(self) -> Any:
        d_x, d_weight, sums = reference.project_backward(
            self.d_pre, self.d_post, self.d_res, self.x, self.weight, self.alphas, self.bias, self.stats, self.eps
        )
        if self.of_x and self.d_aggregate is not None:
            d_x = reference.add_uses(d_x, self.d_aggregate, self.h_pre, self.d_residual)
        return d_x, d_weight, sums

    def spec(self, arch: str) -> MhcSpec:
        spec = super().spec(arch)
        return spec if self.h_pre is None else dataclasses.replace(spec, kernel="pre_backward")


@operator(ProjectCall)
def project_streams(
    x: Tensor, weight: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor, bias: Tensor, eps: float,
    of_stats: bool = False, *, h_pre: Tensor | None = None, h_post: Tensor | None = None,
    h_res: Tensor | None = None,
) -> Any:  # fmt: skip
    """The three results of `project`, and p with the streams' root mean square, or None."""


@operator(ProjectBackwardCall)
def project_backward(
    d_pre: Tensor | None, d_post: Tensor | None, d_res: Tensor | None, x: Tensor, weight: Tensor, alpha_pre: Tensor,
    alpha_post: Tensor, alpha_res: Tensor, bias: Tensor, stats: Tensor, d_aggregate: Tensor | None,
    h_pre: Tensor | None, d_residual: Tensor | None, eps: float, of_x: bool, of_weight: bool,
) -> Any:  # fmt: skip
    """Gradients of x and weight, None of what is not wanted, and those of bias and the alphas side by side, in the
    accumulators' dtype."""


def parameter_gradients(
    saved: Sequence[Tensor], eps: float, needed: Sequence[bool], *given: Tensor | None
) -> Gradients:  # fmt: skip
    """Of project's arguments, each in its own dtype and shape.

    Args:
        saved: these and stats. needed: which of them. given: d_pre, d_post, d_res, d_aggregate, h_pre and d_residual.
    """
    _, _, *alphas, bias, _ = saved
    made = project_backward(*given[:3], *saved, *given[3:], eps, *needed[:2])  # type: ignore[arg-type, call-arg]
    (d_x, d_weight, sums), count = made, bias.numel()
    of_alphas = [
        sums[place].to(alpha.dtype).view(alpha.shape) if want else None
        for place, (alpha, want) in enumerate(zip(alphas, needed[2:5], strict=True), count)
    ]
    return [d_x, d_weight, *of_alphas, sums[:count].to(bias.dtype) if needed[5] else None]
