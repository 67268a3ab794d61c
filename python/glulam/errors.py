"""Error classes for causes other than a bad argument, which raises ValueError or TypeError."""

from __future__ import annotations

ARGUMENT_ERRORS = (
    ValueError, TypeError, RuntimeError, AttributeError, LookupError, ArithmeticError, BufferError,
)  # fmt: skip
"""Classes of errors that a bad argument causes in Python, in torch and in TVM-FFI. After one of these, the call's
arguments are checked again, so that the error names the argument. Other errors propagate at once: torch ends the
recomputation of a checkpoint by an Exception of its own, raised inside the call.
"""


class UnsupportedDevice(RuntimeError):
    """A GPU that no kernel of Glulam runs on. Nothing was launched, and nothing falls back to the CPU silently."""


class GradientNotSupported(NotImplementedError):
    """A gradient was requested of an operator that has no backward yet."""


class CaptureError(RuntimeError):
    """A call that a CUDA graph or an exported program cannot hold as it stands; the message says what to do first."""
