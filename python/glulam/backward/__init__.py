"""Differentiation of the operators by torch's autograd.

A `Path` describes an operator's forward and gradients once, as a list of parts (`path.py`; `mm.py`, `glu.py`,
`data_path.py`, `frozen.py`). For common calls on a GPU, a planned step, whose parts are kernel launches, is kept
(`planned.py`). For other calls each part is a call of a public operator, which runs, is traced and is checked like any
other call: on a GPU by kernels, on the CPU by the reference (`function.py`). A backward computes only the gradients
that are needed.

Gradients of rows after the last group are zero.
"""

from .entry import differentiate
from .parts import Targets

__all__ = ["Targets", "differentiate"]
