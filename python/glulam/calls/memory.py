"""Checks of the memory of arguments: alignment, overlap, freed storages, lazy values. `checks` reads the metadata.

Fake tensors have no memory: callers pass only real tensors, or the check skips fake ones.

A plan (a kept launch, see `launch`) serves calls of equal metadata. Metadata is checked once, but addresses are checked
whenever they are new (`check_unseen`). Allocators return the same addresses again and again: finding them in a set
takes 0.1 us, checking all tensors 2 us.

In signatures, `op` is the operator's name and `name` the argument's name, both for errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from ..errors import GradientNotSupported
from ..host import device as gpus
from ..host.experts import ExpertList, GateUp

ALIGNMENT_BYTES = 16
LOWEST_ADDRESS = 2**32
"""Memory of a GPU or of a 64-bit process lies above this address. A lower data_ptr shows that a tensor's storage was
freed: it is only the tensor's offset.
"""


def tensors_of(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """Return (name in errors, tensor) for each tensor of an argument: a tensor, a list, an ExpertList or a GateUp."""
    if isinstance(value, Tensor):
        return [(name, value)]
    if isinstance(value, GateUp):
        return [pair for part, one in value._asdict().items() for pair in tensors_of(f"{name}.{part}", one)]
    if isinstance(value, ExpertList):
        value = value.tensors
    if isinstance(value, (list, tuple)):
        return [(f"{name}[{i}]", tensor) for i, tensor in enumerate(value) if isinstance(tensor, Tensor)]
    return []


def readable(pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield all experts of `pieces`, tensors [e, N, K], in order, as tensors [e, N, K] that a kernel can read.

    A contiguous and aligned piece is yielded as it is. From other pieces each expert is yielded alone, as a copy if its
    address is misaligned or its strides are wrong. So at most one expert is copied at a time.
    """
    for piece in pieces:
        if piece.is_contiguous() and piece.data_ptr() % ALIGNMENT_BYTES == 0:
            yield piece
        elif len(piece) > 1:
            yield from readable(piece.split(1))
        else:
            yield piece.clone(memory_format=torch.contiguous_format)


def is_transformed(*tensors: Any) -> bool:
    """Return True if a tensor belongs to a transform of torch.func, or has a tangent of forward-mode AD."""
    if forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active():
        return False
    given = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    return any(is_functorch_wrapped_tensor(t) or forward_ad.unpack_dual(t).tangent is not None for t in given)


def check_dense(op: str, name: str, tensor: Tensor) -> None:
    """Raise TypeError if a tensor is sparse or nested."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError(f"{op}: {name} is {'nested' if tensor.is_nested else tensor.layout}; give a dense tensor")


def check_plain(op: str, name: str, tensor: Tensor) -> None:
    """Check that a tensor's memory holds its values. Lazy values and torch.func transforms would be lost in a kernel.

    Tensors without memory, and subclasses, pass: torch's dispatcher handles them.

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
    check_dense(op, name, tensor)
    if tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor():
        lazy = "negation" if tensor.is_neg() else "conjugate" if tensor.is_conj() else "zero"
        remedy = {"negation": "resolve_neg", "conjugate": "resolve_conj"}.get(lazy, "clone")
        raise ValueError(f"{op}: {name} is a lazy {lazy}, whose memory holds other numbers; give {name}.{remedy}()")
    if not is_in_storage(tensor):
        held = tensor.untyped_storage().nbytes()
        raise ValueError(
            f"{op}: {name} needs {extent(tensor)} bytes of a storage that has {held}: it was freed or cut short, as "
            "FSDP does with parameters outside of their module's forward and backward; gather it or allocate it first"
        )


def is_in_storage(tensor: Tensor) -> bool:
    """Return True if a tensor's storage, which may have been resized, still has all of the tensor's bytes."""
    end = tensor.storage_offset() * tensor.element_size() + extent(tensor)
    return not tensor.numel() or tensor.untyped_storage().nbytes() >= end


def check_alignment(op: str, name: str, tensor: Tensor) -> None:
    """Check that a tensor starts at a multiple of 16 bytes, as TMA needs."""
    if address := tensor.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(
            f"{op}: {name} starts {address} bytes after a multiple of {ALIGNMENT_BYTES}; it must start at one, so "
            "clone() it, or cut the view elsewhere"
        )


def extent(matrix: Tensor) -> int:
    """Return the number of bytes from a tensor's first element to the end of its last element."""
    if matrix.is_contiguous():
        return matrix.nbytes
    last = sum((size - 1) * stride for size, stride in zip(matrix.shape, matrix.stride(), strict=True))
    return (last + 1) * matrix.element_size()


def check_no_overlap(op: str, name: str, out: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError if `out` shares a byte with `other`, the input named `other_name`.

    Two disjoint column ranges of one buffer pass: they interleave, but do not overlap.
    """
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
    """Raise ValueError if two experts' gradient buffers, which are dense, share a byte."""
    if any(gpus.is_traced(tensor) for tensor in tensors):
        return
    order = sorted(range(len(tensors)), key=lambda index: tensors[index].data_ptr())
    for low, high in zip(order, order[1:], strict=False):
        if tensors[high].data_ptr() - tensors[low].data_ptr() < extent(tensors[low]):
            raise ValueError(f"{op}: out[{high}] overlaps out[{low}] in memory; give each expert a buffer of its own")


SPREAD = (ExpertList, GateUp)
"""Classes of arguments that hold several tensors at separate addresses."""


class FreedStorage(RuntimeError):
    """Raised when a new address shows that the storage of an argument was freed or is too small.

    Callers catch it as one of ARGUMENT_ERRORS, and call `Arguments.check_after_failure`, which raises a ValueError that
    names the tensor.
    """


MAX_SEEN = 1024
"""Number of address tuples that a plan remembers; after that many it forgets all. A tuple takes about 0.3 KiB."""


def is_near(
    op: str, read: Sequence[int], extents: Sequence[int], out: int = 0, out_extent: int = 0, lists: Sequence[Any] = ()
) -> bool:
    """Return True if an output may overlap an argument that the call reads: a fast test of address ranges.

    Strided tensors may interleave without overlap; callers then make the exact test (`check_overlaps`).

    Args:
        op: the operator, for errors.
        read: the address of each argument that is read.
        extents: the bytes of each of these arguments; 0 if it is absent, empty or an ExpertList.
        out, out_extent: the output's address and bytes; 0: there is no output, only check that arguments have memory.
        lists: arguments that may be ExpertLists or GateUps.

    Raises:
        FreedStorage: an argument, or the output, has no memory.
    """
    near, freed = False, out_extent > 0 and out < LOWEST_ADDRESS
    for begin, extent in zip(read, extents, strict=True):
        if extent:
            freed |= begin < LOWEST_ADDRESS
            near |= begin - out_extent < out < begin + extent
    for one in lists:
        if one.__class__ in SPREAD:
            freed |= one.begin < LOWEST_ADDRESS
            near |= one.begin - out_extent < out < one.end
    if freed:
        raise FreedStorage(f"{op}: the storage of an argument was freed")
    return near


def check_unseen(plan: Any, at: tuple[int, ...], out: Sequence[Any], read: Mapping[str, Any]) -> None:
    """Check tensors at new addresses: storages hold all their tensors, and no output overlaps an argument.

    If all is well, the addresses are remembered in `plan.seen`, and the plan skips this check for exactly these
    addresses from then on. A storage that is resized moves, so its tensors are checked again. Tensors of a list are not
    checked here, but when the list's table is made, or when they are prepared.

    Args:
        plan: a Plan, or an object with `op`; `extents`, the bytes of each argument that is read (`extent`), 0 if it is
            absent, empty or an ExpertList; `out_extents`, the bytes of given outputs; and `seen`, a set.
        at: addresses of the arguments that are read, in the order of `extents`, then of the outputs; for an ExpertList
            its mark, the number that identifies it.
        out: outputs that the caller gave.
        read: arguments that are read, by their names in errors.

    Raises:
        FreedStorage: a storage is freed or too small.
        ValueError: an output overlaps an argument.
    """
    begins = at[: len(plan.extents)]
    lists = [value for value in read.values() if value.__class__ in SPREAD]
    is_near(plan.op, begins, plan.extents, lists=lists)
    if not _are_in_storages(plan, out, read):
        raise FreedStorage(f"{plan.op}: the storage of an argument was cut short")
    for index, (one, extent) in enumerate(zip(out, plan.out_extents, strict=True)):
        begin, size = (one.begin, one.end - one.begin) if one.__class__ is ExpertList else (one.data_ptr(), extent)
        if is_near(plan.op, begins, plan.extents, begin, size, lists):
            check_overlaps(plan.op, "out" if len(out) == 1 else f"out[{index}]", one, read)
    if len(plan.seen) >= MAX_SEEN:
        plan.seen.clear()
    plan.seen.add(at)


def _are_in_storages(plan: Any, out: Sequence[Any], read: Mapping[str, Any]) -> bool:
    """Return True if each given tensor lies entirely in its storage, which may have been resized.

    This is `is_in_storage` with the extents that the plan knows already, which takes only 0.3 us a tensor.
    """
    given = [value for value in read.values() if value.__class__ not in (list, tuple)]
    for value, extent in zip((*given, *out), (*plan.extents, *plan.out_extents), strict=True):
        if extent and value.untyped_storage().nbytes() < value.storage_offset() * value.itemsize + extent:
            return False
        if value.__class__ is GateUp and not all(map(is_in_storage, value)):
            return False
    return True


def check_overlaps(op: str, name: str, out: Any, read: Mapping[str, Any]) -> None:
    """Raise ValueError, naming both tensors, if the output `out` shares memory with an argument that is read."""
    for label, tensor in tensors_of(name, out):
        for other_name, other in read.items():
            for other_label, part in tensors_of(other_name, other):
                check_no_overlap(op, label, tensor, other_label, part)
