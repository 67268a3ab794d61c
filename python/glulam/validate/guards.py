"""Canaries: every buffer that a call allocates on the GPU gets guard bytes on both sides, which nobody may write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..host import device as gpus

CANARY = 0xFF
"""The value of every canary byte.

Read as a number, canary bytes are a NaN in each floating dtype, and -1 as an integer.
"""
BESIDE = 4096
"""Canary bytes before and after each tensor; a multiple of every alignment that kernels need."""
_MAKERS: tuple[tuple[Any, str], ...] = ((Tensor, "new_empty"), (torch, "empty"), (torch, "empty_like"))


@contextlib.contextmanager
def of_new_memory(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Context in which each tensor that torch allocates without writing it is replaced by `change` of that tensor.

    Torch's functions are replaced for the whole process, because a torch mode would not see what autograd allocates in
    a backward.
    """

    def changed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: change(make(*args, **kwargs))

    with contextlib.ExitStack() as undo:
        for owner, name in _MAKERS:
            if name in vars(owner):
                undo.callback(setattr, owner, name, getattr(owner, name))
            else:  # inherited
                undo.callback(delattr, owner, name)
            setattr(owner, name, changed(getattr(owner, name)))
        yield


class Guards:
    """Context in which new memory on the GPU is filled with canaries and has canaries on both sides."""

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, int]] = []
        self._context = of_new_memory(self._guarded_on_gpu)

    def __enter__(self) -> Guards:
        self._context.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._context.__exit__(*raised)

    def _guarded_on_gpu(self, made: Tensor) -> Tensor:
        return self._guarded(made) if made.device.type == gpus.KERNEL_DEVICE else made

    def _guarded(self, like: Tensor) -> Tensor:
        size = like.numel() * like.element_size()
        memory = torch.full((BESIDE + size + BESIDE,), CANARY, dtype=torch.uint8, device=like.device)
        self._made.append((memory, size))
        return memory[BESIDE : BESIDE + size].view(like.dtype).view(like.shape)

    def complaint(self) -> str:
        """Return a description of bytes written beside a tensor; empty if there are none."""
        for memory, size in self._made:
            for side, part in (("before", memory[:BESIDE]), ("after", memory[BESIDE + size :])):
                if count := int((part != CANARY).sum()):
                    return f"{count} bytes {side} a result or workspace of {size} bytes were written"
        return ""


def untouched(tail: Tensor) -> bool:
    """Return True if memory allocated under guards was never written."""
    return bool((tail.contiguous().view(torch.uint8) == CANARY).all())
