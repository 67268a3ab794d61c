"""Conversion of state dicts with another layout, or another library's names, to a module's own layout and names.

Layouts: experts' parameters are packed, `weight` [E, ...], or stored one by one, `weight0`, `weight1`, ... Other
libraries' names are listed in `nn.dialects`. Entries are converted only if they are complete, unambiguous, and belong
to a parameter that the module has. Other entries stay unchanged, so that loading them gives torch's usual error about
missing and unexpected keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..calls.sharding import moved_shards

PACKED_RANKS = {"weight": 3, "weight_scale": 3, "bias": 2}


class Move(NamedTuple):
    """A conversion of some entries of a state dict to other entries, for example `weight0`, `weight1` to `weight`.

    Attributes:
        old, new: the keys before and after the conversion.
        make: function that makes the list of new values from the list of old values; it returns None if the old values
            do not fit.
    """

    old: list[str]
    new: list[str]
    make: Callable[[list[Any]], list[Any] | None]


class Converts(nn.Module):
    """Base of modules that also load state dicts with other layouts or names than their own."""

    def moves(self, keys: Collection[str], prefix: str, moments: bool = False) -> Iterator[list[Move]]:
        """Yield lists of moves that convert a state dict's entries to entries of this module.

        The moves of one list belong together: all of them are applied, or none.

        Args:
            keys: all keys of the state dict.
            prefix: prefix of this module's keys.
            moments: True: the dict is an optimizer's state, whose values are mappings such as {"exp_avg": ...}.
                False: the values are tensors.
        """
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Convert the state dict in place, since torch passes the same dict on to the children, and load it."""
        converted = _converted(state_dict, [(prefix, self)])
        state_dict.clear()
        state_dict.update(converted)
        super()._load_from_state_dict(state_dict, prefix, *args)


def convert_state_dict(state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Convert a state dict with another layout, or with another library's names, to the keys and layout of `module`.

    `module.load_state_dict(state)` does the same conversion itself.

    Args:
        state: a state dict of a module like `module`. It may differ in `packed`, and may have any of the names that
            `nn.dialects` lists for the parameters of an MoE.
        module: a module that contains GroupedLinear and MoE modules at any depth.

    Returns:
        A new dict; unconverted entries are unchanged.

    Raises:
        TypeError: state is not a mapping, module is not a module, or MXFP4 blocks or scales have another dtype.
    """
    _check("convert_state_dict", state, module)
    result = _converted(state, _named(module))
    if (versions := getattr(state, "_metadata", None)) is not None:  # versions of modules, which load_state_dict reads
        result = OrderedDict(result)
        result._metadata = versions  # type: ignore[attr-defined]
    return result


def convert_optimizer_state(state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Convert an optimizer's state, keyed by parameter names, to the layout (`packed`) of the parameters of `module`.

    Moments are stacked or split like the parameters. A value without dimensions, such as a step count, is copied to
    every expert when a parameter is split; when parameters are stacked, it must be equal for all experts. If a
    parameter cannot be converted, for example because its experts are in several groups, its names and its state stay
    unchanged.

    Args:
        state: {parameter name: {"exp_avg": ..., "step": ...}}. Or a mapping with such a mapping under "state", and
            with "param_groups", whose "params" are names, as torch.distributed.checkpoint makes it.
        module: the module that contains GroupedLinear and MoE modules at any depth.

    Returns:
        A new mapping of the same structure.

    Raises:
        TypeError: state is not such a mapping, or module is not a module.
    """
    _check("convert_optimizer_state", state, module)
    if "state" not in state or "param_groups" not in state:
        return _converted(state, _named(module), moments=True)
    _check_groups("convert_optimizer_state", state["state"], state["param_groups"])
    moments: dict[str, Any] = dict(state["state"])
    groups = [dict.fromkeys(group["params"]) for group in state["param_groups"]]
    for prefix, child in _named(module):
        for (move,) in child.moves([key for names in groups for key in names], prefix, moments=True):
            home = next((i for i, names in enumerate(groups) if names.keys() >= set(move.old)), None)
            if home is None:
                continue
            if any(key in moments for key in (*move.old, *move.new)):
                same = [moves for moves in child.moves(moments, prefix, moments=True) if moves[0].old == move.old]
                others = moved(moments, same[0]) if same else None
                if others is None:
                    continue
                moments = others
            groups[home] = _renamed(groups[home], move)
    renamed = [{**group, "params": list(names)} for group, names in zip(state["param_groups"], groups, strict=True)]
    return {**state, "state": moments, "param_groups": renamed}


def _check(op: str, state: Any, module: Any) -> None:
    """Raise TypeError if state is not a mapping, or module is not a module."""
    if not isinstance(state, Mapping):
        raise TypeError(f"{op}: state is a {type(state).__name__}; give a mapping, as state_dict() returns")
    if not isinstance(module, nn.Module):
        raise TypeError(f"{op}: module is a {type(module).__name__}; give the torch.nn.Module that the state is for")


def _check_groups(op: str, moments: Any, groups: Any) -> None:
    """Raise TypeError if an optimizer's state is not keyed by parameters, or a group has no list "params"."""
    if not isinstance(moments, Mapping):
        raise TypeError(f"{op}: state['state'] is a {type(moments).__name__}; give a mapping by parameters' names")
    if not isinstance(groups, Collection) or isinstance(groups, (str, Mapping)):
        raise TypeError(f"{op}: state['param_groups'] is a {type(groups).__name__}; give a list of groups")
    for place, group in enumerate(groups):
        names = group.get("params") if isinstance(group, Mapping) else None
        is_list = isinstance(names, Collection) and not isinstance(names, str)
        if not (is_list and all(isinstance(name, Hashable) for name in names)):  # type: ignore[union-attr]
            what = f"state['param_groups'][{place}]"
            raise TypeError(f"{op}: {what} is {group!r:.60}; give a mapping whose 'params' are a list of names")


def _renamed(names: dict[str, Any], move: Move) -> dict[str, Any]:
    return moved(names, [move._replace(make=lambda _: list(move.new))]) or {}


def _named(module: nn.Module) -> Iterator[tuple[str, Converts]]:
    """Yield (prefix of the keys, submodule) for each Converts in `module`; parents come before children.

    A submodule that is registered under several names is yielded once for each name.
    """
    for path, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, Converts):
            yield f"{path}." if path else "", child


def _converted(
    state: Mapping[str, Any], modules: Collection[tuple[str, Converts]] | Iterator[Any], moments: bool = False
) -> dict[str, Any]:
    result = dict(state)
    for prefix, module in modules:
        for moves in module.moves(result, prefix, moments):
            result = moved(result, moves) or result
    return result


def moved(state: Mapping[str, Any], moves: Sequence[Move]) -> dict[str, Any] | None:
    """Apply moves to a copy of `state`, and return the copy; None: the values of one move do not fit.

    New entries take the position of a move's first old entry, since optimizers number parameters by their order.
    """
    added: dict[str, dict[str, Any]] = {}
    for old, new, make in moves:
        values = make([state[key] for key in old])
        if values is None:
            return None
        added[old[0]] = dict(zip(new, values, strict=True))
    removed = {key for move in moves for key in move.old}
    result: dict[str, Any] = {}
    for key, value in state.items():
        result.update(added.get(key, {}) if key in removed else {key: value})
    return result


def layout_move(keys: Collection[str], whole: str, name: str, packed: bool, experts: int, moments: bool) -> Move | None:
    """Return the move that stacks or splits one parameter's entries; None: it is not necessary, or not possible.

    A `Move` has the keys to remove, the keys to add, and a function that converts the values.

    Args:
        keys: all keys of the state dict.
        whole: the key of the packed parameter. A single expert's key is this key and the expert's number.
        name: "weight" or "bias".
        packed: True: the module has the packed parameter, so the move stacks; False: the move splits.
        experts: the number of experts.
        moments: True: the entries are an optimizer's state, mappings such as {"exp_avg": ...}. False: tensors.
    """
    parts, size = [f"{whole}{expert}" for expert in range(experts)], len(whole)
    old, new = (parts, [whole]) if packed else ([whole], parts)
    found = {k for k in keys if isinstance(k, str) and k.startswith(whole) and (k == whole or k[size:].isdecimal())}
    if found != set(old):
        return None
    rank = None if moments else PACKED_RANKS[name]  # some optimizers also keep moments of rows and columns
    make: Any = partial(_stack, rank=rank) if packed else partial(_split, count=experts, rank=rank, copy=moments)
    return Move(old, new, partial(_of_moments, make=make, count=len(new)) if moments else make)


def alike(parts: list[Any], rank: int | None = None) -> bool:
    """Return True if all are tensors of one shape, dtype and device, with `rank` dimensions (None: any number)."""
    first = parts[0]
    return all(
        isinstance(part, Tensor)
        and rank in (None, part.dim())
        and (part.shape, part.dtype, part.device) == (first.shape, first.dtype, first.device)
        for part in parts
    )


def _stack(parts: list[Any], rank: int | None) -> list[Tensor] | None:
    return [moved_shards(torch.stack(parts), 1, 0)] if alike(parts, None if rank is None else rank - 1) else None


def _split(wholes: list[Any], count: int, rank: int | None, copy: bool) -> list[Tensor] | None:
    (whole,) = wholes
    if not _has_dimensions(whole) or rank not in (None, whole.dim()) or whole.shape[0] != count:
        return None
    parts = moved_shards(whole, 0, 1).unbind()  # a DTensor cannot be split along a sharded dimension
    return [part.clone() if copy else part for part in parts]


def _of_moments(old: list[Any], make: Callable[[list[Any]], Any], count: int) -> list[dict[str, Any]] | None:
    """Convert the optimizer state of some parameters, stacking or splitting each moment like the parameters.

    No tensor is shared between new parameters, since optimizers write state in place.

    Args:
        old: for each old parameter a mapping such as {"exp_avg": ..., "step": ...}.
        make: converts a list of tensors, as `Move.make` does.
        count: number of new parameters.

    Returns:
        A mapping for each new parameter; None: the old mappings do not fit each other.
    """
    if not all(isinstance(part, Mapping) and part.keys() == old[0].keys() for part in old):
        return None
    result: list[dict[str, Any]] = [{} for _ in range(count)]
    for key in old[0]:
        values = [part[key] for part in old]
        first = values[0]
        new = None
        if any(map(_has_dimensions, values)):
            new = make(values)
        elif all(value == first for value in values):
            new = [first.clone() if isinstance(first, Tensor) else first for _ in range(count)]
        if new is None:
            return None
        for part, value in zip(result, new, strict=True):
            part[key] = value
    return result


def _has_dimensions(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
