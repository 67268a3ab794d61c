"""cvt (PTX ISA, section cvt). cvt.pack is an error, since no kernel uses it."""

from __future__ import annotations

from ..emitter import VIEW, instruction
from ..ptx import Unsupported

_NARROW_PAIRS = ("e4m3x2", "e5m2x2", "e2m1x2")
_HALVES = ("f16", "bf16")
_FLOATS = ("f16", "bf16", "f32", "f64")
_TO_INTEGRAL = ("rni", "rzi", "rmi", "rpi")
_BYTES = {"s8": "np.int8", "u8": "np.uint8"}


@instruction("cvt")
def cvt(e, ins, mods):
    to, of = mods.types(2)
    if to in ("f16x2", "bf16x2") and of == "f32":
        _pair_of_halves(e, ins, mods, to)
    elif to == "f16x2" and of in _NARROW_PAIRS:
        mods.require("rn")
        d, a = e.operands(ins, 2)
        e.write(d, f"F.pair_to_f16x2({e.read(a, 'b16')}, {of[:-2]!r})", "b32")
    elif to in _NARROW_PAIRS and of in ("f32", "f16x2"):
        _narrow_pair(e, ins, mods, to, of)
    elif (to, of) == ("tf32", "f32"):
        mods.require("rna")
        d, a = e.operands(ins, 2)
        e.write(d, f"F.to_tf32({e.read(a, 'f32')})", "b32")
    elif to in _FLOATS:
        (_to_float if of in _FLOATS else _integer_to_float)(e, ins, mods, to, of)
    else:
        (_float_to_integer if of in _FLOATS else _integer)(e, ins, mods, to, of)


def _pair_of_halves(e, ins, mods, to):
    """Convert a to the upper half of d, b to the lower."""
    rounding = mods.choice("rn", "rz")
    d, a, b = e.operands(ins, 3)
    if (to, rounding) == ("bf16x2", "rn"):
        e.write(d, f"F.bf16_pair({e.read(a, 'f32')}, {e.read(b, 'f32')})", "b32")
        return
    high, low = (_half(e.read(each, "f32"), to[:-2], rounding) for each in (a, b))
    e.write(d, f"F.pack({high}, {low})", "b32")


def _half(value, to, rounding):
    return f"F.to_{to}({value})" if rounding == "rn" else f"F.narrow({value}, {to!r}, {rounding!r})"


def _narrow_pair(e, ins, mods, to, of):
    """Convert a to the upper part of d, b to the lower. Both .rn and .satfinite are required."""
    mods.require("rn", "satfinite")
    name, shift = to[:-2], 4 if to == "e2m1x2" else 8
    d, *sources = e.operands(ins, 3 if of == "f32" else 2)
    if of == "f32":
        high, low = (e.read(each, "f32") for each in sources)
    else:
        pair = e.temporary(e.read(sources[0], "b32"))
        halves = f"{pair} >> np.uint32(16)", f"{pair} & np.uint32(65535)"
        high, low = (f"F.f16(({half}).astype({e.dtype('b16')}))" for half in halves)
    codes = [f"F.narrow({value}, {name!r}, satfinite=True)" for value in (high, low)]
    e.write(d, f"{codes[0]} << np.uint16({shift}) | {codes[1]}", "b16")


def _to_float(e, ins, mods, to, of):
    d, a = e.operands(ins, 2)
    ftz, sat = "f32" in (to, of) and mods.flag("ftz"), mods.flag("sat")
    value = f"F.{of}({e.read(a, 'b16')})" if of in _HALVES else e.read(a, of)
    value = f"L.flush({value})" if ftz and of == "f32" else value
    if to == of:
        if to in _HALVES:
            raise Unsupported(ins.op)
        rounding = mods.choice(*_TO_INTEGRAL, default="none")
        value = value if rounding == "none" else f"F.round_to_integral({value}, {rounding!r})"
    elif to in _HALVES:
        rounding = mods.choice("rn", "rz")
        if sat or (of, to) in (("f16", "bf16"), ("bf16", "f16")):
            raise Unsupported(ins.op)
        if of == "f64":
            if rounding != "rn":
                raise Unsupported(ins.op)
            value = f"F.float64_to_{to}({value})"
        else:
            value = _half(value, to, rounding)
        e.write(d, value, "b16")
        return
    elif (to, of) == ("f32", "f64"):
        rounding = mods.choice("rn", "rz", "rm", "rp")
        value = f"F.float64_to_float32(np.atleast_1d({value}), {rounding!r})"
        value = f"L.flush({value})" if ftz else value
    elif to == "f64":
        value = f"F.wide({value}, np.float64)"
    e.write(d, f"L.saturate({value})" if sat else value, to)


def _integer_source(e, a, of):
    """Return Python source of the operand; a byte is read from the low part of its register."""
    if of in _BYTES:
        return f"{e.read(a, 'b' + a.cls[1:])}.astype({_BYTES[of]})"
    return e.read(a, VIEW[of])


def _integer_to_float(e, ins, mods, to, of):
    rounding = mods.choice("rn", "rz", "rm", "rp")
    d, a = e.operands(ins, 2)
    value = _integer_source(e, a, of)
    if (rounding == "rn" and to in ("f32", "f64")) or (to == "f64" and of[1:] != "64"):
        e.write(d, f"({value}).astype({e.dtype(to)})", to)
        return
    if of[1:] == "64" or to in ("bf16", "f64"):
        raise Unsupported(ins.op)
    value = f"np.atleast_1d({value}).astype(np.float64)"  # exact
    if to == "f16":
        e.write(d, f"F.narrow({value}, 'f16', {rounding!r})", "b16")
    else:
        e.write(d, f"F.float64_to_float32({value}, {rounding!r})", "f32")


def _float_to_integer(e, ins, mods, to, of):
    rounding = mods.choice(*_TO_INTEGRAL)
    ftz = of == "f32" and mods.flag("ftz")
    mods.flag("sat")  # changes nothing: results are clamped to the range without it, too
    d, a = e.operands(ins, 2)
    value = f"F.{of}({e.read(a, 'b16')})" if of in _HALVES else e.read(a, of)
    value = f"L.flush({value})" if ftz else value
    _write_integer(e, d, f"F.float_to_int({value}, {rounding!r}, {_type(to)})", to)


def _integer(e, ins, mods, to, of):
    """Convert to an integer type: keep the low bits, or with .sat clamp to the type's range."""
    d, a = e.operands(ins, 2)
    value = _integer_source(e, a, of)
    value = f"F.clamp({value}, {_type(to)})" if mods.flag("sat") else f"({value}).astype({_type(to)})"
    _write_integer(e, d, value, to)


def _type(to):
    return f"np.{'uint' if to[0] == 'u' else 'int'}{to[1:]}"


def _write_integer(e, d, value, to):
    if to in _BYTES:  # a byte is extended to the register
        view = "s16" if to == "s8" else "b16"
        e.write(d, f"({value}).astype({e.dtype(view)})", view)
    else:
        e.write(d, value, VIEW[to])
