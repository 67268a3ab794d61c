"""Kept plans (launches, see `calls.launch`), and how a call finds the plan that serves it.

A call is looked up by its tensors' metadata and its options. Plans that were used before are found by torch's own
guards, which compiled functions ask at each call: one C call compares class, dtype, device, sizes, strides and dispatch
keys (lazy negation, functorch, inference mode) of all tensors, in 0.06 us a tensor. Other plans, and plans of calls
with lists of experts, are found by a key made of the same metadata, whose making and hashing takes 0.35 us a tensor.

A call with a new number of rows has no plan. If a call that is identical except for its rows has passed all checks
(`find_resizable`), its plan is copied and only the values that depend on rows are recomputed. Only one check remains:
all tensors with a dimension of rows must have the same number of rows.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from . import invariance
from .device import dispatch_modes, is_watched
from .experts import ExpertList, GateUp
from .invariance import marked

MAX_PLANS = 4096
"""Plans kept for each operator; a plan and its key take about 1 KiB, and each new number of rows needs one."""
MAX_GUARDED = 1024
"""Largest number of an operator's plans that are found by guards."""
MAX_ALIKE = 4
"""Largest number of guarded plans with equal options and equal shape of the first tensor; their guards are tried one
after the other.
"""
PATIENCE = 64
"""Number of calls that match no guard of a full group (MAX_ALIKE guards) before a new guard replaces the group."""

# Private: should it move, every plan is found by its key.
_Guards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)

_UNGUARDED = frozenset((ExpertList, GateUp, list, tuple))

Given = Sequence[Any]


def unplanned() -> bool:
    """Return True if calls must not use plans.

    That is so in traces, which end in torch's dispatcher; in dispatch modes, since guards do not see make_fx's mode;
    and in forward-mode AD, whose tangents are not part of the metadata.
    """
    return is_dynamo_compiling() or forward_ad._current_level >= 0 or dispatch_modes() > 0


UNPLANNED = "is_dynamo_compiling() or forward_ad._current_level >= 0 or dispatch_modes()"
"""The expression of `unplanned` as Python source. Operators' generated functions contain it instead of a call."""


def described(value: Any) -> Hashable:
    """Return the metadata of a tensor, an ExpertList, a GateUp or a list of tensors, as a part of a key."""
    kind = value.__class__
    if kind is ExpertList:
        return kind, value.shape, value.dtype, value.index, is_grad_enabled() and value.requires_grad
    if kind is list or kind is tuple:
        return tuple(map(described, value))
    if kind is GateUp:
        return kind, tuple(map(described, value))
    layout = value.is_contiguous() or value.stride()
    return kind, value.shape, value.dtype, value.get_device(), layout, value.requires_grad, value.is_neg()


class _Guarded(NamedTuple):
    """A plan and its guard.

    Attributes:
        check: function of a call's tensors that returns True if the plan serves them.
        plan: the plan.
    """

    check: Callable[..., bool]
    plan: Any


def _shape(part: Any) -> tuple[Any, ...]:
    """Return the shape in a part of a key (a result of `described`); empty for a list of tensors."""
    shape: tuple[Any, ...] = part[1] if isinstance(part[0], type) else ()
    return shape


def _check_like(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a guard: a function that returns True for tensors with the same metadata as these."""
    sizes, strides = ([list(of(t)) for t in tensors] for of in (Tensor.size, Tensor.stride))
    check: Callable[..., bool] = _Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


PlanType = TypeVar("PlanType")
_all_plans: weakref.WeakSet[Plans[Any]] = weakref.WeakSet()


class Plans(Generic[PlanType]):
    """The kept plans of one operator. Looking up takes no lock."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, PlanType] = {}
        self._guarded: dict[Hashable, list[_Guarded]] = {}  # lists are never changed, but replaced
        self._per_row: dict[Hashable, tuple[bool | None, ...]] = {}
        self._resizable: dict[Hashable, Any] = {}
        self._misses = 0
        self._lock = threading.Lock()
        self.find = self._plans.get
        _all_plans.add(self)

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[PlanType]:
        return iter(list(self._plans.values()))

    def look_up(self, given: Given, options: Hashable) -> tuple[Hashable, PlanType | None]:
        """Find the plan of a call.

        Args:
            given: the call's tensors, ExpertLists or lists of tensors, without absent ones.
            options: all else that a plan depends on: options, which optional tensors are absent, whether grad mode is
                on.

        Returns:
            A key for keeping a plan; None if a guard found the plan, or if a dispatch mode or trace is active
            (`device.is_watched`). The plan, or None.

        Raises:
            Exception: something in `given` does not have the metadata of a tensor.
        """
        if invariance.is_used and invariance.is_on():
            options = marked(options, True)
        place = (given[0].shape, options)
        for check, plan in self._guarded.get(place, ()):
            if check(*given):
                return None, plan
        if is_watched():  # by torch.jit.trace, which guards see
            return None, None
        key = (options, *map(described, given))
        found = self.find(key)
        if found is not None and _Guards is not None and _UNGUARDED.isdisjoint(map(type, given)):
            self._guard(place, given, found)
        return key, found

    def _guard(self, place: Hashable, given: Given, plan: PlanType) -> None:
        """Add a guard (torch's check of metadata, faster than a key) for a plan, so that later calls find the plan by
        it.
        """
        alike = self._guarded.get(place, [])
        if len(alike) >= MAX_ALIKE:
            self._misses += 1
            if self._misses < PATIENCE:
                return
            alike = []
        self._misses = 0
        with contextlib.suppress(Exception):  # a signature of torch's that has changed
            guarded = _Guarded(_check_like(given), plan)
            with self._lock:
                if len(self._guarded) >= MAX_GUARDED:
                    self._guarded.clear()
                self._guarded[place] = [*alike, guarded]

    def keep(self, key: Hashable, plan: PlanType) -> None:
        """Keep a plan under a key; if there are too many plans, the oldest quarter is dropped."""
        self._keep(self._plans, MAX_PLANS, key, plan)

    def keep_resizable(
        self, key: Any, lead: tuple[int, ...], count: int, found: Any, any_rows: tuple[int, ...] = ()
    ) -> None:
        """Remember that a call passed all checks, for `find_resizable` of calls that differ from it only in rows.

        If the shape of another tensor happens to begin with the same sizes, nothing is remembered.

        Args:
            key: the call's key.
            lead: the sizes of the dimensions that count rows, with which the shapes of tensors of rows begin.
            count: the number of tensors of rows, without the tensors in `any_rows`.
            found: what `find_resizable` returns for such calls.
            any_rows: indices, among the call's tensors, of those that may have any number of rows.
        """
        per_row: list[bool | None] = [_shape(one)[: len(lead)] == lead for one in key[1:]]
        for place in any_rows:
            per_row[place] = None
        if per_row.count(True) == count:  # not so if another tensor happens to have as many rows, such as T == E
            self._keep(self._per_row, MAX_PLANS, key[0], tuple(per_row))
            self._keep(self._resizable, MAX_PLANS, self._signature(key, lead), found)

    def find_resizable(self, key: Any, lead: tuple[int, ...]) -> Any:
        """Return what `keep_resizable` remembered for a call that differs from this one only in its rows; None:
        nothing.
        """
        return self._resizable.get(self._signature(key, lead))

    def _signature(self, key: Any, lead: tuple[int, ...]) -> Hashable:
        """Return the key without the number of rows; None if tensors have different numbers of rows."""
        options, *given = key
        signature = [options]
        for one, has_rows in zip(given, self._per_row.get(options, ()), strict=False):
            if has_rows is not False:
                kind, shape, *rest = one
                if shape[: len(lead)] != lead if has_rows else not (shape and shape[0]):
                    return None
                one = kind, shape[len(lead) :], *rest
            signature.append(one)
        return tuple(signature) if len(signature) == len(key) else None

    def _keep(self, kept: dict[Hashable, Any], most: int, key: Hashable, value: Any) -> None:
        """Store a value; if there are `most` values, the oldest quarter is dropped first."""
        with self._lock:
            if len(kept) >= most:
                for old in list(kept)[: most // 4]:
                    del kept[old]
            kept[key] = value

    def forget(self) -> None:
        """Drop all plans of the operator."""
        with self._lock:
            self._plans.clear()
            self._guarded.clear()
            self._per_row.clear()
            self._resizable.clear()


def forget_plans() -> None:
    """Drop all plans, so that every operator chooses its kernels anew."""
    for plans in _all_plans:
        plans.forget()
