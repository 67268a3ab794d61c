"""The portable grouped_wgrad in 16 bits: dw = grouped_wgrad(dy, x)."""

from ...launches import wgrad
from ...specs import GroupedWgradSpec
from ...tracing import Traced
from ..grouped_wgrad import GroupedWgrad


def trace(spec: GroupedWgradSpec) -> Traced:
    """Return (host function that launches the spec's kernel, stand-ins for its arguments), from which to compile."""
    return wgrad.trace(spec, GroupedWgrad)
