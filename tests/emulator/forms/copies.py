"""Asynchronous copies (PTX ISA, section Data Movement and Conversion: Asynchronous copy).

The engines copy the data and raise Fault for unsupported variants; this file checks the syntax and reads operands.
"""

from __future__ import annotations

from ..emitter import BITS, as_list, instruction
from ..ptx import Address, Imm, Reg, Unsupported
from .no_effect import CACHE

_CACHE = {**CACHE, "L2::cache_hint": "the machine has no caches; the policy, an operand behind all others, is not read"}
_TILE = {"tile": "the default mode of tensor copies; im2col and gather are errors"}


@instruction("cp")
def cp(e, ins, mods):
    if mods.flag("reduce"):
        mods.require("async", "bulk")
        _reduce(e, ins, mods)
        return
    mods.require("async")
    if mods.flag("bulk"):
        _bulk(e, ins, mods)
    elif mods.flag("commit_group"):
        e.add("u.cp_commit(m)")
    elif mods.flag("wait_group"):
        e.add(f"u.cp_wait({e.immediate(ins, *e.operands(ins, 1))}, m)")
    elif mods.flag("wait_all"):
        e.add("u.cp_wait(0, m, True)")
    elif mods.flag("mbarrier"):
        _arrive_after_copies(e, ins, mods)
    else:
        _copy(e, ins, mods)


def _copy(e, ins, mods):
    """Translate cp.async: copy 4, 8 or 16 bytes, of which src-size are read and the rest is zero."""
    if ins.mods[2] not in ("ca", "cg"):
        raise Unsupported(ins.op)
    mods.choice("shared", "shared::cta")
    mods.require("global")
    policy = mods.flag("L2::cache_hint")
    mods.drop(CACHE)
    to, of, size, *rest = e.operands(ins, *((4, 5) if policy else (3, 4)))
    given = rest[: len(rest) - policy]
    size = e.immediate(ins, size)
    if size not in ((4, 8, 16) if ins.mods[2] == "ca" else (16,)):
        raise Unsupported(f"{ins.op} of {size} bytes")
    read = str(size)
    if given and isinstance(given[0], Reg) and given[0].cls == "p":  # ignore-src
        raise Unsupported(f"{ins.op} with a predicate")
    if given:
        read = str(given[0].value) if isinstance(given[0], Imm) else e.read(given[0], "b32")
    e.add(f"u.cp_async({e.address(to, 'b32')}, {e.address(of, 'b64')}, {size}, {read}, m)")


def _arrive_after_copies(e, ins, mods):
    """Translate cp.async.mbarrier.arrive: arrive after earlier copies; without .noinc the pending count is raised
    first.
    """
    mods.require("arrive", "b64")
    noinc = mods.flag("noinc")
    mods.choice("shared", "shared::cta", default="generic")
    e.add(f"u.cp_mbarrier_arrive({e.address(*e.operands(ins, 1), 'b32')}, m, {noinc})")


def _bulk(e, ins, mods):
    if mods.flag("commit_group"):
        e.add("u.bulk_commit(m)")
    elif mods.flag("wait_group"):
        e.add(f"u.bulk_wait({e.immediate(ins, *e.operands(ins, 1))}, {mods.flag('read')}, m)")
    elif mods.flag("prefetch"):  # into a cache that the machine does not have; it checks the place
        _dimensions(ins, mods)
        mods.require("L2", "global")
        mods.drop(_CACHE)
        _call(e, ins)
    elif mods.flag("global"):
        _between_spaces(e, ins, mods)
    else:
        raise Unsupported(ins.op)


def _between_spaces(e, ins, mods):
    """Translate bulk copies: global to shared memory with an mbarrier, or shared to global memory in a bulk group."""
    _dimensions(ins, mods)
    mods.drop(_CACHE)
    if mods.flag("bulk_group"):
        mods.require("shared::cta")
    else:
        mods.choice("shared::cta", "shared::cluster")
        mods.require("mbarrier::complete_tx::bytes")
        mods.flag("multicast::cluster")
        mods.choice("cta_group::1", "cta_group::2", default="none")
    _call(e, ins)


def _reduce(e, ins, mods):
    """Translate reductions to a tensor in global memory; the element type is in the tensor map."""
    if "tensor" not in mods.left:
        raise Unsupported(ins.op)
    _dimensions(ins, mods)
    mods.drop(_CACHE)
    mods.require("global", "shared::cta", "add", "bulk_group")
    _call(e, ins)


def _dimensions(ins, mods):
    if mods.flag("tensor"):
        dimensions = int(mods.choice("1d", "2d", "3d", "4d", "5d")[0])
        mods.drop(_TILE)
        if not any(isinstance(each, Address) and len(each.coords) == dimensions for each in ins.args):
            raise Unsupported(f"{ins.op}: no address with {dimensions} coordinates")


def _call(e, ins):
    """Emit a call u.bulk(op, m, ...): an address operand is (addresses, [coordinates]), any other operand its value."""
    e.add(f"u.bulk({ins.op!r}, m, {', '.join(_bulk_operand(e, each) for each in ins.args)})")


def _bulk_operand(e, operand):
    if isinstance(operand, Address):
        view = "b64" if isinstance(operand.base, Reg) and operand.base.cls == "b64" else "b32"
        return f"({e.address(operand, view)}, [{', '.join(_bulk_operand(e, each) for each in operand.coords)}])"
    if isinstance(operand, list):
        return f"[{', '.join(_bulk_operand(e, each) for each in operand)}]"
    if isinstance(operand, Imm):
        return str(operand.value)
    if not isinstance(operand, Reg) or operand.cls == "p":
        raise Unsupported(f"operand {operand} of a bulk copy")
    return e.read(operand, {"b16": "b16", "b32": "s32", "b64": "b64"}[operand.cls])


def store_async(e, ins, mods):
    """Send a value to a CTA of the cluster; its bytes complete on an mbarrier there (st.async)."""
    mods.drop({"weak": "the default"})
    mods.require("mbarrier::complete_tx::bytes")
    mods.choice("shared::cluster", default="generic")
    t = mods.type("b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64")
    address, source, mbarrier = e.operands(ins, 3)
    if len(as_list(source)) != 1:
        raise Unsupported(f"{ins.op} of a vector")
    value = e.read(source, f"b{BITS[t]}")
    e.add(f"u.st_async({e.address(address, 'b32')}, {value}, {e.address(mbarrier, 'b32')}, {BITS[t] // 8}, m)")
