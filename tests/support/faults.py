"""Injection of faults at every place where the host path allocates memory or launches.

A first run counts the places; each later run fails at one of them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from glulam.choose import kernels
from glulam.choose.kernels import Kernel
from glulam.formats.prepared import PREPARED
from glulam.host import device, experts, tickets, workspace
from glulam.host.plans import forget_plans


def _storages(value: Any) -> set[int]:
    tensors = [one for one in pytree.tree_leaves(value) if isinstance(one, Tensor)]
    return {one.untyped_storage()._cdata for one in tensors if not one.is_sparse}


PACKAGE = "/glulam/"
"""Part of the path of every file of the library, by which a stack frame is recognised as library code."""


def _line() -> str:
    """Return the line of the library that is running; "" if only test code is running."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if PACKAGE in name or name.startswith("<glulam"):
            return f"{name.partition(' #')[0]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class Memory(TorchFunctionMode):
    """Counts calls of torch that return new memory; the call of number `fail_at` raises instead.

    Attributes:
        at: by line of the library, the number of the first such call there.
    """

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.calls, self.fail_at, self.has_failed = 0, fail_at, False
        self.at: dict[str, int] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number, self.calls = self.calls, self.calls + 1
        if number == self.fail_at and not self.has_failed:
            self.has_failed = True
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        made = function(*args, **(kwargs or {}))
        is_new = isinstance(made, (Tensor, tuple, list)) and _storages(made) - _storages((args, kwargs))
        if is_new and (line := _line()):
            self.at.setdefault(line, number)
        return made


class Launches:
    """Counts launches; the launch of number `fail_at` raises instead of running."""

    def __init__(self, fail_at: int | None = None, error: Exception | None = None) -> None:
        self.count, self.fail_at = 0, fail_at
        self.error = error or RuntimeError("CUDA error: unspecified launch failure")

    @contextlib.contextmanager
    def installed(self) -> Iterator[Launches]:
        find = kernels.find

        def found(spec: Any) -> Kernel:
            kernel = find(spec)

            def launch(*arguments: Any) -> None:
                number, self.count = self.count, self.count + 1
                if number == self.fail_at:
                    raise self.error
                with torch._C.DisableTorchFunction():  # torch calls of the fake GPU are not counted
                    kernel.function(*arguments)

            return kernel._replace(function=launch)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "find", found)
            forget_plans()
            yield self
        forget_plans()


@contextlib.contextmanager
def inline() -> Iterator[None]:
    """Context in which kept memory is allocated on the calling thread, so that `Memory` counts it, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "on_own_thread", lambda make, device: make())
        yield


def forget_everything() -> None:
    """Clear all caches, as in a process that has not called the library yet."""
    forget_plans()
    workspace.forget()
    tickets.forget()
    PREPARED.clear()
    experts._tables.clear()


def places(call: Callable[[], Any], is_warm: bool = False) -> tuple[list[int], int]:
    """Return the numbers of the torch calls in which `call` allocates memory, and its number of launches.

    Args:
        is_warm: count in the second run of the call.
    """
    with Launches().installed() as launches, inline():
        forget_everything()
        if is_warm:
            call()
        launches.count = 0
        with Memory() as memory:
            call()
    return list(memory.at.values()), launches.count
