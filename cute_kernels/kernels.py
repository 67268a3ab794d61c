"""`Kernel`: an entry of the tables in `layer/kernels.py` and `mhc/kernels.py`. These tables list the kernels that take
only addresses and numbers.

The tables determine these kernels' names, signatures and modules, and which of them bundles (compiled libraries) ship.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .arguments import Signature

ANY = ("float32",)
"""The value of `Kernel.dtypes` for kernels that take any dtype or read no tokens. Their specs have dtype "float32"."""


class Kernel(NamedTuple):
    """A kernel, or a chain of several kernels (`chains`).

    Attributes:
        arguments: the function's arguments; None for a chain, whose steps determine its arguments.
        module: the module of this package that makes the kernel; empty for a chain.
        dtypes: dtypes of tokens, rows or residual streams for which the kernel can be compiled; ANY: its name has no
            dtype.
        ships: the dtypes for which bundles (compiled libraries) export it; empty: it is only a step of chains.
        is_sized: the kernel is compiled for several maximal numbers of experts, `layer.kernels.CAPACITIES`.
        counts: numbers of residual streams for which it is compiled; empty: all of `mhc.kernels.COUNTS`.
    """

    arguments: Signature | None = None
    module: str = ""
    dtypes: Sequence[str] = ANY
    ships: Sequence[str] = ()
    is_sized: bool = False
    counts: Sequence[int] = ()

    @property
    def has_dtype(self) -> bool:
        """True if the kernel's name contains a dtype."""
        return self.dtypes is not ANY
