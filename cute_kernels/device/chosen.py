"""A choice that every thread makes without a branch."""

from __future__ import annotations

from typing import TypeVar

import cutlass
from cutlass import Boolean

Value = TypeVar("Value", bound=cutlass.Numeric)


def chosen(condition: Boolean, if_true: Value, if_false: Value) -> Value:
    """One of two values of a type. Both are computed, whichever it is."""
    return type(if_true)(cutlass.select_(condition, if_true, if_false))
