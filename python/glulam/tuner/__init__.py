"""The tuner: measures candidate kernels for a layer, compiled while the GPU measures, and writes a table of the best.

`choose.known` reads such tables when a kernel is chosen.
"""

from .entry import tune
from .report import TuneReport

__all__ = ["TuneReport", "tune"]
