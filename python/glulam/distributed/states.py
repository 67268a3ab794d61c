"""State dicts and parameters of layers whose experts are spread over ranks: sharding, gathering, selecting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .parallel import ExpertParallel

_NUMBERED = re.compile(
    r"(?P<before>(?:.*\.)?experts\.(?:fc[12]\.(?:weight|bias|weight_scale))?)(?P<number>\d+)(?P<after>.*)"
)
"""Pattern of keys with an expert's number: `experts.7.up_proj.weight` in other models, `experts.fc1.weight7` in nn.MoE.
"""
_PACKED = re.compile(r"(?:.*\.)?experts\..*")


def _number_of(key: str) -> tuple[str, int, str] | None:
    found = _NUMBERED.fullmatch(key)
    return None if found is None else (found["before"], int(found["number"]), found["after"])


def shard_state_dict(state: Mapping[str, Tensor], parallel: ExpertParallel) -> dict[str, Tensor]:
    """Select from a whole model's state dict the entries that this rank loads.

    These are the weights of this rank's experts, and all tensors that do not belong to experts.

    Args:
        state: the whole model's state dict. Experts may have any names that `nn.MoE` loads, and be stacked in one
            tensor or stored one by one.
        parallel: the ExpertParallel of all layers in the state dict.

    Returns:
        A new dict. One-by-one experts are renumbered from 0; stacked experts are views.

    Raises:
        ValueError: a stacked tensor does not hold `parallel.num_experts` experts.
    """
    first, end = parallel.first, parallel.first + parallel.num_local
    made: dict[str, Tensor] = {}
    for key, value in state.items():
        if numbered := _number_of(key):
            before, number, after = numbered
            if first <= number < end:
                made[f"{before}{number - first}{after}"] = value
        elif _PACKED.fullmatch(key):
            if len(value) != parallel.num_experts:
                raise ValueError(f"shard_state_dict: {key} is of {len(value)} experts, not of {parallel.num_experts}")
            made[key] = value[first:end]
        else:
            made[key] = value
    return made


def gather_state_dict(state: Mapping[str, Tensor], parallel: ExpertParallel) -> dict[str, Tensor]:
    """Join the state dicts of all ranks to that of the whole model, which any number of ranks can load.

    Every rank must call this.

    Args:
        state: this rank's state dict.
        parallel: the ExpertParallel of all layers in the state dict.

    Returns:
        On every rank, a dict of CPU tensors with the experts of all ranks.
    """
    mine = {key: value.detach().cpu() for key, value in state.items() if _PACKED.fullmatch(key)}
    parts: list[Any] = [None] * parallel.world
    dist.all_gather_object(parts, mine, group=parallel.group)
    made = {key: value.detach().cpu() for key, value in state.items() if key not in mine}
    for key in mine:
        if not _number_of(key):
            made[key] = torch.cat([part[key] for part in parts])
    for rank, part in enumerate(parts):
        for key, value in part.items():
            if numbered := _number_of(key):
                before, number, after = numbered
                made[f"{before}{number + parallel.owners.first(rank)}{after}"] = value
    return made


def expert_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that differ between ranks: the experts' parameters in layers that have a `parallel`.

    The gradients of these parameters are complete on their rank. The gradients of all other parameters must be averaged
    over the group, as DistributedDataParallel does. This makes DistributedDataParallel skip the experts:

        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(expert_parameters(model)))

    Returns:
        {name in `module`: parameter}.
    """
    found = {}
    for path, layer in module.named_modules():
        if isinstance(getattr(layer, "parallel", None), ExpertParallel):
            prefix = f"{path}.experts." if path else "experts."
            found.update({prefix + name: parameter for name, parameter in layer.experts.named_parameters()})
    return found
