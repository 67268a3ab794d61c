"""The tuner: it measures candidate kernels for a layer, and writes a table of the fastest.

While one candidate is measured, others are compiled. `choose.known` reads such tables when a kernel is chosen.
"""

from .entry import tune
from .report import TuneReport

__all__ = ["TuneReport", "tune"]
