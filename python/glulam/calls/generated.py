"""Compile generated Python under a name by which tracebacks, debuggers and profilers find its lines.

`linecache.checkcache` drops entries whose file does not exist, except those without a modification time.
"""

from __future__ import annotations

import itertools
import linecache
import weakref
from types import CodeType

_numbers = itertools.count(1)


def compiled(text: str, name: str) -> CodeType:
    """Return the compiled code of the one function in `text`. Its source lines are kept for the life of the process."""
    module = compile(text, name, "exec")
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))


def compiled_one_of_many(text: str, name: str) -> CodeType:
    """Return the compiled code of the one function in `text`, under "<name #number>". Its source lines are kept only as
    long as the code object lives.
    """
    numbered = f"<{name} #{next(_numbers)}>"
    code = compiled(text, numbered)
    weakref.finalize(code, linecache.cache.pop, numbered, None).atexit = False
    return code
