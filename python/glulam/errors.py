"""Error classes for causes other than a bad argument. A bad argument raises ValueError or TypeError."""

from __future__ import annotations

ARGUMENT_ERRORS = (
    ValueError, TypeError, RuntimeError, AttributeError, LookupError, ArithmeticError, BufferError,
)  # fmt: skip
"""Classes of errors that a bad argument causes in Python, in torch and in TVM-FFI. After one of these, the call's
arguments are checked again, so that the error names the argument. Other errors propagate at once: torch ends the
recomputation of a checkpoint by an Exception of its own, raised inside the call.
"""


class UnsupportedDevice(RuntimeError):
    """No kernel of Glulam runs on this GPU. Nothing was launched; Glulam never falls back to the CPU silently."""


class GradientNotSupported(NotImplementedError):
    """A gradient was requested from an operator that has no backward for this case."""


class CaptureError(RuntimeError):
    """A call cannot be part of a CUDA graph or an exported program; the message says how to change that."""
