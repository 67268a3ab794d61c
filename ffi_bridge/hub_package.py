"""Glulam's kernels by name: one CUDA library, whose functions are called through TVM-FFI.

    from kernels import get_kernel

    glulam = get_kernel("owner/glulam", version=1)
    for name in glulam.names("grouped_mm_*"):
        print(name, glulam.arguments(name))
    glulam.function(name)(*arguments)

A function checks its arguments, and launches on the current stream. This package is made from the Python package
`glulam` and does not need it; `glulam` has operators on tensors, the choice of kernels, gradients and modules.
"""

from __future__ import annotations

import ctypes
import fnmatch
import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


@functools.cache
def _described() -> dict[str, Any]:
    """Return the content of functions.json.

    "library" is the library's file name; "functions" has, by function name, the list of the function's argument names.
    """
    described: dict[str, Any] = json.loads((_FOLDER / "functions.json").read_text())
    return described


@functools.cache
def _module() -> Any:
    """Load the kernels' library. Raises ImportError if the DSL's run-time library, which it needs, is not installed."""
    found = importlib.util.find_spec("nvidia_cutlass_dsl")
    for folder in (found.submodule_search_locations or ()) if found else ():
        runtime = Path(folder) / "cu13" / "lib" / "libcute_dsl_runtime.so"
        if runtime.is_file():
            break
    else:
        raise ImportError('the kernels need a run-time library; run `pip install "nvidia-cutlass-dsl[cu13]"`')
    import tvm_ffi

    ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    return tvm_ffi.load_module(str(_FOLDER / _described()["library"]))


def names(pattern: str = "*") -> list[str]:
    """Return the sorted names of the functions that match a pattern, for example "grouped_mm_*"."""
    return fnmatch.filter(sorted(_described()["functions"]), pattern)


def arguments(name: str) -> list[str]:
    """Return the names of a function's arguments in their order. Raises KeyError if there is no such function."""
    of_function: list[str] = _described()["functions"][name]
    return of_function


def function(name: str) -> Callable[..., Any]:
    """Return the function of this name; it takes `arguments(name)` by position. Raises KeyError if there is none."""
    arguments(name)
    found: Callable[..., Any] = _module().get_function(name)
    return found
