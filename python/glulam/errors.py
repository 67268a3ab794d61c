"""Error classes for causes other than a bad argument. A bad argument raises ValueError or TypeError."""

from __future__ import annotations

ARGUMENT_ERRORS = (
    ValueError, TypeError, RuntimeError, AttributeError, LookupError, ArithmeticError, BufferError,
)  # fmt: skip
"""Classes of errors that a bad argument causes in Python, in torch and in TVM-FFI.

After one of these, the call's arguments are checked again, so that the error names the argument. Other errors propagate
at once, for example the Exception that torch raises inside the call to end the recomputation of a checkpointed block.
"""


class UnsupportedDevice(RuntimeError):
    """Raised if no kernel of Glulam runs on a GPU. Nothing was launched; Glulam never silently uses the CPU instead."""


class GradientNotSupported(NotImplementedError):
    """Raised if a gradient is requested from an operator that has no backward for this case."""


class CaptureError(RuntimeError):
    """Raised if a call cannot be part of a CUDA graph or an exported program; the message says how to change that."""
