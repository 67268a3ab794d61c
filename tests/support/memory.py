"""Memory of the CPU by address, as functions of a GPU that is played by it read and write."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from cute_kernels.specs import PARAM_FORMS

FORMS = {code: getattr(torch, name) for name, code in PARAM_FORMS.items()}


def memory(address: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """The memory itself, to be written."""
    assert address and address % dtype.itemsize == 0
    whole = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(whole, dtype=dtype).view(shape)


def optional(address: int, *shape: int, dtype: torch.dtype) -> Tensor | None:
    """The same; None at 0."""
    return memory(address, *shape, dtype=dtype) if address else None


def read(address: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return memory(address, *shape, dtype=dtype).clone()


def dtype_in(forms: int, place: int) -> torch.dtype:
    """Of the parameter at a place of `forms`."""
    return FORMS[forms >> 2 * place & 3]
