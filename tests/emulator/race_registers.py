"""Check of wgmma's registers: on every path, a wgmma.fence must separate other accesses to them from the wgmma.

PTX ISA, "wgmma.fence": it is needed between a thread's access to a register and any wgmma.mma_async that uses the
register, as an accumulator or as A, and before the first wgmma. wgmma.mma_async themselves are ordered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .instructions import Address, Ins, Kernel, Reg

ENDS = ("bra", "ret", "exit", "trap")


def unfenced(kernel: Kernel) -> Ins | None:
    """Return a wgmma.mma_async that some path reaches from a register access without a wgmma.fence.

    None: there is none.
    """
    code = kernel.code
    takes = {at: set(_registers(ins.args[:2])) for at, ins in enumerate(code) if _is_multiplication(ins)}
    if not takes:
        return None
    bits = {register: 1 << number for number, register in enumerate(sorted(set().union(*takes.values())))}
    accesses = [_mask(bits, _registers([*ins.args, ins.pred])) for ins in code]
    blocks = _blocks(code)
    before = dict.fromkeys(blocks, 0)
    before[0] = (1 << len(bits)) - 1  # no fence was: all are to be ordered
    waiting = [0]
    reached = {0}
    while waiting:
        begin = waiting.pop()
        end, following = blocks[begin]
        after = before[begin]
        for at in range(begin, end):
            after = _after(code[at], accesses[at], after)
        for block in following:
            if block not in reached or after & ~before[block]:
                reached.add(block)
                before[block] |= after
                waiting.append(block)
    for begin in sorted(reached):
        touched = before[begin]
        for at in range(begin, blocks[begin][0]):
            if at in takes and touched & _mask(bits, takes[at]):
                return code[at]
            touched = _after(code[at], accesses[at], touched)
    return None


def _after(ins: Ins, accesses: int, touched: int) -> int:
    if ins.op.startswith("wgmma.fence"):
        return 0
    return touched if _is_multiplication(ins) else touched | accesses


def _is_multiplication(ins: Ins) -> bool:
    return ins.op.startswith("wgmma.mma_async")


def _registers(operand: Any) -> Iterator[tuple[str, int]]:
    """Yield the 32-bit registers of an operand, in which matrices lie."""
    if isinstance(operand, Reg):
        if operand.cls == "b32":
            yield operand.cls, operand.index
    elif isinstance(operand, (list, tuple)):
        for each in operand:
            yield from _registers(each)
    elif isinstance(operand, Address):
        yield from _registers([operand.base, *operand.coords])


def _mask(bits: dict[tuple[str, int], int], registers: Any) -> int:
    return sum(bits.get(register, 0) for register in set(registers))


def _blocks(code: list[Ins]) -> dict[int, tuple[int, list[int]]]:
    """Return basic blocks: begin -> (end, begins of the following blocks)."""
    ends = [at for at, ins in enumerate(code) if ins.mods[0] in ENDS]
    targets = {code[at].args[0] for at in ends if code[at].mods[0] == "bra"}
    begins = sorted({0, *targets, *(at + 1 for at in ends)} & set(range(len(code))))
    blocks = {}
    for begin, end in zip(begins, [*begins[1:], len(code)], strict=True):
        last = code[end - 1]
        following = [last.args[0]] if last.mods[0] == "bra" else []
        if last.mods[0] not in ENDS or last.pred is not None:
            following.append(end)
        blocks[begin] = end, [block for block in following if block < len(code)]
    return blocks
