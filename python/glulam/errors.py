"""Errors of the front that are not a bad argument (those are ValueError and TypeError)."""

from __future__ import annotations


class UnsupportedDevice(RuntimeError):
    """A GPU that no kernel of Glulam runs on. Nothing was launched, and nothing falls back to the CPU silently."""


class GradientNotSupported(NotImplementedError):
    """A gradient was asked for of an operator that has none yet."""


class CaptureError(RuntimeError):
    """A call that no CUDA graph, or no exported program, can hold as it stands; the message says what to do before."""
