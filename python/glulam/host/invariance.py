"""The switch for batch invariance: a setting of the process, which calls read when they look up a plan.

A backward uses the setting of its forward. A planned step (`backward.planned`) has it in its plans; any other backward
sets it with `held`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Hashable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

NAME = "batch_invariant"
MARK = "batch-invariant"
"""Added to the options in keys of plans that were made with the switch on."""

_lock = threading.Lock()
_blocks: list[batch_invariant] = []
"""Settings that are active as context managers, in the order in which they were entered."""
_statements: list[tuple[bool, weakref.ref[batch_invariant]]] = []
"""Settings made as statements, never entered as context managers. The last one counts if no block is active."""
_setting = False
is_used = False
"""True once the switch has been on in this process. While it is False, calls skip all other checks of the setting."""


class _OfThread(threading.local):
    """A thread's own setting while it runs a backward.

    Attributes:
        mode: the setting. None: the thread uses the process's setting.
    """

    mode: bool | None = None


_thread = _OfThread()


class batch_invariant:
    """Switch for batch invariance: whether a row's result may depend on the other rows of the call.

    With the switch on, a row's result and gradient depend only on the row, its experts' weights and the options. A call
    then uses only kernels that add in one order, whatever the number of rows, their places, the tile and the GPU's
    number of SMs. If there is no such kernel, the call raises NotImplementedError, which says what to do. docs:
    batch-invariance.md lists these cases, and the cases in which a call is invariant without the switch.

    As a statement the setting holds from then on; as a context manager until the block ends. Either way it is a setting
    of the process: all threads' calls read it, including calls in autograd's threads. The block entered last decides,
    whichever thread entered it; if no block is active, the last statement decides. The gradient of a call has the
    setting of its forward.

        glulam.batch_invariant(True)  # for the process
        with glulam.batch_invariant():  # for a block
            y = glulam.moe(x, routing, w1, w2)

    Compiled functions read the setting when they run, so set it outside of them.

    Args:
        mode: True: on. False: off.

    Raises:
        TypeError: mode is not True or False.
        NotImplementedError: the switch is set within a function that torch.compile traces.
    """

    def __init__(self, mode: bool = True) -> None:
        if is_dynamo_compiling():
            raise NotImplementedError(
                f"{NAME}: called within a function that torch.compile traces, whose operators would not see it; set it "
                "before the compiled function is called"
            )
        if not isinstance(mode, bool):
            raise TypeError(f"{NAME}: mode is {mode!r}; give True or False")
        self.mode = mode
        with _lock:
            dead = [statement for statement in _statements if statement[1]() is None]
            for statement in dead[:-1]:  # the last one still holds; earlier ones never apply again
                _statements.remove(statement)
            _statements.append((mode, weakref.ref(self)))
            _settle()

    def __enter__(self) -> batch_invariant:
        with _lock:
            _statements[:] = [statement for statement in _statements if statement[1]() is not self]
            _blocks.append(self)
            _settle()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        with _lock:
            last = max(place for place, block in enumerate(_blocks) if block is self)
            del _blocks[last]
            _settle()

    def __repr__(self) -> str:
        return f"{NAME}({self.mode})"


def _settle() -> None:
    """Determine the process's setting from the active blocks and the statements."""
    global _setting, is_used
    _setting = _blocks[-1].mode if _blocks else bool(_statements) and _statements[-1][0]
    is_used = is_used or _setting


def is_on() -> bool:
    """Return True if calls of this thread must be batch-invariant."""
    if is_dynamo_compiling():  # a trace is guarded by the global, and its operators read the setting when they run
        return _setting
    held_mode = _thread.mode
    return _setting if held_mode is None else held_mode


@contextlib.contextmanager
def held(mode: bool) -> Iterator[None]:
    """Set batch invariance for calls of this thread while the block runs: a backward sets its forward's mode."""
    if not is_used or is_dynamo_compiling():
        yield
        return
    before, _thread.mode = _thread.mode, mode
    try:
        yield
    finally:
        _thread.mode = before


def marked(options: Hashable, mode: bool) -> Hashable:
    """Return `options`, a part of the key by which a plan (a kept launch) is found, with MARK if `mode` is True.

    So a plan serves only calls with the setting with which it was made.
    """
    return (options, MARK) if mode else options


def is_marked(key: Any) -> bool:
    """Return True if a plan's key was made with the switch on."""
    options = key[0]
    return isinstance(options, tuple) and len(options) == 2 and options[1] is MARK


def refuse(op: str, why: str, remedy: str) -> None:
    """Raise NotImplementedError for a batch-invariant call for which no kernel adds in one order.

    Args:
        op: the operator.
        why: the reason.
        remedy: what the user can do.
    """
    raise NotImplementedError(f"{op}: {why}, and glulam.batch_invariant(True) is set; {remedy}")


def refuse_on_cpu(op: str, device: torch.device) -> None:
    """Raise NotImplementedError for a product on a device without kernels, where torch's order is not fixed."""
    refuse(
        op, f"tensors are on {device}, where torch multiplies, in an order of its own for each shape",
        "move them to a GPU, or set it to False",
    )  # fmt: skip
