"""dw = grouped_wgrad(dy, x) with 16-bit dy and x."""

from ...launches import wgrad
from ...specs import GroupedWgradSpec
from ...tracing import Traced
from ..grouped_wgrad import GroupedWgrad


def trace(spec: GroupedWgradSpec) -> Traced:
    return wgrad.trace(spec, GroupedWgrad)
