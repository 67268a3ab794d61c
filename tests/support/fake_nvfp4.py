"""Reads NVFP4 weights from the memory of the fake GPU (`support.fake_gpu`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import mxfp4, nvfp4
from .memory import read


def words(c: Any) -> list[Tensor]:
    """Return the values of a launch's weights.

    Elements are stored as words of eight, with an E4M3 scale for 16 elements, and global scales.
    """
    experts, rows, count = c.w.shape
    assert c.w_scale % 2 == 0
    scales = read(c.w_scale, experts, rows, count // 2, dtype=torch.uint8)
    shape = ((1,), (experts,), (experts, 2))[c.w_global_count]
    factors = read(c.w_global_scale, *shape, dtype=torch.float32)
    if not c.w_global_count:
        factors = factors[0]
    return list(nvfp4.values(mxfp4.bytes_of_words(c.w), scales, factors))
