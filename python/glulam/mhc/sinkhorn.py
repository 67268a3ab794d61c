"""sinkhorn: turn matrices into (nearly) doubly stochastic matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..calls.addressed import Gradients, Like, check_dtype, like
from ..calls.checks import check_tensor
from ..calls.front import operator
from . import reference
from .call import MhcCall, check_count, check_eps, check_iters

MAX_ITERS = {2: 448, 4: 224, 8: 112}
"""Largest number of iterations by n, the matrices' size.

Backward keeps 2n factors per matrix and iteration, for 32 matrices, in 227 KB of shared memory.
"""


class _Normalising(MhcCall):
    """Base of the calls of sinkhorn's forward and backward."""

    op = "sinkhorn"
    leads = "logits"
    formed = ("logits",)
    definition = MhcCall.definition.extended(of_rows=(lambda call: {"matrices": call.num_rows},))

    def check_inputs(self) -> None:
        logits = check_tensor(self.op, "logits", self.logits, "a tensor [..., n, n]")
        check_dtype(self.op, "logits", logits)
        if logits.dim() < 2 or logits.shape[-1] != logits.shape[-2]:
            raise ValueError(f"{self.op}: logits has shape {list(logits.shape)}; give square matrices [..., n, n]")
        check_count(self.op, "logits", logits, logits.shape[-1])
        check_iters(self.op, self.iters, MAX_ITERS.get(int(logits.shape[-1])))
        check_eps(self.op, self.eps)

    def likes(self) -> Sequence[Like | None]:
        return [like(self.logits)]


class SinkhornCall(_Normalising):
    kernel = "sinkhorn"
    differentiable = True
    saves = ("logits",)
    on_cpu = staticmethod(reference.sinkhorn)

    @staticmethod
    def backward(saved: Any, options: Any, needed: Any, *gradients: Any) -> Gradients:
        return (sinkhorn_backward(*gradients, *saved, *options),)


class SinkhornBackwardCall(_Normalising):
    kernel = "sinkhorn_backward"
    returns = ("d_logits",)
    on_cpu = staticmethod(reference.sinkhorn_backward)


@operator(SinkhornCall)
def sinkhorn(logits: Tensor, iters: int = 20, eps: float = 1e-6, *, out: Tensor | None = None) -> Tensor:
    """Compute M = exp(logits - rowmax); then `iters` times M /= rowsum + eps, M /= colsum + eps. Differentiable.

    Kernels compute in float32, and 20 iterations are right however far apart logits are (docs/mhc.md); the CPU
    computes in float64. Backward recomputes the steps, one thread per matrix.

    Args:
        logits: [..., n, n], contiguous; bfloat16, float16 or float32, on the CPU also float64. n is 2, 4 or 8 on a GPU.
        iters: number of iterations, at most 448, 224 or 112 for n = 2, 4 or 8.
        eps: added to sums, so that no division is by zero.
        out: buffer for the result; only if no gradient is recorded. None: a new tensor.

    Returns:
        A tensor like logits. Its rows sum to about 1, its columns to 1 / (1 + eps).

    Raises:
        ValueError, TypeError: an argument does not fit; nothing was launched.
        GradientNotSupported: `out` is given and logits requires a gradient.
        UnsupportedDevice, BundleError (RuntimeErrors): there is no kernel for this GPU, or no usable bundle.
    """
    raise NotImplementedError  # `front` writes the body


@operator(SinkhornBackwardCall)
def sinkhorn_backward(d_out: Tensor, logits: Tensor, iters: int, eps: float) -> Any:
    """Return the gradient of logits from d_out, the gradient of sinkhorn's result."""
