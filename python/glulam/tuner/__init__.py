"""The tuner: it measures candidate kernels for a layer, compiles others at the same time, and writes a table of the
fastest.

`choose.known` reads such tables when a kernel is chosen.
"""

from .entry import tune
from .report import TuneReport

__all__ = ["TuneReport", "tune"]
