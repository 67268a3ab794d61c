"""mov, cvta, mapa (PTX ISA, section Data Movement and Conversion Instructions)."""

from __future__ import annotations

import numpy as np

from ..emitter import BITS, VIEW, instruction
from ..ptx import Unsupported
from .no_effect import CACHE


@instruction("mov")
def mov(e, ins, mods):
    t = mods.type("pred", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
    d, a = e.operands(ins, 2)
    if isinstance(d, list):
        _unpack(e, ins, d, a, BITS[t])
    elif isinstance(a, list):
        _pack(e, ins, d, a, BITS[t])
    else:
        e.write(d, e.read(a, VIEW[t]), VIEW[t])


def _part(ins, parts, bits):
    """Return the width of a vector's parts, and the view that holds one."""
    width = bits // len(parts)
    if width not in (8, 16, 32):
        raise Unsupported(f"{ins.op} of {len(parts)} parts")
    return width, f"b{max(width, 16)}"


def _unpack(e, ins, parts, a, bits):
    """Split a register into parts, lowest bits first."""
    width, view = _part(ins, parts, bits)
    whole = e.temporary(e.read(a, f"b{bits}"))
    for j, part in enumerate(parts):
        value = f"({whole} >> {e.constant(_number(bits, j * width))})" if j else whole
        if width == 8:
            value = f"({value} & {e.constant(_number(bits, 255))})"
        e.write(part, f"{value}.astype({e.dtype(view)})", view)


def _pack(e, ins, d, parts, bits):
    width, view = _part(ins, parts, bits)
    terms = []
    for j, part in enumerate(parts):
        term = f"F.wide({e.read(part, view)}, {e.dtype(f'b{bits}')})"
        if width == 8:
            term = f"({term} & {e.constant(_number(bits, 255))})"
        terms.append(f"({term} << {e.constant(_number(bits, j * width))})" if j else term)
    e.write(d, " | ".join(terms), f"b{bits}")


def _number(bits, value):
    return {16: np.uint16, 32: np.uint32, 64: np.uint64}[bits](value)


@instruction("cvta")
def cvta(e, ins, mods):
    """Copy the address unchanged: generic and specific addresses are equal here, and spaces do not overlap.

    Parameters lie at engines.PARAM_BASE; shared memory lies below 2^32, with the CTA's rank in bits 24 and up.
    """
    mods.flag("to")
    mods.choice("global", "shared", "shared::cta", "shared::cluster", "param")
    view = VIEW[mods.type("u32", "u64")]
    d, a = e.operands(ins, 2)
    e.write(d, e.read(a, view), view)


@instruction("mapa")
def mapa(e, ins, mods):
    """Return the address of the same shared variable in another CTA of the cluster."""
    mods.require("shared::cluster")
    mods.require("u32")
    d, a, rank = e.operands(ins, 3)
    e.write(d, f"u.mapa({e.read(a, 'b32')}, {e.read(rank, 'b32')})", "b32")


@instruction("createpolicy")
def createpolicy(e, ins, mods):
    """Return 0 as a cache policy, which is never used: the machine has no caches."""
    mods.choice("fractional", "range", "cvt")
    mods.require("b64")
    mods.drop(CACHE, {"L2": "the machine has no caches"})
    e.write(ins.args[0], "np.uint64(0)", "b64")
