"""Choice between two values without a branch: both values are computed, and one is taken."""

from __future__ import annotations

from typing import TypeVar

import cutlass
from cutlass import Boolean

Value = TypeVar("Value", bound=cutlass.Numeric)


def select(condition: Boolean, if_true: Value, if_false: Value) -> Value:
    """Return `if_true` if the condition holds, else `if_false`; both have the same type."""
    return type(if_true)(cutlass.select_(condition, if_true, if_false))
