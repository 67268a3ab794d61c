"""Experts modules of transformers: the names of their weights, and storage of quantised weights in them."""

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
"""The name of the experts implementation in transformers."""
_, SCALE, _ = SUFFIXES
"""SCALE: the suffix that turns a weight's name into the name of its scales."""
_FLAGS = ("has_gate", "has_bias", "is_transposed")
"""Attributes that transformers' ExpertsInterface sets on a class of experts, by which such a class is recognised."""


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of configuration entries for the number of a layer's experts on all ranks."""


def world_of(experts: Any) -> int | None:
    """Return the number of experts on all ranks, from the model's configuration; None: this module has all of them."""
    config = getattr(experts, "config", None)
    counts = [getattr(config, name, None) for name in _COUNTS]
    world = next((count for count in counts if type(count) is int), 0)
    return world if world > len(experts.down_proj) else None


def is_experts(module: Any) -> bool:
    return all(hasattr(module, flag) for flag in _FLAGS)


def weight_names(experts: Any) -> tuple[str, str]:
    """Return the names of the module's attributes that hold FC1's and FC2's weights."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def keep(experts: Any, name: str, parts: Parts, recipe: Recipe) -> None:
    """Replace a weight of an experts module by buffers with its quantised parts. 8-bit floats are stored as bytes.

    Args:
        name: the weight's name, to which each buffer adds a suffix.
        parts: the weight's data, scales and global scales, or None.
        recipe: the recipe whose format the parts have; stored as `glulam_recipe`.
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

    Without it copy_ would convert their values to integers. An entry of another dtype is an error; the buffer is kept.
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
    """Return a parameter of a module, or the attribute that replaces it, in 0.1 us; the module's own look-up takes 0.6
    us.
    """
    found = experts._parameters.get(name)
    return getattr(experts, name) if found is None else found


def quantised(experts: Any, name: str) -> Any:
    """Return the weight that `keep` stored under this name, as the quantised tensor that `glulam.moe` takes."""
    parts = Parts(*[experts._buffers.get(name + part) for part in SUFFIXES])
    return experts.glulam_recipe.weights.tensor_of(parts)
