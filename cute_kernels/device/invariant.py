"""Objects that generated loops may use but not change."""

from __future__ import annotations


class Invariant:
    """Base of classes whose compile-time choices and run-time values are never assigned again.

    A staged loop or branch carries every object whose method it calls, because the call might change it. These objects
    have nothing to carry: their values are defined before the loop and do not change.
    """

    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list) -> Invariant:
        return self
