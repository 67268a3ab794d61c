"""Access to CPU memory by address, for the fake GPU's functions."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from cute_kernels.specs import PARAM_FORMS

FORMS = {code: getattr(torch, name) for name, code in PARAM_FORMS.items()}


def memory(address: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Return the memory at an address as a writable tensor of this shape and dtype; nothing is copied."""
    assert address and address % dtype.itemsize == 0
    whole = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(whole, dtype=dtype).view(shape)


def optional(address: int, *shape: int, dtype: torch.dtype) -> Tensor | None:
    """Return the memory at an address as in `memory`; None for address 0."""
    return memory(address, *shape, dtype=dtype) if address else None


def read(address: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return memory(address, *shape, dtype=dtype).clone()


def dtype_in(forms: int, place: int) -> torch.dtype:
    """Return the dtype of parameter number `place` in `forms`, which packs two bits for each parameter."""
    return FORMS[forms >> 2 * place & 3]
