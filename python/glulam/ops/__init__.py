"""The operators, a file each: the public function, its arguments' meaning and its plan."""

from .grouped_glu import grouped_glu
from .grouped_mlp import grouped_mlp
from .grouped_mm import grouped_mm

__all__ = ["grouped_glu", "grouped_mlp", "grouped_mm"]
