"""Memory of a call, by torch's allocator."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(call: Callable[[], object], forget: Callable[[], None]) -> int:
    """Return how far a call raises the memory allocated before it, results and gradients included.

    Args:
        forget: drops gradients, before and after.
    """
    forget()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    forget()
    return torch.cuda.max_memory_allocated() - before
