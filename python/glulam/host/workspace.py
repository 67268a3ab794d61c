"""Memory for what a call needs only while it runs: kept per thread and (device, stream), so that calls allocate once.

Two calls on one stream run one after the other, so they may share a buffer, if one thread makes them: launching
releases the GIL, and the two launches of another thread's call may fall between the two of this one. Hence one set of
buffers a thread; it ends with the thread. A buffer belongs to the stream that it was allocated on, so dropping it
returns its memory to torch's allocator in that stream's order, with work still queued on it.

Under CUDA graph capture nothing here is used: the memory must belong to the graph, which outlives the call.
"""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import device as gpus

MAX_STREAMS = 8
"""Of one device that a thread keeps something for; what was made longest ago is dropped."""
MAX_VIEWS = 256
"""Shapes of the buffers that a thread remembers; a view costs 2 us to make, and the count of shapes has no end."""
ALIGNMENT_BYTES = 128
"""Of matrices that share a buffer: what TMA asks for, and a cache line."""
GRANULE = 2 << 20
"""Buffers grow in steps of this many bytes, the unit in which torch's allocator takes memory from the driver."""


class Layout:
    """What a workspace is for: a row-major matrix on a device. Equal only to itself, so that looking it up is cheap."""

    __slots__ = ("device", "dtype", "index", "num_bytes", "shape")

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, index: int) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.index = index
        self.num_bytes = shape[0] * shape[1] * dtype.itemsize

    def tensor(self, buffer: Tensor, begin: int = 0) -> Tensor:
        """What lies in a buffer behind so many bytes."""
        flat = buffer.view(self.dtype)
        at = flat.storage_offset() + begin // self.dtype.itemsize
        return flat.as_strided(self.shape, (self.shape[1], 1), at)

    def view(self, buffer: Tensor, begin: int = 0) -> Any:
        """The same as kernels take it."""
        view = self.tensor(buffer, begin)
        if view.is_cuda:  # as the kernels' functions take it: converting a tensor costs 0.1 us of every call
            view = importlib.import_module("tvm_ffi").from_dlpack(view)
        return view


class Layouts:
    """Several matrices at once, and pieces of so many bytes: they lie one behind the other in one piece of memory.

    A workspace that is taken is all of the stream's memory, so that what a call needs at the same time is one of these.
    A piece is what kernels take by address: it is given as that alone, since a matrix takes 3 us to make. The memory of
    addresses lives as long as a matrix beside them.
    """

    __slots__ = ("begins", "device", "index", "num_bytes", "parts")

    def __init__(self, first: Layout, *others: Layout | int) -> None:
        self.parts = parts = first, *others
        self.device, self.index = first.device, first.index
        sizes = [part if isinstance(part, int) else part.num_bytes for part in parts]
        whole = [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes]
        *self.begins, self.num_bytes = itertools.accumulate(whole, initial=0)

    def view(self, buffer: Tensor) -> Several:
        return self._placed(buffer, Layout.view)

    def tensors(self, buffer: Tensor) -> Several:
        """The same with matrices that torch can read."""
        return self._placed(buffer, Layout.tensor)

    def _placed(self, buffer: Tensor, matrix: Callable[[Layout, Tensor, int], Any]) -> Several:
        at, placed = buffer.data_ptr(), zip(self.parts, self.begins, strict=True)
        return tuple([at + begin if isinstance(part, int) else matrix(part, buffer, begin) for part, begin in placed])


Several = tuple[Any, ...]
"""Of `Layouts`: a matrix or an address for each part."""


class _Kept(threading.local):
    def __init__(self) -> None:
        self.views: dict[tuple[Layout | Layouts, int], Any] = {}
        self.buffers: dict[tuple[int, int], Tensor] = {}


_kept = _Kept()


class Stats(NamedTuple):
    """What the calling thread keeps: memory by (device, stream), which calls write, and how many views of it."""

    buffers: dict[tuple[int, int], Tensor]
    num_views: int


def stats() -> Stats:
    return Stats(dict(_kept.buffers), len(_kept.views))


def forget() -> None:
    """Give back what the calling thread keeps; its next calls allocate anew."""
    _kept.views.clear()
    _kept.buffers.clear()


def take(layout: Layout | Layouts) -> Any:
    """A matrix, or what `Layouts` tell: uninitialised, the caller's until its work on the current stream is done."""
    stream = gpus.raw_stream(layout.index)
    if stream and gpus.is_capturing():  # 0 is the legacy default stream, which cannot be captured
        return layout.view(torch.empty(layout.num_bytes, dtype=torch.uint8, device=layout.device))
    view = _kept.views.get((layout, stream))
    return _view(layout, stream) if view is None else view


def make_room(kept: dict[tuple[int, int], Any], index: int) -> None:
    """For one more stream of a device, in what is kept by (device, stream)."""
    mine = [other for other in kept if other[0] == index]
    if len(mine) >= MAX_STREAMS:
        del kept[mine[0]]


def _view(layout: Layout | Layouts, stream: int) -> Any:
    buffer = _buffer(layout, stream)
    if len(_kept.views) >= MAX_VIEWS:
        _kept.views.clear()
    view = _kept.views[layout, stream] = layout.view(buffer)
    return view


def _buffer(layout: Layout | Layouts, stream: int) -> Tensor:
    """The buffer of this device and stream, large enough."""
    key = (layout.index, stream)
    buffers = _kept.buffers
    buffer = buffers.get(key)
    if buffer is not None and buffer.numel() >= layout.num_bytes:
        return buffer
    _kept.views.clear()  # views keep the buffers that are dropped here alive
    buffers.pop(key, None)
    del buffer  # before the larger one is taken, so that its memory can serve
    make_room(buffers, layout.index)
    size = -(-layout.num_bytes // GRANULE) * GRANULE
    fresh = gpus.apart(lambda: torch.empty(size, dtype=torch.uint8, device=layout.device))
    buffers[key] = fresh
    return fresh
