"""Differentiation of the operators by torch's autograd.

A step is the forward of one call together with its backward. Its parts are single computations, such as FC1 or the
gradient of w2. A `Path` describes the parts of both directions of an operator once (`path.py`; `mm.py`, `glu.py`,
`data_path.py`, `frozen.py`). For common calls on a GPU, a planned step is kept, whose parts are kernel launches
(`planned.py`). For other calls each part is a call of a public operator, which runs, is traced and is checked like any
other call: on a GPU by kernels, on the CPU by the reference (`function.py`). A backward computes only the gradients
that are needed.

Gradients of rows after the last group are zero.
"""

from .entry import differentiate
from .parts import Targets

__all__ = ["Targets", "differentiate"]
