"""State between the two layouts of weights: packed `weight` [E, ...] and one `weight{e}` for each expert; biases alike.

Conversion takes place only where the set is complete and unambiguous. What is not is left as it is, so that loading it
gives torch's usual error about missing and unexpected keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .linear import GroupedLinear

NAMES = ("weight", "bias")


class Values(NamedTuple):
    """How values of a kind of state are packed, or split into those of E experts; None where they cannot be."""

    pack: Callable[[list[Any]], Any]
    split: Callable[[Any, int], list[Any] | None]


def convert_state_dict(state: Mapping[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """A state dict with the keys that `module` has, from one in either layout.

    Args:
        state: of a module like `module` that differs in `packed` at most. Loading it into `module` does the same.
        module: holds GroupedLinear modules anywhere.
    """
    return _converted(state, module, TENSORS)


def convert_optimizer_state(state: Mapping[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """Optimizer state keyed by parameter names, for the parameters that `module` has.

    Moments are stacked or split as the parameters are. What has no dimension, as a step count, is every expert's; it
    is packed only if it is the same for all.

    Args:
        state: {parameter name: {"exp_avg": ..., "step": ...}}, or that under "state" beside "param_groups" whose
            "params" are names, as torch.distributed.checkpoint has it.
        module: as of `convert_state_dict`.
    """
    if "state" not in state or "param_groups" not in state:
        return _converted(state, module, MOMENTS)
    groups = [{**group, "params": _converted_names(group["params"], module)} for group in state["param_groups"]]
    return {**state, "state": _converted(state["state"], module, MOMENTS), "param_groups": groups}


def convert_linear(state: Mapping[str, Any], prefix: str, linear: GroupedLinear, values: Values) -> dict[str, Any]:
    """A copy of `state` in which the entries of the module at `prefix` have its layout."""
    result = dict(state)
    for name in NAMES:
        whole, count = prefix + name, linear.num_experts
        parts = [f"{whole}{expert}" for expert in range(count)]
        found = sum(part in state for part in parts)
        if f"{whole}{count}" in state or (whole in state) == bool(found):
            continue
        if linear.packed and found == count:
            packed = values.pack([state[part] for part in parts])
            _replace(result, parts, None if packed is None else {whole: packed})
        elif not linear.packed and whole in state:
            split = values.split(state[whole], count)
            _replace(result, [whole], None if split is None else dict(zip(parts, split, strict=True)))
    return result


def _replace(state: dict[str, Any], old: list[str], new: dict[str, Any] | None) -> None:
    if new is not None:
        for key in old:
            del state[key]
        state.update(new)


def _converted(state: Mapping[str, Any], module: torch.nn.Module, values: Values) -> dict[str, Any]:
    from .linear import GroupedLinear

    result = dict(state)
    for path, child in module.named_modules():
        if isinstance(child, GroupedLinear):
            result = convert_linear(result, f"{path}." if path else "", child, values)
    return result


def _converted_names(names: list[str], module: torch.nn.Module) -> list[str]:
    return list(_converted(dict.fromkeys(names), module, Values(lambda parts: (), lambda whole, count: [()] * count)))


def _stacked(parts: list[Any]) -> Tensor | None:
    if not all(isinstance(part, Tensor) and part.shape == parts[0].shape for part in parts):
        return None
    return torch.stack(parts)


def _split(whole: Any, count: int) -> list[Tensor] | None:
    if not isinstance(whole, Tensor) or whole.dim() == 0 or whole.shape[0] != count:
        return None
    return list(whole.unbind())


def _packed_moments(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    result = {}
    for key in parts[0]:
        values = [part.get(key) for part in parts]
        if all(isinstance(value, Tensor) and value.dim() for value in values):
            result[key] = _stacked(values)
        elif any(value != values[0] for value in values[1:]):
            return None
        else:
            result[key] = _copy(values[0])
    return None if any(part.keys() != parts[0].keys() for part in parts) else result


def _split_moments(whole: dict[str, Any], count: int) -> list[dict[str, Any]] | None:
    result: list[dict[str, Any]] = [{} for _ in range(count)]
    for key, value in whole.items():
        has_experts = isinstance(value, Tensor) and value.dim() > 0
        values = _split(value, count) if has_experts else [value] * count
        if values is None:
            return None
        for part, one in zip(result, values, strict=True):
            part[key] = _copy(one)
    return result


def _copy(value: Any) -> Any:
    """Optimizers write their state in place, so no two may share it."""
    return value.clone() if isinstance(value, Tensor) else value


TENSORS = Values(_stacked, _split)
MOMENTS = Values(_packed_moments, _split_moments)
