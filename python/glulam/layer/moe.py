"""moe: the whole layer after the router; it takes tokens and returns tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from .. import recipes
from ..activations import NamedNumbers, Numbers, named_numbers, packed
from ..calls.checks import any_requires_grad
from ..calls.front import operator, passed_to
from ..expert_lora import ExpertLora
from ..formats.mxfp8 import MXFP8Tensor
from ..host.experts import Biases
from ..host.groups import part_of
from ..lora.mlp import check_goes_with_lora, has_kernels, lora_arguments
from ..names import ActivationName, GluLayout, RecipeName
from ..ops.grouped_mlp import GroupedMlpCall, Weights
from ..ops.quantized_mlp import QuantizedMlpCall
from ..recipes import BF16, Recipe
from .adapted import adapted_moe, moe_with_lora
from .expert_rows import expert_rows, rows_of_experts
from .of_tokens import OfTokens, of_tokens
from .routing import Routing
from .rows import combine, row_indices

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Spread(Protocol):
    """The methods of a `glulam.distributed.ExpertParallel` that `moe` calls.

    A protocol, because the module of ExpertParallel imports this module.
    """

    dtype: torch.dtype

    def refusing(self) -> AbstractContextManager[None]: ...
    def layer(
        self, op: str, recipe: str | Recipe, experts: Callable[[Any, Routing, bool], Tensor], given: Mapping[str, Any],
        x: Tensor | MXFP8Tensor, routing: Routing, residual: Tensor | None = None,
    ) -> Tensor: ...  # fmt: skip


def _moe(
    x: Tensor, routing: Routing, w1: Any, w2: Any, b1: Any, b2: Any, activation: str, glu_layout: str, numbers: Numbers,
    recipe: str | Recipe, recompute: bool, transpose_w: bool, lora: ExpertLora | None, residual: Tensor | None,
    out: Tensor | None, parallel: Any,
) -> Tensor:  # fmt: skip
    """Compute `moe`, with all arguments by position, and the activation's numbers as one tuple."""
    if parallel is not None:
        options: dict[str, Any] = {
            "b1": b1, "b2": b2, "activation": activation, "glu_layout": glu_layout, "recipe": recipe,
            "recompute": recompute, "transpose_w": transpose_w, **named_numbers(numbers),
        }  # fmt: skip
        if lora is not None:
            options["lora"] = lora
        return _over_ranks(parallel, x, routing, {"w1": w1, "w2": w2, **options}, residual, out)
    if lora is not None:
        found = check_goes_with_lora(MoeCall.op, lora, x, recipe, recompute)
        if has_kernels(found, x, w1):
            rows = row_indices(MoeCall.op, x, routing)
            made: Tensor = adapted_moe(
                x=x, w1=w1, w2=w2, offs=routing.offs, splits=None, rows=rows, row_of=routing.row_of, residual=residual,
                row_scale=routing.weight_of_row, b1=b1, b2=b2, activation=activation, glu_layout=glu_layout,
                numbers=numbers, transpose_w=transpose_w, world_experts=routing.world_experts, out=out,
                **lora_arguments(lora, MoeCall.op, x),
            )  # fmt: skip
            return made
        call = moe_call(
            x, routing, w1=w1, w2=w2, b1=b1, b2=b2, activation=activation, glu_layout=glu_layout, recipe=found,
            transpose_w=transpose_w, residual=residual, out=out, **named_numbers(numbers),
        )  # fmt: skip
        return moe_with_lora(call, routing, lora)
    rows, row_of, weights = row_indices(MoeCall.op, x, routing), routing.row_of, routing.weight_of_row
    is_plain = recipe == BF16.name or recipe is BF16  # objects that are equal would be compared field by field
    if not is_plain and _residual_alone_is_trained(residual, x, w1, w2, b1, b2, weights):
        y = expert_rows(
            x, w1, w2, offs=routing.offs, splits=None, rows=rows, row_scale=weights, b1=b1, b2=b2,
            activation=activation, glu_layout=glu_layout, numbers=numbers, recipe=recipe, recompute=recompute,
            transpose_w=transpose_w, world_experts=routing.world_experts,
        )  # fmt: skip
        with nullcontext() if is_dynamo_compiling() else part_of(MoeCall.op):
            return combine(y, routing, residual, out=out)
    return layer(
        x=x, w1=w1, w2=w2, offs=routing.offs, splits=None, rows=rows, row_of=row_of, residual=residual,
        row_scale=weights, b1=b1, b2=b2, activation=activation, glu_layout=glu_layout, numbers=numbers,
        recipe=recipe, recompute=recompute, transpose_w=transpose_w, world_experts=routing.world_experts, out=out,
    )  # fmt: skip


@passed_to(_moe)
def moe(
    x: Tensor | MXFP8Tensor, routing: Routing, w1: Weights, w2: Weights, *, b1: Biases = None, b2: Biases = None,
    activation: ActivationName = "swiglu", glu_layout: GluLayout = "concat", recipe: RecipeName | Recipe = "bf16",
    recompute: bool = False, transpose_w: bool = False, lora: ExpertLora | None = None, residual: Tensor | None = None,
    out: Tensor | None = None, parallel: Spread | None = None, **numbers: Unpack[NamedNumbers],
) -> Tensor:  # fmt: skip
    """Return out[n] = residual[n] + the sum over token n's choices of weight * MLP of the chosen expert (x[n]).
    Differentiable.

    The sum is computed in float32, in the order of the choices, and rounded once. Tokens without a row get the
    residual, or 0.

    Forward is one call, whose GEMMs read tokens by index. A recipe that quantises tokens quantises each token once.
    Recipes that decode weights copy rows within the call.

    If gradients are recorded, the GEMMs of forward and backward read by index, too, with one exception. If I is at
    least `of_tokens.COPIED_WIDTH` and a copy of the rows has at most `of_tokens.COPIED_BYTES`, then backward, and with
    recipe "bf16" also forward, reads copied rows. x is saved for backward, and never its rows.

    Args:
        x: tokens [N, H], or an MXFP8Tensor; see `grouped_mlp`. With `parallel` all ranks give 16-bit tokens, or all
            MXFP8.
        routing: the Routing of these tokens, from `route` or `Routing.from_topk`; differentiable in its weights.
        w1, w2, b1, b2, activation, glu_layout, **numbers, recipe, recompute, transpose_w, lora: see `grouped_mlp`.
        residual: [N, H'] in the dtype of the result, contiguous; None: nothing is added.
        out: the result's buffer, contiguous; allowed only if no gradient is recorded, and without `parallel`. None: a
            new one.
        parallel: a `glulam.distributed.ExpertParallel`: weights are then those of this rank's experts, and all ranks of
            the group call this, each with its own tokens. With recipes "mxfp8" and "mxfp4" in no_grad mode tokens are
            sent in MXFP8, if H is a multiple of 128. None: all experts are here.

    Returns:
        [N, H'], H' the number of w2's rows, in x's dtype; with `parallel` in the dtype of the ExpertParallel.

    Raises:
        The errors of `grouped_mlp`, `permute` and `combine`.
    """
    raise NotImplementedError  # `passed_to` writes the body


def _residual_alone_is_trained(residual: Tensor | None, *others: Any) -> bool:
    return is_grad_enabled() and any_requires_grad(residual) and not any_requires_grad(*others)


def _over_ranks(
    parallel: Any, x: Any, routing: Any, given: dict[str, Any], residual: Tensor | None, out: Tensor | None
) -> Tensor:
    """Compute `moe` with experts on several ranks. given: the remaining arguments of `moe`, by name."""
    if not hasattr(parallel, "layer"):
        kind = type(parallel).__name__
        raise TypeError(f"{MoeCall.op}: parallel is a {kind}; give a glulam.distributed.ExpertParallel")
    with parallel.refusing():
        row_indices(MoeCall.op, x, routing)
        if "lora" in given:
            check_goes_with_lora(MoeCall.op, given["lora"], x, given["recipe"], given["recompute"])
        if out is not None:
            raise ValueError(f"{MoeCall.op}: out is given, and so is parallel, whose result is new; leave out one")

    def experts(x: Tensor, here: Routing, is_summed: bool) -> Tensor:
        if is_summed:
            return moe(x, here, **given)
        return rows_of_experts(x, here, dtype=parallel.dtype, **given)

    made: Tensor = parallel.layer(MoeCall.op, given["recipe"], experts, given, x, routing, residual)
    return made


def moe_call(x: Tensor, routing: Routing, *, recipe: str | Recipe, **options: Any) -> MoeCall | QuantizedMoeCall:
    """Return a Call of `moe` that is not run yet. Callers use it if they do not send its gradients to autograd.

    options: arguments of `moe`, without `out`.
    """
    rows = {"rows": row_indices(MoeCall.op, x, routing), "row_of": routing.row_of, "row_scale": routing.weight_of_row}
    given = {
        "x": x, "offs": routing.offs, "splits": None, **rows, "world_experts": routing.world_experts, "out": None,
        "recompute": False, **options,
    }  # fmt: skip
    found = recipes.find(MoeCall.op, recipe)
    if found is BF16:
        return MoeCall(**packed({"transpose_w": False, **given}), recipe=found.name)
    return QuantizedMoeCall(**QuantizedMoeCall.unwrapped(found, given))


class MoeCall(OfTokens, GroupedMlpCall):
    """A call of moe in 16 bits."""

    added = ("b2", "residual")
    definition = of_tokens(GroupedMlpCall.definition)


class QuantizedMoeCall(OfTokens, QuantizedMlpCall):
    """A call of moe with a recipe that quantises."""

    torch_op = "moe_mxfp8"
    definition = of_tokens(QuantizedMlpCall.definition)


@operator(MoeCall, quantized=QuantizedMoeCall)
def layer(
    x: Tensor, w1: Any, w2: Any, *, offs: Any, splits: Any, rows: Any, row_of: Any, residual: Any, row_scale: Any,
    b1: Any, b2: Any, activation: str, glu_layout: str, numbers: Numbers, recipe: Any, recompute: bool,
    transpose_w: bool, world_experts: int, out: Any,
) -> Any:  # fmt: skip
    """Compute `moe` from the tensors of its routing.

    rows, row_of and row_scale are the routing's token_of_row, row_of and weight_of_row.
    """
    raise NotImplementedError  # `front` writes the body


MoeCall.public = staticmethod(moe)
