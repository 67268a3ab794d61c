"""Hopper's grouped_wgrad in 16 bits: dw = grouped_wgrad(dy, x)."""

from ...launches import wgrad
from ...specs import GroupedWgradSpec
from ...tracing import Traced
from ..grouped_wgrad import GroupedWgrad


def trace(spec: GroupedWgradSpec) -> Traced:
    return wgrad.trace(spec, GroupedWgrad)
