"""Weights, biases and gradients given as a list with one tensor an expert: a table of their addresses on the device.

Gradients have tables of their own kind, since what is written was checked for more (no two overlap) than what is read.

Building a table costs a host-to-device copy, so tables are kept, by the addresses that they hold. A table depends on
addresses only; whether the tensors there still have the shapes that were checked is remembered apart from it, and
forgotten as soon as one of the checked tensors dies, since its memory may then hold anything. A call holds the tables
that it reads, so that another thread may drop them from the cache meanwhile.

Tables and CUDA graphs: a table that a captured call used is never freed, since a replay may read it at any later
time. That costs 8 bytes an expert for each list captured. A list that is first seen under capture gets a table of the
graph's own, which the graph fills from pinned memory at each replay; calling once before capture spares that copy.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CaptureError
from . import device as gpus

MAX_TABLES = 1024
UNIT_BYTES = 16  # weight offsets count 16-byte units: experts are 16-byte aligned for TMA anyway

Biases = Tensor | Sequence[Tensor] | None

_data_ptr = Tensor.data_ptr
_tables: dict[tuple[str, tuple[int, ...]], Table] = {}
_lock = threading.Lock()
_kept_for_graphs: dict[int, tuple[Any, ...]] = {}


class GateUp(NamedTuple):
    """w1 of an activation with a gate in two tensors, neither of which is copied: h = [x gate_e^T, x up_e^T] + b1_e.

    It stands for w1 [E, 2I, H] of glu_layout "concat", in 16-bit recipes; biases and preactivations have both halves.

    Attributes:
        gate, up: [E, I, H], the activated and the linear half; contiguous, of one dtype, anywhere in memory.
    """

    gate: Tensor
    up: Tensor

    @property
    def requires_grad(self) -> bool:
        return self.gate.requires_grad or self.up.requires_grad

    def data_ptr(self) -> tuple[int, int]:
        """What tells where it lies."""
        return self.gate.data_ptr(), self.up.data_ptr()

    @property
    def begin(self) -> int:
        return min(self.data_ptr())

    @property
    def end(self) -> int:
        return max(tensor.data_ptr() + tensor.nbytes for tensor in self)


class _Checked(NamedTuple):
    """The tensors of a list as they were when they were checked; see `Table.checked`.

    Attributes:
        shape, dtype: of each tensor.
        lowest: index of the tensor at the lowest address.
        begin, end: addresses between which all tensors lie.
        ids: of the tensors, valid while all of them live.
        alive: weak references, whose callbacks end the validity.
    """

    shape: torch.Size
    dtype: torch.dtype
    lowest: int
    begin: int
    end: int
    ids: list[int]
    alive: tuple[weakref.ref[Tensor], ...]

    def fits(self, tensor: Tensor) -> bool:
        """Return True for plain data of the shape and dtype that were checked."""
        is_plain = tensor.__class__ in gpus.PLAIN_TENSORS and tensor.is_contiguous() and not tensor.is_neg()
        return is_plain and tensor.shape == self.shape and tensor.dtype == self.dtype


class Table:
    """The addresses of a list, on the device: int64 [E], valid as long as this object lives.

    The table holds none of the tensors, so that weights die when they would. Whoever passes its address to a kernel
    holds the table until the kernel is enqueued: another thread may drop it from the cache at any time.

    Attributes:
        address: of the table. It holds, for weights and gradients, offsets from the lowest expert in 16-byte units;
            for biases, addresses.
        mark: a number that no other table has.
        checked: the tensors that were last checked at these addresses; None before the first check, and once one of
            them has died. Replaced as a whole, so that another thread sees all of it or nothing.
    """

    __slots__ = ("__weakref__", "address", "checked", "index", "mark", "streams", "values")
    _marks = itertools.count(1)

    def __init__(self, values: Tensor) -> None:
        self.mark = next(self._marks)
        self.values = values
        self.address = values.data_ptr()
        self.index = values.get_device()
        self.streams = {gpus.raw_stream(self.index)}
        self.checked: _Checked | None = None

    def note(self, tensors: Sequence[Tensor]) -> _Checked:
        """Remember tensors that were just checked."""
        addresses = list(map(_data_ptr, tensors))
        begin, end = min(addresses), max(addresses) + tensors[0].nbytes
        this = weakref.ref(self)
        alive = tuple(weakref.ref(tensor, lambda _: _forget(this)) for tensor in tensors)
        self.checked = checked = _Checked(
            tensors[0].shape, tensors[0].dtype, addresses.index(begin), begin, end, list(map(id, tensors)), alive
        )
        return checked

    def use(self) -> None:
        """Keep the table alive for the current stream's work, and for good where that work is being captured."""
        if gpus.is_capturing():
            _kept_for_graphs[self.address] = (self.values,)
        stream = gpus.raw_stream(self.index)
        if stream not in self.streams:
            self.streams.add(stream)
            self.values.record_stream(torch.cuda.current_stream(self.index))


def _forget(table: weakref.ref[Table]) -> None:
    """One of the tensors has died: its memory may hold anything from now on."""
    if (found := table()) is not None:
        found.checked = None


class ExpertList:
    """A list of experts' tensors that was checked, with its table: stands in for a packed tensor during one call.

    Attributes:
        shape: ("list", E, *the shape of one): never equal to a packed tensor's, so no plan serves both.
        tensors: the experts.
        lowest: weights and gradients: the expert at the lowest address as [1, N, K]; None for biases.
        address: of the table.
        begin, end: addresses between which all experts lie.
        mark: a number of this list of addresses and no other, where a packed tensor has its address.
        table: held here, so that it lives until the call's kernels are enqueued.
    """

    __slots__ = ("address", "begin", "device", "dtype", "end", "index", "lowest", "mark", "shape", "table", "tensors")

    def __init__(self, kind: str, tensors: Sequence[Tensor], table: Table, checked: _Checked) -> None:
        self.tensors = tensors
        self.table = table
        self.address, self.mark = table.address, table.mark
        self.begin, self.end = checked.begin, checked.end
        self.index = table.index
        self.device = table.values.device
        self.dtype = checked.dtype
        self.shape = ("list", len(tensors), *checked.shape)
        self.lowest = None if kind == "bias" else tensors[checked.lowest].unsqueeze(0)

    def is_contiguous(self) -> bool:
        return True

    @property
    def requires_grad(self) -> bool:
        return True in [tensor.requires_grad for tensor in self.tensors]

    def get_device(self) -> int:
        return self.index

    def data_ptr(self) -> int:
        return self.mark


def known(kind: str, tensors: Sequence[Tensor]) -> Any:
    """An ExpertList, ready for the current stream, if the list is known at these addresses; else the list itself."""
    first = tensors[0]
    if first.__class__ not in gpus.PLAIN_TENSORS:  # a fake tensor has no address
        return tensors
    table = _tables.get((kind, tuple(map(_data_ptr, tensors))))
    checked = None if table is None else table.checked
    if table is None or checked is None or not checked.fits(first):
        return tensors
    if checked.ids != list(map(id, tensors)) and not all(map(checked.fits, tensors)):  # other views of the same memory
        return tensors
    table.use()
    return ExpertList(kind, tensors, table, checked)


def enter(kind: str, tensors: Sequence[Tensor]) -> ExpertList:
    """The list, whose tensors were just checked, on a known table or a new one.

    Raises:
        CaptureError: pinned memory cannot be had under this capture.
    """
    table = _table(kind, tuple(map(_data_ptr, tensors)), tensors[0].device)
    return ExpertList(kind, tensors, table, table.note(tensors))


def _table(kind: str, addresses: tuple[int, ...], device: torch.device) -> Table:
    if table := _tables.get((kind, addresses)):
        table.use()
        return table
    base, unit = (0, 1) if kind == "bias" else (min(addresses), UNIT_BYTES)
    values = [(address - base) // unit for address in addresses]
    if gpus.is_capturing():
        return _captured_table(values, device)
    # A blocking copy: once it is done, streams other than this one may read the table too.
    made = Table(gpus.apart(lambda: torch.tensor(values, dtype=torch.int64, device="cpu").to(device)))
    with _lock:
        table = _tables.get((kind, addresses))  # another thread may have been faster
        if table is None:
            while len(_tables) >= MAX_TABLES:
                del _tables[next(iter(_tables))]
            table = _tables[kind, addresses] = made
    table.use()
    return table


def _captured_table(values: list[int], device: torch.device) -> Table:
    """A table in the graph's memory, filled by a copy that the graph makes; its host side is kept for good."""
    try:
        host = torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=True)
    except RuntimeError as error:
        raise CaptureError(
            "a list of expert tensors was first seen under CUDA graph capture, where its table cannot be made; call "
            "the operator once with this list before capturing, or pack the experts into one tensor"
        ) from error
    values_on_device = torch.empty(len(values), dtype=torch.int64, device=device)
    values_on_device.copy_(host, non_blocking=True)
    _kept_for_graphs[values_on_device.data_ptr()] = (values_on_device, host)
    return Table(values_on_device)
