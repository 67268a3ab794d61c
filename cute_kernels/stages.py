"""Which module makes a spec's kernel. Plain Python, as `specs` is."""

from __future__ import annotations

from .specs import Spec


def tracer_of(spec: Spec) -> str:
    """The "module:function" that turns a spec into a jitted host function and its fake arguments."""
    return "cute_kernels.entry:trace"
