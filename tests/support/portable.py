"""The kernels of cute_kernels/portable: which there are, and how tests get them."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

from cute_kernels.specs import DTYPES, GroupedGluSpec, GroupedMmSpec
from cute_kernels.tiles import TileConfig

TILE = TileConfig(m=128, n=128, k=64, schedule="pingpong")
"""Two slabs of 64 rows a warp, as a pingpong warpgroup has them."""
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
FORMS = [("gated", "blocked"), ("gated", "strided"), ("ungated", "concat")]
Spec = GroupedMmSpec | GroupedGluSpec


def mm(dtype: str) -> GroupedMmSpec:
    return GroupedMmSpec(dtype, tile=TILE)


def glu(dtype: str, form: tuple[str, str], save_preact: bool) -> GroupedGluSpec:
    return GroupedGluSpec(dtype, *form, save_preact, TILE)


def specs() -> list[Spec]:
    made = [glu(*choice) for choice in product(DTYPES, FORMS, (False, True))]
    return [*(mm(dtype) for dtype in DTYPES), *made]


def tracer(spec: Spec) -> str:
    return f"cute_kernels.portable.stages.{'mm' if isinstance(spec, GroupedMmSpec) else 'glu'}:trace"


def function(spec: Spec) -> Callable[..., Any]:
    """Compiled for Hopper, or from the cache of compiled kernels. Raises ToolchainError without either."""
    found: Callable[..., Any] = importlib.import_module("ffi_bridge.jit").get(spec, tracer=tracer(spec))
    return found


def resources(arch: str) -> list[tuple[str, int, int]]:
    """Of each kernel of bfloat16, compiled for an architecture: spec, bytes spilled, bytes of shared memory. In a
    process that compiles for no other.
    """
    compiler = importlib.import_module("ffi_bridge.compiler")
    cute, found = compiler._cutlass(arch), []
    for spec in specs():
        if spec.dtype == "bfloat16":
            remarks = io.StringIO()
            host, arguments = compiler.load_tracer(tracer(spec))(spec)
            with contextlib.redirect_stderr(remarks):
                made = cute.compile(host, *arguments, options=compiler.OPTIONS + arch, no_jit_engine=True)
            for kernel in compiler.read_resources(made.kernel_info, remarks.getvalue(), str(made.ir_module)):
                found.append((spec.name, kernel.spill_stores + kernel.spill_loads, kernel.dynamic_smem))
    return found


if __name__ == "__main__":
    print(json.dumps(resources(sys.argv[1])))
