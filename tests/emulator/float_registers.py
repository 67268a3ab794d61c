"""Registers that hold results of float32 instructions and whose NaN bits an integer instruction may read.

PTX's float32 instructions return a single NaN, 0x7fffffff; numpy's NaN keeps an operand's bits, or is negative. So
integer instructions read these registers with each NaN replaced by PTX's. Memory is not tracked: a stored NaN keeps
numpy's bits.
"""

from __future__ import annotations

from .emitter import TYPES, as_list
from .ptx import Ins, Kernel, Reg

_RETURN_NAN = {"add", "sub", "mul", "fma", "div", "min", "max", "rcp", "sqrt", "rsqrt", "ex2", "lg2", "tanh", "cvt",
               "mma"}  # fmt: skip
_PASS_BITS = {"mov", "selp", "slct", "shfl"}
SHOW_BITS = {"add", "sub", "mul", "mad", "min", "max", "and", "or", "xor", "not", "lop3", "shl", "shr", "shf", "prmt",
             "bfe", "bfi", "setp", "popc", "clz", "bfind", "brev", "match", "redux"}  # fmt: skip


def _registers(operand) -> set[int]:
    return {each.index for each in as_list(operand) if isinstance(each, Reg) and each.cls == "b32"}


def _returns_float(ins: Ins) -> bool:
    """Return True if an instruction's result is float32, judging by its type modifiers (of cvt, the first one)."""
    opcode, *mods = ins.mods
    types = [each for each in mods if each in TYPES]
    return opcode in _RETURN_NAN and "f32" in (types[:1] if opcode == "cvt" else types)


def float_results(kernel: Kernel) -> set[int]:
    """Return the indices in `b32` of registers that receive float32 results, directly or by moves."""
    found: set[int] = set()
    passed = []
    for ins in kernel.code:
        if _returns_float(ins):
            found |= _registers(ins.args[0])
        elif ins.mods[0] in _PASS_BITS:
            sources = set().union(*(_registers(each) for each in ins.args[1:]))
            passed.append((_registers(ins.args[0]), sources))
    before = -1
    while before != len(found):
        before = len(found)
        for results, sources in passed:
            if sources & found:
                found |= results
    return found
