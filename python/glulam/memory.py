"""Looks at the memory of arguments, where `signature` reads their metadata: what kernels would misread or overwrite.

Fake tensors have no memory: callers come here with real ones, or the look passes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from . import device as gpus
from .errors import GradientNotSupported
from .experts import ExpertList, GateUp

ALIGNMENT_BYTES = 16
LOWEST_ADDRESS = 2**32
"""No memory of a GPU or of a 64-bit process lies below. A tensor whose storage was freed points to its offset there."""


def tensors_of(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """The tensors of an argument with the names that errors give them."""
    if isinstance(value, Tensor):
        return [(name, value)]
    if isinstance(value, GateUp):
        return [pair for part, one in value._asdict().items() for pair in tensors_of(f"{name}.{part}", one)]
    if isinstance(value, ExpertList):
        value = value.tensors
    if isinstance(value, (list, tuple)):
        return [(f"{name}[{i}]", tensor) for i, tensor in enumerate(value) if isinstance(tensor, Tensor)]
    return []


def is_transformed(*tensors: Any) -> bool:
    """Whether a tensor belongs to a transform of torch.func, or has a tangent of forward-mode AD."""
    if forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active():
        return False
    given = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    return any(is_functorch_wrapped_tensor(t) or forward_ad.unpack_dual(t).tangent is not None for t in given)


def check_plain(op: str, name: str, tensor: Tensor) -> None:
    """Numbers in memory, as they are: no transform of torch's that a kernel would not see. Tensors without memory, and
    subclasses, pass: they are the business of torch's dispatcher.

    Raises:
        GradientNotSupported: a tensor of a torch.func transform, or one with a tangent of forward-mode AD.
        TypeError: a sparse or nested tensor.
        ValueError: a lazy negation, conjugation or zero; a storage that was freed, or is too small.
    """
    if is_dynamo_compiling() or gpus.is_traced(tensor):
        return
    if is_functorch_wrapped_tensor(tensor):
        raise GradientNotSupported(
            f"{op}: {name} belongs to a transform of torch.func (grad, vjp, jvp, vmap), which {op} does not support; "
            "use torch.autograd (backward, grad) and a loop outside of the transform"
        )
    if forward_ad.unpack_dual(tensor).tangent is not None:
        raise GradientNotSupported(
            f"{op}: {name} has a tangent of forward-mode AD, which {op} does not support; use torch.autograd "
            f"(backward, grad), or give {name} without it, as torch.autograd.forward_ad.unpack_dual({name}).primal"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError(f"{op}: {name} is {'nested' if tensor.is_nested else tensor.layout}; give a dense tensor")
    if tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor():
        lazy = "negation" if tensor.is_neg() else "conjugate" if tensor.is_conj() else "zero"
        remedy = {"negation": "resolve_neg", "conjugate": "resolve_conj"}.get(lazy, "clone")
        raise ValueError(f"{op}: {name} is a lazy {lazy}, whose memory holds other numbers; give {name}.{remedy}()")
    held, needed = tensor.untyped_storage().nbytes(), extent(tensor)
    if needed and held < tensor.storage_offset() * tensor.element_size() + needed:
        raise ValueError(
            f"{op}: {name} needs {needed} bytes of a storage that has {held}: it was freed, as FSDP does with "
            "parameters outside of their module's forward and backward; gather or allocate it again first"
        )


def check_alignment(op: str, name: str, tensor: Tensor) -> None:
    """What TMA asks of a base address."""
    if address := tensor.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(
            f"{op}: {name} starts {address} bytes after a multiple of {ALIGNMENT_BYTES}; it must start at one, so "
            "clone() it, or cut the view elsewhere"
        )


def extent(matrix: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if matrix.is_contiguous():
        return matrix.nbytes
    last = sum((size - 1) * stride for size, stride in zip(matrix.shape, matrix.stride(), strict=True))
    return (last + 1) * matrix.element_size()


def check_no_overlap(op: str, name: str, out: Tensor, other_name: str, other: Tensor) -> None:
    """`out` shares no byte with an input. Two column ranges of one buffer do not overlap, though they interleave."""
    distance = other.data_ptr() - out.data_ptr()
    if distance >= extent(out) or -distance >= extent(other):
        return
    pitch = out.stride(0) * out.element_size()
    if other.dim() == out.dim() == 2 and other.stride(0) == out.stride(0):
        offset = distance % pitch
        if offset >= out.shape[1] * out.element_size() and offset + other.shape[1] * other.element_size() <= pitch:
            return
    raise ValueError(f"{op}: {name} overlaps {other_name} in memory; give a buffer of its own")


def check_disjoint(op: str, tensors: Sequence[Tensor]) -> None:
    """Gradient buffers of experts, dense, none of which shares a byte with another."""
    if any(gpus.is_traced(tensor) for tensor in tensors):
        return
    order = sorted(range(len(tensors)), key=lambda index: tensors[index].data_ptr())
    for low, high in zip(order, order[1:], strict=False):
        if tensors[high].data_ptr() - tensors[low].data_ptr() < extent(tensors[low]):
            raise ValueError(f"{op}: out[{high}] overlaps out[{low}] in memory; give each expert a buffer of its own")
