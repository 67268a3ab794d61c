"""Comparison and selection (PTX ISA, section Comparison and Selection Instructions)."""

from __future__ import annotations

from ..emitter import BITS, VIEW, instruction
from ..ptx import Imm, Unsupported

_ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
# An unordered comparison is true where the opposite, ordered one is not.
_OPPOSITE = {"ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}
_UNORDERED = (*_OPPOSITE, "equ", "neu")
_FLOATS = ("f16", "bf16", "f32", "f64")
_COMBINE = {"and": "&", "or": "|", "xor": "^"}


@instruction("setp")
def setp(e, ins, mods):
    """Set p to the comparison and q to its opposite, each combined with c."""
    t = mods.type(*(name for name in BITS if BITS[name] > 8))
    comparison = mods.choice(*_ORDERED, *_UNSIGNED, *_UNORDERED, "num", "nan")
    combine = mods.choice(*_COMBINE, default="none")
    ftz = t == "f32" and mods.flag("ftz")
    results, a, b, *rest = e.operands(ins, 3 if combine == "none" else 4)
    test = _comparison(ins, comparison, t, *(_value(e, each, t, ftz) for each in (a, b)))
    if not isinstance(results, list):
        e.write(results, _combined(e, test, combine, rest), "p")
        return
    p, q = results
    test = e.temporary(test)
    other = e.temporary(_combined(e, f"~{test}", combine, rest))  # before p is set: c may be p
    e.write(p, _combined(e, test, combine, rest), "p")
    e.write(q, other, "p")


def _value(e, operand, t, ftz):
    if t in ("f16", "bf16"):
        return f"F.{t}({e.read(operand, 'b16')})"
    return f"L.flush({e.read(operand, 'f32')})" if ftz else e.read(operand, VIEW[t])


def _comparison(ins, comparison, t, x, y):
    """Return the comparison as Python source. With a NaN, ordered comparisons are false, unordered ones (ltu, neu...)
    true.
    """
    if comparison in ("num", "nan"):
        if t not in _FLOATS:
            raise Unsupported(ins.op)
        return f"{'~' if comparison == 'num' else ''}L.unordered({x}, {y})"
    if t not in _FLOATS:
        if comparison in _UNORDERED or (comparison in _UNSIGNED and t[0] == "s"):
            raise Unsupported(ins.op)
        return f"({x} {(_ORDERED | _UNSIGNED)[comparison]} {y})"
    if comparison in ("ne", "equ"):  # numpy's == and != compare like neu and eq
        return f"{'~' if comparison == 'equ' else ''}(({x} < {y}) | ({x} > {y}))"
    if comparison == "neu":
        return f"({x} != {y})"
    if comparison in _OPPOSITE:
        return f"~({x} {_OPPOSITE[comparison]} {y})"
    if comparison not in _ORDERED:
        raise Unsupported(ins.op)
    return f"({x} {_ORDERED[comparison]} {y})"


def _combined(e, test, combine, rest):
    return test if combine == "none" else f"{test} {_COMBINE[combine]} {e.read(rest[0], 'p')}"


@instruction("selp")
def selp(e, ins, mods):
    view = VIEW[mods.type(*(name for name in BITS if BITS[name] > 8 and name != "bf16"))]
    d, a, b, condition = e.operands(ins, 4)
    e.write(d, f"np.where({e.read(condition, 'p')}, {e.read(a, view)}, {e.read(b, view)})", view)


@instruction("slct")
def slct(e, ins, mods):
    """Select a if c >= 0, else b. -0 counts as 0, NaN as negative."""
    t, of = mods.types(2)
    if of not in ("s32", "f32"):
        raise Unsupported(ins.op)
    ftz = of == "f32" and mods.flag("ftz")
    d, a, b, c = e.operands(ins, 4)
    condition = _comparison(ins, "ge", of, _value(e, c, of, ftz), e.read(Imm(0), of))
    e.write(d, f"np.where({condition}, {e.read(a, VIEW[t])}, {e.read(b, VIEW[t])})", VIEW[t])
