"""Scratch memory that a call needs only while it runs. Buffers are kept and reused, so that calls do not allocate.

There is one buffer for each thread, device and stream. Two calls on one stream by one thread run one after the other,
so they may share a buffer. Calls of different threads may not: launching releases the GIL, and another thread's
launches may fall between the launches of this call. A thread's buffers end with the thread. A buffer belongs to the
stream on which it was allocated, so dropping it returns its memory to torch's allocator in that stream's order, even
while work is queued.

Under CUDA graph capture no kept buffer is used: the memory must belong to the graph, which outlives the call.
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
"""Largest number of streams of a device for which a thread keeps memory; the oldest is dropped."""
MAX_VIEWS = 256
"""Largest number of views of buffers that a thread keeps. Keeping saves the 2 us of making a view; the limit is there
because new shapes may come without end.
"""
ALIGNMENT_BYTES = 128
"""Alignment of matrices that share a buffer: a cache line, and enough for TMA."""
GRANULE = 2 << 20
"""Buffers grow in steps of this many bytes, the unit in which torch's allocator takes memory from the driver."""


class MatrixLayout:
    """Shape and dtype of a row-major matrix in a buffer. An object equals only itself, so that looking it up is fast.

    Args:
        shape: rows and columns.
        dtype: the dtype of the elements.
        device, index: the device and its index.

    Attributes:
        num_bytes: bytes of the matrix.
    """

    __slots__ = ("device", "dtype", "index", "num_bytes", "shape")

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, index: int) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.index = index
        self.num_bytes = shape[0] * shape[1] * dtype.itemsize

    def tensor(self, buffer: Tensor, begin: int = 0) -> Tensor:
        """Return the matrix at byte `begin` of a buffer, as a tensor."""
        flat = buffer.view(self.dtype)
        at = flat.storage_offset() + begin // self.dtype.itemsize
        return flat.as_strided(self.shape, (self.shape[1], 1), at)

    def view(self, buffer: Tensor, begin: int = 0) -> Any:
        """Return the matrix at byte `begin` of a buffer, in the type that kernels take (a TVM-FFI tensor on a GPU)."""
        view = self.tensor(buffer, begin)
        if view.is_cuda:  # converted once: converting a tensor costs 0.1 us of every call
            view = importlib.import_module("tvm_ffi").from_dlpack(view)
        return view


class MatrixLayouts:
    """Layout of several matrices and raw pieces of memory, one after the other in one buffer.

    Each `take` returns memory from the begin of the stream's buffer. So everything that a call needs at the same time
    must be one MatrixLayouts. A raw piece is memory that kernels take by address; only its address is returned, since
    making a matrix takes 3 us. The memory of raw pieces lives as long as the matrices that are returned with them.

    Args:
        first: the first matrix.
        others: more matrices, or raw pieces as their numbers of bytes. `parts` has all of them, the first included.
    """

    __slots__ = ("begins", "device", "index", "num_bytes", "parts")

    def __init__(self, first: MatrixLayout, *others: MatrixLayout | int) -> None:
        self.parts = parts = first, *others
        self.device, self.index = first.device, first.index
        sizes = [part if isinstance(part, int) else part.num_bytes for part in parts]
        whole = [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes]
        *self.begins, self.num_bytes = itertools.accumulate(whole, initial=0)

    def view(self, buffer: Tensor) -> Several:
        """Lay all parts into a buffer, one after the other; return one value for each part, in the order of `parts`.

        A matrix is returned in the type that kernels take (see `MatrixLayout.view`), a raw piece as its address (int).
        """
        return self._placed(buffer, MatrixLayout.view)

    def tensors(self, buffer: Tensor) -> Several:
        """Lay all parts into a buffer, one after the other; return one value for each part, in the order of `parts`.

        A matrix is returned as a torch tensor that views the buffer, a raw piece as its address (int).
        """
        return self._placed(buffer, MatrixLayout.tensor)

    def _placed(self, buffer: Tensor, matrix: Callable[[MatrixLayout, Tensor, int], Any]) -> Several:
        """Return `matrix(part, buffer, begin)` for each part that is a matrix, and the address of each raw piece."""
        at, placed = buffer.data_ptr(), zip(self.parts, self.begins, strict=True)
        return tuple([at + begin if isinstance(part, int) else matrix(part, buffer, begin) for part, begin in placed])


Several = tuple[Any, ...]
"""A matrix or an address for each part of a `MatrixLayouts`."""


class _Kept(threading.local):
    """The calling thread's buffers, by (device, stream), and views of buffers, by (layout, stream)."""

    def __init__(self) -> None:
        self.views: dict[tuple[MatrixLayout | MatrixLayouts, int], Any] = {}
        self.buffers: dict[tuple[int, int], Tensor] = {}


_kept = _Kept()


class Stats(NamedTuple):
    """Buffers that the calling thread keeps, by (device, stream), and its number of kept views."""

    buffers: dict[tuple[int, int], Tensor]
    num_views: int


def stats() -> Stats:
    """Return the `Stats` of the calling thread."""
    return Stats(dict(_kept.buffers), len(_kept.views))


def forget() -> None:
    """Free the memory that the calling thread keeps; its next calls allocate anew."""
    _kept.views.clear()
    _kept.buffers.clear()


def take(layout: MatrixLayout | MatrixLayouts) -> Any:
    """Return uninitialised scratch memory for work on the current stream.

    The memory is the caller's for work that is enqueued before the next `take` of this thread on this stream.

    Args:
        layout: the layout of the memory.

    Returns:
        A matrix; for a `MatrixLayouts` a matrix or an address for each part (`Several`).
    """
    stream = gpus.raw_stream(layout.index)
    if stream and gpus.is_capturing():  # 0 is the legacy default stream, which cannot be captured
        return layout.view(torch.empty(layout.num_bytes, dtype=torch.uint8, device=layout.device))
    view = _kept.views.get((layout, stream))
    return _view(layout, stream) if view is None else view


def make_room(kept: dict[tuple[int, int], Any], index: int) -> None:
    """Drop the oldest entry of a device from `kept` if the device has MAX_STREAMS entries.

    Args:
        kept: entries by (device, stream).
        index: the device's index.
    """
    mine = [other for other in kept if other[0] == index]
    if len(mine) >= MAX_STREAMS:
        del kept[mine[0]]


def _view(layout: MatrixLayout | MatrixLayouts, stream: int) -> Any:
    """Make a view of the stream's buffer in this layout, keep it, and return it."""
    buffer = _buffer(layout, stream)
    if len(_kept.views) >= MAX_VIEWS:
        _kept.views.clear()
    view = _kept.views[layout, stream] = layout.view(buffer)
    return view


def _buffer(layout: MatrixLayout | MatrixLayouts, stream: int) -> Tensor:
    """Return the kept buffer of the layout's device and of a stream. If it is too small, a larger one replaces it."""
    key = (layout.index, stream)
    buffers = _kept.buffers
    buffer = buffers.get(key)
    if buffer is not None and buffer.numel() >= layout.num_bytes:
        return buffer
    _kept.views.clear()  # views keep the buffers that are dropped here alive
    buffers.pop(key, None)
    del buffer  # before the larger buffer is allocated, so that its memory can be reused
    make_room(buffers, layout.index)
    size = -(-layout.num_bytes // GRANULE) * GRANULE
    fresh = gpus.on_own_thread(lambda: torch.empty(size, dtype=torch.uint8, device=layout.device), layout.device)
    buffers[key] = fresh
    return fresh
