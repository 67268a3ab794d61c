"""Additions to a training step if experts are spread over the ranks of torch.distributed.

Every rank has a part of each batch, its own experts and all other parameters. A loss is the mean over all ranks' parts:
experts get the gradients of all tokens that came to them; the other parameters get gradients of the rank's own tokens,
which are averaged over the ranks here.
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
    """Become one of the ranks that torchrun started. Raises RuntimeError if torchrun started none or another number.

    command: what torchrun is to start, for the message.
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
    """Return whether this process is the first rank, or the only one: it runs what needs no other ranks, and shows
    results.
    """
    return not dist.is_initialized() or dist.get_rank() == 0


def spread(size: Size, batch: int, dtype: torch.dtype) -> ExpertParallel:
    """Return the expert-parallel group that all layers of a model share, over all ranks."""
    return ExpertParallel(None, size.experts, size.top_k, size.width, batch * size.context, dtype=dtype)


def part_of(tokens: Tensor, parallel: ExpertParallel) -> Tensor:
    """Return this rank's sequences of a batch; the number of ranks divides the batch."""
    return tokens.chunk(parallel.world)[parallel.rank]


@torch.no_grad()
def whole(model: nn.Module, parallel: ExpertParallel | None, of_gradients: bool = False) -> dict[str, Tensor]:
    """Return parameters by name, or their gradients, with the experts of all ranks gathered. Every rank must call
    it.
    """
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
    """Return the mean of a value over the ranks, computed in place."""
    dist.all_reduce(value, group=parallel.group)
    return value.div_(parallel.world)


@torch.no_grad()
def finish_gradients(model: nn.Module, parallel: ExpertParallel, most: float) -> None:
    """Average the gradients over the ranks, and clip them to norm `most`."""
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
    """Clip gradients as `torch.nn.utils.clip_grad_norm_` would clip the whole model's.

    Args:
        own: parameters of experts, which differ between ranks. shared: all other parameters.
    """
    of_own, of_shared = (get_total_norm([p.grad for p in part if p.grad is not None]) for part in (own, shared))
    squares = of_own.square()
    dist.all_reduce(squares, group=group)
    clip_grads_with_norm_([*own, *shared], most, (squares + of_shared.square()).sqrt())
