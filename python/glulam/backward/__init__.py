"""Differentiation of the operators by torch's autograd.

Three terms:
* A step is the forward of one call together with its backward.
* A part is one computation of a step, such as FC1 or the gradient of w2.
* A `Path` describes, once for each operator, the parts of both directions (`path.py`; subclasses in `mm.py`, `glu.py`,
  `data_path.py`, `frozen.py`).

A step runs in one of two ways. For common calls on a GPU a planned step is kept, whose parts are kernel launches
(`planned.py`). For other calls each part is a call of a public operator (`function.py`), which runs, is traced and is
checked like any other call: on a GPU by kernels, on the CPU by the reference.

A backward computes only the gradients that are needed. Gradients of rows after the last group are zero.
"""

from .entry import differentiate
from .parts import Targets

__all__ = ["Targets", "differentiate"]
