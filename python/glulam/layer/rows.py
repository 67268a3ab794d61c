"""permute and combine: tokens to rows of experts, and rows back to tokens. Each is the other's gradient."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, is_grad_enabled

from cute_kernels.specs import LayerSpec

from ..addressed import Layout, Tensors, recorded
from ..backward.parts import once_differentiable, usable, without_graph
from ..mhc.checks import check_dtype, check_like, check_vectors
from ..mxfp8 import MXFP8Tensor
from . import reference
from .operator import LayerOperator, check_matrix, check_shape
from .routing import Routing


def permute(x: Tensor, routing: Routing) -> Tensor:
    """Rows of experts: out[r] = x[routing.token_of_row[r]]. Differentiable.

    Args:
        x: tokens [N, H], contiguous; bfloat16, float16 or float32, on the CPU also float64. On a GPU H is a multiple
            of 8.
        routing: of these tokens.

    Returns:
        [T, H], T = N K; rows from routing.offs[-1] on are left as they were (on the CPU they are zero).

    Raises:
        ValueError, TypeError: an argument that does not fit; nothing was launched.
        UnsupportedDevice, BundleError (RuntimeErrors): no kernel for this GPU, or no usable bundle.
    """
    row_of = _row_of("permute", routing)
    is_recorded = is_grad_enabled() and recorded("permute", None, x)
    rows: Tensor = Permute.apply(x, row_of) if is_recorded else PERMUTE((x, row_of))[0]  # type: ignore[no-untyped-call]
    return rows.view(row_of.numel(), x.shape[1])


def combine(y: Tensor, routing: Routing, residual: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Sums of experts' rows: out[n] = residual[n] + sum over j of y[routing.row_of[n, j]]. Differentiable.

    The sum is in float32, in the order of j, and rounded once. A choice without a row adds nothing.

    Args:
        y: rows of experts [T, H], T = N K, contiguous, as of `permute`.
        routing: that the rows are of.
        residual: [N, H] in y's dtype.
        out: the result's buffer, contiguous; only where no gradient is recorded.

    Returns:
        [N, H] in y's dtype.

    Raises:
        ValueError, TypeError: an argument that does not fit; nothing was launched.
        GradientNotSupported: `out` is given and an argument requires a gradient.
        UnsupportedDevice, BundleError (RuntimeErrors): no kernel for this GPU, or no usable bundle.
    """
    row_of = _row_of("combine", routing)
    try:
        y = y.view(*row_of.shape, y.shape[1])
    except Exception:
        _check_rows_of(y, row_of)
        raise
    if is_grad_enabled() and recorded("combine", out, y, residual):
        return Combine.apply(y, row_of, residual)  # type: ignore[no-untyped-call]
    return COMBINE((y, row_of, residual), (), None if out is None else (out,))[0]


def _check_rows_of(y: Any, row_of: Tensor) -> None:
    """Raises ValueError or TypeError where y is not [T, H] of the routing's rows."""
    _, columns = check_matrix("combine", "y", y, "T, H")
    why = f"{len(row_of)} tokens chose {row_of.shape[1]} experts each"
    check_shape("combine", "y", y, (row_of.numel(), columns), why)


def row_indices(op: str, x: Tensor | MXFP8Tensor, routing: Any) -> Tensor:
    """`routing.token_of_row`, of a routing of x's tokens. Raises ValueError or TypeError where it is none."""
    row_of = _row_of(op, routing)
    if isinstance(x, (Tensor, MXFP8Tensor)) and len(x.shape) == 2 and x.shape[0] != row_of.shape[0]:
        _mismatch(op, x.shape[0], len(row_of))
    indices: Tensor = routing.token_of_row
    return indices


def _mismatch(op: str, tokens: int, routed: int) -> NoReturn:
    raise ValueError(f"{op}: x has {tokens} tokens, but routing is of {routed}; route these tokens")


def _row_of(op: str, routing: Any) -> Tensor:
    if not isinstance(routing, Routing):
        raise TypeError(
            f"{op}: routing is a {type(routing).__name__}; give what glulam.route or Routing.from_topk returned"
        )
    return routing.row_of


class _Moving(LayerOperator):
    """What permute and combine have in common: a thread for each 16 bytes of a token."""

    streams = "row_of"

    def _check_rows(self, name: str, rows: Tensor, row_of: Tensor) -> None:
        check_dtype(self.op, name, rows)
        check_vectors(self.op, name, "H", rows)
        if row_of.device != rows.device:
            raise ValueError(
                f"{self.op}: routing is on {row_of.device}, {name} on {rows.device}; route on {rows.device}"
            )

    def layout(self, tensors: Any, options: Any, sm_count: int) -> Layout:
        rows, row_of = tensors[:2]
        tokens, k = row_of.shape
        numbers = {"tokens": tokens, "k": k, "width": rows.shape[-1], "position": 0}
        return Layout(rows, self.kernel, 0, numbers, tokens > 0)

    def spec(self, layout: Layout, arch: str) -> LayerSpec:
        return LayerSpec(self.kernel, str(layout.lead.dtype).removeprefix("torch."), arch=arch)


class PermuteForward(_Moving):
    op = kernel = "permute"
    inputs, outputs = ("x", "row_of"), ("out",)
    loose = ("row_of",)
    schema = "(Tensor x, Tensor row_of) -> Tensor[]"

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> None:
        x: Any = tensors[0]
        row_of: Any = tensors[1]
        tokens, _ = check_matrix(self.op, "x", x, "N, H")
        if tokens != len(row_of):
            _mismatch(self.op, tokens, len(row_of))
        self._check_rows("x", x, row_of)

    def results(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        x, row_of = tensors
        return (x.new_empty(*row_of.shape, x.shape[1]),)

    def reference(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        return reference.permute(*tensors)

    def differentiable(self, tensors: Any, options: Any) -> tuple[Any, ...]:
        return (Permute.apply(*tensors),)  # type: ignore[no-untyped-call]


class CombineForward(_Moving):
    op = kernel = "combine"
    inputs, outputs = ("y", "row_of", "residual"), ("out",)
    loose = ("row_of",)
    schema = "(Tensor y, Tensor row_of, Tensor? residual) -> Tensor[]"

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> None:
        y: Any = tensors[0]
        row_of: Any = tensors[1]
        residual: Any = tensors[2]
        if not y.is_contiguous():
            raise ValueError(f"{self.op}: y is not contiguous; call .contiguous()")
        self._check_rows("y", y, row_of)
        if residual is not None:
            shape = len(row_of), y.shape[-1]
            check_like(self.op, "residual", residual, shape, y, "it is added to the tokens' sums")

    def results(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        y, row_of, _ = tensors
        return (y.new_empty(len(row_of), y.shape[-1]),)

    def reference(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        return reference.combine(*tensors)

    def differentiable(self, tensors: Any, options: Any) -> tuple[Any, ...]:
        return (Combine.apply(*tensors),)  # type: ignore[no-untyped-call]


PERMUTE, COMBINE = PermuteForward(), CombineForward()


class Permute(torch.autograd.Function):
    """Saves row_of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row_of: Tensor) -> Tensor:
        ctx.save_for_backward(row_of)
        return PERMUTE((x, row_of))[0]

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> Any:
        with without_graph():
            d_x = COMBINE((usable(d_rows), *ctx.saved_tensors, None))
        return *once_differentiable("permute", d_x), None


class Combine(torch.autograd.Function):
    """Saves row_of."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, row_of: Tensor, residual: Tensor | None) -> Tensor:
        ctx.save_for_backward(row_of)
        return COMBINE((y, row_of, residual))[0]

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        d_y = d_residual = None
        with without_graph():
            if ctx.needs_input_grad[0]:
                d_y = PERMUTE((usable(d_out), *ctx.saved_tensors))[0]
            if ctx.needs_input_grad[2]:
                d_residual = d_out
        d_y, d_residual = once_differentiable("combine", [d_y, d_residual])
        return d_y, None, d_residual
