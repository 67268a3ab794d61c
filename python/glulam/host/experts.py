"""Address tables for experts' tensors (weights, biases, gradients) that are given as a list with one tensor an expert.

Kernels find the experts of such a list by a table of addresses on the device. There are three kinds of tables,
"weight", "bias" and "gradient". Gradients have their own kind, since tensors that are written pass one more check (no
two overlap) than tensors that are read.

Building a table costs a host-to-device copy, so tables are kept, by the addresses that they hold. A table depends on
addresses only. `Table.checked` remembers which tensors at these addresses passed the checks; it is reset as soon as one
of these tensors dies, since its memory may then hold anything. A call holds the tables that it reads, so that another
thread may drop them from the cache meanwhile.

Tables and CUDA graphs: a table that a captured call used is never freed, since a replay may read it at any later
time. That costs 8 bytes an expert for each list captured. A list that is first seen under capture gets a table in the
graph's memory, which the graph fills from pinned memory at each replay; a call before the capture avoids that copy.
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
Key = tuple[str, int, tuple[int, ...]]
"""Key of a table: "weight", "bias" or "gradient"; the GPU's index; the tensors' addresses."""
_tables: dict[Key, Table] = {}
_lock = threading.Lock()
_kept_for_graphs: dict[int, tuple[Any, ...]] = {}


class GateUp(NamedTuple):
    """w1 as two tensors, gate and up, for an activation with a gate: h = [x gate_e^T, x up_e^T] + b1_e. No copies.

    Pass it in place of w1 [E, 2I, H] of glu_layout "concat", in 16-bit recipes. Biases and preactivations are not
    divided: they hold both halves.

    Attributes:
        gate: [E, I, H], the half whose product is activated; contiguous, anywhere in memory.
        up: [E, I, H], the linear half, of the same dtype; contiguous, anywhere in memory.
    """

    gate: Tensor
    up: Tensor

    @property
    def requires_grad(self) -> bool:
        """True if either tensor requires a gradient."""
        return self.gate.requires_grad or self.up.requires_grad

    def data_ptr(self) -> tuple[int, int]:
        """Return the addresses of both tensors."""
        return self.gate.data_ptr(), self.up.data_ptr()

    @property
    def begin(self) -> int:
        """The lowest address of either tensor."""
        return min(self.data_ptr())

    @property
    def end(self) -> int:
        """The address after the last byte of either tensor."""
        return max(tensor.data_ptr() + tensor.nbytes for tensor in self)


class _Checked(NamedTuple):
    """Properties of a list's tensors when they last passed all checks; a table keeps them as `Table.checked`.

    Attributes:
        shape, dtype: the shape and dtype of each tensor.
        lowest: index of the tensor at the lowest address.
        begin, end: addresses between which all tensors lie.
        ids: Python's id() of each tensor, valid while all tensors live.
        alive: weak references to the tensors; when a tensor dies, their callback resets `Table.checked`.
    """

    shape: torch.Size
    dtype: torch.dtype
    lowest: int
    begin: int
    end: int
    ids: list[int]
    alive: tuple[weakref.ref[Tensor], ...]

    def fits(self, tensor: Tensor) -> bool:
        """Return True if a tensor at a known address is plain and contiguous, and has the checked shape and dtype."""
        is_plain = tensor.__class__ in gpus.PLAIN_TENSORS and tensor.is_contiguous() and not tensor.is_neg()
        return is_plain and tensor.shape == self.shape and tensor.dtype == self.dtype


class Table:
    """A table on the device, int64 [E], of the addresses of a list of experts' tensors.

    The table does not keep the tensors alive. Its memory is valid as long as this object lives. So code that passes the
    table's address to a kernel must hold this object until the kernel is enqueued: another thread may drop the table
    from the cache at any time.

    Attributes:
        values: int64 [E]. For weights and gradients: offsets from the lowest expert, in 16-byte units. For biases:
            addresses.
        address: the address of `values`.
        index: the device's index.
        mark: a number that no other table has.
        streams: handles of the streams on which the table was used.
        checked: properties of the tensors at these addresses that last passed the checks. None: no tensors did yet, or
            one of them has died. The object is replaced as a whole, so that another thread never sees a partial change.
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
        """Remember tensors that just passed the checks: store a record of them as `self.checked`, and return it.

        The record (shape, dtype, addresses, identities) lets later calls with these tensors skip the checks.
        """
        addresses = list(map(_data_ptr, tensors))
        begin, end = min(addresses), max(addresses) + tensors[0].nbytes
        this = weakref.ref(self)
        alive = tuple(weakref.ref(tensor, lambda _: _forget(this)) for tensor in tensors)
        self.checked = checked = _Checked(
            tensors[0].shape, tensors[0].dtype, addresses.index(begin), begin, end, list(map(id, tensors)), alive
        )
        return checked

    def use(self) -> None:
        """Keep the table's memory until the work of the current stream is done; forever if the work is captured."""
        if gpus.is_capturing():
            _kept_for_graphs[self.address] = (self.values,)
        stream = gpus.raw_stream(self.index)
        if stream not in self.streams:
            self.streams.add(stream)
            self.values.record_stream(torch.cuda.current_stream(self.index))


def _forget(table: weakref.ref[Table]) -> None:
    """Set a table's `checked` to None: one of the checked tensors has died, so its memory may hold anything now."""
    if (found := table()) is not None:
        found.checked = None


class ExpertList:
    """A list of experts' tensors that passed the checks, with its table. A call has it in place of a packed tensor.

    Attributes:
        shape: ("list", E, *shape of one expert). It never equals a packed tensor's shape, so no plan serves both.
        dtype: the dtype of all experts.
        device, index: the device and its index.
        tensors: the experts.
        lowest: for weights and gradients, the expert at the lowest address as [1, N, K], from which the table's offsets
            count. None for biases.
        address: the address of the table.
        begin, end: addresses between which all experts lie.
        mark: a number that no other list of addresses has. It serves as `data_ptr`, to recognise known addresses.
        table: the table; holding it here keeps its memory until the call's kernels are enqueued.
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
        """Return True, since all experts passed this check."""
        return True

    @property
    def requires_grad(self) -> bool:
        """True if any expert requires a gradient."""
        return True in [tensor.requires_grad for tensor in self.tensors]

    def get_device(self) -> int:
        """Return the device's index."""
        return self.index

    def data_ptr(self) -> int:
        """Return the list's mark, which identifies its addresses as the address of a packed tensor would."""
        return self.mark


def with_kept_table(kind: str, tensors: Sequence[Tensor]) -> Any:
    """Replace a list by an ExpertList if its table of addresses is kept and its tensors passed the checks before.

    Each call runs this function, so it must be fast.

    Args:
        kind: "weight", "bias" or "gradient".
        tensors: the list.

    Returns:
        The ExpertList, ready for the current stream; or `tensors` itself, if the list is new or must be checked again.
    """
    first = tensors[0]
    if first.__class__ not in gpus.PLAIN_TENSORS:  # a fake tensor has no address
        return tensors
    table = _tables.get(_key(kind, tensors))
    checked = None if table is None else table.checked
    if table is None or checked is None or not checked.fits(first):
        return tensors
    if checked.ids != list(map(id, tensors)) and not all(map(checked.fits, tensors)):  # other views of the same memory
        return tensors
    table.use()
    return ExpertList(kind, tensors, table, checked)


def enter(kind: str, tensors: Sequence[Tensor]) -> ExpertList:
    """Make an ExpertList of a list that was just checked, with a kept or new table, ready for the current stream.

    Args:
        kind: "weight", "bias" or "gradient".
        tensors: the list.

    Raises:
        CaptureError: a table must be made under graph capture, and pinned memory cannot be allocated there.
    """
    table = _table(_key(kind, tensors), tensors[0].device)
    return ExpertList(kind, tensors, table, table.note(tensors))


def _key(kind: str, tensors: Sequence[Tensor]) -> Key:
    return kind, tensors[0].get_device(), tuple(map(_data_ptr, tensors))


def _table(key: Key, device: torch.device) -> Table:
    """Return the table of these addresses, kept from an earlier call or made now, ready for the current stream."""
    if table := _tables.get(key):
        table.use()
        return table
    kind, _, addresses = key
    base, unit = (0, 1) if kind == "bias" else (min(addresses), UNIT_BYTES)
    values = [(address - base) // unit for address in addresses]
    if gpus.is_capturing():
        return _captured_table(values, device)
    # A blocking copy: once it is done, streams other than this one may read the table too.
    made = Table(gpus.on_own_thread(lambda: torch.tensor(values, dtype=torch.int64, device="cpu").to(device), device))
    with _lock:
        table = _tables.get(key)  # another thread may have been faster
        if table is None:
            while len(_tables) >= MAX_TABLES:
                del _tables[next(iter(_tables))]
            table = _tables[key] = made
    table.use()
    return table


def _captured_table(values: list[int], device: torch.device) -> Table:
    """Make a table in the memory of the graph being captured. Replays fill it from host memory that is never freed."""
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
