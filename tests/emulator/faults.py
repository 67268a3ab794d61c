"""Fault, the emulator's only exception."""

from __future__ import annotations


class Fault(Exception):
    """Raised for a mistake of the running kernel, or for an instruction that the emulator does not model.

    It ends the launch.
    """

    def __init__(self, message: str):
        super().__init__(message)
        self.where: str | None = None

    def located(self, where: str) -> Fault:
        """Record the place of the fault, unless a more exact place is known already."""
        if self.where is None:
            self.where = where
        return self

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n  {self.where}" if self.where else message
