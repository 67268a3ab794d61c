"""A decoder of weights: the element type of a format, and the type of the scales that multiply its elements."""

from __future__ import annotations

from typing import NamedTuple

from .elements import Element
from .scales import Scales


class Decoder(NamedTuple):
    """The element type and the scale type of a format.

    Elements may be read as a power of two times their value (`Element.read_exponent`); the scales' multipliers then
    include the inverse (`Scales.multipliers`).
    """

    element: Element
    scales: Scales
