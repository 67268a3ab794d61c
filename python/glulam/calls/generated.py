"""Compile generated Python so that tracebacks, debuggers and profilers find its source lines, by `linecache`.

The entries in linecache have no modification time: `linecache.checkcache` would drop them otherwise, since there is no
file.
"""

from __future__ import annotations

import itertools
import linecache
import weakref
from types import CodeType

_numbers = itertools.count(1)


def compiled(text: str, name: str) -> CodeType:
    """Compile the one function in `text`, as file `name`. Its source lines are kept for the life of the process."""
    module = compile(text, name, "exec")
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))


def compiled_one_of_many(text: str, name: str) -> CodeType:
    """Compile the one function in `text`, as file "<name #number>". Source lines are kept as long as the code lives."""
    numbered = f"<{name} #{next(_numbers)}>"
    code = compiled(text, numbered)
    weakref.finalize(code, linecache.cache.pop, numbered, None).atexit = False
    return code
