"""Names of kernels in compiled libraries."""

from __future__ import annotations

from typing import Any


def name_kernel(kernel: Any, name: str) -> None:
    """Name a kernel after its spec, for profilers.

    The DSL's own name prefix is removed, since ptxas would treat the kernel as one of CUTLASS's.
    """
    kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
