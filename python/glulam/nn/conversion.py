"""State between the two layouts of weights: packed `weight` [E, ...] and one `weight{e}` for each expert; biases alike.

Conversion takes place only where the set is complete and unambiguous, and of a parameter that the module has. What is
not is left as it is, so that loading it gives torch's usual error about missing and unexpected keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .linear import GroupedLinear

Kind = TypeVar("Kind", bound=torch.nn.Module)

PACKED_RANKS = {"weight": 3, "bias": 2}


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


def convert_state_dict(state: Mapping[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """A state dict with the keys that `module` has, from one in either layout, or of another library's MoE blocks.

    Args:
        state: of a module like `module` that differs in `packed` at most, or in the names of an MoE's parts, which are
            one of `nn.dialects`. Loading it into `module` does the same.
        module: holds GroupedLinear and MoE modules anywhere.
    """
    from .dialects import convert_block
    from .moe import MoE

    result = dict(state)
    for prefix, block in _named(module, MoE):
        result = convert_block(result, prefix, block)
    result = _converted(result, module, TENSORS)
    if (versions := getattr(state, "_metadata", None)) is not None:  # of modules, which load_state_dict looks at
        result = OrderedDict(result)
        result._metadata = versions  # type: ignore[attr-defined]
    return result


def convert_optimizer_state(state: Mapping[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """Optimizer state keyed by parameter names, for the parameters that `module` has.

    Moments are stacked or split as the parameters are. What has no dimension, as a step count, is every expert's; it
    is packed only if it is the same for all. A parameter keeps its names and its state where one of them cannot be
    converted, as where its experts are in several groups.

    Args:
        state: {parameter name: {"exp_avg": ..., "step": ...}}, or that under "state" beside "param_groups" whose
            "params" are names, as torch.distributed.checkpoint has it.
        module: as of `convert_state_dict`.
    """
    if "state" not in state or "param_groups" not in state:
        return _converted(state, module, MOMENTS)
    moments: dict[str, Any] = dict(state["state"])
    groups = [list(group["params"]) for group in state["param_groups"]]
    for prefix, linear in _linears(module):
        for name in _names(linear):
            move = _find_move(dict.fromkeys(key for names in groups for key in names), prefix + name, linear)
            home = next((i for i, names in enumerate(groups) if move and set(move.old) <= set(names)), None)
            if move is None or home is None:
                continue
            if any(key in moments for key in (*move.old, *move.new)):
                moved = _moved(moments, prefix, name, linear, MOMENTS)
                if moved is None:
                    continue
                moments = moved
            groups[home] = list(replaced(dict.fromkeys(groups[home]), move, [None] * len(move.new)))
    renamed = [{**group, "params": names} for group, names in zip(state["param_groups"], groups, strict=True)]
    return {**state, "state": moments, "param_groups": renamed}


def convert_linear(state: Mapping[str, Any], prefix: str, linear: GroupedLinear, values: Values) -> dict[str, Any]:
    """A copy of `state` in which the entries of the module at `prefix` have its layout."""
    result = dict(state)
    for name in _names(linear):
        moved = _moved(result, prefix, name, linear, values)
        result = result if moved is None else moved
    return result


def _names(linear: GroupedLinear) -> list[str]:
    return ["weight", "bias"] if linear.has_bias else ["weight"]


def _moved(
    state: Mapping[str, Any], prefix: str, name: str, linear: GroupedLinear, values: Values
) -> dict[str, Any] | None:
    """`state` with one parameter in its module's layout; None where nothing is to be converted, or cannot be."""
    move, rank = _find_move(state, prefix + name, linear), PACKED_RANKS[name]
    if move is None:
        return None
    old = [state[key] for key in move.old]
    if linear.packed:
        packed = values.pack(old, rank)
        return None if packed is None else replaced(state, move, [packed])
    parts = values.split(old[0], linear.num_experts, rank)
    return None if parts is None else replaced(state, move, parts)


def _find_move(keys: Collection[str], whole: str, linear: GroupedLinear) -> Move | None:
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


def _linears(module: torch.nn.Module) -> Iterator[tuple[str, GroupedLinear]]:
    from .linear import GroupedLinear

    return _named(module, GroupedLinear)


def _named(module: torch.nn.Module, kind: type[Kind]) -> Iterator[tuple[str, Kind]]:
    """Each module of a kind under each of its names, as state dicts have it, with the prefix of its keys."""
    for path, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, kind):
            yield f"{path}." if path else "", child


def _converted(state: Mapping[str, Any], module: torch.nn.Module, values: Values) -> dict[str, Any]:
    result = dict(state)
    for prefix, linear in _linears(module):
        result = convert_linear(result, prefix, linear, values)
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
