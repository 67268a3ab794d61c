"""Integer arithmetic (PTX ISA, section Integer Arithmetic Instructions). Results wrap around."""

from __future__ import annotations

from ..emitter import NUMPY, VIEW, Expression, instruction
from ..ptx import Imm, Unsupported
from . import floats

_INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
_WIDE = {"s16": "s32", "b16": "b32", "s32": "s64", "b32": "b64"}
_NUMPY = {"add": "np.add", "sub": "np.subtract", "max": "np.maximum", "min": "np.minimum"}


@instruction("add", "sub", "min", "max")
def add(e, ins, mods):
    if floats.is_float(mods):
        floats.binary(e, ins, mods)
        return
    operation = ins.mods[0]
    t = mods.type(*_INTEGERS, "u16x2", "s16x2")
    if t in ("u16x2", "s16x2"):
        _pairs(e, ins, _NUMPY[operation], t)
        return
    relu = t == "s32" and operation in ("min", "max") and mods.flag("relu")
    d, a, b = e.operands(ins, 3)
    e.apply(_NUMPY[operation], d, VIEW[t], a, b)
    if relu:  # negative results are 0
        e.apply("np.maximum", d, "s32", d, Imm(0))


def _pairs(e, ins, function, t):
    d, a, b = e.operands(ins, 3)
    view = e.dtype(VIEW[t[:3]])
    x, y = (f"np.atleast_1d({e.read(each, 'b32')}).view({view})" for each in (a, b))
    e.write(d, f"{function}({x}, {y}).view({e.dtype('b32')})", "b32")


@instruction("mul")
def mul(e, ins, mods):
    """Multiply: .wide keeps all bits of the product, .hi the upper half, .lo the lower half."""
    if floats.is_float(mods):
        floats.binary(e, ins, mods)
        return
    view = VIEW[mods.type(*_INTEGERS)]
    half = mods.choice("lo", "hi", "wide")
    d, a, b = e.operands(ins, 3)
    if half == "lo":
        e.apply("np.multiply", d, view, a, b)
    elif half == "hi":
        e.write(d, f"L.multiply_high({e.read(a, view)}, {e.read(b, view)})", view)
    else:
        wide = _wide(ins, view)
        e.apply("np.multiply", d, wide, *(Expression(_widened(e, each, view, wide)) for each in (a, b)))


@instruction("mad")
def mad(e, ins, mods):
    view = VIEW[mods.type(*_INTEGERS)]
    half = mods.choice("lo", "hi", "wide")
    d, a, b, c = e.operands(ins, 4)
    if half == "lo":
        e.write(d, f"{e.read(a, view)} * {e.read(b, view)} + {e.read(c, view)}", view)
    elif half == "hi":
        e.write(d, f"L.multiply_high({e.read(a, view)}, {e.read(b, view)}) + {e.read(c, view)}", view)
    else:
        wide = _wide(ins, view)
        x, y = (_widened(e, each, view, wide) for each in (a, b))
        e.write(d, f"{x} * {y} + {e.read(c, wide)}", wide)


def _wide(ins, view):
    if view not in _WIDE:
        raise Unsupported(ins.op)
    return _WIDE[view]


def _widened(e, operand, view, wide):
    return f"F.wide({e.read(operand, view)}, {e.constant(NUMPY[wide])})"


@instruction("div", "rem")
def div(e, ins, mods):
    if floats.is_float(mods):
        floats.divide(e, ins, mods)
        return
    view = VIEW[mods.type(*_INTEGERS)]
    d, a, b = e.operands(ins, 3)
    e.write(d, f"L.{ins.mods[0]}({e.read(a, view)}, {e.read(b, view)})", view)


@instruction("neg", "abs")
def neg(e, ins, mods):
    """Negate, or take the absolute value; the lowest number stays unchanged."""
    if floats.is_float(mods):
        floats.sign(e, ins, mods)
        return
    d, a = e.operands(ins, 2)
    e.apply({"neg": "np.negative", "abs": "np.abs"}[ins.mods[0]], d, VIEW[mods.type("s16", "s32", "s64")], a)
