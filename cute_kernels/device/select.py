"""Selects: both values are computed and one is taken, without a branch."""

from __future__ import annotations

from typing import TypeVar

import cutlass
from cutlass import Boolean

Value = TypeVar("Value", bound=cutlass.Numeric)


def select(condition: Boolean, if_true: Value, if_false: Value) -> Value:
    """Return `if_true` if the condition holds, else `if_false`; both are of one type."""
    return type(if_true)(cutlass.select_(condition, if_true, if_false))
