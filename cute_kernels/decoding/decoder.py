"""A decoder of weights: the element type of a format, and the type of the scales that multiply its elements.

Elements may be read too small by a power of two, for which the scales' multipliers make up (`elements`, `scales`).
"""

from __future__ import annotations

from typing import NamedTuple

from .elements import Element
from .scales import Scales


class Decoder(NamedTuple):
    element: Element
    scales: Scales
