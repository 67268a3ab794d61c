"""Work that no other rank has a part in, on a stream of its own while rows are on their way."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..host import device as gpus

FEW_TOKENS = 256
"""Up to here. A graph of 64 tokens on two H100: the layer of Qwen2-57B-A14B, whose shared expert is wide, takes 800 us
where it took 821, DeepSeek-V3's 3850 and 3864. Of 4096 tokens the shared expert's tiles take turns with those of the
others: 2 % less and 2 % more.
"""


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Beside:
    """`work` of x: of few tokens, on a GPU and without gradients, beside whatever the current stream gets from here on;
    else in its turn.

    What it makes lies in memory of its own stream, which other threads, and other current streams of this one, share:
    that memory goes back only when the current stream has read it.
    """

    def __init__(self, work: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self._work, self._x = work, x
        is_beside = x.is_cuda and len(x) <= FEW_TOKENS and not torch.is_grad_enabled()
        self._begin = torch.cuda.current_stream(x.device).record_event() if is_beside else None

    def run(self) -> Tensor:
        """What work makes, for the current stream once that has joined."""
        if self._begin is None:
            return self._work(self._x)
        side, current = _stream(self._x.device), torch.cuda.current_stream(self._x.device)
        side.wait_event(self._begin)
        with torch.cuda.stream(side):
            made = self._work(self._x)
        if not gpus.is_capturing():  # within a graph only its own work follows
            made.record_stream(current)
        return made

    def join(self) -> None:
        if self._begin is not None:
            torch.cuda.current_stream(self._x.device).wait_stream(_stream(self._x.device))
