"""Cache of an operator's plans (launches, see `calls.launch`), looked up by the metadata of a call's tensors.

A call finds its plan in one of three ways:
* By a guard, in 0.06 us a tensor: torch's own guards, which compiled functions use, compare class, dtype, device,
  sizes, strides and dispatch keys (lazy negation, functorch, inference mode) of all tensors in one C call. A plan gets
  a guard when it is used again.
* By a key made of the same metadata, which takes 0.35 us a tensor to make and hash. This finds all other plans, and
  all plans of calls with lists of experts.
* By `find_resizable`, for a call with a new number of rows. If a call that is identical except for its rows has passed
  all checks, its plan is copied, and only the values that depend on rows are recomputed. Only one check remains: all
  tensors with a dimension of rows must have the same number of rows.
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
"""Largest number of guarded plans in a group. A group has equal options and equal shapes of the first tensor; its
guards are tried one after the other.
"""
PATIENCE = 64
"""Number of calls that match no guard of a full group, after which a new guard replaces the whole group."""

# Private: should it move, every plan is found by its key.
_Guards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)

_UNGUARDED = frozenset((ExpertList, GateUp, list, tuple))

Given = Sequence[Any]


def unplanned() -> bool:
    """Return True if calls must not use plans.

    That is so in traces of torch.compile, where calls must reach torch's dispatcher; in dispatch modes, since guards do
    not see make_fx's mode; and in forward-mode AD, whose tangents are not part of the metadata.
    """
    return is_dynamo_compiling() or forward_ad._current_level >= 0 or dispatch_modes() > 0


UNPLANNED = "is_dynamo_compiling() or forward_ad._current_level >= 0 or dispatch_modes()"
"""The expression of `unplanned` as Python source. Operators' generated functions contain it, which saves a call."""


def described(value: Any) -> Hashable:
    """Return the metadata of a tensor, an ExpertList, a GateUp or a list of tensors, as a part of a plan's key."""
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
    """A plan with its guard, a function that tests tensors' metadata.

    Attributes:
        check: the guard: called with a call's tensors, it returns True if the plan serves them.
        plan: the plan.
    """

    check: Callable[..., bool]
    plan: Any


def _shape(part: Any) -> tuple[Any, ...]:
    """Return the shape from a part of a key (a result of `described`); () for a list of tensors."""
    shape: tuple[Any, ...] = part[1] if isinstance(part[0], type) else ()
    return shape


def _check_like(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Make a guard: a function that returns True if it is called with tensors of the same metadata as these."""
    sizes, strides = ([list(of(t)) for t in tensors] for of in (Tensor.size, Tensor.stride))
    check: Callable[..., bool] = _Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


Value = TypeVar("Value")
_all_kept: weakref.WeakSet[Kept[Any]] = weakref.WeakSet()


class Kept(Generic[Value]):
    """Up to MAX_PLANS values by keys, which `forget_plans` drops. A look-up (`find`) takes no lock."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Value] = {}
        self._lock = threading.Lock()
        self.find = self._values.get
        _all_kept.add(self)

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Value]:
        return iter(list(self._values.values()))

    def keep(self, key: Hashable, value: Value) -> None:
        """Keep a value. If there are MAX_PLANS values, the oldest quarter is dropped first."""
        with self._lock:
            if len(self._values) >= MAX_PLANS:
                for old in list(self._values)[: MAX_PLANS // 4]:
                    del self._values[old]
            self._values[key] = value

    def forget(self) -> None:
        """Drop all values."""
        with self._lock:
            self._values.clear()


class Plans(Kept[Value]):
    """The plans of one operator that are kept for later calls, looked up by the metadata of a call's tensors.

    A plan is an object that runs a call without checking the metadata again: a launch (`calls.launch.Plan`), or forward
    and backward of a call together (`backward.planned`, `calls.addressed.GradientPlan`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._guarded: dict[Hashable, list[_Guarded]] = {}  # lists are never changed, but replaced
        self._per_row: Kept[tuple[bool | None, ...]] = Kept()
        self._resizable: Kept[Any] = Kept()
        self._misses = 0

    def look_up(self, given: Given, options: Hashable) -> tuple[Hashable, Value | None]:
        """Find the plan of a call. Keep a new plan by `keep`.

        Args:
            given: the call's tensors, ExpertLists or lists of tensors, without absent ones.
            options: everything else on which a plan depends: options, which optional tensors are absent, grad mode.

        Returns:
            (key, plan). The plan is None if none is kept. The key is for keeping a new plan; None if a guard found the
            plan, or if a dispatch mode or trace is active (`device.is_watched`), in which no plan may be kept.

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

    def _guard(self, place: Hashable, given: Given, plan: Value) -> None:
        """Add a guard (torch's check of metadata, faster than a key) for a plan, by which later calls find the plan.

        Args:
            place: key of the guards to try for a call: the first tensor's shape, and the options.
            given: the call's tensors.
            plan: the plan.
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

    def keep_resizable(
        self, key: Any, lead: tuple[int, ...], count: int, found: Any, any_rows: tuple[int, ...] = ()
    ) -> None:
        """Store `found` for a call that passed all checks, so that `find_resizable` returns it for similar calls.

        Similar calls differ from this call only in their number of rows. Nothing is stored if another tensor's shape
        happens to begin with the same sizes, as when T == E: then it is not clear which tensors have rows.

        Args:
            key: the call's key.
            lead: the sizes of the dimensions that count rows, with which the shapes of tensors with rows begin.
            count: the number of tensors with rows, without the tensors in `any_rows`.
            found: the object to store.
            any_rows: positions, among the call's tensors, of tensors that may have any number of rows.
        """
        per_row: list[bool | None] = [_shape(one)[: len(lead)] == lead for one in key[1:]]
        for place in any_rows:
            per_row[place] = None
        if per_row.count(True) == count:  # not so if another tensor happens to have as many rows, such as T == E
            self._per_row.keep(key[0], tuple(per_row))
            self._resizable.keep(self._signature(key, lead), found)

    def find_resizable(self, key: Any, lead: tuple[int, ...]) -> Any:
        """Return the object that `keep_resizable` stored for a call that differs only in its number of rows.

        None: there is none.

        Args:
            key: this call's key.
            lead: the sizes of this call's dimensions that count rows.
        """
        return self._resizable.find(self._signature(key, lead))

    def _signature(self, key: Any, lead: tuple[int, ...]) -> Hashable:
        """Return the key without the sizes `lead`, equal for calls that differ only in their number of rows.

        None: the tensors with rows do not all have these sizes, or `keep_resizable` stored no call with these options.
        """
        options, *given = key
        signature = [options]
        for one, has_rows in zip(given, self._per_row.find(options, ()), strict=False):
            if has_rows is not False:
                kind, shape, *rest = one
                if shape[: len(lead)] != lead if has_rows else not (shape and shape[0]):
                    return None
                one = kind, shape[len(lead) :], *rest
            signature.append(one)
        return tuple(signature) if len(signature) == len(key) else None

    def forget(self) -> None:
        """Drop all plans of the operator."""
        super().forget()
        with self._lock:
            self._guarded.clear()


def forget_plans() -> None:
    """Drop the plans of all operators and what else is `Kept`, so that their next calls choose kernels anew."""
    for kept in list(_all_kept):
        kept.forget()
