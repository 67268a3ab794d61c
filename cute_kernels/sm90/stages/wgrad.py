"""Hopper's grouped_wgrad in 16 bits: dw = grouped_wgrad(dy, x)."""

from ...launches import wgrad
from ...specs import GroupedWgradSpec
from ...tracing import Traced
from ..grouped_wgrad import GroupedWgrad


def trace(spec: GroupedWgradSpec) -> Traced:
    """Return the host function that launches the spec's kernel, and stand-ins for its arguments to compile it with."""
    return wgrad.trace(spec, GroupedWgrad)
