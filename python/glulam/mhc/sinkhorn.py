"""sinkhorn: matrices to (nearly) doubly stochastic ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from ..addressed import Layout, Tensors, forms, recorded
from ..backward.parts import once_differentiable, usable, without_graph
from ..signature import check_tensor
from . import reference
from .checks import check_count, check_dtype, check_eps, check_iters
from .operator import MhcOperator

MAX_ITERS = {2: 448, 4: 224, 8: 112}
"""Backward keeps 2n factors a matrix and iteration, for 32 matrices, in 227 KB of shared memory."""


def sinkhorn(logits: Tensor, iters: int = 20, eps: float = 1e-6, *, out: Tensor | None = None) -> Tensor:
    """M = exp(logits - rowmax); then `iters` times M /= rowsum + eps, M /= colsum + eps. Differentiable.

    Sums are in float32 (float64 for float64). Backward computes the steps again, one thread a matrix.

    Args:
        logits: [..., n, n], contiguous; bfloat16, float16 or float32, on the CPU also float64. n is 2, 4 or 8 on a GPU.
        iters: at most 448, 224 or 112 there, for n = 2, 4 or 8.
        eps: keeps sums from dividing by zero.
        out: the result's buffer; only where no gradient is recorded.

    Returns:
        A tensor like logits. Its rows sum to about 1, its columns to 1 / (1 + eps).

    Raises:
        ValueError, TypeError: an argument that does not fit; nothing was launched.
        GradientNotSupported: `out` is given and logits requires a gradient.
        UnsupportedDevice, BundleError (RuntimeErrors): no kernel for this GPU, or no usable bundle.
    """
    options = (iters, eps)
    if is_grad_enabled() and recorded("sinkhorn", out, logits):
        return Sinkhorn.apply(logits, *options)  # type: ignore[no-untyped-call]
    return SINKHORN((logits,), options, None if out is None else (out,))[0]


class _Normalising(MhcOperator):
    """What forward and backward have in common."""

    op = "sinkhorn"
    streams = "logits"

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> None:
        logits = check_tensor(self.op, "logits", tensors[-1], "a tensor [..., n, n]")
        check_dtype(self.op, "logits", logits)
        if logits.dim() < 2 or logits.shape[-1] != logits.shape[-2]:
            raise ValueError(f"{self.op}: logits has shape {list(logits.shape)}; give square matrices [..., n, n]")
        check_count(self.op, "logits", logits, logits.shape[-1])
        iters, eps = options
        check_iters(self.op, iters, MAX_ITERS.get(logits.shape[-1]))
        check_eps(self.op, eps)

    def results(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        return (torch.empty_like(tensors[-1]),)

    def layout(self, tensors: Any, options: Any, sm_count: int) -> Layout:
        logits, (iters, eps) = tensors[-1], options
        n = logits.shape[-1]
        matrices = logits.numel() // (n * n)
        numbers = {"forms": forms(logits), "matrices": matrices, "iters": iters, "eps": float(eps)}
        return Layout(logits, self.kernel, n, numbers, matrices > 0)


class SinkhornForward(_Normalising):
    kernel = "sinkhorn"
    inputs, outputs = ("logits",), ("out",)
    schema = "(Tensor logits, int iters, float eps) -> Tensor[]"

    def reference(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        return (reference.sinkhorn(*tensors, *options),)

    def differentiable(self, tensors: Any, options: Any) -> tuple[Any, ...]:
        return (Sinkhorn.apply(*tensors, *options),)  # type: ignore[no-untyped-call]


class SinkhornBackward(_Normalising):
    kernel = "sinkhorn_backward"
    inputs, outputs = ("d_out", "logits"), ("d_logits",)
    schema = "(Tensor d_out, Tensor logits, int iters, float eps) -> Tensor[]"

    def reference(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        return (reference.sinkhorn_backward(*tensors, *options),)


SINKHORN, SINKHORN_BACKWARD = SinkhornForward(), SinkhornBackward()


class Sinkhorn(torch.autograd.Function):
    """Saves the logits alone."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iters: int, eps: float) -> Tensor:
        ctx.options = (iters, eps)
        ctx.save_for_backward(logits)
        return SINKHORN((logits,), ctx.options)[0]

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        with without_graph():
            (d_logits,) = SINKHORN_BACKWARD((usable(d_out), *ctx.saved_tensors), ctx.options)
        return *once_differentiable("sinkhorn", [d_logits]), None, None
