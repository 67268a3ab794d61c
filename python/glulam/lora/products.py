"""Products of an adapted MLP, each differentiable: with an expert's own weight, and with its low-rank matrices.

x (W + s B A)^T is x W^T + (s x A^T) B^T, so each weight needs two more grouped GEMMs, of rank r. Autograd would save
the input of the product x A^T for backward: rows of tokens, or the activation. Both can be recomputed from tensors that
are saved anyway, so `low_rank` can save those instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..backward.frozen import Frozen, times_factors, without_factors
from ..backward.parts import backward_of
from ..calls.autograd import once_differentiable, usable
from ..calls.checks import ALIGNMENT_ELEMENTS
from ..calls.quantized import Quantized
from ..host.experts import GateUp
from ..host.invariance import held, is_on
from ..ops.gate import gate_rows
from ..ops.grouped_mm import grouped_mm
from ..ops.grouped_wgrad import grouped_wgrad
from ..ops.quantized_weights import parts_given

HALVES = (torch.bfloat16, torch.float16)
Groups = dict[str, Any]
"""Group sizes as one keyword argument of grouped operators, `offs` or `splits`, a tensor."""


class Rows(NamedTuple):
    """The tensors from which backward recomputes the rows x that an adapter's matrix a was multiplied with.

    The rows are tokens selected by indices, or the activation of a preactivation times the row scale.

    Attributes:
        matrix: tokens [N, H], or a preactivation [T, 2I or I].
        beside: int32 [T], the token of each row; or the row scale [T].
        activation: (name of the activation, layout of its gate, numbers of all formulas) if matrix is a preactivation.
            None: matrix holds tokens.
    """

    matrix: Tensor
    beside: Tensor | None
    activation: tuple[Any, ...] | None = None

    def recomputed(self) -> tuple[Tensor, Tensor | None]:
        """Return (a matrix, indices): row t of x is row indices[t] of the matrix. None: x is the matrix."""
        if self.activation is None:
            return self.matrix, self.beside
        return gate_rows(self.matrix, self.beside, *self.activation), None


class _Narrow(torch.autograd.Function):
    """x a_e^T as an autograd function that saves the tensors from which x can be recomputed (`Rows`), not x."""

    @staticmethod
    def forward(
        ctx: Any, op: str, grouped_by: str, activation: Any, x: Tensor, a: Tensor, sizes: Tensor, matrix: Tensor,
        beside: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.op, ctx.grouped_by, ctx.activation = op, grouped_by, activation
        ctx.save_for_backward(a, sizes, matrix, beside)
        ctx.invariant = is_on()
        groups: Groups = {grouped_by: sizes}
        return grouped_mm(x, a, **groups)

    @staticmethod
    def backward(ctx: Any, d_narrow: Tensor) -> Any:
        if is_dynamo_compiling():
            made = _narrow_gradients(ctx, d_narrow)
        else:
            with backward_of(ctx.op):
                made = _narrow_gradients(ctx, usable(d_narrow))
            made = once_differentiable(ctx.op, made)
        return None, None, None, *made, None, None, None


def _narrow_gradients(ctx: Any, d_narrow: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of x (None if not needed) and a, from d_narrow, the gradient of x a_e^T.

    x's gradient is uninitialised after the last group, where nobody reads it.
    """
    a, sizes, matrix, beside = ctx.saved_tensors
    groups: Groups = {ctx.grouped_by: sizes}
    dx = None
    with held(ctx.invariant):
        if ctx.needs_input_grad[3]:
            dx = grouped_mm(d_narrow, a, **groups, transpose_w=True)
        x, rows = Rows(matrix, beside, ctx.activation).recomputed()
        return dx, grouped_wgrad(d_narrow, x, x_rows=rows, **groups)


def low_rank(
    op: str, x: Tensor, a: Tensor, b: Tensor, scale: float, groups: Groups, rows: Tensor | None = None,
    kept: Rows | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return (scale x a_e^T) b_e^T.

    Args:
        op: the public operator's name in errors.
        x: rows [T, K].
        a, b: [E, r, K] and [E, N, r], in x's dtype or float32. Kernels take widths that are multiples of 8, so r is
            padded with zeros to the next multiple.
        groups: the group sizes, as {"offs": ...} or {"splits": ...}.
        rows: int32 [T], row t is x[rows[t]]; None: rows are in order.
        kept: tensors from which x can be recomputed for the gradient of a; None: x itself is saved.
        out: the result's buffer; None: a new one.
    """
    a, b = as_multiplied(a, x, 1), as_multiplied(b, x, 2)
    if kept is not None and torch.is_grad_enabled() and a.requires_grad:
        ((grouped_by, sizes),) = groups.items()
        narrow: Tensor = _Narrow.apply(op, grouped_by, kept.activation, x, a, sizes, kept.matrix, kept.beside)  # type: ignore[no-untyped-call]
    else:
        narrow = grouped_mm(x, a, rows=rows, **groups)
    return grouped_mm(narrow.mul_(scale), b, **groups, out=out)


def as_multiplied(matrix: Tensor, x: Tensor, rank_at: int) -> Tensor:
    """Return an adapter matrix in the layout that kernels take.

    It is contiguous, its rank is padded with zeros to a multiple of 8, and it is cast to x's dtype if it is float32 and
    x 16-bit. A matrix that is not strided is returned unchanged, so that later checks refuse it by name.

    rank_at: the dimension of the rank.
    """
    if matrix.layout is not torch.strided:
        return matrix
    if missing := -matrix.shape[rank_at] % ALIGNMENT_ELEMENTS:
        matrix = F.pad(matrix, (0, 0, 0, missing) if rank_at == 1 else (0, missing))
    if matrix.dtype == torch.float32 and x.dtype in HALVES:
        matrix = matrix.to(x.dtype)
    return matrix.contiguous()


def times_w1(call: Any, groups: Groups) -> Tensor:
    """Return the preactivation without w1's adapter, x w1_e^T + b1_e, [T, 2I or I].

    groups: group sizes as one keyword, `offs` or `splits`.
    """
    if isinstance(call, Quantized):
        w1, factors = without_factors(parts_given(call, "w1"))
        ((grouped_by, sizes),) = groups.items()
        frozen = Frozen(recipe=call.recipe, grouped_by=grouped_by)
        if factors is None:
            return frozen.product("preact", call.x, w1, sizes, bias=call.b1)
        return times_factors(frozen.product("preact", call.x, w1, sizes), factors, groups, call.b1)
    if isinstance(call.w1, GateUp):
        halves = zip(call.w1, _halves(call.b1), strict=True)
        return torch.cat([grouped_mm(call.x, w, bias=b, rows=call.rows, **groups) for w, b in halves], dim=1)
    return grouped_mm(call.x, call.w1, bias=call.b1, rows=call.rows, transpose_w=call.transpose_w, **groups)


def _halves(biases: Any) -> list[Any]:
    """Return [the gate's biases, the up-projection's biases] from biases [E, 2I] or a list of E."""
    if biases is None:
        return [None, None]
    if isinstance(biases, Tensor):
        return [half.contiguous() for half in biases.chunk(2, dim=1)]
    return [list(half) for half in zip(*[bias.chunk(2) for bias in biases], strict=True)]


def times_w2(call: Any, act: Tensor, row_scale: Tensor | None, groups: Groups, out: Tensor | None) -> Tensor:
    """Return FC2's product with w2 alone, without adapters: [T, H'], bias included. H' is the number of w2's rows."""
    addends = {"bias": call.b2, "bias_scale": None if call.b2 is None else row_scale, "out": out}
    if isinstance(call, Quantized):
        ((grouped_by, sizes),) = groups.items()
        frozen = Frozen(recipe=call.recipe, grouped_by=grouped_by)
        return frozen.product("fc2", act, parts_given(call, "w2"), sizes, **addends)
    return grouped_mm(act, call.w2, transpose_w=call.transpose_w, **groups, **addends)
