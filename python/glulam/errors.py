"""Errors of the front that are not a bad argument (those are ValueError and TypeError)."""

from __future__ import annotations

ARGUMENT_ERRORS = (
    ValueError, TypeError, RuntimeError, AttributeError, LookupError, ArithmeticError, BufferError,
)  # fmt: skip
"""Classes of errors that a bad argument causes in Python, in torch and in TVM-FFI. After one of these a call is checked
again, so that the error names the argument. Others propagate at once: torch ends a checkpoint's recomputation by an
Exception of its own, raised within the call.
"""


class UnsupportedDevice(RuntimeError):
    """A GPU that no kernel of Glulam runs on. Nothing was launched, and nothing falls back to the CPU silently."""


class GradientNotSupported(NotImplementedError):
    """A gradient was asked for of an operator that has none yet."""


class CaptureError(RuntimeError):
    """A call that no CUDA graph, or no exported program, can hold as it stands; the message says what to do before."""
