"""Helpers for experts modules of transformers: names of their weights, and storage of quantised weights in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..calls.roles import SUFFIXES
from ..formats.mxfp8.layout import DATA_DTYPE
from ..formats.scaled import Parts, bytes_of_floats
from ..nn.quantized_linear import refusal
from ..recipes import Recipe

NAME = "glulam"
"""The name under which transformers knows this experts implementation."""
_, SCALE, _ = SUFFIXES
"""SCALE: the suffix that turns a weight's name into the name of its scales."""
_FLAGS = ("has_gate", "has_bias", "is_transposed")
"""Attributes that transformers' ExpertsInterface sets on its experts classes. A module with all of them is an experts
module."""


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names that models' configurations use for the number of a layer's experts on all ranks."""


def world_of(experts: Any) -> int | None:
    """Return the number of experts on all ranks, from the model's configuration; None: this module has all experts."""
    config = getattr(experts, "config", None)
    counts = [getattr(config, name, None) for name in _COUNTS]
    world = next((count for count in counts if type(count) is int), 0)
    return world if world > len(experts.down_proj) else None


def is_experts(module: Any) -> bool:
    return all(hasattr(module, flag) for flag in _FLAGS)


def weight_names(experts: Any) -> tuple[str, str]:
    """Return the names of the module's attributes for FC1's weight and FC2's weight."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def keep(experts: Any, name: str, parts: Parts, recipe: Recipe) -> None:
    """Store the quantised parts of an experts module's weight as buffers. 8-bit floats are stored as bytes.

    Args:
        experts: the module, whose parameter of this name must be deleted before.
        name: the weight's name. The buffers' names are this name and a suffix of SUFFIXES.
        parts: the weight's data, scales and, in some formats, global scales.
        recipe: the recipe whose format the parts have; stored as the attribute `glulam_recipe`.
    """
    if not hasattr(experts, "glulam_recipe"):
        experts.register_load_state_dict_pre_hook(_read)
    for part, tensor in zip(SUFFIXES, parts, strict=True):
        if tensor is not None:
            experts.register_buffer(name + part, bytes_of_floats(tensor))
    experts.glulam_recipe = recipe


def _read(
    experts: Any, state: dict[str, Any], prefix: str, _metadata: Any, _strict: bool, _missing: Any, _unexpected: Any,
    errors: list[str],
) -> None:  # fmt: skip
    """Hook before load_state_dict: view a quantised weight's 8-bit floats as bytes, like the buffers.

    Without this view, copy_ would convert the floats' values to integers. An entry of another dtype adds an error, and
    the buffer is kept.
    """
    kind = experts.glulam_recipe.weights.kind
    for name in weight_names(experts):
        for part, floats in zip(SUFFIXES, (DATA_DTYPE, kind.scale_dtype, None), strict=True):
            if (own := experts._buffers.get(name + part)) is None:
                continue
            key = prefix + name + part
            value = state.get(key)
            if isinstance(value, Tensor) and value.dtype == floats and own.dtype == torch.uint8:
                state[key] = value.view(torch.uint8)
            elif message := refusal(key, value, (own.dtype,)):
                errors.append(message)
                state[key] = own


def parameter(experts: Any, name: str) -> Any:
    """Return a parameter of a module, or the attribute that replaces it.

    This takes 0.1 us; `Module.__getattr__` takes 0.6 us.
    """
    found = experts._parameters.get(name)
    return getattr(experts, name) if found is None else found


def quantised(experts: Any, name: str) -> Any:
    """Return a weight that `keep` has stored, as a quantised tensor for `glulam.moe`."""
    parts = Parts(*[experts._buffers.get(name + part) for part in SUFFIXES])
    return experts.glulam_recipe.weights.tensor_of(parts)
