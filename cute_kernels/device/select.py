"""Selects: both values are computed, one is taken, and nothing branches."""

from __future__ import annotations

from typing import TypeVar

import cutlass
from cutlass import Boolean

Value = TypeVar("Value", bound=cutlass.Numeric)


def select(condition: Boolean, if_true: Value, if_false: Value) -> Value:
    """`if_true` where the condition holds, else `if_false`; both of one type."""
    return type(if_true)(cutlass.select_(condition, if_true, if_false))
