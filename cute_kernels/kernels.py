"""Rows of the tables in `layer/kernels.py` and `mhc/kernels.py`: kernels that take nothing but addresses and numbers.

Names, signatures, the modules that make these kernels, and what bundles ship follow from the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .arguments import Signature

ANY = ("float32",)
"""The dtype by name of kernels that take any, or none."""


class Kernel(NamedTuple):
    """A kernel, or a chain of several (`chains`).

    Attributes:
        arguments: of its function; None: of a chain, whose steps tell them.
        module: that makes it, of this package; empty: of a chain.
        dtypes: of tokens, rows or streams; ANY: its name has none.
        ships: the dtypes that bundles hold as a function of its own; none: a chain's step alone.
        is_sized: whether it is compiled for a number of experts.
        counts: numbers of streams that it is compiled for; empty: all that hyper-connections have.
    """

    arguments: Signature | None = None
    module: str = ""
    dtypes: Sequence[str] = ANY
    ships: Sequence[str] = ()
    is_sized: bool = False
    counts: Sequence[int] = ()

    @property
    def has_dtype(self) -> bool:
        return self.dtypes is not ANY
