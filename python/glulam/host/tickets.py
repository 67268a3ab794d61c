"""Counters that the kernels of a call draw tickets from: int32, zero between calls, shared by no two that may overlap.

Calls on one stream run one after the other, so they share counters, if one thread makes them: launching releases the
GIL, and another thread's launch may fall between the two of a call.

Replays of a graph run one after the other as well, but beside calls on any stream. So every stream of a capture has
counters of its own, for good, since a graph may be replayed at any time. They are zero before the first replay and lie
in no pool of the graph's: in memory that was made outside of captures, 64 KiB a device. Where none are left, and where
a process has made no call before the one that is captured, kernels get none and deal their tiles.
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
"""Of a call, one for each of its kernels: the next may begin before one has ended."""
SET_BYTES = NUM_COUNTERS * torch.int32.itemsize
MAX_GRAPH_SETS = 8192
"""Streams of captures that have counters, on one device in all of a process's life."""


class _Kept(threading.local):
    """Addresses by (device, stream), each with its memory, or with what stands for the capture."""

    def __init__(self) -> None:
        self.eager: dict[tuple[int, int], tuple[int, Tensor]] = {}
        self.captured: dict[tuple[int, int], tuple[int, Any]] = {}


class _OfGraphs(NamedTuple):
    """Counters of a device's captures. `unused`: addresses."""

    memory: Tensor
    unused: Iterator[int]


class Stats(NamedTuple):
    """Streams, and streams of captures, that the calling thread has counters for; all those of captures by device."""

    streams: int
    captured: int
    of_graphs: dict[int, Tensor]


_kept = _Kept()
_of_graphs: dict[int, _OfGraphs] = {}
_of_old_graphs: list[_OfGraphs] = []
_lock = threading.Lock()


def stats() -> Stats:
    of_graphs = {index: counters.memory for index, counters in _of_graphs.items()}
    return Stats(len(_kept.eager), len(_kept.captured), of_graphs)


def forget() -> None:
    """As in a process that has made no call yet, for the calling thread. Graphs keep the counters that they have."""
    _kept.eager.clear()
    _kept.captured.clear()
    with _lock:
        _of_old_graphs.extend(_of_graphs.values())
        _of_graphs.clear()


def counters(device: torch.device, index: int) -> int:
    """The address of NUM_COUNTERS counters for a call on the current stream, or 0."""
    stream = gpus.raw_stream(index)
    if stream and gpus.is_capturing():  # 0 is the legacy default stream, which cannot be captured
        return _captured(index, stream)
    found = _kept.eager.get((index, stream)) or _eager(device, index, stream)
    return found[0]


def new_counters(device: torch.device | str) -> Tensor:
    """Counters as kernels on the current stream want them."""
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


def prepare(device: torch.device, index: int) -> None:
    """Make the memory that captured calls on a device take their counters from."""

    def make() -> _OfGraphs:
        with gpus.other_stream(device):  # so that the host waits for the copy and for nothing else
            memory = torch.zeros(MAX_GRAPH_SETS, NUM_COUNTERS, dtype=torch.int32, device="cpu").to(device)
        start = memory.data_ptr()
        return _OfGraphs(memory, iter(range(start, start + memory.nbytes, SET_BYTES)))

    with _lock:
        if index not in _of_graphs:
            _of_graphs[index] = gpus.apart(make)


def _eager(device: torch.device, index: int, stream: int) -> tuple[int, Tensor]:
    prepare(device, index)
    make_room(_kept.eager, index)
    memory = gpus.apart(lambda: new_counters(device))
    found = _kept.eager[index, stream] = memory.data_ptr(), memory
    return found


def _captured(index: int, stream: int) -> int:
    capture = gpus.capture_id()
    address, of = _kept.captured.get((index, stream), (0, None))
    if of == capture:
        return address
    make_room(_kept.captured, index)
    address = next(_of_graphs[index].unused, 0) if index in _of_graphs else 0
    _kept.captured[index, stream] = address, capture
    return address
