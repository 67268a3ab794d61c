"""Mutations: wrong variants of an instruction, and samples of a kernel's mutants."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from .ptx import Address, Imm, Ins, Kernel

LEFT_OUT, OTHER_SENSE, EXCHANGED, ONE_MORE, OTHER_BOUND = "left out", "other sense", "exchanged", "one more", "bound"
_ORDERED = ("sub", "div", "rem", "shl", "shr", "selp", "prmt", "bfi", "bfe", "mad", "fma", "mma", "wgmma", "cvt", "sad",
            "copysign", "setp", "tcgen05")  # fmt: skip
_SYMMETRIC = re.compile(r"setp\.(eq|ne)\b")
_BOUNDS = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "lo": "ls", "ls": "lo", "hi": "hs", "hs": "hi",
           "ltu": "leu", "leu": "ltu", "gtu": "geu", "geu": "gtu", "eq": "ne", "ne": "eq"}  # fmt: skip
_COUNTED = ("mbarrier", "bar", "barrier", "cp", "wgmma", "shfl", "add", "sub", "mad", "mul", "shl", "shr", "and", "or",
            "xor", "setp", "selp", "mov", "prmt", "bfe", "bfi", "min", "max", "div", "rem", "st", "atom", "red",
            "createpolicy", "setmaxnreg", "lop3", "shf", "fma", "vote")  # fmt: skip
_BYTES = re.compile(r"\.(?:b|u|s|f)(8|16|32|64)\b")
_VECTOR = re.compile(r"\.v([248])\b")
_ENDS = ("ret", "exit", "trap")
_OF_TENSOR_MEMORY = ("tcgen05.mma", "tcgen05.cp", "tcgen05.ld")
NEAR = 12
"""The number of instructions before, and after, an instruction that count as its neighbourhood."""


class Mutant(NamedTuple):
    """A changed instruction of a kernel.

    Attributes:
        at: its index in `kernel.code`.
        text: the original text without register names.
        operand: the changed operand; -1: none.
    """

    at: int
    kind: str
    text: str
    ins: Ins
    operand: int = -1


def normal(text: str) -> str:
    """Return an instruction's text without numbers of registers and labels, which change whenever a kernel changes."""
    text = re.sub(r"%(r|rd|rs|f|fd|p|h|hh|b|ra|rq|dd|SP|SPL)\d+\b", r"%\1", text)
    return re.sub(r"\$L__BB\w+|\bLAB_\w+|\$\w+", "$L", text)


def mutants_of(kernel: Kernel, reached: set[int]) -> list[Mutant]:
    """Return all mutants of a kernel that change an instruction in `reached`."""
    return [
        Mutant(at, kind, normal(ins.text), changed, operand)
        for at, ins in enumerate(kernel.code)
        if at in reached
        for kind, changed, operand in _forms(ins)
    ]


def around(kernel: Kernel, at: int) -> str:
    """Return the instruction at a place, marked by ">", with NEAR instructions before and after it.

    There is one `normal` text a line.
    """
    texts = [normal(ins.text) for ins in kernel.code[max(at - NEAR, 0) : at + NEAR + 1]]
    texts[min(at, NEAR)] = "> " + texts[min(at, NEAR)]
    return "\n".join(texts)


def _forms(ins: Ins) -> Iterator[tuple[str, Ins, int]]:
    """Yield (kind, changed instruction, changed operand)."""
    opcode = ins.mods[0]
    if opcode in _ENDS:
        return
    if ins.op.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
        yield LEFT_OUT, Ins("setp.eq.b32", [ins.args[0], Imm(0), Imm(0)], line=ins.line), -1
    else:
        yield LEFT_OUT, Ins("pragma", [], line=ins.line), -1
    if ins.pred is not None:
        yield OTHER_SENSE, dataclasses.replace(ins, negated=not ins.negated), -1
    if opcode == "setp" and _other_bound(ins.op) != ins.op:
        yield OTHER_BOUND, dataclasses.replace(ins, op=_other_bound(ins.op)), -1
    if opcode in _ORDERED and not _SYMMETRIC.match(ins.op):
        yield from _exchanges(ins)
    yield from _counts(ins)


def _other_bound(op: str) -> str:
    return ".".join(_BOUNDS.get(each, each) for each in op.split("."))


def _exchanges(ins: Ins) -> Iterator[tuple[str, Ins, int]]:
    """Yield variants of an instruction with two exchanged operands.

    They are the first two sources; for fma and mad a factor and the addend; for mma A and B, if they fit. For MMAs with
    block scales the scales of A and B are exchanged, too.
    """
    pairs = [(2, 3) if ins.mods[0] in ("fma", "mad") else (1, 2)]
    if "block_scale" in ins.mods:
        pairs.append((4, 5))
    for first, last in pairs:
        if len(ins.args) > last and repr(ins.args[first]) != repr(ins.args[last]):
            args = list(ins.args)
            args[first], args[last] = args[last], args[first]
            yield EXCHANGED, dataclasses.replace(ins, args=args), first if len(pairs) > 1 else -1


def _counts(ins: Ins) -> Iterator[tuple[str, Ins, int]]:
    """Yield variants with one integer constant changed (usually increased by 1), or with one address advanced.

    Addresses in tensor memory are advanced by one column.
    """
    for place, operand in enumerate(ins.args):
        changed: Any = None
        if isinstance(operand, Imm) and not operand.is_float and ins.mods[0] in _COUNTED:
            value = _other_count(ins, place, int(operand.value))
            changed = None if value is None else Imm(value)
        elif isinstance(operand, Address) and not ins.op.startswith(("mbarrier.init", "prefetch")):
            changed = dataclasses.replace(operand, offset=operand.offset + _access_bytes(ins.op))
        if changed is not None:
            yield ONE_MORE, dataclasses.replace(ins, args=[*ins.args[:place], changed, *ins.args[place + 1 :]]), place


def _other_count(ins: Ins, place: int, value: int) -> int | None:
    """Return another value for a constant; None if the constant has no effect.

    Constants without effect are, for example, masks of all lanes and sleep times.
    """
    if ins.op.startswith("shfl"):  # half the distance; the source of a broadcast is any lane of equal ones
        return value // 2 if place == 2 and "idx" not in ins.op else None
    if ins.mods[0] in ("bar", "barrier"):
        return value + 32 if place == 1 else value + 1 if len(ins.args) > 1 else None
    if ins.op.startswith(("mbarrier.try_wait", "wgmma.mma_async")) and place != 2:
        return None
    if ins.mods[0] == "prmt" and place == 3:
        return value + 4
    return value + 1


def _access_bytes(op: str) -> int:
    """Return the distance between adjacent accesses, in units of the address.

    The unit is a column in tensor memory, and a byte elsewhere.
    """
    if op.startswith(_OF_TENSOR_MEMORY):
        return 1
    if "matrix" in op or op.startswith("cp.async"):
        return 16
    size, count = _BYTES.search(op), _VECTOR.search(op)
    return (int(size[1]) // 8 if size else 8) * (int(count[1]) if count else 1)


_SYNCHRONISES = ("mbarrier", "bar", "barrier", "fence", "membar", "cp", "wgmma", "mma", "shfl", "vote", "match",
                 "redux", "elect", "st.async", "ldmatrix", "stmatrix", "setmaxnreg", "griddepcontrol", "atom",
                 "red", "tcgen05")  # fmt: skip


def sample(name: str, mutants: list[Mutant], count: int, seed: int = 0) -> list[Mutant]:
    """Return a sample of mutants: two thirds change instructions that synchronise or multiply, one third others.

    Mutants are chosen by a hash of their text and the seed, so a changed kernel keeps most of its sample.
    """
    salt = f" of sample {seed}" if seed else ""
    seen: Counter[tuple[str, str]] = Counter()
    ranked: dict[bool, list[tuple[str, Mutant]]] = {True: [], False: []}
    for mutant in mutants:
        key = (mutant.kind, mutant.text)
        rank = hashlib.sha256(f"{name} {key} {seen[key]}{salt}".encode()).hexdigest()
        seen[key] += 1
        opcode = mutant.text.split(None, 1)[1] if mutant.text.startswith("@") else mutant.text
        ranked[opcode.startswith(_SYNCHRONISES)].append((rank, mutant))
    halves = [[mutant for _, mutant in sorted(ranked[half], key=lambda pair: pair[0])] for half in (True, False)]
    first = min(len(halves[0]), max(2 * count // 3, count - len(halves[1])))
    return sorted([*halves[0][:first], *halves[1][: count - first]], key=lambda mutant: mutant.at)
