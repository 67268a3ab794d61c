"""Expert weights as the kernels of a recipe read them, made from what a caller holds, once for each of its versions.

Process-wide, by where a weight lies and by its version counter, which in-place operations of torch advance (as
load_state_dict does). Views of a weight share both, so that a new view of it, as a module or torch.compile may pass at
each call, is not prepared anew. What was prepared goes once the weight's memory does.

Optimizers need not advance it: torch's fused ones do not, nor do those that copy into parameters through `.data`, as
sharded ones. So the step of any torch.optim.Optimizer makes a new version of every weight that requires a gradient.

Writes through `.data` at another time (averaged weights, weights sent by a trainer), and writes to an inference tensor,
which has no version, show in a sample: before each use outside of graphs and of training, SAMPLED elements from all
over a weight are compared with those that were prepared. On a GPU the host waits for the comparison, so for all that
the stream has queued; there only Parameters and inference tensors are compared, since other tensors are written in
ways that advance their version. After a write that leaves the sample as it was, call `refresh_weights`.

CUDA graphs. A replay runs no Python, so no version is looked at. A weight that is not trained is prepared before the
capture, and the graph goes on with that. A weight that is trained changes between replays, or within them where the
graph holds the optimizer's step. So the graph itself prepares it, into memory of its own: once for each version that
the capture sees, so that all micro-batches of a step share it. Nor do replays advance versions. So such a weight is
prepared for every call outside of graphs from then on.
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
"""Elements of a weight that are compared before it is used again."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class _Entry:
    """What was prepared of one version, in the capture `capture` or in none.

    `trains`: whether the weight was ever seen to require a gradient; `step`: `steps` as it was prepared.
    `streams`: on which it may be read; others wait for `ready`. `sample`: of the weight; None where its
    gradient was being recorded, or a graph captured.
    """

    __slots__ = (
        "capture", "index", "like", "prepared", "ready", "sample", "step", "streams", "trains", "versions",
    )  # fmt: skip
    steps: ClassVar[int] = 0
    """That optimizers took in this process."""

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
        """Compare the weight with its sample, where writes may be unseen. Call `use` before, for the current stream."""
        if self.sample is None:  # prepared in training
            return False
        return not _is_compared(tensors) or torch.equal(self.sample, sample_of(tensors))

    def use(self) -> Parts:
        """Ready for the current stream, and alive until its work is done."""
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
    """What is kept of a weight, by form: entries for eager calls, and those that the last captures made.

    `trained_by_graph`: replays may have changed it. `trains`: an entry was seen to train before its place was given to
    the next version, whose preparation may fail. `memory`: of its tensors; once that is gone, so is this.
    """

    __slots__ = ("__weakref__", "entries", "in_graphs", "memory", "trained_by_graph", "trains")

    def __init__(self, tensors: Sequence[Tensor], forget: Callable[[Any], object]) -> None:
        self.entries: dict[Form, _Entry] = {}
        self.in_graphs: dict[Form, _Entry] = {}
        self.trained_by_graph = self.trains = False
        self.memory = [weakref.ref(tensor.untyped_storage(), forget) for tensor in tensors]

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if tensors at these addresses are of the storages that were prepared: a storage that was freed
        and allocated again, as FSDP does, may lie where another one did.
        """
        return all(memory() is one.untyped_storage() for memory, one in zip(self.memory, tensors, strict=True))


class PreparedWeights:
    """See above. A weight is `Parts`: [E, N, K] or a list of E tensors [N, K] in 16 bits or float32, or data and scales
    in a format. `form`: how it is to be read.
    """

    def __init__(self) -> None:
        self._weights: dict[tuple[int, ...], _Weight] = {}
        self._kept_for_graphs: list[Parts] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many were prepared outside of graphs, one for each form."""
        return sum(len(weight.entries) for weight in list(self._weights.values()))

    def clear(self) -> None:
        """Forget all weights; what a captured graph reads stays."""
        with self._lock:
            self._weights.clear()

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Forget every weight that one of these tensors is part of."""
        addresses = set(map(Tensor.data_ptr, tensors))
        with self._lock:
            for key in list(self._weights):  # a weight whose memory goes leaves the dictionary at any time
                if not addresses.isdisjoint(key):
                    self._weights.pop(key, None)

    def find(self, form: Form, parts: Parts, trained: bool = False) -> Parts | None:
        """What was prepared of this version of a weight, ready for the current stream, and compared with its sample.

        Args:
            trained: a gradient is being recorded; the weight is not compared with its sample.
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
        """The same, prepared now where it was not.

        Args:
            trained: a gradient is being recorded, and the weight changes by it: it is not checked for what folding
                costs, which would make the host wait, and a graph that is being captured prepares it at every replay.

        Raises:
            FoldError, ValueError, TypeError: as of `prepare_mxfp8_weight`.
            CaptureError: a graph is being captured, which would prepare a weight at every replay that is not trained.
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

        prepared, sample = gpus.apart(make)
        weight.entries[form] = _Entry(tensors, prepared, weight.trains, sample=sample)
        return prepared

    def _of_graph(self, form: Form, parts: Parts) -> Parts:
        """What the graph that is being captured prepares of this version; the capture records it at its first use."""
        tensors, capture = _tensors(parts), gpus.capture_id()
        weight = self._weight(tensors)
        found = weight.in_graphs.pop(form, None)
        if found is None or found.capture != capture or not found.is_of(tensors):
            del found  # before memory is taken, so that what an older version had can serve
            found = _Entry(tensors, prepare(form, parts, report=False), capture=capture)
        weight.in_graphs[form], weight.trained_by_graph = found, True
        return found.use()

    def _weight(self, tensors: Sequence[Tensor]) -> _Weight:
        """What is kept of these, until the memory of one of them is gone, which may hold anything from then on."""
        addresses, weights = tuple(map(Tensor.data_ptr, tensors)), self._weights
        with self._lock:
            weight = weights.get(addresses)
            if weight is None or not weight.is_of(tensors):
                weight = weights[addresses] = _Weight(tensors, lambda _: weights.pop(addresses, None))
            return weight


PREPARED = PreparedWeights()
"""Of this process."""


def refresh_weights(*weights: Any) -> None:
    """Make what recipes keep of 16-bit weights anew, at the next use of each.

    Operators see almost every write to a weight by themselves: in-place operations, steps of optimizers, and, by a
    sample of the elements, writes through `.data`; on a GPU the latter of Parameters and inference tensors alone. Call
    this after a write through `.data` of a few elements, or to another tensor on a GPU. CUDA graphs that were captured
    keep the weights of their capture.

    Args:
        weights: tensors, lists of tensors, or modules, of which all parameters and buffers are meant; none: everything.

    Raises:
        TypeError: something else.
    """
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
    """Return True if writes may pass by the version counters of these tensors, or if comparing waits for nobody."""
    return any(isinstance(one, torch.nn.Parameter) or one.is_inference() or not one.is_cuda for one in tensors)


def sample_of(tensors: Sequence[Tensor]) -> Tensor:
    """The bits of SAMPLED elements, evenly spaced, of all tensors together; of tensors of several dtypes, as int32."""
    each = max(1, SAMPLED // len(tensors))
    parts = []
    for tensor in tensors:
        bits = tensor.detach().view(_BITS[tensor.itemsize]).flatten()
        step = max(1, len(bits) // each) | 1  # odd, so that it goes through all columns
        parts.append(bits[::step])
    return torch.cat([part.to(torch.int32) for part in parts] if len({p.dtype for p in parts}) > 1 else parts)


@torch.no_grad()
def prepare(form: Form, parts: Parts, report: bool) -> Parts:
    """A weight as `form` reads it. `report`: raise what folding refuses."""
    return form.made(parts, report)


def _tensors(parts: Parts) -> list[Tensor]:
    data, *others = parts
    return [*(data if isinstance(data, (list, tuple)) else [data]), *[one for one in others if one is not None]]


def _like(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return shapes and dtypes of a weight's tensors: of a list, those of the first and the last."""
    first, last = tensors[0], tensors[-1]
    return first.shape, first.dtype, last.shape, last.dtype


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_capturing(tensors: Sequence[Tensor]) -> bool:
    return runs_kernels(tensors[0]) and gpus.is_capturing()
