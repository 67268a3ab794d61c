"""Process-wide cache of prepared weights: weights converted (for example quantised) to the layout that kernels read.

Each version of a weight is prepared only once. The key of a version is the addresses of the weight's tensors and their
version counters (`Tensor._version`), which torch's in-place operations advance (load_state_dict is one). Views of a
weight share addresses and counters, so a new view, which a module or torch.compile may pass at each call, is not
prepared again. A prepared weight is freed when the original's memory is freed.

Three kinds of writes do not advance version counters:
  * Steps of some optimizers: torch's fused ones, and sharded ones, which copy into parameters through `.data`. So each
    step of any torch.optim.Optimizer counts as a new version of every weight that requires a gradient.
  * Other writes through `.data`: averaged weights, weights sent by a trainer.
  * Writes to an inference tensor, which has no version counter.
The last two are detected by a sample: before each use outside of graphs and of training, SAMPLED elements from all over
a weight are compared with the values that they had when the weight was prepared. On a GPU the host must wait for the
comparison, and so for all work that the stream has queued. So on a GPU only Parameters and inference tensors are
compared; other tensors are usually written in ways that advance their version. After a write that leaves the sampled
elements unchanged, call `refresh_weights`.

CUDA graphs. A replay runs no Python, so it cannot see that a weight has a new version. A weight that is not trained is
prepared before the capture, and the graph keeps using the prepared weight. A weight that is trained changes between
replays, or within a replay if the graph holds the optimizer's step. So the graph itself prepares the weight, into the
graph's memory: once for each version that the capture sees, so that all micro-batches of a step share the prepared
weight. A replay does not advance versions, either. So after such a capture every call outside of graphs prepares the
weight anew.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..calls.checks import runs_kernels
from ..errors import CaptureError
from ..host import device as gpus
from .form import Form
from .scaled import Parts

SAMPLED = 4096
"""Approximate number of elements of a weight that are compared to detect writes (see the top of this file)."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class _Entry:
    """A cache entry: the prepared copy of one version of a weight, and what identifies this version.

    Attributes:
        like: shapes and dtypes of the weight's first and last tensor.
        versions: version counters of the weight's tensors.
        prepared: the prepared copy, as Parts.
        capture: id of the CUDA graph capture that prepared the weight. None: it was prepared outside of captures.
        index: the GPU's index. None: on the CPU.
        trains: True: the weight has required a gradient in some call, so optimizer steps make new versions.
        step: value of `steps` when the weight was prepared.
        ready: event that is recorded after the preparation.
        streams: handles of the CUDA streams that may read `prepared`; any other stream first waits for `ready`.
        sample: the weight's sampled elements when it was prepared. None: it was prepared in training, or by a graph.
    """

    __slots__ = (
        "capture", "index", "like", "prepared", "ready", "sample", "step", "streams", "trains", "versions",
    )  # fmt: skip
    steps: ClassVar[int] = 0
    """Number of optimizer steps in this process."""

    def __init__(
        self, tensors: Sequence[Tensor], prepared: Parts, trains: bool = False, capture: Any = None,
        sample: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.like = _like(tensors)
        self.versions = [_version(tensor) for tensor in tensors]
        self.trains = trains or any(tensor.requires_grad for tensor in tensors)
        self.step = _Entry.steps
        self.prepared = prepared
        self.capture = capture
        self.index = prepared.data.get_device() if runs_kernels(prepared.data) else None
        self.sample = sample
        self.streams = {self._stream()}
        self.ready = torch.cuda.current_stream(prepared.data.device).record_event() if prepared.data.is_cuda else None

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        if not self.trains and any(tensor.requires_grad for tensor in tensors):
            self.trains = True
        if self.trains and self.step != _Entry.steps:
            return False
        if not all(map(Tensor.is_contiguous, tensors)) or any(map(Tensor.is_neg, tensors)):  # other views of its memory
            return False
        return self.like == _like(tensors) and self.versions == [_version(tensor) for tensor in tensors]

    def is_unchanged(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if the weight's sampled elements still have the values from when the weight was prepared.

        True also, without a comparison, if the tensors need none (`_is_compared`). False if the weight was prepared in
        training, since then no sample is stored. Call `use` first: it makes the current stream wait until the stream
        may read the stored sample.
        """
        if self.sample is None:  # prepared in training
            return False
        return not _is_compared(tensors) or torch.equal(self.sample, sample_of(tensors))

    def use(self) -> Parts:
        """Return the prepared parts, and make them safe for kernels on the current stream.

        The stream waits until the parts are written, and the allocator does not reuse the parts' memory before the
        stream has read them.
        """
        stream = self._stream()
        if stream in self.streams:
            return self.prepared
        if self.ready is not None:
            current = torch.cuda.current_stream(self.prepared.data.device)
            current.wait_event(self.ready)
            for tensor in (*self.prepared, self.sample):
                if tensor is not None:
                    tensor.record_stream(current)
        self.streams.add(stream)
        return self.prepared

    def _stream(self) -> int:
        return 0 if self.index is None else gpus.raw_stream(self.index)


def _note_step(*_: Any) -> None:
    _Entry.steps += 1


register_optimizer_step_post_hook(_note_step)


class _Weight:
    """The cache's record of one weight: its prepared copies, one for each form (`Form`, the layout for kernels).

    Attributes:
        entries: for each form, the copy that calls outside of graphs use.
        in_graphs: for each form, the copy that the last graph capture made.
        memory: weak references to the storages of the weight's tensors; when one is freed, this object is dropped.
        trained_by_graph: True: a captured graph prepares the weight, so replays may change it.
        trains: True: `_Entry.trains` of a former copy was True. It is kept here, because preparing the next version may
            fail after the former copy was removed.
    """

    __slots__ = ("__weakref__", "entries", "in_graphs", "memory", "trained_by_graph", "trains")

    def __init__(self, tensors: Sequence[Tensor], forget: Callable[[Any], object]) -> None:
        self.entries: dict[Form, _Entry] = {}
        self.in_graphs: dict[Form, _Entry] = {}
        self.trained_by_graph = self.trains = False
        self.memory = [weakref.ref(tensor.untyped_storage(), forget) for tensor in tensors]

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if these tensors lie in the same storages as the tensors for which this record was made.

        Equal addresses do not suffice: after a storage is freed, as FSDP does, another may get the same address.
        """
        return all(memory() is one.untyped_storage() for memory, one in zip(self.memory, tensors, strict=True))


class PreparedWeights:
    """The process's cache of prepared weights: weights in the layout that kernels read, by weight and form.

    A weight is passed as `Parts`: data [E, N, K], or a list of E tensors [N, K], in 16 bits or float32; or data and
    scales in a quantised format. `form` is the layout (`Form`) in which kernels will read the weight.

    Attributes:
        refreshes: number of calls of `refresh_weights`.
    """

    def __init__(self) -> None:
        self.refreshes = 0
        self._weights: dict[tuple[int, ...], _Weight] = {}
        self._kept_for_graphs: list[Parts] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of prepared copies for calls outside of graphs; a weight has one for each form."""
        return sum(len(weight.entries) for weight in list(self._weights.values()))

    def clear(self) -> None:
        """Drop all weights from the cache; prepared weights that captured graphs read stay in memory."""
        with self._lock:
            self._weights.clear()

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Drop from the cache every weight that contains one of these tensors."""
        addresses = set(map(Tensor.data_ptr, tensors))
        with self._lock:
            for key in list(self._weights):  # a weight whose memory goes leaves the dictionary at any time
                if not addresses.isdisjoint(key):
                    self._weights.pop(key, None)

    def find(self, form: Form, parts: Parts, trained: bool = False) -> Parts | None:
        """Return the cached prepared parts of this version of a weight, ready for the current stream; None: not cached.

        If the weight's sampled elements have changed (see the top of this file), the cached parts do not count.

        Args:
            form: the layout in which kernels will read the weight.
            parts: the weight's tensors, see the class.
            trained: True: a gradient is being recorded; the sampled elements are then not compared.
        """
        tensors = _tensors(parts)
        weight = self._weights.get(tuple(map(Tensor.data_ptr, tensors)))
        entry = None if weight is None else weight.entries.get(form)
        if weight is None or entry is None or weight.trained_by_graph:
            return None
        if not (weight.is_of(tensors) and entry.is_of(tensors)):
            return None
        if entry.index is None or not gpus.is_capturing():
            prepared = entry.use()
            return prepared if trained or entry.is_unchanged(tensors) else None
        if not any(kept is entry.prepared for kept in self._kept_for_graphs):
            self._kept_for_graphs.append(entry.prepared)
        return entry.prepared  # a capture begins when the device is idle, so it is ready

    def get(self, form: Form, parts: Parts, trained: bool = False) -> Parts:
        """Return the prepared parts of this version of a weight: cached ones (`find`), else prepare them now.

        Args:
            form: the layout in which kernels will read the weight.
            parts: the weight's tensors, see the class.
            trained: True: a gradient is being recorded, and training changes the weight. Then no FoldError is raised
                for a weight that folding changes too much, since the check would make the host wait. If a graph is
                being captured, the graph prepares the weight at every replay.

        Raises:
            FoldError, ValueError, TypeError: see `prepare_mxfp8_weight`.
            CaptureError: a graph is being captured, the weight is not trained, and it is not cached. The graph would
                prepare the weight again at every replay.
        """
        tensors = _tensors(parts)
        capturing = _is_capturing(tensors)
        if trained and capturing:
            return self._of_graph(form, parts)
        if found := self.find(form, parts, trained):
            return found
        if capturing:
            raise CaptureError(
                "a weight was first seen, or has changed, under CUDA graph capture, where it cannot be prepared; call "
                "the operator once with it before capturing, or pass what prepare_mxfp8_weight or prepare_ returns"
            )
        weight = self._weight(tensors)
        old = weight.entries.pop(form, None)
        weight.trains |= old is not None and old.trains
        del old  # so that its memory can serve

        def make() -> tuple[Parts, Tensor | None]:
            in_training = trained and any(tensor.requires_grad for tensor in tensors)
            is_sampled = not in_training and not tensors[0].is_meta and all(map(Tensor.is_contiguous, tensors))
            return prepare(form, parts, report=not trained), sample_of(tensors) if is_sampled else None

        prepared, sample = gpus.on_own_thread(make, tensors[0].device)
        weight.entries[form] = _Entry(tensors, prepared, weight.trains, sample=sample)
        return prepared

    def _of_graph(self, form: Form, parts: Parts) -> Parts:
        """Return prepared parts of a weight for the graph that is being captured, which prepares them at each replay.

        The first use of a version in a capture records the preparation; later uses of this version share the result.
        """
        tensors, capture = _tensors(parts), gpus.capture_id()
        weight = self._weight(tensors)
        found = weight.in_graphs.pop(form, None)
        if found is None or found.capture != capture or not found.is_of(tensors):
            del found  # before memory is taken, so that what an older version had can serve
            found = _Entry(tensors, prepare(form, parts, report=False), capture=capture)
        weight.in_graphs[form], weight.trained_by_graph = found, True
        return found.use()

    def _weight(self, tensors: Sequence[Tensor]) -> _Weight:
        """Return the record of the weight with these tensors; make a new record if there is none.

        The record is dropped when the memory of one of the tensors is freed, since other data may then get the same
        address.
        """
        addresses, weights = tuple(map(Tensor.data_ptr, tensors)), self._weights
        with self._lock:
            weight = weights.get(addresses)
            if weight is None or not weight.is_of(tensors):
                weight = weights[addresses] = _Weight(tensors, lambda _: weights.pop(addresses, None))
            return weight


PREPARED = PreparedWeights()
"""The prepared weights of this process."""


def refresh_weights(*weights: Any) -> None:
    """Drop prepared weights from the cache, so that each weight is prepared (quantised, converted) at its next use.

    Operators detect almost every write to a weight by themselves: all in-place operations, all steps of optimizers, and
    writes through `.data`. For the latter they compare a sample of the elements; on a GPU only for Parameters and
    inference tensors. So call this function after a write through `.data` that changes only a few elements, and on a
    GPU also after a write through `.data` to any other kind of tensor. CUDA graphs that were captured before keep the
    weights of their capture.

    Args:
        weights: tensors, lists of tensors, or modules, with all their parameters and buffers. No arguments: all
            weights.

    Raises:
        TypeError: an argument is something else.
    """
    PREPARED.refreshes += 1
    if not weights:
        PREPARED.clear()
    for weight in weights:
        PREPARED.forget(list(_all_tensors(weight)))


def _all_tensors(weight: Any) -> Iterator[Tensor]:
    if isinstance(weight, torch.nn.Module):
        yield from (*weight.parameters(), *weight.buffers())
    elif isinstance(weight, (list, tuple)):
        for one in weight:
            yield from _all_tensors(one)
    elif isinstance(weight, Tensor):
        yield weight
    else:
        raise TypeError(f"refresh_weights: got a {type(weight).__name__}; give tensors, lists of tensors or modules")


def _is_compared(tensors: Sequence[Tensor]) -> bool:
    """Return True if the sampled elements of a weight must be compared to detect writes.

    This is so if a tensor is a Parameter or an inference tensor, since writes may leave their version counters
    unchanged; or if a tensor is on the CPU, where a comparison needs no synchronisation.
    """
    return any(isinstance(one, torch.nn.Parameter) or one.is_inference() or not one.is_cuda for one in tensors)


def sample_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return about SAMPLED elements, evenly spaced over all tensors, as a vector of their bits.

    The bits are integers of the elements' size; int32 if the tensors have several dtypes.
    """
    each = max(1, SAMPLED // len(tensors))
    parts = []
    for tensor in tensors:
        bits = tensor.detach().view(_BITS[tensor.itemsize]).flatten()
        step = max(1, len(bits) // each) | 1  # odd, so that it goes through all columns
        parts.append(bits[::step])
    return torch.cat([part.to(torch.int32) for part in parts] if len({p.dtype for p in parts}) > 1 else parts)


class Snapshot:
    """One version of some tensors, from which a module computed a value that it keeps.

    A write is detected as by `PreparedWeights`: by the tensors themselves, their addresses and version counters, a
    sample of their elements where that is compared (`_is_compared`), and calls of `refresh_weights`.
    """

    __slots__ = ("addresses", "refreshes", "sample", "tensors", "versions")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.refreshes = list(tensors), PREPARED.refreshes
        self.addresses = _addresses(tensors)
        self.versions = [_version(tensor) for tensor in tensors]
        self.sample = sample_of(tensors) if None not in self.addresses and _is_compared(tensors) else None

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if these are the same tensors, and nothing was written to them since."""
        if any(now is not before for now, before in zip(tensors, self.tensors, strict=True)):
            return False
        now = _addresses(tensors), [_version(tensor) for tensor in tensors], PREPARED.refreshes
        if now != (self.addresses, self.versions, self.refreshes):
            return False
        return self.sample is None or _is_capturing(tensors) or torch.equal(self.sample, sample_of(tensors))


def _addresses(tensors: Sequence[Tensor]) -> list[int | None]:
    """Return the tensors' addresses; None for a tensor that is no plain one, such as a DTensor."""
    return [tensor.data_ptr() if type(tensor) in gpus.PLAIN_TENSORS else None for tensor in tensors]


@torch.no_grad()
def prepare(form: Form, parts: Parts, report: bool) -> Parts:
    """Return a weight's parts, converted to the layout of `form`.

    report: True: raise FoldError if folding (`mxfp8.fold`) would change values too much.
    """
    return form.made(parts, report)


def _tensors(parts: Parts) -> list[Tensor]:
    data, *others = parts
    return [*(data if isinstance(data, (list, tuple)) else [data]), *[one for one in others if one is not None]]


def _like(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the shapes and dtypes of a weight's first and last tensor."""
    first, last = tensors[0], tensors[-1]
    return first.shape, first.dtype, last.shape, last.dtype


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_capturing(tensors: Sequence[Tensor]) -> bool:
    return runs_kernels(tensors[0]) and gpus.is_capturing()
