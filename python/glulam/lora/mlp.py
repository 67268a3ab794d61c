"""An MLP with LoRA adapters on its weights.

    h = x w1^T + b1 + s (x a1^T) b1'^T
    m = activation(h) scale
    y = m w2^T + b2 + s (m a2^T) b2'^T

b1 and b2 are biases, b1' and b2' adapter matrices, s is the adapters' scale. For weights in 16 bits there are kernels
that add both products (`path`). In three cases the MLP is composed of differentiable operators instead
(`rows_with_lora`): for quantised weights, for a GateUp (gate and up-projection in two tensors), and for dtypes whose
kernels do not ship with adapters. These operators save x, h and two matrices [T, r] for the backward; if w1 is trained
as well, also the rows of tokens; if w2 is trained, also the activation. Each of the two sums rounds its terms and its
result, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from cute_kernels.shipped import ships_adapted
from cute_kernels.specs import is_gated

from .. import recipes
from ..activations import named_numbers
from ..backward.parts import tensor_groups
from ..calls.checks import any_requires_grad, refuse_out, refuse_rows, runs_kernels
from ..calls.quantized import Quantized
from ..calls.sharding import refuse_dtensors
from ..choose.problem import dtype_name
from ..expert_lora import NAME, ExpertLora
from ..formats.mxfp8 import MXFP8Tensor
from ..host import device as gpus
from ..host.experts import GateUp
from ..host.groups import part_of
from ..ops.gate import gate_rows, without_tail
from ..ops.grouped_mlp import GroupedMlpCall
from ..ops.quantized_mlp import QuantizedMlpCall
from ..ops.quantized_weights import with_parts_as_read
from ..recipes import BF16, Recipe
from . import path as path
from .call import adapted_mlp
from .products import Rows, as_multiplied, low_rank, times_w1, times_w2


def grouped_mlp_with_lora(*, lora: Any, **public: Any) -> Tensor:
    """Compute `grouped_mlp` with adapters.

    public: the other arguments of `grouped_mlp` by name, with the activation's numbers as one tuple, `numbers`.
    """
    recipe = check_goes_with_lora(GroupedMlpCall.op, lora, public["x"], public["recipe"], public["recompute"])
    if has_kernels(recipe, public["x"], public["w1"]):
        del public["recipe"], public["recompute"]
        made: Tensor = adapted_mlp(**public, **lora_arguments(lora, GroupedMlpCall.op, public["x"]))
        return made
    if recipe is BF16:
        call: Any = GroupedMlpCall(**{**public, "recipe": recipe.name})
    else:
        named = {**public, **named_numbers(public.pop("numbers"))}
        call = QuantizedMlpCall(**QuantizedMlpCall.unwrapped(recipe, named))

    def rows(is_trained: bool) -> Tensor:
        if is_trained and public["rows"] is not None:
            refuse_rows(call.op)
        return rows_with_lora(call, lora)

    return checked(call, lora, rows)


def has_kernels(recipe: Recipe, x: Any, w1: Any) -> bool:
    """Return True if adapted_mlp takes these weights: 16-bit, no GateUp; on a GPU also only if its kernels ship."""
    if recipe is not BF16 or isinstance(w1, GateUp):
        return False
    if not (isinstance(x, Tensor) and runs_kernels(x)):
        return True
    return _ships_adapted(dtype_name(x.dtype), x.get_device())


def _ships_adapted(dtype: str, index: int) -> bool:
    return ships_adapted(dtype, gpus.gpu(index).arch)


# Traces take the result for a constant. torch.compiler.assume_constant_result does the same, but imports the compiler.
_ships_adapted._dynamo_marked_constant = True  # type: ignore[attr-defined]


def lora_arguments(lora: ExpertLora, op: str, x: Any) -> dict[str, Any]:
    """Return the adapters as keyword arguments of `adapted_mlp`, with matrices cast and padded for x."""
    lora.refuse_dtensors(op)
    given = lora.given()
    named = {
        f"lora_{name}": as_multiplied(matrix, x, 1 if name in ("a1", "a2") else 2) for name, matrix in given.items()
    }
    return {**named, "lora_scale": float(lora.scale)}


def check_goes_with_lora(op: str, lora: Any, x: Any, recipe: str | Recipe, recompute: bool) -> Recipe:
    """Check that arguments can be combined with adapters, and return the call's recipe.

    Raises:
        ValueError, TypeError: an argument cannot be combined with adapters.
    """
    if not isinstance(lora, ExpertLora):
        raise TypeError(f"{op}: lora is a {type(lora).__name__}; give a glulam.{NAME}")
    if isinstance(x, MXFP8Tensor):
        raise TypeError(f"{op}: x is in MXFP8, and lora is given; give x.dequantize() in 16 bits")
    if recompute:
        raise ValueError(f"{op}: recompute is True, and lora is given, which keeps the preactivation; leave it out")
    return recipe_with_lora(op, recipe)


def recipe_with_lora(op: str, recipe: str | Recipe) -> Recipe:
    """Return the Recipe of that name. Raises ValueError if it quantises rows, which does not work with adapters."""
    found = recipes.find(op, recipe)
    if found is not BF16 and not found.freezes_weights:
        served = [repr(name) for name, one in recipes.RECIPES.items() if one is BF16 or one.freezes_weights]
        raise ValueError(
            f"{op}: recipe is {found.name!r}, which quantises rows, and lora is given; choose {', '.join(served)}"
        )
    return found


def checked(call: Any, lora: ExpertLora, made: Callable[[bool], Tensor]) -> Tensor:
    """Check all arguments, except in a trace, where each operator checks its own; then return the result of `made`.

    Args:
        call: the call without adapters.
        lora: the adapters.
        made: computes the result; called with True if a gradient is recorded, else with False.

    Raises:
        ValueError, TypeError: an argument does not fit.
        GradientNotSupported: an argument that cannot be trained requires a gradient.
    """
    refuse_dtensors(call, "lora is given")
    lora.refuse_dtensors(call.op)
    if not is_dynamo_compiling():
        _check(call, lora)
    is_trained = torch.is_grad_enabled() and any_requires_grad(lora, *[getattr(call, name) for name in call.reads])
    if is_trained:
        refuse_out(call.op, call.out)
        if isinstance(call, Quantized):
            call.refuse_gradients()
    with nullcontext() if is_dynamo_compiling() else part_of(call.op):
        return made(is_trained)


def _check(call: Any, lora: ExpertLora) -> None:
    """Check all arguments of a call with adapters, so that errors name the caller's arguments.

    Without this check, errors would name arguments of the operators that compute the call.
    """
    call.check_plain()
    problem = call.check()
    rows = problem.intermediate * (2 if is_gated(call.activation) else 1)
    widths = {"a1": problem.in_features, "b1": rows, "a2": problem.intermediate, "b2": problem.out_features}
    lora.check_fits(call.op, call.x, problem.experts, **widths)
    if not call.is_traced():
        call.check_addresses()
        lora.check_memory(call.op, call.out)
    if torch._C._are_functorch_transforms_active():
        call.check_after_failure()


def rows_with_lora(call: Any, lora: ExpertLora, kept: Rows | None = None) -> Tensor:
    """Compute an MLP with adapters by differentiable operators; return [T, H'], H' the number of w2's rows.

    Args:
        call: the call without adapters.
        kept: tensors from which backward recomputes the rows of x; they are saved instead of these rows. None: the
            rows are saved.
    """
    groups = tensor_groups(call.op, call.offs, call.splits, call.x)
    if isinstance(call, Quantized) and not call.is_traced():
        call = with_parts_as_read(call)
    scale, activation = without_tail(call.row_scale, lambda: groups), (call.activation, call.glu_layout, call.numbers)
    preact = times_w1(call, groups)
    if lora.a1 is not None and lora.b1 is not None:
        preact.add_(low_rank(call.op, call.x, lora.a1, lora.b1, lora.scale, groups, call.rows, kept))
    act = gate_rows(preact, scale, *activation)
    y = times_w2(call, act, scale, groups, call.out)
    if lora.a2 is None or lora.b2 is None:
        return y
    # A buffer keeps its rows after the last group: adding -0.0 changes no number.
    added = None if call.out is None else torch.full_like(y, -0.0)
    again = Rows(preact, scale, activation)
    return y.add_(low_rank(call.op, act, lora.a2, lora.b2, lora.scale, groups, kept=again, out=added))


GroupedMlpCall.with_lora = staticmethod(grouped_mlp_with_lora)
