"""Differentiation of the operators by torch's autograd.

An operator has a `Path`, which describes its forward and gradients once, in parts (`path.py`; `mm.py`, `glu.py`,
`data_path.py`, `frozen.py`). For common calls on a GPU a step is kept, whose parts are launches (`planned.py`); for
others each part is a call of a public operator, which runs, is traced and is checked like any other call: on a GPU by
kernels, on the CPU by the reference (`function.py`). A backward computes what is asked of it and nothing else.

Gradients of rows after the last group are zero.
"""

from .entry import differentiate
from .parts import Targets

__all__ = ["Targets", "differentiate"]
