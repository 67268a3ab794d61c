"""Translate a kernel's basic blocks to Python: functions `block(u, m)` on lanes, m True or a mask of lanes.

A block ends after an instruction that may move or stop lanes. The machine executes such a terminator:
    ("bra", guard, block)             branch
    ("ret" | "exit" | "trap", guard, None)
    ("bar_sync" | "bar_arrive", guard, [number] or [number, threads])     a number may be a register: "b32[5]"
    ("cluster_arrive" | "cluster_wait", guard, None)
    ("warp_sync", guard, [membermask])
guard is None or (predicate's index, negated). A block that waits for an mbarrier ends there without a terminator.
"""

from __future__ import annotations

import dataclasses
import functools
import marshal
from collections.abc import Iterator
from types import CodeType
from typing import Any

import numpy as np

from . import formats, forms, lanes
from .emitter import VIEWS, Emitter, Modifiers
from .float_registers import SHOW_BITS, float_results
from .forms.no_effect import ALIGNED, UNIFORM
from .ptx import Imm, Ins, Kernel, Reg, Unsupported

__all__ = ["Translation", "Unsupported", "forms", "translate"]

_ENDS = ("bra", "ret", "exit", "trap", "bar", "barrier")
_WAITS = ("mbarrier.try_wait", "mbarrier.test_wait")  # a spinning unit is seen by the blocks that it comes back to
_CLUSTER_ORDER = dict.fromkeys(
    ("acquire", "release", "relaxed"), "the machine executes one step at a time: all accesses are in one order"
)


def _terminator(ins: Ins, block_of: dict, end: int) -> tuple:
    guard = (ins.pred.index, ins.negated) if ins.pred else None
    mods, opcode = Modifiers(ins.op), ins.mods[0]
    if opcode == "bra":
        mods.drop(UNIFORM)
        end_of = ("bra", guard, block_of.get(ins.args[0], end))
    elif opcode in ("ret", "exit", "trap"):
        mods.drop(UNIFORM)
        end_of = (opcode, guard, None)
    elif mods.flag("warp"):
        mods.require("sync")
        end_of = ("warp_sync", guard, [_barrier_operand(ins, *ins.args)])
    elif mods.flag("cluster"):
        mods.drop(ALIGNED, _CLUSTER_ORDER)
        end_of = ("cluster_" + mods.choice("arrive", "wait"), guard, None)
    else:
        mods.drop(ALIGNED)
        mods.flag("cta")
        end_of = ("bar_" + mods.choice("sync", "arrive"), guard, [_barrier_operand(ins, each) for each in ins.args])
    mods.finish()
    return end_of


def _barrier_operand(ins: Ins, operand):
    if isinstance(operand, Imm):
        return operand.value
    if isinstance(operand, Reg) and operand.cls == "b32":
        return f"b32[{operand.index}]"
    raise Unsupported(f"{ins.op} of {operand}")


def _block_starts(kernel: Kernel) -> list[int]:
    starts = {0, *kernel.labels}
    starts |= {at + 1 for at, ins in enumerate(kernel.code) if ins.mods[0] in _ENDS or ins.op.startswith(_WAITS)}
    return sorted(at for at in starts if at < len(kernel.code))


def _block_lines(emitter: Emitter, code: list[Ins], floats: set[int]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a block's body, each with its instruction's place in the PTX."""
    for ins in code:
        emitter.lines = []
        emitter.with_ptx_nan = floats if ins.mods[0] in SHOW_BITS else set()
        try:
            emitter.emit(ins)
        except (Unsupported, ValueError, TypeError, AttributeError, KeyError) as error:  # the others: unfit operands
            raise Unsupported(f"{emitter.kernel.name}, line {ins.line}: {ins.text}: {error}") from error
        yield from ((line, f"line {ins.line}: {ins.text}") for line in emitter.lines)


@dataclasses.dataclass
class Translation:
    """A kernel's blocks as Python; can be pickled.

    Attributes:
        source: the text of all functions. places: by line number, the PTX of the line.
        code: the compiled source. constants: objects that the source uses by name.
        ends: for each block the number of its instructions, and the terminator or None.
    """

    source: str
    places: dict[int, str]
    code: CodeType
    constants: dict[str, Any]
    ends: list[tuple[int, tuple | None]]

    @functools.cached_property
    def blocks(self) -> list[tuple]:
        """Return (function, number of instructions, terminator or None) of each block."""
        space = {"np": np, "L": lanes, "F": formats, **self.constants}
        exec(self.code, space)
        return [(space[f"block_{index}"], *end) for index, end in enumerate(self.ends)]

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "code": marshal.dumps(self.code)}
        state.pop("blocks", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, code=marshal.loads(state["code"]))


@np.errstate(all="ignore")
def translate(kernel: Kernel) -> Translation:
    emitter, floats = Emitter(kernel), float_results(kernel)
    starts = _block_starts(kernel)
    block_of = {at: index for index, at in enumerate(starts)}
    source: list[str] = []
    ends: list[tuple[int, tuple | None]] = []
    places: dict[int, str] = {}
    for index, (begin, end) in enumerate(zip(starts, [*starts[1:], len(kernel.code)], strict=True)):
        code = kernel.code[begin:end]
        terminator = None
        if code and code[-1].mods[0] in _ENDS:
            terminator = _terminator(code[-1], block_of, len(starts))
            code = code[:-1]
        body = list(_block_lines(emitter, code, floats))
        views = [f"    {view} = u.{view}" for view in VIEWS if any(f"{view}[" in line for line, _ in body)]
        source += [f"def block_{index}(u, m):", *(views or ["    pass"])]
        places |= {len(source) + number: place for number, (_, place) in enumerate(body, 1)}
        source += [f"    {line}" for line, _ in body]
        ends.append((end - begin, terminator))
    text = "\n".join(source)
    return Translation(text, places, compile(text, kernel.name, "exec"), emitter.constants, ends)
