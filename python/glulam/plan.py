"""Plans: what a call needs once its arguments were checked.

A plan serves calls of equal metadata (`plans`), which were checked once. What no metadata tells, the addresses, each
call looks at (`Launch.apart`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import tickets
from .experts import ExpertList, GateUp
from .kernels import Serving
from .signature import (
    ALIGNMENT_ELEMENTS,
    LOWEST_ADDRESS,
    check_alignment,
    check_no_overlap,
    check_plain,
    tensors_of,
)

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


@dataclass(frozen=True)
class Launch:
    """What every plan holds: the kernel's function and the constants of its call.

    Attributes:
        op: the operator's name, for messages.
        function: takes tensors, addresses and numbers, as its signature lists them.
        serving: finds the function for another number of rows.
        index: of the device; `only`: the process sees no other GPU.
        group_form: how to read group sizes (`groups.form`).
        draws_tickets: whether the function's kernels do, and so take `tickets`.
        sm_count: of the device, the size of the kernels' persistent grid.
        rows: T.
        extents: for each argument that is read, in the order of the call's `reads`, the bytes from its first element
            to behind its last; 0 of one that is absent, empty or an ExpertList.
        out_extents: the same of given outputs.
        apart: addresses of calls, in the order of `extents` and then of given outputs, that were looked at: all are
            memory, and no output overlaps anything. Allocators give the same ones again and again, and a look at the
            set takes 0.1 us, at the extents 1 us and more.
    """

    op: str
    function: Callable[..., Any]
    device: torch.device
    index: int
    only: bool
    dtype: torch.dtype
    group_form: int
    draws_tickets: bool
    experts: int
    sm_count: int
    serving: Serving
    rows: int
    extents: tuple[int, ...]
    out_extents: tuple[int, ...]
    apart: set[tuple[int, ...]] = field(default_factory=set, kw_only=True)

    def tickets(self) -> int:
        """The address of the counters that the call's kernels draw tickets from, or 0."""
        return tickets.counters(self.device, self.index)

    def check_apart(self, at: tuple[int, ...], *out: Any, **read: Any) -> None:
        """Of addresses `at` that are not in `apart`: all are memory, and no output overlaps an argument.

        Args:
            at: of what is read, in the order of `extents`, and of outputs, 0 for a new one; of an ExpertList its mark.
            out: the outputs; None for a new one.
            read: what is read, by the names that errors give it.

        Raises:
            FreedStorage, ValueError: they are not.
        """
        check_apart(self, at, [one for one in out if one is not None], read)


def check_apart(
    plan: Any, at: tuple[int, ...], out: Sequence[Any], read: Mapping[str, Any], aligned: tuple[str, ...] = ()
) -> None:
    """As `Launch.check_apart`, of any plan with `op`, `extents`, `out_extents` and `apart`.

    Args:
        out: given outputs.
        aligned: names of what begins at multiples of 16 bytes.
    """
    for name, value in (*read.items(), *(("out", one) for one in out)):
        for label, tensor in tensors_of(name, value) if name in aligned else ():
            check_alignment(plan.op, label, tensor)
    begins = at[: len(plan.extents)]
    lists = [value for value in read.values() if value.__class__ in SPREAD]
    try:
        is_near(plan.op, begins, plan.extents, lists=lists)
        for index, (one, extent) in enumerate(zip(out, plan.out_extents, strict=True)):
            begin, size = (one.begin, one.end - one.begin) if one.__class__ is ExpertList else (one.data_ptr(), extent)
            if is_near(plan.op, begins, plan.extents, begin, size, lists):
                check_overlaps(plan.op, "out" if len(out) == 1 else f"out[{index}]", one, read)
    except FreedStorage:
        for name, value in (*read.items(), *(("out", one) for one in out)):
            for label, tensor in tensors_of(name, value):
                check_plain(plan.op, label, tensor)  # which names it
        raise
    if len(plan.apart) >= MAX_APART:
        plan.apart.clear()
    plan.apart.add(at)


def check_overlaps(op: str, name: str, out: Any, read: Mapping[str, Any]) -> None:
    """Raises ValueError, naming both, where an output shares memory with what is read."""
    for label, tensor in tensors_of(name, out):
        for other_name, other in read.items():
            for other_label, part in tensors_of(other_name, other):
                check_no_overlap(op, label, tensor, other_label, part)


def addresses(bias: Any) -> tuple[int, int, int]:
    """A bias as the kernels take it: the address of a packed one and of a list's table, 0 for the other; and the number
    that tells where it lies, as of `Launch.check_apart`."""
    if bias.__class__ is ExpertList:
        return 0, bias.address, bias.mark
    at = 0 if bias is None else bias.data_ptr()
    return at, 0, at


def address(tensor: Tensor | None) -> int:
    """0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def launch_nothing(*_: Any) -> None:
    """The function of a plan for T = 0."""


def aligned_row(matrix: Tensor) -> Tensor:
    """A matrix of which a single row has a stride that kernels accept: torch leaves that arbitrary."""
    return matrix if matrix.stride(0) % ALIGNMENT_ELEMENTS == 0 else matrix.view(-1).view(1, -1)
