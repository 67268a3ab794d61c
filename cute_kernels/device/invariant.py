"""Base of objects that run-time loops and branches of the DSL may use, but do not change."""

from __future__ import annotations


class Invariant:
    """Base of classes whose attributes do not change after `__init__`, as far as run-time loops and branches are
    concerned.

    The DSL makes a run-time loop or branch carry every object of which it calls a method, because the call might change
    the object. Objects of this class have nothing to carry: their values are defined before the loop and do not change.
    """

    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list) -> Invariant:
        return self
