"""Faults at every place where the host path takes memory or launches, found by a run that counts them."""

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
"""Parts of the names of the library's files and of files that it generates."""


def _line() -> str:
    """The line of the library that is being run; "" where only a test is."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if PACKAGE in name or name.startswith("<glulam"):
            return f"{name.partition(' #')[0]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class Memory(TorchFunctionMode):
    """Counts calls of torch that return new memory; the one of a number raises instead.

    Attributes:
        at: by lines of the library, the first of those calls among all calls of torch.
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
    """Counts launches; the one of a number raises instead of running."""

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
                with torch._C.DisableTorchFunction():  # what plays the GPU takes no memory
                    kernel.function(*arguments)

            return kernel._replace(function=launch)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "find", found)
            forget_plans()
            yield self
        forget_plans()


@contextlib.contextmanager
def inline() -> Iterator[None]:
    """Let what is kept be allocated on the calling thread, whose calls of torch are counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "on_own_thread", lambda make: make())
        yield


def forget_everything() -> None:
    """Leave nothing that calls keep: as in a process that has made none."""
    forget_plans()
    workspace.forget()
    tickets.forget()
    PREPARED.clear()
    experts._tables.clear()


def places(call: Callable[[], Any], is_warm: bool = False) -> tuple[list[int], int]:
    """Return at which calls of torch a call takes memory, and how often it launches. is_warm: at its second run."""
    with Launches().installed() as launches, inline():
        forget_everything()
        if is_warm:
            call()
        launches.count = 0
        with Memory() as memory:
            call()
    return list(memory.at.values()), launches.count
