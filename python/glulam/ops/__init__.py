"""The operators, a file each: the public function, its arguments' meaning and its plan."""

from .grouped_bias_grad import grouped_bias_grad
from .grouped_dglu import GluGradients, grouped_dglu
from .grouped_glu import grouped_glu
from .grouped_mlp import grouped_mlp
from .grouped_mm import grouped_mm
from .grouped_wgrad import grouped_wgrad

__all__ = [
    "GluGradients",
    "grouped_bias_grad",
    "grouped_dglu",
    "grouped_glu",
    "grouped_mlp",
    "grouped_mm",
    "grouped_wgrad",
]
