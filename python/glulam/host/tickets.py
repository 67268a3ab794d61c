"""Ticket counters: int32 in device memory, from which the clusters of a persistent kernel draw the numbers of tiles.

In signatures, `index` is the device's index.

Counters are zero between calls. Two calls that may overlap must not share counters.

Outside of graphs: calls on one stream by one thread run one after the other, so they share counters. Calls of different
threads have different counters: launching releases the GIL, and another thread's launch may fall between the two
launches of a call.

In graphs: the replays of a graph also run one after the other, but beside calls on any stream, and at any time. So each
captured stream gets its own counters for the life of the process. These are zero before the first replay, and lie not
in the graph's pool but in memory that is allocated outside of captures. If no counters are left, or if the process made
no call before the captured one, kernels get no counters, and assign their tiles statically.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import device as gpus
from .workspace import make_room

NUM_COUNTERS = 4
"""Counters of a call, one for each of its kernels, since a kernel may begin before the previous kernel has ended."""
SET_BYTES = NUM_COUNTERS * torch.int32.itemsize
MAX_GRAPH_SETS = 8192
"""Largest number of captured streams that get counters on one device in the life of a process."""


class _Kept(threading.local):
    """The calling thread's counters.

    Attributes:
        eager: {(device, stream): (address of the counters, their memory)}.
        captured: {(device, stream): (address of the counters, identifier of the stream's capture)}; address 0: none.
    """

    def __init__(self) -> None:
        self.eager: dict[tuple[int, int], tuple[int, Tensor]] = {}
        self.captured: dict[tuple[int, int], tuple[int, Any]] = {}


class _OfGraphs(NamedTuple):
    """The memory of counters for all captures on a device.

    Attributes:
        memory: all counters, [MAX_GRAPH_SETS, NUM_COUNTERS].
        unused: iterator over the addresses of rows of `memory` that no captured stream has yet.
    """

    memory: Tensor
    unused: Iterator[int]


class Stats(NamedTuple):
    """Statistics of ticket counters.

    Attributes:
        streams: number of streams for which the calling thread has counters.
        captured: number of captured streams for which the calling thread has counters.
        of_graphs: {device index: memory of the counters for captures}.
    """

    streams: int
    captured: int
    of_graphs: dict[int, Tensor]


_kept = _Kept()
_of_graphs: dict[int, _OfGraphs] = {}
_of_old_graphs: list[_OfGraphs] = []
_lock = threading.Lock()


def stats() -> Stats:
    """Return the `Stats` of the calling thread's streams and of all captures."""
    of_graphs = {index: counters.memory for index, counters in _of_graphs.items()}
    return Stats(len(_kept.eager), len(_kept.captured), of_graphs)


def forget() -> None:
    """Reset the calling thread to the state before its first call. Graphs keep their counters."""
    _kept.eager.clear()
    _kept.captured.clear()
    with _lock:
        _of_old_graphs.extend(_of_graphs.values())
        _of_graphs.clear()


def counters(device: torch.device, index: int) -> int:
    """Return the address of NUM_COUNTERS counters for a call on the current stream; 0: no counters are available."""
    stream = gpus.raw_stream(index)
    if stream and gpus.is_capturing():  # 0 is the legacy default stream, which cannot be captured
        return _captured(index, stream)
    found = _kept.eager.get((index, stream)) or _eager(device, index, stream)
    return found[0]


def new_counters(device: torch.device | str) -> Tensor:
    """Return new counters, zero, for kernels on the current stream."""
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


def prepare(device: torch.device, index: int) -> None:
    """Allocate the memory from which captured calls on a device take their counters."""

    def make() -> _OfGraphs:
        with gpus.other_stream(device):  # so that the host waits for the copy and for nothing else
            memory = torch.zeros(MAX_GRAPH_SETS, NUM_COUNTERS, dtype=torch.int32, device="cpu").to(device)
        start = memory.data_ptr()
        return _OfGraphs(memory, iter(range(start, start + memory.nbytes, SET_BYTES)))

    with _lock:
        if index not in _of_graphs:
            _of_graphs[index] = gpus.on_own_thread(make, device)


def _eager(device: torch.device, index: int, stream: int) -> tuple[int, Tensor]:
    """Allocate counters for this thread's calls on a stream outside of captures; return (address, memory)."""
    prepare(device, index)
    make_room(_kept.eager, index)
    memory = gpus.on_own_thread(lambda: new_counters(device), device)
    found = _kept.eager[index, stream] = memory.data_ptr(), memory
    return found


def _captured(index: int, stream: int) -> int:
    """Return the address of counters for calls on a captured stream; 0: no counters are available."""
    capture = gpus.capture_id()
    address, of = _kept.captured.get((index, stream), (0, None))
    if of == capture:
        return address
    make_room(_kept.captured, index)
    address = next(_of_graphs[index].unused, 0) if index in _of_graphs else 0
    _kept.captured[index, stream] = address, capture
    return address
