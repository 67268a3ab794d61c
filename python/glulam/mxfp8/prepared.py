"""Expert weights as the kernels of a recipe read them, made from what a caller holds, once for each of its versions.

Process-wide, by where a weight lies and by its version counter, which every in-place operation of torch advances (an
optimizer's step and load_state_dict do). Views of a weight share both, so that a new view of it, as a module or
torch.compile may pass at each call, is not prepared anew. What was prepared goes once the weight's memory does.

Two things a version counter does not see: what is written through `.data`, and inference tensors, which have none. Call
`clear` after either.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import device as gpus
from ..errors import CaptureError
from .fold import prepare_mxfp8_weight
from .layout import BLOCK, DATA_DTYPE, SCALE_DTYPE
from .quantize import quantize_mxfp8
from .tensor import MXFP8Tensor

SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Prepared(NamedTuple):
    """Data [E, R, C] float8_e4m3fn; scales [E, R] where they were folded, else [E, R, C/32], float8_e8m0fnu."""

    data: Tensor
    scale: Tensor


Key = tuple[bool, tuple[int, ...]]


class _Entry:
    __slots__ = ("__weakref__", "prepared", "shape", "streams", "versions")

    def __init__(self, tensors: Sequence[Tensor], prepared: Prepared) -> None:
        self.shape = tensors[0].shape
        self.versions = [_version(tensor) for tensor in tensors]
        self.prepared = prepared
        self.streams = {_stream(prepared.data)}


class PreparedWeights:
    """See above. `fold`: to one scale a row; else a scale for each 32 elements."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        self._memory: dict[Key, list[Any]] = {}
        self._kept_for_graphs: list[Prepared] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget all weights; what a captured graph reads stays."""
        with self._lock:
            self._entries.clear()
            self._memory.clear()

    def find(self, fold: bool, w: Any, scale: Tensor | None) -> Prepared:
        """What was prepared of this version of a weight, ready for the current stream; else a KeyError.

        Args:
            w: [E, N, K], or a list of E tensors [N, K]; float8_e4m3fn with `scale` [E, N, K/32].
        """
        tensors = _tensors(w, scale)
        entry = self._entries[fold, tuple([tensor.data_ptr() for tensor in tensors])]
        if entry.shape != tensors[0].shape or entry.versions != [_version(tensor) for tensor in tensors]:
            raise KeyError(fold)
        self._use(entry)
        return entry.prepared

    def get(self, fold: bool, w: Any, scale: Tensor | None) -> Prepared:
        """The same, prepared now where it was not.

        Raises:
            FoldError, ValueError, TypeError: as of `prepare_mxfp8_weight`.
            CaptureError: a graph is being captured, which would prepare the weight at every replay.
        """
        try:
            return self.find(fold, w, scale)
        except KeyError:
            pass
        tensors = _tensors(w, scale)
        if _on_gpu(tensors[0]) and gpus.is_capturing():
            raise CaptureError(
                "a weight was first seen, or has changed, under CUDA graph capture, where it cannot be prepared for "
                "MXFP8; call the operator once with it before capturing, or pass what prepare_mxfp8_weight returns"
            )
        entry = _Entry(tensors, _prepare(fold, w, scale))
        key = fold, tuple([tensor.data_ptr() for tensor in tensors])
        with self._lock:
            self._entries[key] = entry
            self._memory[key] = [weakref.ref(t.untyped_storage(), lambda _: self._forget(key)) for t in tensors]
        return entry.prepared

    def _forget(self, key: Key) -> None:
        """The memory of one of its tensors is gone, and may hold anything from now on."""
        self._entries.pop(key, None)
        self._memory.pop(key, None)

    def _use(self, entry: _Entry) -> None:
        """Keep it alive for the current stream's work, and for good where that work is being captured."""
        data, scale = entry.prepared
        if not _on_gpu(data):
            return
        if gpus.is_capturing() and not any(kept is entry.prepared for kept in self._kept_for_graphs):
            self._kept_for_graphs.append(entry.prepared)
        stream = _stream(data)
        if stream not in entry.streams:
            entry.streams.add(stream)
            for tensor in (data, scale):
                tensor.record_stream(torch.cuda.current_stream(data.device))


PREPARED = PreparedWeights()
"""Of this process."""


def _tensors(w: Any, scale: Tensor | None) -> list[Tensor]:
    tensors = list(w) if isinstance(w, (list, tuple)) else [w]
    return tensors if scale is None else [*tensors, scale]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == gpus.KERNEL_DEVICE


def _stream(tensor: Tensor) -> int:
    return gpus.raw_stream(tensor.get_device()) if _on_gpu(tensor) else 0


@torch.no_grad()
def _prepare(fold: bool, w: Any, scale: Tensor | None) -> Prepared:
    if fold:
        # What is trained changes each step: no report, so that nothing is read back, and nothing refused.
        is_trained = any(tensor.requires_grad for tensor in _tensors(w, scale))
        folded = prepare_mxfp8_weight(w if scale is None else MXFP8Tensor(w, scale), report=not is_trained)
        prepared = Prepared(folded.data, folded.scale)
    else:
        prepared = _quantized(w)
    if prepared.data.is_cuda:  # other streams may read it from now on
        torch.cuda.current_stream(prepared.data.device).synchronize()
    return prepared


def _quantized(w: Any) -> Prepared:
    """By rows, with a scale for 32, one expert after the other."""
    rows, columns = w[0].shape
    data = torch.empty(len(w), rows, columns, dtype=DATA_DTYPE, device=w[0].device)
    scale = torch.empty(len(w), rows, columns // BLOCK, dtype=SCALE_DTYPE, device=w[0].device)
    for expert, out, out_scale in zip(w, data, scale, strict=True):
        quantize_mxfp8(expert.detach(), out=MXFP8Tensor(out, out_scale))
    return Prepared(data, scale)
