"""moe_of_choices: `moe` for tokens whose experts were chosen outside of Glulam, as by a serving engine's router.

For few tokens a single call sorts the choices by expert and computes the layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from cute_kernels.chains import SORTED_EXPERTS

from ..activations import NamedNumbers, Numbers, named_numbers
from ..calls.call import Call
from ..calls.checks import any_requires_grad, mismatch, runs_kernels
from ..calls.definition import Definition, ScratchPart
from ..calls.front import operator, passed_to
from ..choose.problem import Problem, changed
from ..errors import GradientNotSupported
from ..formats.mxfp8 import MXFP8Tensor
from ..host.experts import Biases
from ..host.groups import OFFS_OF_CALL
from ..names import ActivationName, GluLayout, RecipeName
from ..ops.grouped_mlp import Weights
from ..recipes import Recipe
from .checks import check_choices, experts_of_world, forms_of_choices, num_mapped
from .moe import MoeCall, QuantizedMoeCall, moe
from .of_tokens import OfTokens
from .reference import sort
from .routing import MOST_SORTED, Routing

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _moe_of_choices(
    x: Tensor, ids: Tensor, weights: Tensor, num_experts: int, w1: Any, w2: Any, expert_map: Tensor | None,
    world_experts: int | None, b1: Any, b2: Any, activation: ActivationName, glu_layout: GluLayout,
    numbers: Numbers, recipe: RecipeName | Recipe, transpose_w: bool, out: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute `moe_of_choices`, with all arguments by position."""
    if not _are_sorted_within(x, ids, weights, num_experts, w1, w2, b1, b2):
        routing = Routing.from_topk(ids, weights, num_experts, expert_map=expert_map, world_experts=world_experts)
        return moe(
            x, routing, w1, w2, b1=b1, b2=b2, activation=activation, glu_layout=glu_layout, recipe=recipe,
            transpose_w=transpose_w, out=out, **named_numbers(numbers),
        )  # fmt: skip
    world = experts_of_world(OfChoices.op, num_experts, expert_map, world_experts)
    return layer_of_choices(
        x, ids, weights, expert_map, num_experts, world, w1, w2, b1, b2, activation, glu_layout, numbers, recipe,
        transpose_w, out,
    )  # fmt: skip


@passed_to(_moe_of_choices)
def moe_of_choices(
    x: Tensor, ids: Tensor, weights: Tensor, num_experts: int, w1: Weights, w2: Weights, *,
    expert_map: Tensor | None = None, world_experts: int | None = None, b1: Biases = None, b2: Biases = None,
    activation: ActivationName = "swiglu", glu_layout: GluLayout = "concat", recipe: RecipeName | Recipe = "bf16",
    transpose_w: bool = False, out: Tensor | None = None, **numbers: Unpack[NamedNumbers],
) -> Tensor:  # fmt: skip
    """Compute `moe(x, Routing.from_topk(ids, weights, num_experts, ...), w1, w2, ...)` in one call if possible.

    The result is the same bit for bit. One call is possible on a GPU, if no gradient is recorded, for at most 2048
    choices (MOST_SORTED, which one CTA sorts) of at most 256 experts (SORTED_EXPERTS). The routing then lies in memory
    that the calling thread reuses. Otherwise the two calls are made.

    Args:
        x: tokens [N, H]; see `moe`.
        ids, weights, num_experts, expert_map, world_experts: see `Routing.from_topk`.
        w1, w2, b1, b2, activation, glu_layout, **numbers, recipe, transpose_w, out: see `moe`.

    Returns:
        [N, H'] in x's dtype, H' the number of w2's rows; `out` if given.

    Raises:
        The errors of `moe` and `Routing.from_topk`.
    """
    raise NotImplementedError  # `passed_to` writes the body


def _are_sorted_within(x: Tensor, ids: Tensor, weights: Tensor, num_experts: int, *others: Any) -> bool:
    """Return True if one call can sort the choices and compute the layer.

    This needs a GPU, few choices and experts (`moe_of_choices` has the numbers), and that no gradient is recorded.

    Args:
        x, ids, weights, num_experts: see `moe_of_choices`.
        others: further tensors that may require a gradient.
    """
    return (
        isinstance(x, (Tensor, MXFP8Tensor))
        and isinstance(ids, Tensor)
        and isinstance(num_experts, int)  # wrong types are refused by the call's parts
        and ids.numel() <= MOST_SORTED
        and num_experts <= SORTED_EXPERTS
        and runs_kernels(x)
        and not (torch.is_grad_enabled() and any_requires_grad(x, weights, *others))
    )


def _constants(call: Any) -> dict[str, Any]:
    wide, weight_form = forms_of_choices(call.ids, call.id_weights)
    return {
        "wide_ids": wide, "weight_form": weight_form, "group_form": OFFS_OF_CALL,
        "num_mapped": num_mapped(call.expert_map),
    }  # fmt: skip


def _scratch(call: Any, problem: Problem) -> dict[str, ScratchPart]:
    """Return the scratch memory of a call: the experts' rows, offs, and each row's token, weight and choice."""
    of_rows = dict.fromkeys(("rows", "scale", "row_of"), 4 * problem.rows)
    return {"y": ((problem.rows, problem.out_features), call.result_dtype), "groups": 4 * problem.experts, **of_rows}


def of_choices(layer: Definition) -> Definition:
    """Return the definition of a call of `moe_of_choices`, which sorts the choices itself.

    layer: the definition of the call of `moe` that takes the tensors of a Routing instead.
    """

    def reference(call: Any, problem: Problem, out: Tensor) -> None:
        made = sort(call.ids, call.id_weights, None, call.expert_map, call.num_experts, 0)
        routing = dict(zip(("offs", "rows", "row_of", "row_scale"), made, strict=True))
        layer.reference(changed(call, **routing), problem, out)

    own = layer.extended(
        constants=(_constants,), scratch=(_scratch,), reference=reference,
        overrides=("group_form",),  # the call makes its offs, though no groups are given
    )  # fmt: skip
    return dataclasses.replace(own, results=layer.results[1:])


class OfChoices(OfTokens):
    """Base of calls of `moe_of_choices`: calls of `moe` that make the routing themselves, from ids and weights."""

    differentiable = explains = False
    labels: ClassVar = {**Call.labels, "id_weights": "weights"}
    offs = splits = rows = row_of = row_scale = residual = None
    recompute = False
    may_read_fewer = True

    @property
    def choices(self) -> Tensor:
        ids: Tensor = self.ids
        return ids

    @property
    def num_rows(self) -> int:
        return self.choices.numel()

    @property
    def lead_sizes(self) -> tuple[int, ...]:
        return tuple(self.lead.shape[:1])

    def check_sizes(self, experts: int, counted: str) -> None:
        check_choices(self.op, self.ids, self.id_weights, self.expert_map, self.num_experts, 0)
        if self.ids.device != self.lead.device:
            raise ValueError(f"{self.op}: ids are on {self.ids.device}, x on {self.lead.device}; move them there")
        if self.ids.shape[0] != self.lead.shape[0]:
            mismatch(self.op, "ids", self.ids.shape, (self.lead.shape[0], self.ids.shape[1]), "x has so many tokens")
        if self.num_experts != experts:
            raise ValueError(f"{self.op}: num_experts is {self.num_experts}, but {counted} has {experts} experts")

    def refuse_gradients(self) -> None:
        if any_requires_grad(*(getattr(self, name) for name in self.reads)):
            raise GradientNotSupported(
                f"{self.op}: torch.ops.glulam.{self.torch_op} has no gradient; call glulam.moe of a Routing.from_topk"
            )

    @staticmethod
    def with_backward(call: Any, key: Hashable = None) -> Any:
        call.refuse_gradients()


class MoeOfChoicesCall(OfChoices, MoeCall):
    """A call of `moe_of_choices` in 16 bits."""

    torch_op = "moe_of_choices"
    definition = of_choices(MoeCall.definition)


class QuantizedMoeOfChoicesCall(OfChoices, QuantizedMoeCall):
    """A call of `moe_of_choices` with a recipe that quantises."""

    torch_op = "moe_of_choices_mxfp8"
    definition = of_choices(QuantizedMoeCall.definition)


@operator(MoeOfChoicesCall, quantized=QuantizedMoeOfChoicesCall)
def layer_of_choices(
    x: Tensor, ids: Tensor, id_weights: Tensor, expert_map: Tensor | None, num_experts: int, world_experts: int,
    w1: Any, w2: Any, b1: Any, b2: Any, activation: str, glu_layout: str, numbers: Numbers, recipe: Any,
    transpose_w: bool, out: Any,
) -> Any:  # fmt: skip
    """Compute the result of `moe_of_choices`, [N, H'], by one call that sorts the choices and computes the layer.

    id_weights is the argument `weights` of `moe_of_choices`, which also describes the other arguments.
    """
    raise NotImplementedError  # `front` writes the body
