"""Bit operations (PTX ISA, sections Logic and Shift Instructions; bit fields of Integer Arithmetic Instructions)."""

from __future__ import annotations

import numpy as np

from ..emitter import BITS, VIEW, instruction
from ..lanes import PRMT_MODES
from ..ptx import Imm

_BITS = ("pred", "b16", "b32", "b64")


@instruction("and", "or", "xor")
def binary(e, ins, mods):
    view = VIEW[mods.type(*_BITS)]
    d, a, b = e.operands(ins, 3)
    e.apply({"and": "np.bitwise_and", "or": "np.bitwise_or", "xor": "np.bitwise_xor"}[ins.mods[0]], d, view, a, b)


@instruction("not")
def invert(e, ins, mods):
    view = VIEW[mods.type(*_BITS)]
    d, a = e.operands(ins, 2)
    e.apply("np.invert", d, view, a)


@instruction("lop3")
def lop3(e, ins, mods):
    mods.require("b32")
    d, a, b, c, table = e.operands(ins, 5)
    values = ", ".join(e.read(each, "b32") for each in (a, b, c))
    e.write(d, f"L.lop3({values}, {e.immediate(ins, table)})", "b32")


@instruction("shl", "shr")
def shift(e, ins, mods):
    """Translate shl and shr; shr of a signed type copies the sign. Amounts beyond the width count as the width."""
    right = ins.mods[0] == "shr"
    t = mods.type(*_BITS[1:], *(("u16", "s16", "u32", "s32", "u64", "s64") if right else ()))
    view, bits = VIEW[t], BITS[t]
    d, a, amount = e.operands(ins, 3)
    function = "np.right_shift" if right else "np.left_shift"
    if not isinstance(amount, Imm):
        e.write(d, f"L.shift({function}, {e.read(a, view)}, {e.read(amount, 'b32')}, {bits})", view)
    elif 0 <= amount.value < bits or (right and view[0] == "s"):
        e.apply(function, d, view, a, Imm(amount.value if 0 <= amount.value < bits else bits - 1))
    else:
        e.write(d, e.read(Imm(0), view), view)


@instruction("shf")
def funnel_shift(e, ins, mods):
    left = mods.choice("l", "r") == "l"
    wrap = mods.choice("wrap", "clamp") == "wrap"
    mods.require("b32")
    d, low, high, amount = e.operands(ins, 4)
    values = ", ".join(e.read(each, "b32") for each in (low, high, amount))
    e.write(d, f"L.funnel({left}, {values}, {wrap})", "b32")


@instruction("prmt")
def permute_bytes(e, ins, mods):
    mods.require("b32")
    mode = mods.choice(*PRMT_MODES, default="index")
    d, a, b, selector = e.operands(ins, 4)
    x, y = e.read(a, "b32"), e.read(b, "b32")
    if mode != "index":
        e.write(d, f"L.prmt_mode({x}, {y}, {e.read(selector, 'b32')}, {mode!r})", "b32")
    elif isinstance(selector, Imm) and not selector.value & 0x8888:
        e.write(d, _fixed_permutation(e, x, y, selector.value), "b32")
    else:
        e.write(d, f"L.prmt({x}, {y}, {e.read(selector, 'b32')})", "b32")


def _fixed_permutation(e, x, y, selector):
    """Return shifts and masks for a prmt with constant selector: bytes that move equally far are moved together."""
    masks: dict[tuple[str, int], int] = {}
    for to in range(4):
        of = selector >> 4 * to & 7
        moved = (y if of > 3 else x, 8 * (to - of % 4))
        masks[moved] = masks.get(moved, 0) | 255 << 8 * to
    terms = []
    for (source, left), mask in masks.items():
        moved = source
        if left:
            moved = f"({source} {'<<' if left > 0 else '>>'} {e.constant(np.uint32(abs(left)))})"
        terms.append(moved if mask == 0xFFFFFFFF else f"({moved} & {e.constant(np.uint32(mask))})")
    return " | ".join(terms)


@instruction("popc", "clz")
def count_bits(e, ins, mods):
    view = VIEW[mods.type("b32", "b64")]
    d, a = e.operands(ins, 2)
    e.write(d, f"L.{ins.mods[0]}({e.read(a, view)})", "b32")


@instruction("bfind")
def find_bit(e, ins, mods):
    view = VIEW[mods.type("u32", "s32", "u64", "s64")]
    d, a = e.operands(ins, 2)
    e.write(d, f"L.bfind({e.read(a, view)}, {mods.flag('shiftamt')})", "b32")


@instruction("brev")
def reverse_bits(e, ins, mods):
    view = VIEW[mods.type("b32", "b64")]
    d, a = e.operands(ins, 2)
    e.write(d, f"L.brev({e.read(a, view)})", view)


@instruction("bfe")
def extract_bits(e, ins, mods):
    view = VIEW[mods.type("u32", "s32", "u64", "s64")]
    d, a, position, length = e.operands(ins, 4)
    e.write(d, f"L.bfe({e.read(a, view)}, {e.read(position, 'b32')}, {e.read(length, 'b32')})", view)


@instruction("bfi")
def insert_bits(e, ins, mods):
    view = VIEW[mods.type("b32", "b64")]
    d, a, b, position, length = e.operands(ins, 5)
    values = ", ".join([e.read(a, view), e.read(b, view), e.read(position, "b32"), e.read(length, "b32")])
    e.write(d, f"L.bfi({values})", view)
