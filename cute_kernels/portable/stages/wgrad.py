"""dw = grouped_wgrad(dy, x): a launch of sm90's, with the kernel of this folder."""

from ...sm90.stages import wgrad
from ...specs import GroupedWgradSpec
from ...tracing import Traced, traced
from ..grouped_wgrad import GroupedWgrad


class Wgrad(wgrad.Wgrad):
    wgrad_type = GroupedWgrad


def trace(spec: GroupedWgradSpec) -> Traced:
    return traced(spec, Wgrad(spec))
