"""Runs work that needs no other rank, such as a shared expert, on a side stream while rows are exchanged."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..host import device as gpus

FEW_TOKENS = 256
"""Largest number of tokens for which a side stream is used.

Times of a layer as a CUDA graph of 64 tokens on two H100, with and without a side stream: Qwen2-57B-A14B, whose shared
expert is wide, 800 and 821 us; DeepSeek-V3 3850 and 3864 us. At 4096 tokens the shared expert's tiles take turns with
the other experts' tiles: one layer takes 2 % less time, the other 2 % more.
"""


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class SideStreamWork:
    """Runs `work(x)` on a side stream, concurrently with work that the current stream gets after construction.

    Call `run`, then `join`; after `join` the current stream may read the result. The side stream is used only on a GPU,
    for at most FEW_TOKENS tokens, and without gradients. Otherwise `run` computes on the current stream. A device has
    one side stream for all threads and streams. The result's memory belongs to the side stream, and is reused only
    after the current stream has read the result.
    """

    def __init__(self, work: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self._work, self._x = work, x
        is_beside = x.is_cuda and len(x) <= FEW_TOKENS and not torch.is_grad_enabled()
        self._begin = torch.cuda.current_stream(x.device).record_event() if is_beside else None

    def run(self) -> Tensor:
        """Enqueue `work`, and return its result, which the current stream may read after `join`."""
        if self._begin is None:
            return self._work(self._x)
        side, current = _stream(self._x.device), torch.cuda.current_stream(self._x.device)
        side.wait_event(self._begin)
        with torch.cuda.stream(side):
            made = self._work(self._x)
        if not gpus.is_capturing():  # inside a graph, only the graph's own work can reuse the memory
            made.record_stream(current)
        return made

    def join(self) -> None:
        if self._begin is not None:
            torch.cuda.current_stream(self._x.device).wait_stream(_stream(self._x.device))
