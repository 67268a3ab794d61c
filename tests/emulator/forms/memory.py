"""ld, st, atom, red, ldmatrix, stmatrix (PTX ISA, sections of these names)."""

from __future__ import annotations

import numpy as np

from .. import parameters
from ..emitter import BITS, NUMPY, VIEW, as_list, instruction
from ..ptx import Unsupported
from . import copies
from .no_effect import ALIGNED, CACHE, ORDER, SCOPE

_SHARED = ("shared", "shared::cta", "shared::cluster")
_ATOMS = ("add", "cas", "exch", "min", "max", "or", "and", "xor", "inc", "dec")


def space_of(mods) -> str:
    """Return "shared" or "global". A generic address counts as global; a shared one then causes a Fault."""
    return "shared" if mods.choice(*_SHARED, "global", default="global") in _SHARED else "global"


def _memory_address(e, address, space):
    return e.address(address, "b32" if space == "shared" else "b64")


def _vector(ins, mods, registers):
    count = int(mods.choice("v2", "v4", "v8", default="v1")[1:])
    if len(registers) != count:
        raise Unsupported(f"{ins.op} of {len(registers)} registers")


def _cache_hint(mods, operands):
    """Remove the policy operand that .L2::cache_hint adds."""
    return operands[:-1] if mods.flag("L2::cache_hint") else operands


@instruction("ld")
def ld(e, ins, mods):
    mods.drop(ORDER, SCOPE, CACHE)
    t = mods.type(*(name for name in BITS if name not in ("f16", "bf16")))
    d, address = _cache_hint(mods, e.operands(ins, 2, 3))
    registers = as_list(d)
    _vector(ins, mods, registers)
    if mods.flag("param"):
        _load_parameter(e, registers, address, t)
        return
    space = space_of(mods)
    where = _memory_address(e, address, space)
    values = e.temporary(f"u.load_{space}({where}, {BITS[t] // 8}, {len(registers)}, m)")
    for j, register in enumerate(registers):
        e.write(register, _loaded(e, f"{values}[{j}]", t), _loaded_view(t))


def _loaded_view(t):
    """Return the view in which a loaded value is written: signed types are sign-extended, others zero-extended."""
    return VIEW[t] if t[0] == "s" else f"b{max(BITS[t], 16)}"


def _loaded(e, value, t):
    if BITS[t] > 8:
        return f"{value}.view({e.dtype(VIEW[t])})" if t[0] == "s" else value
    return f"{value}.view(np.int8).astype(np.int16)" if t == "s8" else f"{value}.astype(np.uint16)"


def _load_parameter(e, registers, address, t):
    """Load a kernel parameter: by its name one value for all lanes, otherwise by generic address."""
    bytes_, view = BITS[t] // 8, _loaded_view(t)
    of = e.constant({"s8": np.int8, "u8": np.uint8, "b8": np.uint8}.get(t) or NUMPY[view])
    if isinstance(address.base, str):
        at, size = e.kernel.params[address.base]
        if address.offset + bytes_ * len(registers) > size:
            raise Unsupported(f"ld.param beyond {address.base}")
        values = [f"u.cta.params({at + address.offset + j * bytes_}, {of})" for j in range(len(registers))]
    else:
        load = f"{e.constant(parameters.load)}(u, {e.address(address, 'b64')}, {len(registers)}, {of}, m)"
        loaded = e.temporary(load)
        values = [f"{loaded}[{j}]" for j in range(len(registers))]
    for register, value in zip(registers, values, strict=True):
        e.write(register, f"{value}.astype({e.dtype(view)})" if bytes_ == 1 else value, view)


@instruction("st")
def st(e, ins, mods):
    if mods.flag("async"):
        copies.store_async(e, ins, mods)
        return
    mods.drop(ORDER, SCOPE, CACHE)
    t = mods.type(*(name for name in BITS if name not in ("f16", "bf16")))
    space = space_of(mods)
    address, sources = _cache_hint(mods, e.operands(ins, 2, 3))
    _vector(ins, mods, as_list(sources))
    view = f"b{max(BITS[t], 16)}"
    values = [e.read(each, view) for each in as_list(sources)]
    if BITS[t] == 8:
        values = [f"F.wide({value}, np.uint8)" for value in values]
    where = _memory_address(e, address, space)
    e.add(f"u.store_{space}({where}, {BITS[t] // 8}, ({''.join(f'{value}, ' for value in values)}), m)")


@instruction("atom", "red")
def atom(e, ins, mods):
    """Translate atom and red: lanes act one after the other, since the ISA leaves the order open; red has no result.

    Atomics of floats are refused, since the hardware's treatment of subnormal numbers depends on the space.
    """
    operation = mods.choice(*_ATOMS)
    mods.drop(ORDER, SCOPE, CACHE)
    t = mods.type("b32", "u32", "s32", "b64", "u64", "s64")
    space = space_of(mods)
    sources = 2 if operation == "cas" else 1
    operands = _cache_hint(mods, ins.args)
    d, operands = (operands[0], operands[1:]) if ins.mods[0] == "atom" else (None, operands)
    if len(operands) != sources + 1:
        raise Unsupported(f"{ins.op} with {len(ins.args)} operands")
    view = VIEW[t]
    address = _memory_address(e, operands[0], space)
    values = ", ".join(e.read(each, view) for each in operands[1:])
    old = e.temporary(f"u.atomic({space!r}, {operation!r}, {address}, {e.dtype(view)}, m, {values})")
    e.write(d, old, view)


@instruction("ldmatrix")
def ldmatrix(e, ins, mods):
    transposed = _matrices(mods)
    count = int(mods.choice("x1", "x2", "x4")[1:])
    d, address = e.operands(ins, 2)
    registers = as_list(d)
    if len(registers) != count:
        raise Unsupported(f"{ins.op} of {len(registers)} registers")
    values = e.temporary(f"u.ldmatrix({e.address(address, 'b32')}, {count}, {transposed}, m)")
    for j, register in enumerate(registers):
        e.write(register, f"{values}[{j}]", "b32")


@instruction("stmatrix")
def stmatrix(e, ins, mods):
    transposed = _matrices(mods)
    count = int(mods.choice("x1", "x2", "x4")[1:])
    address, sources = e.operands(ins, 2)
    if len(as_list(sources)) != count:
        raise Unsupported(f"{ins.op} of {len(as_list(sources))} registers")
    e.add(f"u.stmatrix({e.address(address, 'b32')}, {e.reads(sources, 'b32')}, {transposed}, m)")


def _matrices(mods) -> bool:
    """Check the modifiers of ldmatrix and stmatrix: only 8 rows of 16 bytes are supported. Return True for .trans."""
    mods.require("sync", "m8n8", "b16")
    mods.drop(ALIGNED)
    mods.choice("shared", "shared::cta")
    return mods.flag("trans")
