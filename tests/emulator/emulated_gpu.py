"""A GPU that runs device code on the CPU: operators called with CPU tensors run the PTX of the shipped functions.

The host path, its checks and records come from `support.fake_gpu`; the functions that it finds come from `launch`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import operator
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import fake_gpu
from support.fake_gpu import FakeGpu, bound, exported

from cute_kernels.chains import signature_of, stages_of
from cute_kernels.specs import Spec
from glulam.choose import kernels
from glulam.choose.kernels import Kernel, forget_choices
from glulam.host import device, tickets

from .launch import NUM_SMS, Emulator
from .memory import Memory

NAME = "emulated"
_no_collection = threading.Lock()


def live_storages() -> dict[int, Any]:
    """Return the storage of every live CPU tensor, by address: the memory that a kernel may access now."""
    tensors = [one for one in (reference() for reference in _early_tensors()) if one is not None]
    tensors += _young_tensors()
    found: dict[int, Any] = {}
    for one in tensors:
        if one.device.type == "cpu" and one.layout is torch.strided:
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage
    found.pop(0, None)
    return found


@functools.cache
def _early_tensors() -> list[weakref.ref]:
    """Return weak references to all tensors that exist now, and freeze all present objects in the garbage collector.

    Imported modules have about 500,000 objects; searching them again for each launch would take 0.15 s. No other thread
    may create tensors meanwhile: a tensor made between the list and the freeze would be in neither.
    """
    gc.collect()
    tensors = [weakref.ref(each) for each in _young_tensors()]
    gc.freeze()
    return tensors


def _young_tensors() -> list[torch.Tensor]:
    """Return the tensors that the garbage collector tracks, in one step that no other thread can interrupt.

    No reference to another thread's object may remain: a thread that is building a tuple fails if somebody else holds a
    reference to the tuple when it continues. So the last of these iterators empties the list of all objects, which also
    contains the iterators and would outlive this call.
    """

    def lazily() -> Iterator[torch.Tensor]:
        flat = itertools.chain.from_iterable
        objects, last, *others = itertools.tee(map(gc.get_objects, (None,)), 2 + len(device.PLAIN_TENSORS))
        # Not by a set: a metaclass may hash in Python.
        are = [
            map(operator.is_, map(type, flat(each)), itertools.repeat(kind))
            for each, kind in zip(others, device.PLAIN_TENSORS, strict=True)
        ]
        return itertools.compress(itertools.chain(flat(objects), map(list.clear, last)), map(operator.or_, *are))

    with _no_collection:  # a thread that ends here would otherwise switch the collector on under another one
        gc.disable()
        try:
            return list(lazily())
        finally:
            gc.enable()


@dataclasses.dataclass
class EmulatedGpu:
    """A fake GPU that records the host path, and the emulator that runs its kernels."""

    fake: FakeGpu
    emulator: Emulator

    @property
    def called(self) -> set[str]:
        """Return the names of the functions that were called, and of the stages that they launched."""
        return {stage.name for spec in self.fake.specs for stage in (spec, *stages_of(spec))}

    def find(self, spec: Spec) -> Kernel:
        """Return the emulated function of a spec; replaces `kernels.find`."""
        self.fake.specs.append(spec)
        check, signature = exported(spec, check_only=True), signature_of(spec)

        def launch(*arguments: Any) -> None:
            check(*arguments)  # all arguments first, as a compiled function does
            named = bound(signature, arguments)
            self.fake.launches.append(named)
            memory = Memory()  # for this call alone: a tensor that was freed too early is a fault
            for address, storage in live_storages().items():
                memory.allow(address, storage.nbytes(), "a tensor")
            with torch.device("cpu"):  # whatever the caller's default is
                self.emulator.run(spec, named, memory)

        return Kernel(launch, "shipped")


@contextlib.contextmanager
def installed(
    arch: str, num_sms: int = NUM_SMS, seed: int = 0, patience_s: float = 0.0, check_races: bool = False
) -> Iterator[EmulatedGpu]:
    """Context in which CPU tensors are on an emulated GPU. No kernels are preferred.

    Args:
        patience_s, check_races: see `Emulator`; patience_s is for ranks that are threads.
    """
    _early_tensors()  # before ranks are threads
    with pytest.MonkeyPatch.context() as patch:
        gpu = EmulatedGpu(fake_gpu.install(patch), Emulator(arch, seed, num_sms, patience_s, check_races))
        patch.setattr(fake_gpu, "SM_COUNT", num_sms)
        patch.setattr(device, "gpu", lambda index: device.Gpu(NAME, arch, num_sms))
        patch.setattr(kernels, "find", gpu.find)
        forget_choices()
        tickets.forget()  # a kernel that ended in a fault left its own as they were
        yield gpu
    forget_choices()
