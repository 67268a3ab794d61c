"""project: compute the coefficients that mix residual streams. One pass over the streams also computes their norm."""

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
"""Number of tokens. Columns are cut for this number if results must not depend on the call's number of tokens."""


class Coefficients(NamedTuple):
    """Results of `project`, float32 (float64 if the streams are float64).

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
    """Compute the coefficients of the streams' mixing. Differentiable in every tensor.

        p = x_flat weight^T,  r = 1 / (||x_flat|| / sqrt(n C) + eps),  z = r p alpha + bias
        h_pre = sigmoid(z_pre),  h_post = 2 sigmoid(z_post),  h_res = z_res

    x_flat is x as [..., n C]; z_pre, z_post and z_res are parts of z, each with its own alpha.

    A float32 weight keeps its precision, whatever x is: products are summed in float32, with an error of some 1e-6 of
    their size. A 16-bit weight is rounded to x's dtype if it differs, and multiplied in that dtype (float32: in TF32).

    Args:
        x: streams [..., n, C], contiguous; bfloat16, float16 or float32, on the CPU also float64. On a GPU n is 2, 4 or
            8 and C a multiple of 8.
        weight: [n n + 2n, n C], rows for h_pre, h_post and h_res (row-major) in this order; float32 or 16-bit.
        alpha_pre, alpha_post, alpha_res: tensors of one element and of one dtype; float32 or 16-bit.
        bias: [n n + 2n], float32 or 16-bit.
        eps: keeps a token of zeros from dividing by zero.
        norm_weight: [n C], float32 or 16-bit, an RMSNorm's weight. weight is replaced by weight * norm_weight, which
            scales its columns and is float32 whatever weight's dtype. None: no RMSNorm weight.
        out: buffers for the three results; only if no gradient is recorded. None: new tensors.

    Returns:
        Coefficients(h_pre, h_post, h_res).

    Raises:
        ValueError, TypeError: an argument does not fit; nothing was launched.
        GradientNotSupported: `out` is given and an argument requires a gradient.
        UnsupportedDevice, BundleError (RuntimeErrors): there is no kernel for this GPU, or no usable bundle.
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
    """Return the dtype of sums over x: float32, or float64 if x is float64."""
    return torch.promote_types(x.dtype, torch.float32)


def check_parameters(op: str, tensors: Any) -> None:
    """Check weight, the three alphas and bias.

    Args:
        tensors: x, weight, alpha_pre, alpha_post, alpha_res, bias; x was checked before.
    """
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
    """Return weight * norm_weight, in float32.

    Torch computes the product, and its autograd computes both gradients from the product's gradient, which is float32.
    That is cheap: 24 rows of some 10^4 columns take a few us, while the streams take hundreds. If the kernels
    multiplied instead, they would read one more address each, and backward would need one more kernel, for the sums
    over rows.

    Args:
        op: the operator's name, for messages.
        tensors: x, weight, alpha_pre, alpha_post, alpha_res, bias.
        norm_weight: [n C].
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
    """Return the slices into which kernels cut the n C columns of x_flat and weight, to sum p = x_flat weight^T.

    They depend on the weight's dtype.

    Args:
        x, weight: the operator's arguments.
        tokens: number of tokens.
        gpu: the GPU.
        invariant: True: slices depend neither on `tokens` nor on the GPU; they are the slices of `USUAL_TOKENS`
            tokens and `USUAL_SMS` SMs.
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
    """Base of the calls of project, project_backward and pre: their common checks and results."""

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
        """Return (shape, dtype) of one result per `end` in `ends`.

        The shape is [..., *end]; the dtype is the dtype of sums over x (`accumulator`).
        """
        tokens, dtype = self.lead_sizes, accumulator(self.x)
        return [((*tokens, *end), dtype) for end in ends]


class ProjectCall(Projecting):
    """A call of project.

    `of_stats`: True: also return `stats` (projections and norm of each token), which backward needs.
    """

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
    """A call of project_backward, whose d_x may include two more gradients of the streams.

    project, aggregate and post_mix all read a layer's streams. Adding up their three gradients afterwards would take
    separate passes over memory. So if they are given, d_x also includes h_pre d_aggregate, the gradient through
    `aggregate`, and d_residual, the gradient through `post_mix`.
    """

    op, kernel = "project", "project_backward"
    returns = ("d_x", "d_weight", "d_sums")
    definition = MhcCall.definition.extended(
        of_rows=(_cut_of_backward,), cuts="tokens, for parameters' gradients, into parts, by the number of SMs"
    )

    def check_inputs(self) -> None:
        """Check nothing: like other backward operators, this one is called only by `backward` methods."""

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
    """Return the three results of `project`, then stats [..., n n + 2n + 1].

    stats holds p = x_flat weight^T, then the root mean square of the token's n streams.

    Args:
        of_stats: True: return stats, which backward needs. False: return None instead.
        h_pre, h_post, h_res: buffers for the results. None: new tensors.
        Others: see `project`.
    """


@operator(ProjectBackwardCall)
def project_backward(
    d_pre: Tensor | None, d_post: Tensor | None, d_res: Tensor | None, x: Tensor, weight: Tensor, alpha_pre: Tensor,
    alpha_post: Tensor, alpha_res: Tensor, bias: Tensor, stats: Tensor, d_aggregate: Tensor | None,
    h_pre: Tensor | None, d_residual: Tensor | None, eps: float, of_x: bool, of_weight: bool,
) -> Any:  # fmt: skip
    """Return (d_x, d_weight, d_sums): d_sums holds the gradients of bias, then of the three alphas.

    d_sums has the dtype of sums over x (`accumulator`).

    Args:
        d_pre, d_post, d_res: gradients of the results. None: there is none.
        stats: the fourth result of `project_streams`.
        d_aggregate, h_pre, d_residual: gradients [..., C] of aggregate's result and [..., n, C] of post_mix's streams,
            and aggregate's coefficients [..., n]: h_pre d_aggregate and d_residual are added to d_x. None: not added.
        of_x, of_weight: True: compute d_x, d_weight. False: return None instead.
    """


def parameter_gradients(
    saved: Sequence[Tensor], eps: float, needed: Sequence[bool], *given: Tensor | None
) -> Gradients:  # fmt: skip
    """Return the gradients of project's arguments, each in its argument's dtype and shape; None if not needed.

    Args:
        saved: project's arguments, then stats (see `project_streams`).
        eps: project's eps.
        needed: for each of these arguments, True if its gradient is needed.
        given: gradients of project's results (d_pre, d_post, d_res), and addends of x's gradient (d_aggregate, h_pre,
            d_residual), all as `project_backward` takes them.
    """
    _, _, *alphas, bias, _ = saved
    made = project_backward(*given[:3], *saved, *given[3:], eps, *needed[:2])  # type: ignore[arg-type, call-arg]
    (d_x, d_weight, sums), count = made, bias.numel()
    of_alphas = [
        sums[place].to(alpha.dtype).view(alpha.shape) if want else None
        for place, (alpha, want) in enumerate(zip(alphas, needed[2:5], strict=True), count)
    ]
    return [d_x, d_weight, *of_alphas, sums[:count].to(bias.dtype) if needed[5] else None]
