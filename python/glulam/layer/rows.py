"""permute (from tokens to rows of experts) and combine (from rows back to tokens).

Each is the backward of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from cute_kernels.specs import LayerSpec, Spec

from ..calls.addressed import Gradients, Like, check_dtype, check_like, check_vectors
from ..calls.checks import check_tensor
from ..calls.front import operator
from ..calls.sharding import SUM, Split
from ..choose.problem import dtype_name
from ..errors import ARGUMENT_ERRORS
from ..formats.mxfp8 import MXFP8Tensor
from . import reference
from .checks import check_matrix, check_row_of
from .routing import LayerCall, Routing

ROW_OF = "routing.row_of"


def permute(x: Tensor, routing: Routing) -> Tensor:
    """Return the rows of experts, out[r] = x[routing.token_of_row[r]]. Differentiable.

    Args:
        x: tokens [N, H], contiguous; bfloat16, float16 or float32, on the CPU also float64. On a GPU H is a multiple
            of 8.
        routing: the Routing of these tokens.

    Returns:
        [T, H], T = N K, in x's dtype; rows from routing.offs[-1] on are not written (on the CPU they are zero).

    Raises:
        ValueError, TypeError: an argument is invalid; nothing was launched.
        UnsupportedDevice, BundleError (RuntimeErrors): no kernel for this GPU, or no usable bundle.
    """
    row_of = _row_of("permute", routing)
    rows: Tensor = permute_tokens(x, row_of)
    return rows.view(row_of.numel(), x.shape[1])


def combine(y: Tensor, routing: Routing, residual: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return sums of experts' rows, out[n] = residual[n] + sum over j of y[routing.row_of[n, j]]. Differentiable.

    The sum is computed in float32, in the order of j, and rounded once. A choice without a row adds nothing, and a row
    that belongs to no choice gets a gradient of zeros.

    Args:
        y: rows of experts [T, H], T = N K, contiguous, in the order and dtypes of `permute`.
        routing: the Routing of the rows.
        residual: [N, H] in y's dtype; None: nothing is added.
        out: the result's buffer [N, H], contiguous; not allowed if a gradient is recorded. None: a new one.

    Returns:
        [N, H] in y's dtype.

    Raises:
        ValueError, TypeError: an argument is invalid; nothing was launched.
        GradientNotSupported: `out` is given and an argument requires a gradient.
        UnsupportedDevice, BundleError (RuntimeErrors): no kernel for this GPU, or no usable bundle.
    """
    row_of = _row_of("combine", routing)
    try:
        y = y.view(*row_of.shape, y.shape[1])
    except ARGUMENT_ERRORS:
        check_rows_of(y, routing)
        raise
    sums: Tensor = combine_rows(y, row_of, residual, True, out=out)
    return sums


def check_rows_of(y: Any, routing: Routing) -> None:
    """Raise ValueError or TypeError if y is not [T, H] with the routing's number of rows."""
    check_row_of("combine", ROW_OF, routing.row_of)
    _, columns = check_matrix("combine", "y", y, "T, H")
    tokens, k = routing.row_of.shape
    why = f"{tokens} tokens chose {k} experts each"
    check_tensor("combine", "y", y, "a tensor [T, H]", shape=(tokens * k, columns), why=why)


def row_indices(op: str, x: Tensor | MXFP8Tensor, routing: Any) -> Tensor:
    """Return `routing.token_of_row`, the token of each row.

    Raises ValueError or TypeError if routing is not a Routing of x's tokens.
    """
    row_of = _row_of(op, routing)
    if isinstance(x, (Tensor, MXFP8Tensor)) and len(x.shape) == 2 and x.shape[0] != row_of.shape[0]:
        check_routed(op, x.shape[0], row_of.shape[0])
    indices: Tensor = routing.token_of_row
    return indices


def check_routed(op: str, tokens: int, routed: int) -> None:
    """Raise ValueError if a routing has another number of tokens than x."""
    if tokens != routed:
        raise ValueError(f"{op}: x has {tokens} tokens, but routing is of {routed}; route these tokens")


def _row_of(op: str, routing: Any) -> Tensor:
    if not isinstance(routing, Routing):
        raise TypeError(
            f"{op}: routing is a {type(routing).__name__}; give what glulam.route or Routing.from_topk returned"
        )
    row_of = routing.row_of
    if row_of.__class__ is not Tensor or row_of.dim() != 2:
        check_row_of(op, ROW_OF, row_of)
    return row_of


def _constants(call: Any) -> dict[str, int]:
    return {"k": call.row_of.shape[1], "width": call.lead.shape[-1], "position": 0}


class _Moving(LayerCall):
    """Base of the calls of permute and combine, whose kernels have a thread for each 16 bytes of a token."""

    labels: ClassVar[dict[str, str]] = {"row_of": ROW_OF}

    unaligned = frozenset(("row_of",))
    differentiable = True
    saves = ("row_of",)
    definition = LayerCall.definition.extended(constants=(_constants,))

    def check_rows(self) -> None:
        name, rows, device = self.leads, self.lead, self.lead.device
        check_dtype(self.op, name, rows)
        check_vectors(self.op, name, "H", rows)
        check_row_of(self.op, ROW_OF, self.row_of)
        if self.row_of.device != device:
            raise ValueError(f"{self.op}: routing is on {self.row_of.device}, {name} on {device}; route on {device}")

    def spec(self, arch: str) -> Spec:
        return LayerSpec(self.kernel, dtype_name(self.lead.dtype), arch=arch)


class PermuteCall(_Moving):
    op = kernel = "permute"
    on_cpu = staticmethod(reference.permute)

    def check_inputs(self) -> None:
        tokens, _ = check_matrix(self.op, "x", self.x, "N, H")
        check_routed(self.op, tokens, self.row_of.shape[0])
        self.check_rows()

    def likes(self) -> Sequence[Like | None]:
        return [((*self.row_of.shape, self.x.shape[1]), self.x.dtype)]

    @staticmethod
    def backward(saved: Any, options: Any, needed: Any, *gradients: Any) -> Gradients:
        return (combine_rows(gradients[0], saved[0], None),)


class CombineCall(_Moving):
    op = kernel = "combine"
    leads = "y"
    trailing = 2
    definition = _Moving.definition.extended(of_rows=(lambda call: {"bound": call.y.shape[:-1].numel()},))
    on_cpu = staticmethod(reference.combine)

    def served_splits(self) -> tuple[Split, ...]:
        return (Split({"y": SUM, "residual": SUM}, SUM),)

    def check_inputs(self) -> None:
        y = self.y
        if not y.is_contiguous():
            raise ValueError(f"{self.op}: y is not contiguous; call .contiguous()")
        self.check_rows()
        if self.residual is not None:
            shape = self.row_of.shape[0], y.shape[-1]
            check_like(self.op, "residual", self.residual, shape, y, "it is added to the tokens' sums")

    def likes(self) -> Sequence[Like | None]:
        return [((self.row_of.shape[0], self.y.shape[-1]), self.y.dtype)]

    @staticmethod
    def backward(saved: Any, options: Any, needed: Any, *gradients: Any) -> Gradients:
        (d_out,), (row_of,), (of_spare_rows,) = gradients, saved, options
        of_y, _, of_residual, *_ = needed
        d_y = None
        if of_y:
            rows = d_out.new_zeros(*row_of.shape, d_out.shape[-1]) if of_spare_rows else None
            d_y = permute_tokens(d_out, row_of, out=rows)
        return d_y, None, d_out if of_residual else None


@operator(PermuteCall)
def permute_tokens(x: Tensor, row_of: Tensor, *, out: Tensor | None = None) -> Any:
    """Return `permute`'s rows, viewed as [N, K, H]. row_of [N, K]: the row of each choice."""


@operator(CombineCall)
def combine_rows(
    y: Tensor, row_of: Tensor, residual: Tensor | None, of_spare_rows: bool = False, *, out: Tensor | None = None
) -> Any:  # fmt: skip
    """Return `combine` of rows y, viewed as [N, K, H].

    Args:
        row_of: int32 [N, K], the row of each choice.
        of_spare_rows: True: backward writes zeros as the gradient of rows that belong to no choice. False: backward
            leaves the gradient of such rows uninitialised.
        Others: see `combine`.
    """
