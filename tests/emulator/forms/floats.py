"""Float arithmetic (PTX ISA, sections Floating Point, Half Precision and Mixed Precision Instructions).

Without a rounding modifier add, sub and mul round to nearest here; ptxas may fuse such a mul and add to one fma, which
rounds once. The ISA allows both, so results of kernels with such pairs must be compared with a tolerance.
"""

from __future__ import annotations

from ..emitter import VIEW, Expression, instruction
from ..ptx import Imm, Unsupported

_FLOATS = ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2")
_NUMPY = {"add": "np.add", "sub": "np.subtract", "mul": "np.multiply"}
_DIRECTED = ("rz", "rm", "rp")


def is_float(mods) -> bool:
    return any(each in _FLOATS for each in mods.left)


def binary(e, ins, mods):
    """Translate add, sub, mul, min or max by type."""
    operation, found = ins.mods[0], [each for each in mods.left if each in _FLOATS]
    if operation in ("min", "max"):
        _extreme(e, ins, mods)
    elif found in (["f32", "bf16"], ["f32", "f16"]) and operation != "mul":
        _mixed(e, ins, mods)
    elif found[0] in ("f16x2", "bf16x2", "f32x2", "f16", "bf16"):
        _narrow(e, ins, mods, operation, 3)
    else:
        _single(e, ins, mods, operation)


def _single(e, ins, mods, operation):
    t = mods.type("f32", "f64")
    rounding = mods.choice("rn", *_DIRECTED, default="rn")
    ftz, sat = mods.flag("ftz"), mods.flag("sat")
    d, a, b = e.operands(ins, 3)
    if rounding == "rn" and not (ftz or sat):
        e.apply(_NUMPY[operation], d, t, a, b)
        return
    if t == "f64":
        raise Unsupported(ins.op)
    x, y = (_flushed(e, each, ftz) for each in (a, b))
    if rounding == "rn":
        value = f"{_NUMPY[operation]}({x}, {y})"
    elif operation == "mul":  # a product of two float32 is exact in float64
        value = f"L.fma_rounded({x}, {y}, np.float32(0), {rounding!r})"
    else:
        value = f"L.fma_rounded({x}, np.float32(1), {'-' if operation == 'sub' else ''}{y}, {rounding!r})"
    e.write(d, _finished(value, ftz, sat), "f32")


def _flushed(e, operand, ftz):
    value = e.read(operand, "f32")
    return f"L.flush({value})" if ftz else value


def _finished(value, ftz, sat):
    value = f"L.flush({value})" if ftz else value
    return f"L.saturate({value})" if sat else value


def _mixed(e, ins, mods):
    """Translate add or sub with a 16-bit operand: c and the result are float32 (add{.rn}.f32.bf16 d, a, c)."""
    t = mods.types(2)[1]
    mods.flag("rn")
    d, a, c = e.operands(ins, 3)
    e.apply(_NUMPY[ins.mods[0]], d, "f32", Expression(f"F.{t}({e.read(a, 'b16')})"), c)


def _narrow(e, ins, mods, operation, count):
    """Compute 16-bit floats, single or in pairs, in float64 and round once."""
    t = mods.type()
    mods.flag("rn")
    d, *sources = e.operands(ins, count)
    pair = t if t.endswith("x2") else t + "x2"
    view = {"f32x2": "b64"}.get(t, "b32") if t.endswith("x2") else "b16"
    values = ", ".join(e.read(each, view) for each in sources)
    if view == "b16":  # one number is the low half of a pair
        values = ", ".join(f"F.wide({e.read(each, view)}, {e.dtype('b32')})" for each in sources)
        e.write(d, f"L.pairs({operation!r}, {pair!r}, {values}).astype({e.dtype('b16')})", "b16")
    else:
        e.write(d, f"L.pairs({operation!r}, {pair!r}, {values})", view)


@instruction("fma")
def fma(e, ins, mods):
    """Multiply and add with one rounding. A rounding modifier is required; halves have .rn only."""
    found = [each for each in mods.left if each in _FLOATS]
    rounding = mods.choice("rn", *_DIRECTED)
    if len(found) == 1 and found[0] in ("f16x2", "bf16x2", "f32x2", "f16", "bf16"):
        if rounding != "rn":
            raise Unsupported(ins.op)
        _narrow(e, ins, mods, "fma", 4)
        return
    d, a, b, c = e.operands(ins, 4)
    if found in (["f32", "bf16"], ["f32", "f16"]):
        t = mods.types(2)[1]
        ftz, sat = False, mods.flag("sat")
        x, y = (f"F.{t}({e.read(each, 'b16')})" for each in (a, b))
        z = e.read(c, "f32")
    else:
        mods.type("f32")
        ftz, sat = mods.flag("ftz"), mods.flag("sat")
        x, y, z = (_flushed(e, each, ftz) for each in (a, b, c))
    value = f"L.fma({x}, {y}, {z})" if rounding == "rn" else f"L.fma_rounded({x}, {y}, {z}, {rounding!r})"
    e.write(d, _finished(value, ftz, sat), "f32")


def _extreme(e, ins, mods):
    """Translate min or max: of a NaN and a number the number, or with .NaN a NaN. On sm_100 there may be three
    operands.
    """
    t = mods.type(*_FLOATS)
    which = ins.mods[0] + (".NaN" if mods.flag("NaN") else "")
    if t in ("f16", "bf16", "f16x2", "bf16x2"):
        d, a, b = e.operands(ins, 3)
        view = "b32" if t.endswith("x2") else "b16"
        e.write(d, f"L.extreme_of_halves({which!r}, {e.read(a, view)}, {e.read(b, view)}, {t!r})", view)
        return
    if t not in ("f32", "f64"):
        raise Unsupported(ins.op)
    ftz = t == "f32" and mods.flag("ftz")
    d, first, *rest = e.operands(ins, 3, 4)
    name = {"max": "float_max", "min": "float_min", "max.NaN": "float_max_nan", "min.NaN": "float_min_nan"}[which]
    value = _flushed(e, first, True) if ftz else e.read(first, t)
    for each in rest:
        value = f"L.{name}({value}, {_flushed(e, each, True) if ftz else e.read(each, t)})"
    e.write(d, value, t)


def sign(e, ins, mods):
    """Change only the sign bit, also for NaN."""
    t = mods.type("f16", "bf16", "f16x2", "bf16x2", "f32", "f64")
    d, a = e.operands(ins, 2)
    if t == "f32" and mods.flag("ftz"):
        e.write(d, f"{ {'neg': '-', 'abs': 'np.abs'}[ins.mods[0]] }(L.flush({e.read(a, 'f32')}))", "f32")
        return
    if t in ("f32", "f64"):
        e.apply({"neg": "np.negative", "abs": "np.abs"}[ins.mods[0]], d, t, a)
        return
    view, bits = ("b32", 0x80008000) if t.endswith("x2") else ("b16", 0x8000)
    flipped = f"{e.read(a, view)} ^ {e.read(Imm(bits), view)}"
    e.write(d, flipped if ins.mods[0] == "neg" else f"{e.read(a, view)} & {e.read(Imm(~bits), view)}", view)


def divide(e, ins, mods):
    """Divide exactly as IEEE, also for .approx and .full, which allow an error of 2 units in the last place."""
    t = mods.type("f32", "f64")
    if ins.mods[0] != "div":
        raise Unsupported(ins.op)
    mods.choice("rn", "approx", "full")
    ftz = mods.flag("ftz")
    d, a, b = e.operands(ins, 3)
    if not ftz:
        e.apply("np.divide", d, t, a, b)
    else:
        e.write(d, f"L.flush({_flushed(e, a, ftz)} / {_flushed(e, b, ftz)})", "f32")


# By function: numpy's expression, and whether .ftz may change the operand and the result.
_FUNCTIONS = {"rcp": ("np.float32(1) / {}", True, True), "sqrt": ("np.sqrt({})", True, False),
              "rsqrt": ("np.float32(1) / np.sqrt({})", True, False), "ex2": ("np.exp2({})", False, True),
              "lg2": ("np.log2({})", True, False), "tanh": ("np.tanh({})", False, False)}  # fmt: skip
_EXACT = ("rcp", "sqrt")  # have .rn


@instruction(*_FUNCTIONS)
def function(e, ins, mods):
    """Call numpy's float32 function, which .approx approximates within an error bound. 16-bit types are errors."""
    name = ins.mods[0]
    mods.type("f32")
    mods.choice("approx", *(("rn",) if name in _EXACT else ()))
    ftz = mods.flag("ftz")
    text, flush_operand, flush_result = _FUNCTIONS[name]
    d, a = e.operands(ins, 2)
    e.write(d, _finished(text.format(_flushed(e, a, ftz and flush_operand)), ftz and flush_result, False), "f32")


@instruction("copysign")
def copysign(e, ins, mods):
    t = mods.type("f32", "f64")
    d, a, b = e.operands(ins, 3)
    e.write(d, f"L.copysign({e.read(a, VIEW[t])}, {e.read(b, VIEW[t])})", t)
