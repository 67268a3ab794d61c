"""State of whole modules, in the layout and with the names that they have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch

from .dialects import convert_block
from .layouts import MOMENTS, TENSORS, Values, convert_linear, find_move, moved, names_of, replaced
from .linear import GroupedLinear
from .moe import MoE

Kind = TypeVar("Kind", bound=torch.nn.Module)


def convert_state_dict(state: Mapping[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """A state dict with the keys that `module` has, from one in either layout, or of another library's MoE blocks.

    Args:
        state: of a module like `module` that differs in `packed` at most, or in the names of an MoE's parts, which are
            one of `nn.dialects`. Loading it into `module` does the same.
        module: holds GroupedLinear and MoE modules anywhere.
    """
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
        for name in names_of(linear):
            move = find_move(dict.fromkeys(key for names in groups for key in names), prefix + name, linear)
            home = next((i for i, names in enumerate(groups) if move and set(move.old) <= set(names)), None)
            if move is None or home is None:
                continue
            if any(key in moments for key in (*move.old, *move.new)):
                others = moved(moments, prefix, name, linear, MOMENTS)
                if others is None:
                    continue
                moments = others
            groups[home] = list(replaced(dict.fromkeys(groups[home]), move, [None] * len(move.new)))
    renamed = [{**group, "params": names} for group, names in zip(state["param_groups"], groups, strict=True)]
    return {**state, "state": moments, "param_groups": renamed}


def _linears(module: torch.nn.Module) -> Iterator[tuple[str, GroupedLinear]]:
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
