"""Objects that the DSL's loops may use but not change."""

from __future__ import annotations


class Invariant:
    """Base of classes whose attributes do not change after `__init__`, as far as run-time loops and branches are
    concerned.

    The DSL makes a run-time loop or branch carry every object whose method it calls, because the call might change the
    object. These objects have nothing to carry: their values are defined before the loop and do not change.
    """

    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list) -> Invariant:
        return self
