"""State dicts and parameters of layers whose experts are spread over ranks."""

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
"""A key of one expert: `experts.7.up_proj.weight` of others, `experts.fc1.weight7` of nn.MoE."""
_PACKED = re.compile(r"(?:.*\.)?experts\..*")


def _number_of(key: str) -> tuple[str, int, str] | None:
    found = _NUMBERED.fullmatch(key)
    return None if found is None else (found["before"], int(found["number"]), found["after"])


def shard_state_dict(state: Mapping[str, Tensor], parallel: ExpertParallel) -> dict[str, Tensor]:
    """Of the state dict of a whole model what this rank loads: of experts its own, of all else everything.

    Args:
        state: with experts under any names that `nn.MoE` loads, stacked or one by one.
        parallel: of all layers in it.

    Raises:
        ValueError: a tensor of all experts has another number of them.
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
    """The state dict of the whole model, on every rank and on the CPU, from that of each: to be saved, and loaded by
    any number of ranks. Every rank calls it.
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
    """The parameters, by name, that each rank has its own of: experts of the layers in `module` that are spread over
    ranks. Their gradients are whole where they are; those of all other parameters are to be averaged over the group's
    data, as by DistributedDataParallel, which leaves out names that it is given so:

        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(expert_parameters(model)))
    """
    found = {}
    for path, layer in module.named_modules():
        if isinstance(getattr(layer, "parallel", None), ExpertParallel):
            prefix = f"{path}.experts." if path else "experts."
            found.update({prefix + name: parameter for name, parameter in layer.experts.named_parameters()})
    return found
