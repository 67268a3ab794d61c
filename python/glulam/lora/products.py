"""Products of an adapted MLP, each differentiable: with an expert's own weight, and with its low-rank matrices.

x (W + s B A)^T is x W^T + (s x A^T) B^T: two more grouped GEMMs, of rank r, for each weight. Saved for the backward of
the first of them would be its input, rows of tokens or the activation. Both can be had again from what is kept anyway.
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
"""Group sizes as a keyword, a tensor."""


class Rows(NamedTuple):
    """Rows that are made again in backward.

    Attributes:
        matrix, beside: tokens and int32 [T], the token of each row; or a preactivation and the row scale.
        form: None of tokens; of a preactivation the activation, the layout of its gate and the numbers of all formulas.
    """

    matrix: Tensor
    beside: Tensor | None
    form: tuple[Any, ...] | None = None

    def again(self) -> tuple[Tensor, Tensor | None]:
        """A matrix, and which of its rows these are; None: all, in order."""
        if self.form is None:
            return self.matrix, self.beside
        return gate_rows(self.matrix, self.beside, *self.form), None


class _Narrow(torch.autograd.Function):
    """x a_e^T, which saves what x is made of in its place."""

    @staticmethod
    def forward(
        ctx: Any, op: str, grouped_by: str, form: Any, x: Tensor, a: Tensor, sizes: Tensor, matrix: Tensor,
        beside: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.op, ctx.grouped_by, ctx.form = op, grouped_by, form
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
    """The gradients of x, uninitialised after the last group, where nobody reads it, and of a."""
    a, sizes, matrix, beside = ctx.saved_tensors
    groups: Groups = {ctx.grouped_by: sizes}
    dx = None
    with held(ctx.invariant):
        if ctx.needs_input_grad[3]:
            dx = grouped_mm(d_narrow, a, **groups, transpose_w=True)
        x, rows = Rows(matrix, beside, ctx.form).again()
        return dx, grouped_wgrad(d_narrow, x, x_rows=rows, **groups)


def low_rank(
    op: str, x: Tensor, a: Tensor, b: Tensor, scale: float, groups: Groups, rows: Tensor | None = None,
    kept: Rows | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(scale x a_e^T) b_e^T.

    Args:
        a, b: [E, r, K] and [E, N, r], of x's dtype or float32. Kernels take widths that are multiples of 8, so that r
            is padded to one with zeros.
        rows: int32 [T], row t is x[rows[t]]; None: rows lie in order.
        kept: what x is made of, for the gradient of a; None: x itself is saved. out: the result's buffer.
    """
    a, b = as_multiplied(a, x, 1), as_multiplied(b, x, 2)
    if kept is not None and torch.is_grad_enabled() and a.requires_grad:
        ((grouped_by, sizes),) = groups.items()
        narrow: Tensor = _Narrow.apply(op, grouped_by, kept.form, x, a, sizes, kept.matrix, kept.beside)  # type: ignore[no-untyped-call]
    else:
        narrow = grouped_mm(x, a, rows=rows, **groups)
    return grouped_mm(narrow.mul_(scale), b, **groups, out=out)


def as_multiplied(matrix: Tensor, x: Tensor, rank_at: int) -> Tensor:
    """A matrix in x's dtype, if it is float32 beside 16 bits, contiguous, with zeros up to a rank that kernels take.

    One that is no strided tensor is returned as it is: checks refuse it by name.
    """
    if matrix.layout is not torch.strided:
        return matrix
    if missing := -matrix.shape[rank_at] % ALIGNMENT_ELEMENTS:
        matrix = F.pad(matrix, (0, 0, 0, missing) if rank_at == 1 else (0, missing))
    if matrix.dtype == torch.float32 and x.dtype in HALVES:
        matrix = matrix.to(x.dtype)
    return matrix.contiguous()


def times_w1(call: Any, groups: Groups) -> Tensor:
    """The preactivation of a call's rows without adapters: [T, 2I or I]."""
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
    """The gate's biases and the up-projection's, of [E, 2I] or a list."""
    if biases is None:
        return [None, None]
    if isinstance(biases, Tensor):
        return [half.contiguous() for half in biases.chunk(2, dim=1)]
    return [list(half) for half in zip(*[bias.chunk(2) for bias in biases], strict=True)]


def times_w2(call: Any, act: Tensor, row_scale: Tensor | None, groups: Groups, out: Tensor | None) -> Tensor:
    """The result of a call's rows without adapters: [T, H']."""
    addends = {"bias": call.b2, "bias_scale": None if call.b2 is None else row_scale, "out": out}
    if isinstance(call, Quantized):
        ((grouped_by, sizes),) = groups.items()
        frozen = Frozen(recipe=call.recipe, grouped_by=grouped_by)
        return frozen.product("fc2", act, parts_given(call, "w2"), sizes, **addends)
    return grouped_mm(act, call.w2, transpose_w=call.transpose_w, **groups, **addends)
