"""Rows of the tables in `layer/kernels.py` and `mhc/kernels.py`: kernels that take only addresses and numbers.

The tables determine these kernels' names, signatures and modules, and which of them bundles ship.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .arguments import Signature

ANY = ("float32",)
"""The nominal dtype of kernels that take any dtype, or none."""


class Kernel(NamedTuple):
    """A kernel, or a chain of several (`chains`).

    Attributes:
        arguments: its function's arguments; None: a chain, whose arguments follow from its steps.
        module: the module of this package that makes it; empty: a chain.
        dtypes: dtypes of tokens, rows or streams; ANY: its name has no dtype.
        ships: the dtypes for which bundles hold it as an exported function; empty: it is only a step of chains.
        is_sized: it is compiled for a number of experts.
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
