"""The two layouts of experts' parameters in state: packed `weight` [E, ...] and one `weight{e}` for each expert; biases
alike.

Conversion takes place only where the set is complete and unambiguous, and of a parameter that the module has. What is
not is left as it is, so that loading it gives torch's usual error about missing and unexpected keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

PACKED_RANKS = {"weight": 3, "bias": 2}


class Linear(Protocol):
    """What is asked of a GroupedLinear."""

    num_experts: int
    packed: bool
    has_bias: bool


class Values(NamedTuple):
    """How values of a kind of state are packed, or split into those of E experts; None where they cannot be.

    Both are given the packed parameter's rank.
    """

    pack: Callable[[list[Any], int], Any]
    split: Callable[[Any, int, int], list[Any] | None]


class Move(NamedTuple):
    """A parameter's keys in the layout that its module does not have, and in the one that it has."""

    old: list[str]
    new: list[str]


def convert_linear(state: Mapping[str, Any], prefix: str, linear: Linear, values: Values) -> dict[str, Any]:
    """A copy of `state` in which the entries of the module at `prefix` have its layout."""
    result = dict(state)
    for name in names_of(linear):
        result = moved(result, prefix, name, linear, values) or result
    return result


def names_of(linear: Linear) -> list[str]:
    """Its parameters'."""
    return ["weight", "bias"] if linear.has_bias else ["weight"]


def moved(state: Mapping[str, Any], prefix: str, name: str, linear: Linear, values: Values) -> dict[str, Any] | None:
    """`state` with one parameter in its module's layout; None where nothing is to be converted, or cannot be."""
    move, rank = find_move(state, prefix + name, linear), PACKED_RANKS[name]
    if move is None:
        return None
    old = [state[key] for key in move.old]
    if linear.packed:
        packed = values.pack(old, rank)
        return None if packed is None else replaced(state, move, [packed])
    parts = values.split(old[0], linear.num_experts, rank)
    return None if parts is None else replaced(state, move, parts)


def find_move(keys: Collection[str], whole: str, linear: Linear) -> Move | None:
    """How a parameter's keys change; None where they need not, or are incomplete or ambiguous."""
    parts = [f"{whole}{expert}" for expert in range(linear.num_experts)]
    move = Move(parts, [whole]) if linear.packed else Move([whole], parts)
    if not all(key in keys for key in move.old):
        return None
    size = len(whole)
    found = [k for k in keys if isinstance(k, str) and k.startswith(whole) and (k == whole or k[size:].isdecimal())]
    return move if len(found) == len(move.old) else None


def replaced(state: Mapping[str, Any], move: Move, values: list[Any]) -> dict[str, Any]:
    """New entries stand where the first old one stood: optimizers number parameters by their order."""
    old = set(move.old)
    result: dict[str, Any] = {}
    for key, value in state.items():
        if key == move.old[0]:
            result.update(zip(move.new, values, strict=True))
        elif key not in old:
            result[key] = value
    return result


def alike(parts: list[Any], rank: int | None = None) -> bool:
    """Whether all are tensors of one shape, dtype and device, and of `rank` where it says something."""
    first = parts[0]
    return all(
        isinstance(part, Tensor)
        and rank in (None, part.dim())
        and (part.shape, part.dtype, part.device) == (first.shape, first.dtype, first.device)
        for part in parts
    )


def _stacked(parts: list[Any], rank: int | None = None) -> Tensor | None:
    return torch.stack(parts) if alike(parts, None if rank is None else rank - 1) else None


def _split(whole: Any, count: int, rank: int | None = None) -> list[Tensor] | None:
    if not _has_dimensions(whole) or rank not in (None, whole.dim()) or whole.shape[0] != count:
        return None
    return list(whole.unbind())


def _packed_moments(parts: list[Any], rank: int) -> dict[str, Any] | None:
    """`rank` says nothing: optimizers also keep moments of rows and columns."""
    if not all(isinstance(part, Mapping) and part.keys() == parts[0].keys() for part in parts):
        return None
    result = {}
    for key in parts[0]:
        values = [part[key] for part in parts]
        if any(map(_has_dimensions, values)):
            result[key] = _stacked(values)
            if result[key] is None:
                return None
        elif any(value != values[0] for value in values[1:]):
            return None
        else:
            result[key] = _copy(values[0])
    return result


def _split_moments(whole: Any, count: int, rank: int) -> list[dict[str, Any]] | None:
    if not isinstance(whole, Mapping):
        return None
    result: list[dict[str, Any]] = [{} for _ in range(count)]
    for key, value in whole.items():
        values = _split(value, count) if _has_dimensions(value) else [value] * count
        if values is None:
            return None
        for part, one in zip(result, values, strict=True):
            part[key] = _copy(one)
    return result


def _has_dimensions(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _copy(value: Any) -> Any:
    """Optimizers write their state in place, so no two may share it."""
    return value.clone() if isinstance(value, Tensor) else value


TENSORS = Values(_stacked, _split)
MOMENTS = Values(_packed_moments, _split_moments)
