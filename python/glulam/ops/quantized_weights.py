"""Quantised weights of calls: their parts (elements, scales, global scale), checks, and conversion for kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cute_kernels.formats import OPERANDS

from .. import recipes
from ..activations import is_in_halves
from ..calls.checks import check_width, mismatch, runs_kernels
from ..calls.quantized import Quantized
from ..calls.roles import SUFFIXES
from ..calls.weight_checks import check_experts
from ..choose.problem import changed
from ..formats import prepared
from ..formats.form import Form
from ..formats.mlp_reference import Weight
from ..formats.scaled import SCALE_DTYPE, Parts
from ..host.groups import UNINITIALISED
from ..recipes import Recipe

FORMS: dict[str, Form] = {name: recipe.weights for name, recipe in recipes.RECIPES.items() if recipe.weights}
"""The `Form` (format and layout) in which kernels read weights, by the recipe's name."""
READY_AS = {name: form.ready_as for name, form in FORMS.items()}


def weight_parts(op: str, name: str, w: Any, recipe: Recipe) -> Parts:
    """Return the parts of weight `w`: elements, scales and global scale.

    Raises:
        TypeError, ValueError: the recipe does not take such a weight.
    """
    form: Any = recipe.weights
    if w.__class__ in form.classes and w.reads_as == form.name:
        parts: Parts = w.parts
        return parts
    made: Parts = form.parts_of(op, name, w, recipe.name)
    return made


def ready(
    recipe: str, w: Any, scale: Tensor | None, global_scale: Tensor | None, activation: str = "", glu_layout: str = ""
) -> Parts:
    """Return the prepared parts of a weight from the cache; the weight's own parts if the cache has none.

    Kernels cannot read weights of some layouts directly; `formats.prepared` keeps a converted copy of them.

    Args:
        recipe: the recipe's name.
        w, scale, global_scale: the weight's own parts.
        activation, glu_layout: the call's options for a w1; empty for a w2.
    """
    parts, form = Parts(w, scale, global_scale), FORMS[recipe]
    if scale is None and is_in_halves(activation, glu_layout):
        form = form.of_gate((w if isinstance(w, Tensor) else w[0]).shape[-2])
    return prepared.PREPARED.find(form, parts) or parts


def form_of(call: Any, name: str) -> Form:
    """Return the `Form` (format and layout) in which kernels read a weight of a call.

    Args:
        call: a call of an operator with quantised weights.
        name: the weight's argument, such as "w1".
    """
    form, data = FORMS[call.recipe], getattr(call, name)
    first = data if isinstance(data, Tensor) else data[0]
    return form.of_gate(first.shape[-2]) if is_concatenated(call, name) else form


def is_concatenated(call: Any, name: str) -> bool:
    """Return True if `name` is "w1" and its rows are a gate followed by an up-projection (layout "concat")."""
    return name == "w1" and is_in_halves(call.activation, call.glu_layout)


def parts_given(call: Any, name: str) -> Parts:
    """Return the parts of a call's weight (elements, scales, global scale) as the call was given them."""
    return Parts(*[getattr(call, name + suffix, None) for suffix in SUFFIXES])


def weight_as_read(call: Any, name: str) -> Weight:
    """Return the call's weight `name` in the layout that kernels read; prepare (convert) it if it has another layout.

    On the CPU some weights stay unprepared, because the CPU reference can read them.
    """
    form, parts = form_of(call, name), parts_given(call, name)
    if form.is_ready(parts) or (form.has_values(parts) and not runs_kernels(call.lead)):
        return Weight(form, parts)
    return Weight(form, prepared.PREPARED.get(form, parts))


def with_parts_as_read(call: Any) -> Any:
    """Return the call with its weights in the layout that kernels read; the call itself if they already have it."""
    changes = {
        part: value
        for name in call.weights
        for part, value in zip(call.parts_of(name), weight_as_read(call, name).parts, strict=False)
    }
    return call if all(getattr(call, name) is value for name, value in changes.items()) else changed(call, **changes)


def check_weight(call: Any, name: str, letters: str, recipe: Recipe) -> tuple[int, ...]:
    """Check a call's weight, in any form that the recipe takes, and return its shape [E, N, K].

    Args:
        call: the call.
        name: the weight's argument, such as "w1".
        letters: names of the three dimensions, for messages.
        recipe: the call's recipe.
    """
    form, parts = FORMS[recipe.name], parts_given(call, name)
    value = parts.data
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    dtype = first.dtype if isinstance(first, Tensor) else torch.bfloat16
    form.check_dtype(call.op, name, parts, dtype, recipe.name)
    shape = check_experts(call.op, name, value, call.lead.new_empty(0, dtype=dtype), letters)
    if parts.scale is not None:
        shape = (*shape[:2], form.columns(value))
    check_width(call.op, name, shape[1], runs_kernels(call.lead))
    if parts.scale is not None:
        check_scale(call.op, name, parts.scale, form.scale_shape(shape, parts.scale), value, form.kind.scale_dtype)
        form.check_fit(call.op, name, parts, shape, is_concatenated(call, name))
    return shape


def look_at_scales(kind: Any, outs: list[Any], read: Mapping[str, Any]) -> None:
    """Raise ValueError if E4M3 scales of a weight start at an odd address: kernels read two scales at once.

    Args:
        kind: the class of the call.
        outs: not used.
        read: the arguments that kernels read, by name.
    """
    for name, tensor in read.items():
        if name.endswith("_scale") and getattr(tensor, "dtype", None) == torch.float8_e4m3fn and tensor.data_ptr() % 2:
            raise ValueError(
                f"{kind.op}: {kind.labels[name]} starts at an odd address; clone() it, or cut the view elsewhere"
            )


def global_counts(call: Any) -> dict[str, int]:
    """Return kernel constants: for each weight with global scales, their number of dimensions."""
    found = {name: getattr(call, f"{name}_global_scale", None) for name in call.weights}
    has_counts = OPERANDS[recipes.RECIPES[call.recipe].operands].w.has_global
    return {f"{name}_global_count": one.dim() for name, one in found.items() if one is not None and has_counts}


def check_scale(
    op: str, name: str, scale: Tensor, shape: tuple[int, ...], data: Tensor, dtype: torch.dtype = SCALE_DTYPE
) -> None:
    """Check the scales of an argument's data: their dtype, shape, device and contiguity."""
    if scale.dtype != dtype:
        raise TypeError(f"{op}: {name}'s scale is {scale.dtype}; it must be {dtype}")
    if tuple(scale.shape) != tuple(shape):
        mismatch(op, f"{name}'s scale", scale.shape, shape, f"that is what its data {data.dtype} goes with")
    if scale.device != data.device or not scale.is_contiguous():
        raise ValueError(f"{op}: {name}'s scale must be contiguous, and on {data.device} as its data")


class ReadsQuantized(Quantized):
    """Base of calls whose kernels read quantised weights."""

    after_groups = UNINITIALISED
    differentiable = True
    ready, ready_as = staticmethod(ready), READY_AS
    recipe_of, recipes = staticmethod(recipes.find), recipes.RECIPES

    def prepared(self) -> Any:
        """Return this call with its arguments in the layouts that kernels (or the CPU reference) read.

        First each weight in another layout is converted; the cache `formats.prepared` keeps the converted weight for
        later calls. Then `Call.prepared` replaces lists of experts by address tables, and copies group sizes to the
        device.
        """
        return super(ReadsQuantized, with_parts_as_read(self)).prepared()
