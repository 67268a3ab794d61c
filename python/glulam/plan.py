"""Plans: what a call needs once its arguments were checked, kept by what the checks depend on.

A call builds a key from the metadata that decides everything (shapes, dtypes, options), finds the plan and runs it.
The key leaves out what the kernel's own entry checks at each call on the tensors that it takes as tensors: their
dtype, device, rank, strides (no padding within an expert), base alignment and equal dimensions. It holds all there is
to know of tensors that a kernel takes as bare addresses (group sizes, biases, scales).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from . import tickets
from .experts import ExpertList
from .signature import ALIGNMENT_ELEMENTS

MAX_PLANS = 4096
"""Plans kept for each operator; a plan and its key take about 1 KiB, and each new number of rows needs one."""

ENV_CHECK = "GLULAM_CHECK"


def checking() -> bool:
    """Whether group sizes are to be read back and checked; asked when a plan is made, and then for every call."""
    return os.environ.get(ENV_CHECK, "0") not in ("", "0")


@dataclass(frozen=True)
class Launch:
    """What every plan holds: the kernel's function and the constants of its call.

    Attributes:
        op: the operator's name, for messages.
        function: takes tensors, addresses and numbers, as `cute_kernels.entry` lists them.
        index: of the device; `only`: the process sees no other GPU.
        group_form: how to read group sizes (`groups.form`).
        draws_tickets: whether the function's kernels do, and so take `tickets`.
        sm_count: of the device, the size of the kernels' persistent grid.
        rows: T.
        x_extent, out_extent: bytes from the first element of x, or of a given output, to behind its last.
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
    rows: int
    x_extent: int
    out_extent: int

    def tickets(self) -> int:
        """The address of the counters that the call's kernels draw tickets from, or 0."""
        return tickets.counters(self.device, self.index)


def bare(tensor: Any) -> tuple[Hashable, ...]:
    """The part of a key for a tensor, or a list of them, that kernels take as a bare address."""
    return tensor.shape, tensor.dtype, tensor.get_device(), tensor.is_contiguous()


def addresses(bias: Any) -> tuple[int, int]:
    """A bias as the kernels take it: the address of a packed one and of a list's table, 0 for the other."""
    return (0, bias.address) if bias.__class__ is ExpertList else (bias.data_ptr(), 0)


def address(tensor: Tensor | None) -> int:
    """0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def launch_nothing(*_: Any) -> None:
    """The function of a plan for T = 0."""


def aligned_row(matrix: Tensor) -> Tensor:
    """A matrix of one row with a row stride that kernels accept. torch leaves the stride of a single row arbitrary."""
    return matrix if matrix.stride(0) % ALIGNMENT_ELEMENTS == 0 else matrix.view(-1).view(1, -1)


PlanType = TypeVar("PlanType")
_all_plans: weakref.WeakSet[Plans[Any]] = weakref.WeakSet()


class Plans(Generic[PlanType]):
    """One operator's plans by key. `find` is a dict's get: looking up takes no lock."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, PlanType] = {}
        self._lock = threading.Lock()
        self.find = self._plans.get
        _all_plans.add(self)

    def __len__(self) -> int:
        return len(self._plans)

    def keep(self, key: Hashable, plan: PlanType) -> None:
        """Remember a plan; the oldest quarter goes where there are too many."""
        with self._lock:
            if len(self._plans) >= MAX_PLANS:
                for old in list(self._plans)[: MAX_PLANS // 4]:
                    del self._plans[old]
            self._plans[key] = plan

    def forget(self) -> None:
        with self._lock:
            self._plans.clear()


def forget_plans() -> None:
    """Let every operator choose its kernels anew."""
    for plans in _all_plans:
        plans.forget()
