"""Device memory: the process's own memory by address; only registered extents may be accessed."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .faults import Fault

LOWEST = 4096  # no process maps the page at 0, so the views begin after it
HIGHEST = 1 << 47  # user addresses of x86-64 and of aarch64 with 48 bits that a heap or mmap returns
GUARD = 4096
SHIFTS = {1: 0, 2: 1, 4: 2, 8: 3}


@dataclass(frozen=True)
class Extent:
    """Bytes [start, end) that kernels may read and, if writable, write."""

    start: int
    end: int
    name: str
    writable: bool

    def __str__(self) -> str:
        return f"{self.name} [{self.start:#x}, {self.end:#x}){'' if self.writable else ' read-only'}"


class _AddressSpace:
    """Array interface for all user memory as one array of bytes; no memory is touched until it is indexed."""

    __array_interface__ = {"data": (LOWEST, False), "shape": (HIGHEST - LOWEST,), "typestr": "|u1", "version": 3}


class Memory:
    """Memory that kernels access by real addresses: tensors of torch and numpy, and its own buffers.

    An access outside the registered extents, across two of them, or to a misaligned address raises Fault. Overlapping
    extents form one piece of memory; a byte is writable if one of its extents is.
    """

    def __init__(self, poison: int = 0xFF):
        self.poison = poison
        self._bytes = np.asarray(_AddressSpace())
        self.views = {size: self._bytes.view(f"u{size}") for size in (1, 2, 4, 8)}
        self._extents: list[Extent] = []
        self._own: dict[int, np.ndarray] = {}
        self._is_cut = True  # `_starts`, `_ends` and `_pieces` are those of `_extents`
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._pieces: list[tuple] = []  # start, size, writable, views that begin there

    def allow(self, address: int, size: int, name: str, writable: bool = True) -> None:
        """Register `size` bytes from `address` on (nothing if size is 0). `name`: used in faults."""
        if size:
            if not LOWEST <= address <= HIGHEST - size:
                raise ValueError(f"address {address:#x} is outside of [{LOWEST:#x}, {HIGHEST:#x})")
            self._extents.append(Extent(address, address + size, name, writable))
            self._is_cut = False

    def forget(self, address: int) -> None:
        """Remove the extent registered last at `address`; free it if it is one of this object's buffers."""
        for at in reversed(range(len(self._extents))):
            if self._extents[at].start == address:
                del self._extents[at]
                self._own.pop(address, None)
                self._is_cut = False
                return
        raise KeyError(f"no extent begins at {address:#x}")

    def alloc(self, size: int, name: str = "buffer", align: int = 256) -> int:
        """Allocate and register a poisoned buffer; return its address.

        The 4 KiB on either side of the buffer must not be accessed.
        """
        raw = np.full(size + 2 * GUARD + align, self.poison, np.uint8)
        address = (raw.ctypes.data + GUARD + align - 1) // align * align
        self._own[address] = raw
        self.allow(address, max(size, 1), name)
        return address

    def put(self, array: np.ndarray, name: str = "array") -> int:
        """Copy an array into a new buffer; return its address."""
        address = self.alloc(array.nbytes, name)
        self.array(address, array.dtype, array.shape)[...] = array
        return address

    def array(self, address: int, dtype, shape) -> np.ndarray:
        """View registered memory as an array."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        at = address - LOWEST
        if not any(e.start <= address and address + size <= e.end for e in self._extents):
            raise Fault(f"array of {size} bytes at {address:#x}: not allocated; {self._nearest(address)}")
        return self._bytes[at : at + size].view(dtype).reshape(shape)

    def place(self, addresses: np.ndarray, size: int, what: str, write: bool = False, width: int = 0):
        """Check accesses of `size` bytes, a power of two.

        Returns:
            A view of memory as words of `width` bytes (0: `size`), and the indices of the accesses in it.
        """
        width = width or size
        if not self._is_cut:
            self._cut()
        if not addresses.size:
            return self.views[width], np.zeros(0, np.int64)
        at = bisect_right(self._starts, addresses.item(0)) - 1
        if at >= 0:  # the common case: one extent has them all
            start, room, writable, views = self._pieces[at]
            offset = addresses - start
            bits = int(np.bitwise_or.reduce(offset, axis=None))  # no offset is above it, and it has all low bits
            inside = not bits & (size - 1) and (bits <= room - size or int(offset.max()) <= room - size)
            if inside and views and (writable or not write):
                return views[width], offset.view(np.int64) >> SHIFTS[width]
        self._check_each(addresses, size, what, write)
        at = addresses.astype(np.int64) - LOWEST
        return self.views[width], at >> SHIFTS[width]

    def _check_each(self, addresses: np.ndarray, size: int, what: str, write: bool) -> None:
        """Check accesses that do not lie in one piece; raise Fault for the first bad one."""
        starts = np.array(self._starts, np.uint64)
        ends = np.array([0, *self._ends], np.uint64)
        writable = np.array([False, *(piece[2] for piece in self._pieces)])
        at = np.searchsorted(starts, addresses, "right")
        allowed = (addresses <= ends[at] - np.uint64(size)) & (at > 0)
        for bad in addresses[~allowed].tolist():  # a piece may be a part of an extent
            if not any(e.start <= bad and bad + size <= e.end and (e.writable or not write) for e in self._extents):
                raise Fault(f"{what} of {size} bytes at {bad:#x}: not allocated; {self._nearest(bad)}")
        if (addresses & np.uint64(size - 1)).any():
            bad = int(addresses[addresses & np.uint64(size - 1) != 0].flat[0])
            raise Fault(f"{what}: address {bad:#x} is not a multiple of {size}; {self._nearest(bad)}")
        if write and not writable[at].all():
            bad = int(addresses[~writable[at]].flat[0])
            raise Fault(f"{what} writes at {bad:#x}: {self._nearest(bad)}")

    def _nearest(self, address: int) -> str:
        if not self._extents:
            return "no memory is registered"

        def distance(extent: Extent) -> int:
            return max(extent.start - address, address - extent.end + 1, 0)

        nearest = min(self._extents, key=distance)
        if not distance(nearest):
            return f"in {nearest}, byte {address - nearest.start}"
        if address < nearest.start:
            return f"{nearest.start - address} bytes before {nearest}"
        return f"{address - nearest.end} bytes after the end of {nearest}"

    def _cut(self) -> None:
        """Cut the extents into pieces that do not overlap; adjacent extents stay separate pieces."""
        pieces: list[list] = []
        edges = sorted({e.start for e in self._extents} | {e.end for e in self._extents})
        covers: list[set] = []
        for low, high in pairwise(edges):
            cover = {id(e) for e in self._extents if e.start <= low and high <= e.end}
            if not cover:
                continue
            writable = any(e.writable for e in self._extents if id(e) in cover)
            if pieces and pieces[-1][1] == low and pieces[-1][2] == writable and covers[-1] & cover:
                pieces[-1][1] = high
                covers[-1] = cover
            else:
                pieces.append([low, high, writable])
                covers.append(cover)
        self._is_cut = True
        self._starts = [low for low, _, _ in pieces]
        self._ends = [high for _, high, _ in pieces]
        self._pieces = [(np.uint64(low), high - low, can, self._views(low, high)) for low, high, can in pieces]

    def _views(self, low: int, high: int) -> dict[int, np.ndarray] | None:
        """Return views of a piece as words of 1 to 8 bytes; None if it does not begin at a multiple of 16 bytes."""
        if low % 16:
            return None
        whole = self._bytes[low - LOWEST : (high + 7) // 8 * 8 - LOWEST]
        return {size: whole.view(f"u{size}") for size in (1, 2, 4, 8)}
