"""Objects that generated loops may use but never change."""

from __future__ import annotations


class Invariant:
    """Base of classes that hold compile-time choices and run-time values, none of which is ever assigned again.

    A staged loop or branch carries every object whose method it calls, because the call might change it. These objects
    have nothing to carry: their values are defined before the loop, and stay.
    """

    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list) -> Invariant:
        return self
