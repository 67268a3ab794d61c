"""Plans of the latest calls, found by comparing tensors with those of then in one call of torch's, not by a key.

Building and hashing a key takes 0.35 us a tensor, comparing 0.06: torch's own guards do it, which compiled functions
ask at each call. They see class, dtype, device, sizes, strides and dispatch keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from ..plan import Plans, PlanType

MOST = 4
PATIENCE = 64
"""Calls that none of `MOST` plans serves before other plans take their places."""

# Private: should it move, every plan is found by its key.
_Guards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)

Given = Sequence[Tensor | None]


class _Call(NamedTuple):
    """What a call must be like: its options, number of tensors, and whether they are like those of then."""

    options: tuple[Any, ...]
    size: int
    check: Callable[..., bool]


def _like(given: Given, options: tuple[Any, ...]) -> _Call:
    tensors = [t for t in given if t is not None]
    sizes, strides = ([list(of(t)) for t in tensors] for of in (Tensor.size, Tensor.stride))
    check = _Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    if len(tensors) == len(given):
        return _Call(options, len(given), check)
    absent = [t is None for t in given]

    def check_present(*given: Tensor | None) -> bool:
        return [t is None for t in given] == absent and check(*[t for t in given if t is not None])

    return _Call(options, len(given), check_present)


class RecentPlans(Plans[PlanType], Generic[PlanType]):
    """Plans by key, and the latest ones before them."""

    def __init__(self) -> None:
        super().__init__()
        self._recent: list[tuple[_Call, PlanType]] = []
        self._misses = 0

    def recent(self, given: Given, options: tuple[Any, ...]) -> PlanType | None:
        """The plan of a call like one of the latest."""
        for (wanted, size, check), plan in self._recent:
            if wanted == options and len(given) == size and check(*given):
                return plan
        return None

    def known(self, key: Hashable, given: Given, options: tuple[Any, ...]) -> PlanType | None:
        """The plan of a key; the next call like this one needs no key."""
        plan = self.find(key)
        if plan is not None and _Guards is not None:
            with contextlib.suppress(Exception):  # a signature that has changed
                self._remember(_like(given, options), plan)
        return plan

    def _remember(self, call: _Call, plan: PlanType) -> None:
        latest = self._recent
        if len(latest) >= MOST:
            self._misses += 1
            if self._misses < PATIENCE:
                return
            latest = []
        self._misses = 0
        self._recent = [*latest, (call, plan)]

    def forget(self) -> None:
        super().forget()
        self._recent = []
