"""Rules for the tcgen05 instructions of a kernel, checked on its PTX from top to bottom; nothing is executed.

Straight-line code ends at a branch and where a branch goes to.

| rule | a kernel keeps it if |
|---|---|
| KNOWN | all its instructions are in INSTRUCTIONS |
| ONE_CTA | none has another group than `cta_group::1` |
| COLUMNS | an allocation takes a constant number of columns, a power of two from 32 to 512; together at most 512 |
| FREED | a dealloc of as many columns follows each alloc |
| RELINQUISHED | a relinquish follows each alloc |
| WAITED | a wait::ld follows each ld in the same straight-line code, before any arrival at an mbarrier |
| ELECTED | an elected thread issues each mma, each commit and each cp |
| ALIGNED | whole warps execute all other instructions: none is predicated or under an elect |
| COMMITS | it has two commits: of a stage, in the loop of the mmas, and of the accumulator, after that loop |

Why WAITED: the arrival lets the MMA warp overwrite the accumulator. Code that uses the result of a ld needs no wait,
since ptxas knows the register dependency (PTX ISA, tcgen05's canonical synchronization patterns).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from emulator.ptx import Imm, Ins, Kernel, Reg

KNOWN, ONE_CTA, COLUMNS, FREED, RELINQUISHED = "known", "one CTA", "columns", "freed", "relinquished"
WAITED, ELECTED, ALIGNED, COMMITS = "waited", "elected", "aligned", "commits"
RULES = (KNOWN, ONE_CTA, COLUMNS, FREED, RELINQUISHED, WAITED, ELECTED, ALIGNED, COMMITS)

ALLOC, RELINQUISH = "tcgen05.alloc", "tcgen05.relinquish_alloc_permit"
CP = "tcgen05.cp"
DEALLOC, MMA, COMMIT, LD, WAIT_LD = "tcgen05.dealloc", "tcgen05.mma", "tcgen05.commit", "tcgen05.ld", "tcgen05.wait::ld"
INSTRUCTIONS = {
    f"{ALLOC}.sync.aligned.shared::cta.b32",
    f"{RELINQUISH}.sync.aligned",
    f"{DEALLOC}.sync.aligned.b32",
    f"{MMA}.kind::f16.collector::a::discard",
    f"{MMA}.kind::mxf8f6f4.block_scale.block32.collector::a::discard",
    f"{CP}.32x128b.warpx4",
    f"{COMMIT}.mbarrier::arrive::one.shared::cluster.b64",
    f"{LD}.sync.aligned.16x256b.x16.b32",
    f"{LD}.sync.aligned.32x32b.x32.b32",
    f"{WAIT_LD}.sync.aligned",
}
"""Known tcgen05 instructions, without their `cta_group`."""
MOST_COLUMNS = 512
SIZES = {32, 64, 128, 256, MOST_COLUMNS}
_GROUP = re.compile(r"\.cta_group::(\d)")
_ARRIVES = ("mbarrier.arrive", "cp.async.mbarrier.arrive", COMMIT)
_BRANCHES = ("bra", "brx", "ret", "exit", "trap", "call")


class Finding(NamedTuple):
    """A place where a kernel breaks a rule: the line of its PTX text, and the instruction there."""

    rule: str
    line: int
    op: str


def lint(kernel: Kernel) -> list[Finding]:
    """Return all findings of a kernel."""
    return [*_names(kernel), *_allocations(kernel), *_waits(kernel), *_threads(kernel), *_commits(kernel)]


def _is(ins: Ins, name: str) -> bool:
    """Return True if an instruction is `name`, with any modifiers."""
    return f"{ins.op}.".startswith(f"{name}.")


def _at(rule: str, ins: Ins) -> Finding:
    return Finding(rule, ins.line, ins.op)


def _names(kernel: Kernel) -> Iterator[Finding]:
    for ins in kernel.code:
        if _is(ins, "tcgen05"):
            if _GROUP.sub("", ins.op) not in INSTRUCTIONS:
                yield _at(KNOWN, ins)
            if set(_GROUP.findall(ins.op)) - {"1"}:
                yield _at(ONE_CTA, ins)


def _allocations(kernel: Kernel) -> Iterator[Finding]:
    constants: dict[int, int] = {}
    held: list[tuple[int | None, Ins]] = []
    permits: list[Ins] = []
    total = 0
    for ins in kernel.code:
        if _is(ins, ALLOC):
            columns = _columns(ins, constants)
            total += columns or 0
            if columns not in SIZES or total > MOST_COLUMNS:
                yield _at(COLUMNS, ins)
            held.append((columns, ins))
            permits.append(ins)
        elif _is(ins, RELINQUISH):
            permits.clear()
        elif _is(ins, DEALLOC):
            columns = _columns(ins, constants)
            fitting = [each for each in held if each[0] == columns]
            if fitting:
                held.remove(fitting[0])
            else:
                yield _at(FREED, ins)
        _note_constant(ins, constants)
    yield from (_at(FREED, ins) for _, ins in held)
    yield from (_at(RELINQUISHED, ins) for ins in permits)


def _columns(ins: Ins, constants: dict[int, int]) -> int | None:
    """Return the number of columns of an alloc or a dealloc; None if it is not constant."""
    operand = ins.args[1]
    return int(operand.value) if isinstance(operand, Imm) else constants.get(operand.index)


def _note_constant(ins: Ins, constants: dict[int, int]) -> None:
    """Update `constants`, the known values of 32-bit registers, after an instruction."""
    for register in _written(ins):
        if register.cls == "b32":
            constants.pop(register.index, None)
            if ins.op == "mov.b32" and isinstance(ins.args[1], Imm) and ins.pred is None:
                constants[register.index] = int(ins.args[1].value)


def _written(ins: Ins) -> list[Reg]:
    """Return the registers in an instruction's first operand, which for most instructions is the result."""
    first = ins.args[0] if ins.args else None
    return [each for each in (first if isinstance(first, list) else [first]) if isinstance(each, Reg)]


def _waits(kernel: Kernel) -> Iterator[Finding]:
    reads: list[Ins] = []
    for at, ins in enumerate(kernel.code):
        if at in kernel.labels or ins.op.startswith((*_ARRIVES, *_BRANCHES)):
            yield from (_at(WAITED, read) for read in reads)
            reads = []
        if _is(ins, LD):
            reads.append(ins)
        elif _is(ins, WAIT_LD):
            reads = []


def _threads(kernel: Kernel) -> Iterator[Finding]:
    """Yield single-thread instructions that several threads execute, and warp-wide ones that one thread executes."""
    elected = False  # straight-line code after a branch that all threads but the elected one take
    leaders: set[int] = set()  # predicate registers that are true for the elected thread alone
    others: set[int] = set()  # predicate registers that are false for the elected thread alone
    for at, ins in enumerate(kernel.code):
        elected = elected and at not in kernel.labels
        only_leader = ins.pred is not None and ins.pred.index in (others if ins.negated else leaders)
        only_others = ins.pred is not None and ins.pred.index in (leaders if ins.negated else others)
        if _is(ins, "bra"):
            elected = elected or only_others
        elif any(_is(ins, one) for one in (MMA, COMMIT, CP)):
            if not (elected or only_leader):
                yield _at(ELECTED, ins)
        elif _is(ins, "tcgen05") and (elected or ins.pred is not None):
            yield _at(ALIGNED, ins)
        sources = {each.index for each in ins.args[1:] if isinstance(each, Reg)} if ins.op == "not.pred" else set()
        makes_others, makes_leaders = sources & leaders, sources & others
        written = {register.index for register in _written(ins) if register.cls == "p"}
        leaders, others = leaders - written, others - written
        if _is(ins, "elect.sync") or makes_leaders:
            leaders |= written
        elif makes_others:
            others |= written


def _commits(kernel: Kernel) -> Iterator[Finding]:
    """Yield all commits if they are not the two required ones; if there are none, yield an mma or the last line."""
    commits = [at for at, ins in enumerate(kernel.code) if _is(ins, COMMIT)]
    mmas = [at for at, ins in enumerate(kernel.code) if _is(ins, MMA)]
    if not commits:
        yield _at(COMMITS, kernel.code[mmas[0] if mmas else -1])
    elif len(commits) != 2 or not mmas or not _are_of_loop_and_after(kernel, mmas, *commits):
        yield from (_at(COMMITS, kernel.code[at]) for at in commits)


def _are_of_loop_and_after(kernel: Kernel, mmas: list[int], stages: int, accumulators: int) -> bool:
    """Return True if the first commit is in the loop of the mmas, and the second after it, for another mbarrier."""
    returns = (at for at, ins in enumerate(kernel.code) if at > mmas[-1] and _is(ins, "bra") and ins.args[0] <= mmas[0])
    one, other = (kernel.code[at].args[0] for at in (stages, accumulators))
    return bool(mmas[-1] < stages < next(returns, -1) < accumulators and one != other)
