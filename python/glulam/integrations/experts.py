"""Experts modules of transformers: what their weights are called, and how quantised ones are kept."""

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
"""Of the implementation."""
_, SCALE, _ = SUFFIXES
"""What a quantised weight's scales are called behind its own name."""
_FLAGS = ("has_gate", "has_bias", "is_transposed")
"""What transformers' ExpertsInterface gives a class."""


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names that configurations have for the number of a layer's experts, on all ranks."""


def world_of(experts: Any) -> int | None:
    """Return the experts of all ranks, as the model's configuration counts them; None if all of them are here."""
    config = getattr(experts, "config", None)
    counts = [getattr(config, name, None) for name in _COUNTS]
    world = next((count for count in counts if type(count) is int), 0)
    return world if world > len(experts.down_proj) else None


def is_experts(module: Any) -> bool:
    return all(hasattr(module, flag) for flag in _FLAGS)


def weight_names(experts: Any) -> tuple[str, str]:
    """Of FC1's and FC2's weights."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def keep(experts: Any, name: str, parts: Parts, recipe: Recipe) -> None:
    """Keep a weight in a recipe's format, as buffers: 8-bit floats as bytes, and so in state dicts."""
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
    """Make bytes of 8-bit floats before they load: copy_ would convert the numbers. Other dtypes are an error."""
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
    """A parameter, found in 0.1 us where the module's own look-up takes 0.6; or what stands in its place."""
    found = experts._parameters.get(name)
    return getattr(experts, name) if found is None else found


def quantised(experts: Any, name: str) -> Any:
    """A weight that was kept, as `glulam.moe` takes it."""
    parts = Parts(*[experts._buffers.get(name + part) for part in SUFFIXES])
    return experts.glulam_recipe.weights.tensor_of(parts)
