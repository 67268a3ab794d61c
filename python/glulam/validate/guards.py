"""Canaries: all memory that a call allocates on the GPU lies between bytes that nobody may write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..host import device as gpus

CANARY = 0xFF
"""The value of every canary byte: together a NaN in each floating dtype, and -1 as an integer."""
BESIDE = 4096
"""Canary bytes before and after each tensor; a multiple of every alignment that kernels need."""
_MAKERS: tuple[tuple[Any, str], ...] = ((Tensor, "new_empty"), (torch, "empty"), (torch, "empty_like"))


class Guards:
    """Context in which new memory on the GPU is filled with canaries and has canaries on both sides.

    In it torch's functions that make such memory are replaced for the whole process: a mode of torch would not see what
    autograd allocates in a backward.
    """

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, int]] = []
        self._replaced: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Guards:
        for owner, name in _MAKERS:
            self._replaced.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, self._guarding(getattr(owner, name)))
        return self

    def __exit__(self, *_: object) -> None:
        while self._replaced:
            owner, name, own = self._replaced.pop()
            if own is None:  # inherited
                delattr(owner, name)
            else:
                setattr(owner, name, own)

    def _guarding(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def guarding(*args: Any, **kwargs: Any) -> Tensor:
            made = make(*args, **kwargs)
            return self._guarded(made) if made.device.type == gpus.KERNEL_DEVICE else made

        return guarding

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
