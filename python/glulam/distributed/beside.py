"""Work that no other rank has a part in, on a stream of its own while rows are on their way."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Beside:
    """`work` of x, which may run beside whatever the current stream gets from here on. On a CPU it runs at once.

    What it makes lies in memory of its own stream, where nothing begins before the current one has come as far as here.
    """

    def __init__(self, work: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self._work, self._x = work, x
        self._begin = torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None

    def run(self) -> Tensor:
        """What work makes, for the current stream once that has joined."""
        if self._begin is None:
            return self._work(self._x)
        side = _stream(self._x.device)
        self._x.record_stream(side)  # work's backward reads x there, too, and may be the last that does
        side.wait_event(self._begin)
        with torch.cuda.stream(side):
            return self._work(self._x)

    def join(self) -> None:
        if self._begin is not None:
            torch.cuda.current_stream(self._x.device).wait_stream(_stream(self._x.device))
