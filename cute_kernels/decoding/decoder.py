"""A decoder of weights: how a format's elements are read, and the bfloat16 numbers that they are multiplied by.

Elements may be read as smaller than they are, by a power of two that multipliers make up for (`elements`, `scales`).
"""

from __future__ import annotations

from typing import NamedTuple

from .elements import Element
from .scales import Scales


class Decoder(NamedTuple):
    element: Element
    scales: Scales
