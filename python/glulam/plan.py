"""What no metadata tells of a call: where its tensors lie.

A plan serves calls of equal metadata (`plans`), which were checked once. Addresses are looked at whenever they are new:
allocators give the same ones again and again, and a look at a set takes 0.1 us, at all tensors 1 us and more.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .experts import ExpertList, GateUp
from .signature import ALIGNMENT_ELEMENTS, LOWEST_ADDRESS, check_no_overlap, tensors_of

ENV_CHECK = "GLULAM_CHECK"


def checking() -> bool:
    """Whether group sizes are to be read back and checked; asked when a plan is made, and then for every call."""
    return os.environ.get(ENV_CHECK, "0") not in ("", "0")


SPREAD = (ExpertList, GateUp)
"""What is several tensors, each with an address of its own."""


class FreedStorage(RuntimeError):
    """A tensor has no memory; the slow path says which."""


MAX_APART = 1024
"""Tuples of addresses that a plan remembers; one takes about 0.3 KiB."""


def is_near(
    op: str, read: Sequence[int], extents: Sequence[int], out: int = 0, out_extent: int = 0, lists: Sequence[Any] = ()
) -> bool:
    """Whether an output of `out_extent` bytes at address `out` may overlap what a call reads.

    Args:
        read, extents: each argument's address, and its bytes; 0 of one that is absent, empty or an ExpertList.
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


def check_apart(plan: Any, at: tuple[int, ...], out: Sequence[Any], read: Mapping[str, Any]) -> None:
    """Of addresses that a plan has not seen: all are memory, and no output overlaps an argument.

    Args:
        plan: has `op`; `extents`, for each argument that is read the bytes from its first element to behind its last, 0
            of one that is absent, empty or an ExpertList; `out_extents`, of given outputs; and `apart`, a set that
            takes `at`.
        at: addresses of what is read, in the order of `extents`, and of outputs; of an ExpertList its mark.
        out: given outputs. read: by the names that errors give them.

    Raises:
        FreedStorage, ValueError: they are not.
    """
    begins = at[: len(plan.extents)]
    lists = [value for value in read.values() if value.__class__ in SPREAD]
    is_near(plan.op, begins, plan.extents, lists=lists)
    for index, (one, extent) in enumerate(zip(out, plan.out_extents, strict=True)):
        begin, size = (one.begin, one.end - one.begin) if one.__class__ is ExpertList else (one.data_ptr(), extent)
        if is_near(plan.op, begins, plan.extents, begin, size, lists):
            check_overlaps(plan.op, "out" if len(out) == 1 else f"out[{index}]", one, read)
    if len(plan.apart) >= MAX_APART:
        plan.apart.clear()
    plan.apart.add(at)


def check_overlaps(op: str, name: str, out: Any, read: Mapping[str, Any]) -> None:
    """Raises ValueError, naming both, where an output shares memory with what is read."""
    for label, tensor in tensors_of(name, out):
        for other_name, other in read.items():
            for other_label, part in tensors_of(other_name, other):
                check_no_overlap(op, label, tensor, other_label, part)


def launch_nothing(*_: Any) -> None:
    """The function of a plan for T = 0."""


def aligned_row(matrix: Tensor) -> Tensor:
    """A matrix of which a single row has a stride that kernels accept: torch leaves that arbitrary."""
    return matrix if matrix.stride(0) % ALIGNMENT_ELEMENTS == 0 else matrix.view(-1).view(1, -1)
