"""What a training step does besides where experts are spread over the ranks of torch.distributed.

Every rank has a part of each batch, its own experts and all other parameters. A loss is the mean over all ranks' parts:
experts get the gradients of all tokens that came to them, all other parameters those of the rank's own, which are
added up here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from examples.moe_model import Size
from glulam.distributed import ExpertParallel, expert_parameters


def join(ranks: int, device: str, command: str) -> None:
    """Become one of the ranks that torchrun started. Raises RuntimeError where it did not, or started others; `command`
    is what it is to start.
    """
    started = int(os.environ.get("WORLD_SIZE", "0"))
    if started != ranks:
        raise RuntimeError(
            f"--expert-parallel {ranks}: torchrun started {started or 'no'} ranks; run "
            f"`torchrun --nproc-per-node {ranks} {command}`"
        )
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")


def is_first() -> bool:
    """Whether this process trains what needs no others, and shows results."""
    return not dist.is_initialized() or dist.get_rank() == 0


def spread(size: Size, batch: int, dtype: torch.dtype) -> ExpertParallel:
    """The experts of all layers of a model."""
    return ExpertParallel(None, size.experts, size.top_k, size.width, batch * size.context, dtype=dtype)


def part_of(tokens: Tensor, parallel: ExpertParallel) -> Tensor:
    """A rank's sequences of a batch, which the number of ranks divides."""
    return tokens.chunk(parallel.world)[parallel.rank]


@torch.no_grad()
def whole(model: nn.Module, parallel: ExpertParallel | None, of_gradients: bool = False) -> dict[str, Tensor]:
    """Parameters by name, or their gradients, with the experts of all ranks. Every rank calls it."""
    found = {}
    own = expert_parameters(model)
    for name, parameter in model.named_parameters():
        value = parameter.grad if of_gradients else parameter.detach()
        assert value is not None
        if parallel is not None and name in own:
            everyones = value.new_zeros(parallel.num_experts, *value.shape[1:])
            everyones[parallel.first : parallel.first + parallel.num_local] = value
            dist.all_reduce(everyones, group=parallel.group)
            value = everyones
        found[name] = value
    return found


def mean(value: Tensor, parallel: ExpertParallel) -> Tensor:
    """Over ranks, in place."""
    dist.all_reduce(value, group=parallel.group)
    return value.div_(parallel.world)


@torch.no_grad()
def finish_gradients(model: nn.Module, parallel: ExpertParallel, most: float) -> None:
    """Means over ranks, cut to norm `most`."""
    names = expert_parameters(model)
    own, shared = [], []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        if name in names:
            parameter.grad.div_(parallel.world)
            own.append(parameter)
        else:
            mean(parameter.grad, parallel)
            shared.append(parameter)
    cut_to_norm(own, shared, most, parallel.group)


def cut_to_norm(own: Sequence[Tensor], shared: Sequence[Tensor], most: float, group: dist.ProcessGroup | None) -> None:
    """Cut gradients as `torch.nn.utils.clip_grad_norm_` would those of the whole model.

    Args:
        own: experts' parameters, of which each rank has others. shared: all other parameters.
    """
    of_own, of_shared = (get_total_norm([p.grad for p in part if p.grad is not None]) for part in (own, shared))
    squares = of_own.square()
    dist.all_reduce(squares, group=group)
    clip_grads_with_norm_([*own, *shared], most, (squares + of_shared.square()).sqrt())
