"""mma, wgmma, tcgen05 (PTX ISA, sections Warp-Level Matrix Instructions, Asynchronous Warpgroup-Level Matrix
Instructions, TensorCore 5th Generation Family Instructions).

Tables list the variants that the machine's engines compute; every other variant is an error.
"""

from __future__ import annotations

import re

import numpy as np

from ..emitter import as_list, instruction
from ..ptx import Address, Imm, Reg, Unsupported
from .no_effect import ALIGNED

_MMA = {("m16n8k16", "bf16"): (4, 2), ("m16n8k16", "f16"): (4, 2), ("m16n8k8", "bf16"): (2, 1),
        ("m16n8k8", "f16"): (2, 1), ("m16n8k8", "tf32"): (4, 2)}  # fmt: skip


@instruction("mma")
def mma(e, ins, mods):
    """Translate mma: D = A B + C with float32 C and D. The table _MMA has the register counts of A and B."""
    found = re.fullmatch(r"mma\.sync\.aligned\.(m16n8k\d+)\.row\.col\.f32\.(\w+)\.(\w+)\.f32", ins.op)
    if not found or found[2] != found[3] or (found[1], found[2]) not in _MMA:
        raise Unsupported(ins.op)
    mods.left = []
    shape, kind = found[1], found[2]
    d, a, b, c = e.operands(ins, 4)
    if (len(a), len(b), len(c), len(d)) != (*_MMA[shape, kind], 4, 4):
        raise Unsupported(f"{ins.op} of {len(a)}, {len(b)}, {len(c)}, {len(d)} registers")
    values = f"{e.reads(a, 'b32')}, {e.reads(b, 'b32')}, {e.reads(c, 'f32')}"
    result = e.temporary(f"u.mma({shape!r}, {kind!r}, {values}, m)")
    for j, register in enumerate(d):
        e.write(register, f"{result}[{j}]", "f32")


_WGMMA_DEPTH = {"bf16": 16, "f16": 16, "e4m3": 32, "e5m2": 32}


@instruction("wgmma")
def wgmma(e, ins, mods):
    operation = mods.choice("mma_async", "fence", "commit_group", "wait_group")
    mods.require("sync")
    mods.drop(ALIGNED)
    if operation == "mma_async":
        _wgmma_mma(e, ins, mods)
    elif operation == "wait_group":
        e.add(f"u.wgmma_wait({e.immediate(ins, *e.operands(ins, 1))}, m)")
    else:
        e.operands(ins, 0)
        e.add(f"u.wgmma_{'fence' if operation == 'fence' else 'commit'}(m)")


def _wgmma_mma(e, ins, mods):
    """Emit a call u.wgmma(op, accumulators, a, b, scale_d, scale_a, scale_b, trans_a, trans_b). a: descriptor or
    registers.

    8-bit types have no trans operands; with A in registers there is only trans_b. Registers are passed by their indices
    in u.b32, since the machine may read and write them at any time until they are waited for.
    """
    found = re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(\w+)\.(\w+)", ins.op)
    if not found or found[3] not in _WGMMA_DEPTH or int(found[2]) != _WGMMA_DEPTH[found[3]] or int(found[1]) % 8:
        raise Unsupported(ins.op)
    if found[3] != found[4] and "16" in found[3] + found[4]:
        raise Unsupported(ins.op)
    mods.left = []
    d, a, b, scale_d, *scales = ins.args
    halves = found[3] in ("bf16", "f16")
    if len(d) != int(found[1]) // 2 or len(scales) != 2 + halves * (1 if isinstance(a, list) else 2):
        raise Unsupported(f"{ins.op} with {len(d)} accumulators and {len(scales)} numbers")
    left = _places(e, a) if isinstance(a, list) else e.read(a, "b64")
    keep = str(scale_d.value) if isinstance(scale_d, Imm) else e.read(scale_d, "p")
    numbers = ", ".join(str(e.immediate(ins, each)) for each in scales)
    e.add(f"u.wgmma({ins.op!r}, {_places(e, d)}, {left}, {e.read(b, 'b64')}, {keep}, {numbers}, m=m)")


def _places(e, registers):
    return e.constant(np.array([register.index for register in registers]))


# A hint of how long A stays in the collector's buffer: no effect (PTX ISA, tcgen05.mma, .collector_usage).
_COLLECTOR = r"(\.collector::a::(fill|use|lastuse|discard))?"
_TCGEN05 = [
    r"alloc\.cta_group::[12]\.sync\.aligned(\.shared::cta)?\.b32",
    r"dealloc\.cta_group::[12]\.sync\.aligned\.b32",
    r"relinquish_alloc_permit\.cta_group::[12]\.sync\.aligned",
    r"mma\.cta_group::[12]\.kind::f16" + _COLLECTOR,
    r"mma\.cta_group::[12]\.kind::mxf8f6f4\.block_scale(\.scale_vec::1X|\.block32)?" + _COLLECTOR,
    r"cp\.cta_group::[12]\.32x128b\.warpx4",
    r"commit\.cta_group::[12]\.mbarrier::arrive::one(\.shared::cluster)?(\.multicast::cluster)?\.b64",
    r"wait::(ld|st)\.sync\.aligned",
    r"fence::(before|after)_thread_sync",
    r"ld\.sync\.aligned\.(32x32b|16x256b)\.x\d+\.b32",
]


@instruction("tcgen05")
def tcgen05(e, ins, mods):
    """Pass an instruction's operands to the engine: addresses, descriptors, predicates; vectors as tuples."""
    if not any(re.fullmatch(r"tcgen05\." + form, ins.op) for form in _TCGEN05):
        raise Unsupported(ins.op)
    mods.left = []
    if ins.mods[1] == "ld":
        d, address = e.operands(ins, 2)
        e.add(f"u.tcgen05_ld({ins.op!r}, m, {_places(e, as_list(d))}, {_tensor_operand(e, address)})")
    else:
        e.add(f"u.tcgen05({', '.join([repr(ins.op), 'm', *(_tensor_operand(e, each) for each in ins.args)])})")


def _tensor_operand(e, operand):
    if isinstance(operand, Address):
        return e.address(operand, "b64" if isinstance(operand.base, Reg) and operand.base.cls == "b64" else "b32")
    if isinstance(operand, list):
        return "(" + "".join(f"{_tensor_operand(e, each)}, " for each in operand) + ")"
    if isinstance(operand, Imm):
        return str(operand.value)
    if isinstance(operand, tuple):
        return e.read(operand, "p")
    return e.read(operand, operand.cls)
