"""A decoder of weights: a pair of an element type and of the type of the scales that multiply the elements."""

from __future__ import annotations

from typing import NamedTuple

from .elements import Element
from .scales import Scales


class Decoder(NamedTuple):
    """The element type and the scale type of a format.

    Elements may be read as their value times a power of two (`Element.read_exponent`). Then the scales' multipliers
    include the inverse of this power (`Scales.multipliers`).
    """

    element: Element
    scales: Scales
