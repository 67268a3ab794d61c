"""Checks of the hyper-connection operators' arguments, from metadata alone; see `glulam.signature`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels.specs import STREAM_COUNTS

from ..addressed import MAX_TOKENS
from ..signature import check_number, check_tensor, runs_kernels, shape_text

STREAM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTH_MULTIPLE = 8
"""Kernels move 16 bytes at a time. A width that 8 does not divide would misalign rows, and reading element by element
would take several times as long: better to pad C than to be slow in silence."""


def check_dtype(op: str, name: str, tensor: Tensor) -> None:
    """What kernels take; on the CPU float64, too."""
    valid = STREAM_DTYPES if runs_kernels(tensor) else (*STREAM_DTYPES, torch.float64)
    if tensor.dtype not in valid:
        raise TypeError(f"{op}: {name} is {tensor.dtype}; it must be {', '.join(map(str, valid))}, so cast it")


def check_param(op: str, name: str, value: Any, shape: tuple[int, ...], like: Tensor, why: str) -> Tensor:
    """A parameter or coefficient of `shape`, of any dtype of `check_dtype`."""
    tensor = check_tensor(op, name, value, f"a tensor {shape_text(shape)}", like, shape=shape, why=why)
    check_dtype(op, name, tensor)
    return tensor


def check_like(op: str, name: str, value: Any, shape: tuple[int, ...], like: Tensor, why: str) -> Tensor:
    """A tensor of `shape` in the dtype of `like`, on its device."""
    what = f"a tensor {shape_text(shape)}"
    return check_tensor(op, name, value, what, like, dtypes=(like.dtype,), shape=shape, why=why)


def check_count(op: str, name: str, tensor: Tensor, n: int) -> None:
    """The number of streams, n."""
    if n == 0 or (runs_kernels(tensor) and n not in STREAM_COUNTS):
        choices = ", ".join(map(str, STREAM_COUNTS))
        raise ValueError(
            f"{op}: {name} has shape {shape_text(tensor.shape)}, so {n} streams; kernels exist for n = {choices}"
        )


def check_vectors(op: str, name: str, letter: str, tensor: Tensor) -> None:
    """Columns: on a GPU whole vectors of 16 bytes."""
    width = tensor.shape[-1]
    if width == 0 or (runs_kernels(tensor) and width % WIDTH_MULTIPLE):
        raise ValueError(
            f"{op}: {name} has {letter} = {width}; it must be a positive multiple of {WIDTH_MULTIPLE} (16 bytes), so "
            "pad it with zeros"
        )


def check_streams(op: str, name: str, value: Any) -> tuple[tuple[int, ...], int, int]:
    """Streams [..., n, C]: the leading shape, n and C."""
    x = check_tensor(op, name, value, "streams [..., n, C]")
    check_dtype(op, name, x)
    if x.dim() < 2:
        raise ValueError(f"{op}: {name} has shape {shape_text(x.shape)}; give [..., n, C]")
    *lead, n, width = x.shape
    check_count(op, name, x, n)
    check_vectors(op, name, "C", x)
    if x.numel() // (n * width) >= MAX_TOKENS:
        raise ValueError(f"{op}: {name} has {x.numel() // (n * width)} tokens; at most {MAX_TOKENS - 1} are possible")
    return tuple(lead), n, width


def check_eps(op: str, eps: Any) -> None:
    check_number(op, "eps", eps)
    if not eps >= 0:
        raise ValueError(f"{op}: eps is {eps}; it keeps a divisor above zero, so give a small positive number")


def check_iters(op: str, iters: Any, limit: int | None) -> None:
    if isinstance(iters, bool) or not isinstance(iters, int):
        raise TypeError(f"{op}: iters is {iters!r}; give an integer")
    if iters < 0 or (limit is not None and iters > limit):
        most = "" if limit is None else f" and at most {limit}, whose factors fit shared memory in backward"
        raise ValueError(f"{op}: iters is {iters}; it must be 0 or more{most}")
