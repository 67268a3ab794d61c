"""The tuner: candidates from the valid space, compiled while the GPU measures, and a table for the dispatcher."""

from .entry import tune
from .report import TuneReport

__all__ = ["TuneReport", "tune"]
