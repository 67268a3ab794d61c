"""Differentiation of the operators by torch's autograd: a file for each operator.

The functions here run where a gradient is asked for, and only there. Forward and backward are made of the public
operators, so that a backward runs, is traced and is checked like any other call: on a GPU by kernels, on the CPU by
the reference. A backward computes what is asked of it and nothing else. Common calls on a GPU have a plan of their own
instead (`planned_mm`, `planned_mlp`), since going through each operator's front door would cost the host more than
all of the launches.

Gradients of rows behind the last group are zero.
"""

from .entry import differentiate
from .parts import Targets

__all__ = ["Targets", "differentiate"]
