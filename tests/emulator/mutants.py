"""Broken kernels: one reached instruction of a kernel left out or changed, to see whether the emulator finds it.

A case is one launch of a shipped function, kept with all memory that it may touch. A mutant of its kernel is found if a
run with one of the seeds ends in a fault, or leaves other bytes than the kernel itself does with every seed.
`python -m emulator.mutants CASE COUNT` in tests/ prints what became of a sample, or of every mutant if COUNT is 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import glulam
from cute_kernels.specs import Spec
from ffi_bridge import profiles
from glulam.host import device
from glulam.validate import child

from . import launch as launches
from . import translate
from .calls import F32, Inputs
from .emulated_gpu import installed
from .faults import Fault
from .machine import Machine
from .ptx import Address, Imm, Ins, Kernel, Unsupported
from .races import Race, Races

SEEDS = (0, 1, 2)
"""One for each of the machine's orders."""
REASONS = Path(__file__).with_name("equivalent_mutants.json")
DIFFERENCE, FAULT, RACE = "difference", "fault", "race"

# Mutations of one instruction -----------------------------------------------------------------------------------------

LEFT_OUT, OTHER_SENSE, EXCHANGED, ONE_MORE, OTHER_BOUND = "left out", "other sense", "exchanged", "one more", "bound"
_ORDERED = ("sub", "div", "rem", "shl", "shr", "selp", "prmt", "bfi", "bfe", "mad", "fma", "mma", "wgmma", "cvt", "sad",
            "copysign", "setp")  # fmt: skip
_SYMMETRIC = re.compile(r"setp\.(eq|ne)\b")
_BOUNDS = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "lo": "ls", "ls": "lo", "hi": "hs", "hs": "hi",
           "ltu": "leu", "leu": "ltu", "gtu": "geu", "geu": "gtu", "eq": "ne", "ne": "eq"}  # fmt: skip
_COUNTED = ("mbarrier", "bar", "barrier", "cp", "wgmma", "shfl", "add", "sub", "mad", "mul", "shl", "shr", "and", "or",
            "xor", "setp", "selp", "mov", "prmt", "bfe", "bfi", "min", "max", "div", "rem", "st", "atom", "red",
            "createpolicy", "setmaxnreg", "lop3", "shf", "fma", "vote")  # fmt: skip
_BYTES = re.compile(r"\.(?:b|u|s|f)(8|16|32|64)\b")
_VECTOR = re.compile(r"\.v([248])\b")
_ENDS = ("ret", "exit", "trap")


class Mutant(NamedTuple):
    """An instruction of a kernel in another form. at: its place in `kernel.code`; text: without names of registers."""

    at: int
    kind: str
    text: str
    ins: Ins


def normal(text: str) -> str:
    """An instruction's text without the numbers of registers and labels, which any change of a kernel moves."""
    text = re.sub(r"%(r|rd|rs|f|fd|p|h|hh|b|ra|rq|dd|SP|SPL)\d+\b", r"%\1", text)
    return re.sub(r"\$L__BB\w+|\bLAB_\w+|\$\w+", "$L", text)


def mutants_of(kernel: Kernel, reached: set[int]) -> list[Mutant]:
    """All mutants of a kernel that change an instruction of `reached`."""
    return [
        Mutant(at, kind, normal(ins.text), changed)
        for at, ins in enumerate(kernel.code)
        if at in reached
        for kind, changed in _forms(ins)
    ]


def _forms(ins: Ins) -> Iterator[tuple[str, Ins]]:
    opcode = ins.mods[0]
    if opcode in _ENDS:
        return
    if ins.op.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
        yield LEFT_OUT, Ins("setp.eq.b32", [ins.args[0], Imm(0), Imm(0)], line=ins.line)
    else:
        yield LEFT_OUT, Ins("pragma", [], line=ins.line)
    if ins.pred is not None:
        yield OTHER_SENSE, dataclasses.replace(ins, negated=not ins.negated)
    if opcode == "setp":
        yield OTHER_BOUND, dataclasses.replace(ins, op=_other_bound(ins.op))
    if opcode in _ORDERED and not _SYMMETRIC.match(ins.op):
        yield from _exchanges(ins)
    yield from _counts(ins)


def _other_bound(op: str) -> str:
    return ".".join(_BOUNDS.get(each, each) for each in op.split("."))


def _exchanges(ins: Ins) -> Iterator[tuple[str, Ins]]:
    """Two source operands exchanged; of fma and mad, a factor and the summand; of mma, A and B where they fit."""
    first, last = (2, 3) if ins.mods[0] in ("fma", "mad") else (1, 2)
    if len(ins.args) > last and repr(ins.args[first]) != repr(ins.args[last]):
        args = list(ins.args)
        args[first], args[last] = args[last], args[first]
        yield EXCHANGED, dataclasses.replace(ins, args=args)


def _counts(ins: Ins) -> Iterator[tuple[str, Ins]]:
    """Each integer constant one larger, or another one that matters as much; each address one access further."""
    for place, operand in enumerate(ins.args):
        changed: Any = None
        if isinstance(operand, Imm) and not operand.is_float and ins.mods[0] in _COUNTED:
            value = _other_count(ins, place, int(operand.value))
            changed = None if value is None else Imm(value)
        elif isinstance(operand, Address) and not ins.op.startswith(("mbarrier.init", "prefetch")):
            changed = dataclasses.replace(operand, offset=operand.offset + _access_bytes(ins.op))
        if changed is not None:
            yield ONE_MORE, dataclasses.replace(ins, args=[*ins.args[:place], changed, *ins.args[place + 1 :]])


def _other_count(ins: Ins, place: int, value: int) -> int | None:
    """None for constants that matter to nothing: masks of all lanes, a barrier's only number, how long to sleep."""
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
    if "matrix" in op or op.startswith("cp.async"):
        return 16
    size, count = _BYTES.search(op), _VECTOR.search(op)
    return (int(size[1]) // 8 if size else 8) * (int(count[1]) if count else 1)


_SYNCHRONISES = ("mbarrier", "bar", "barrier", "fence", "membar", "cp", "wgmma", "mma", "shfl", "vote", "match",
                 "redux", "elect", "st.async", "ldmatrix", "stmatrix", "setmaxnreg", "griddepcontrol", "atom",
                 "red", "tcgen05")  # fmt: skip


def sample(name: str, mutants: list[Mutant], count: int) -> list[Mutant]:
    """Two thirds of instructions that synchronise or multiply, a third of others, chosen by a hash.

    The hash is of the text, so that a kernel's change leaves most of the sample as it was.
    """
    seen: Counter[tuple[str, str]] = Counter()
    ranked: dict[bool, list[tuple[str, Mutant]]] = {True: [], False: []}
    for mutant in mutants:
        key = (mutant.kind, mutant.text)
        rank = hashlib.sha256(f"{name} {key} {seen[key]}".encode()).hexdigest()
        seen[key] += 1
        opcode = mutant.text.split(None, 1)[1] if mutant.text.startswith("@") else mutant.text
        ranked[opcode.startswith(_SYNCHRONISES)].append((rank, mutant))
    halves = [[mutant for _, mutant in sorted(ranked[half], key=lambda pair: pair[0])] for half in (True, False)]
    first = min(len(halves[0]), max(2 * count // 3, count - len(halves[1])))
    return sorted([*halves[0][:first], *halves[1][: count - first]], key=lambda mutant: mutant.at)


# Cases ----------------------------------------------------------------------------------------------------------------

SIZES = (19, 0, 5)
"""Rows of each expert: more than a tile of 16, none, and less than a tile."""
ROWS = 27
"""3 rows after the last group."""
MANY = (150, 0, 5, 20)
FEW_ROWS = (19, 0, 5, 33, 3, 17, 2, 9)
"""Rows of each expert of kernels whose tiles go through a ring, which they fill more than once."""


class Case(NamedTuple):
    """A call of a shipped function.

    kernel: how the name of the kernel that is changed begins; empty: with the function's name.
    num_sms: 1 where one CTA shall have all tiles, so that its rings come round.
    """

    spec: str
    call: Callable[[Inputs], Any]
    kernel: str = ""
    num_sms: int = 2

    @property
    def arch(self) -> str:
        return "sm_" + self.spec.rpartition("_sm_")[2]


def _offs(given: Inputs, sizes: tuple[int, ...] = SIZES) -> torch.Tensor:
    return given.given(np.cumsum(sizes), torch.int32)


def _tail(x: torch.Tensor, sizes: tuple[int, ...] = SIZES) -> torch.Tensor:
    x[sum(sizes) :] = torch.nan
    return x


def _mm(given: Inputs) -> Any:
    x, w = _tail(given.normal(ROWS, 264)), given.normal(3, 136, 264)
    options = {"bias": given.normal(3, 136), "bias_scale": given.normal(ROWS, dtype=F32)}
    return glulam.grouped_mm(x, w, offs=_offs(given), **options)


def _mm_of_many_rows(given: Inputs) -> Any:
    x, w = _tail(given.normal(178, 136), MANY), given.normal(4, 136, 136)
    options = {"bias": given.normal(4, 136), "bias_scale": given.normal(178, dtype=F32)}
    return glulam.grouped_mm(x, w, offs=_offs(given, MANY), **options)


def _mm_mxfp4(given: Inputs) -> Any:
    x, w = _tail(given.normal(ROWS, 288)), given.normal(3, 136, 288)
    return glulam.grouped_mm(x, _quantized(given, w), offs=_offs(given))


def _mm_mxfp4_of_many_tiles(given: Inputs) -> Any:
    x, w = _tail(given.normal(91, 288), FEW_ROWS), given.normal(8, 136, 288)
    return glulam.grouped_mm(x, _quantized(given, w), offs=_offs(given, FEW_ROWS))


def _quantized(given: Inputs, w: torch.Tensor) -> Any:
    with given.reference():
        return glulam.quantize_mxfp4(w)


def _glu(given: Inputs) -> Any:
    x, w = _tail(given.normal(ROWS, 264)), given.normal(3, 256, 264, scale=0.1)
    return glulam.grouped_glu(x, w, offs=_offs(given), bias=given.normal(3, 256))


def _wgrad(given: Inputs) -> Any:
    dy, x = (_tail(given.normal(90, 136), (75, 0, 5)) for _ in range(2))
    return glulam.grouped_wgrad(dy, x, offs=_offs(given, (75, 0, 5)))


def _mlp_mxfp8(given: Inputs) -> Any:
    x = _tail(given.normal(91, 384), FEW_ROWS)
    w1, w2 = given.normal(8, 256, 384, scale=0.1), given.normal(8, 384, 128, scale=0.1)
    return glulam.grouped_mlp(x, w1, w2, offs=_offs(given, FEW_ROWS), recipe="mxfp8")


def _quantize(given: Inputs) -> Any:
    x = given.normal(226, 512) * given.scales(226, 1).to(torch.bfloat16)
    for row in range(5, 226):  # NaN or inf in each place that a thread of the unrolled code looks at
        x[row, 5 * row % 32 + 32 * (row % 3) :: 96] = torch.nan if row % 4 else torch.inf
    x[3, :70], x[4, ::33], x[225] = 0, 3e38, 1e-38
    return glulam.quantize_mxfp8(x)


def _route(given: Inputs) -> Any:
    logits, bias = given.normal(70, 100, dtype=F32), given.normal(100, dtype=F32)
    return glulam.route(logits, 20, score="sigmoid", bias=bias, scale=2.5)


FP8 = "grouped_mlp_mxfp8_bf16_gated_concat_t64x256x128_c1x1_coop__nt_t64x128x128_c1x1_coop_sm_90a"

CASES = {
    case.spec: case
    for case in (
        Case("grouped_mm_bf16_nt_t16x128x64_c1x1_warps_sm_90", _mm),
        Case("grouped_glu_bf16_gated_blocked_t16x128x64_c1x1_warps_sm_90", _glu),
        Case("grouped_wgrad_bf16_bf16_t128x128x64_c1x1_warps_sm_90", _wgrad),
        Case("quantize_mxfp8_bf16_row_sm_90", _quantize),
        Case("layer_route_e128_sm_90", _route, "layer_choose"),
        Case("grouped_mm_mxfp4w_bf16_nt_t16x128x64_c1x1_warps_sm_90", _mm_mxfp4),
        Case("grouped_mm_bf16_nt_t128x128x64_c2x1a_pp_sm_90a", _mm_of_many_rows),
        Case("grouped_mm_mxfp4w_bf16_nt_t16x128x128_c1x1_swap1_sm_90a", _mm_mxfp4_of_many_tiles, num_sms=1),
        Case("grouped_wgrad_bf16_bf16_t128x128x64_c1x2_pp_sm_90a", _wgrad),
        Case(FP8, _mlp_mxfp8, "grouped_glu_mxfp8", num_sms=1),
    )
}


def spec_of(case: Case) -> Spec:
    return next(spec for spec in profiles.shipped_specs(case.arch, "full") if spec.name == case.spec)


class _OfAReference(Inputs):
    """Inputs some of which the CPU reference makes."""

    def __init__(self, name: str, reference: Callable[[], Any]) -> None:
        super().__init__("cpu", name)
        self.reference = reference


# Launches, kept to be run again ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Recorded:
    """A launch, and the memory before it. `kept` holds the tensors whose memory it is."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    kernel: Kernel
    before: dict[int, np.ndarray]
    now: dict[int, np.ndarray]
    kept: list[Any]

    def run(self, kernel: Kernel, program: Any, seed: int, **options: Any) -> Machine:
        """Run a form of the kernel in memory as it was before the launch."""
        for address, values in self.before.items():
            self.now[address][...] = values
        machine = Machine(kernel, *self.arguments, **{**self.options, "program": program, "seed": seed, **options})
        if isinstance(machine.observer, Races):
            machine.observer.launch(machine)
        machine.run()
        return machine

    def after(self) -> np.ndarray:
        """All bytes of the memory."""
        return np.concatenate([self.now[address] for address in self.before])


@contextlib.contextmanager
def _recording() -> Iterator[list[Recorded]]:
    """While entered, launches of the emulator are kept."""
    kept: list[Recorded] = []

    class Recorder(Machine):
        def __init__(self, kernel: Kernel, memory: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(kernel, memory, *arguments, **options)
            self._as_given = (memory, *arguments), options

        def run(self) -> float:
            storages = _live_storages()
            now = {one.data_ptr(): self.memory.array(one.data_ptr(), np.uint8, one.nbytes()) for one in storages}
            before = {address: values.copy() for address, values in now.items()}
            kept.append(Recorded(*self._as_given, self.kernel, before, now, storages))
            return super().run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "Machine", Recorder)
        yield kept


def _live_storages() -> list[Any]:
    plain = frozenset(device.PLAIN_TENSORS)
    tensors = [each for each in gc.get_objects() if type(each) in plain]
    found = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors if one.device.type == "cpu"}
    return [storage for address, storage in sorted(found.items()) if address]


@functools.lru_cache(maxsize=4)
def recorded(name: str) -> Recorded:
    """The launch of a case."""
    case = CASES[name]
    gc.collect()
    with installed(case.arch, case.num_sms) as gpu, _recording() as kept, torch.no_grad():
        child.prefer(spec_of(case))
        case.call(_OfAReference(name, gpu.reference))
        if case.spec not in gpu.called:
            raise ValueError(f"{case.spec} did not serve its call, but {sorted(gpu.called)}")
    return next(launch for launch in kept if launch.kernel.name.startswith(case.kernel or case.spec))


# Runs -----------------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """How a mutant was found: `how` is empty if it was not."""

    how: str
    seed: int
    words: str


@dataclasses.dataclass
class Trier:
    """A case whose kernel is broken again and again.

    Attributes:
        reached: places of instructions that ran. total: how many the kernel has.
    """

    name: str
    checks_races: bool = True

    def __post_init__(self) -> None:
        self.launch = recorded(self.name)
        self.kernel = self.launch.kernel
        self.total = len(self.kernel.code)
        program = self.launch.options["program"]
        runs, steps, blocks = [], [], set()
        for seed in SEEDS:
            machine = self.launch.run(self.kernel, program, seed)
            runs.append(self.launch.after())
            steps.append(machine.steps)
            blocks |= machine.reached
        if self.checks_races:
            self.launch.run(self.kernel, program, SEEDS[0], observer=Races())  # which finds nothing
        self.most_steps = 1000 + 4 * max(steps)
        self.want = runs[0]
        self.same = np.logical_and.reduce([run == self.want for run in runs])
        self.reached = set(_places(program[0], blocks))
        self.mutants = mutants_of(self.kernel, self.reached)

    def try_out(self, mutant: Mutant) -> Found | None:
        """How a mutant was found; None if the emulator does not know the instruction that it has."""
        code = list(self.kernel.code)
        code[mutant.at] = mutant.ins
        kernel = dataclasses.replace(self.kernel, code=code)
        try:
            program = translate.translate(kernel)
        except Unsupported:
            return None
        for seed in SEEDS:
            try:
                self.launch.run(kernel, program, seed, most_steps=self.most_steps)
            except Fault as fault:
                return Found(FAULT, seed, str(fault))
            wrong = (self.launch.after() != self.want) & self.same
            if wrong.any():
                return Found(DIFFERENCE, seed, f"{int(wrong.sum())} bytes differ")
        if self.checks_races:
            try:
                self.launch.run(kernel, program, SEEDS[0], most_steps=self.most_steps, observer=Races())
            except Race as race:
                return Found(RACE, SEEDS[0], str(race))
        return Found("", SEEDS[0], "")


def _places(blocks: list[Any], reached: set[int]) -> Iterator[int]:
    begin = 0
    for number, (_, count, _) in enumerate(blocks):
        if number in reached:
            yield from range(begin, begin + count)
        begin += count


# Mutants that change nothing ------------------------------------------------------------------------------------------


class Reason(NamedTuple):
    """Why mutants are equivalent to their kernel. case: of names; kind: empty for all; text: a regular expression."""

    case: str
    kind: str
    text: str
    why: str


@functools.cache
def reasons() -> tuple[Reason, ...]:
    return tuple(Reason(*entry) for entry in json.loads(REASONS.read_text())) if REASONS.exists() else ()


def reason_for(name: str, mutant: Mutant) -> str:
    """Why a mutant changes nothing; empty where nobody has said."""
    for reason in reasons():
        fits = fnmatch(name, reason.case) and reason.kind in ("", mutant.kind)
        if fits and re.fullmatch(reason.text, mutant.text):
            return reason.why
    return ""


def main(name: str, count: int) -> None:
    trier = Trier(name)
    chosen = sample(name, trier.mutants, count) if count else trier.mutants
    print(
        f"{name}: {len(trier.reached)} of {trier.total} instructions reached, {len(trier.mutants)} mutants", flush=True
    )
    how: Counter[str] = Counter()
    begin = time.perf_counter()
    for mutant in chosen:
        found = trier.try_out(mutant)
        if found is None:
            how["not an instruction"] += 1
            continue
        why = "" if found.how else reason_for(name, mutant)
        how[found.how or ("equivalent" if why else "NOT FOUND")] += 1
        if not found.how:
            print(f"  {mutant.at} {mutant.kind}: {mutant.text}: {why or 'NOT FOUND'}", flush=True)
    print(f"{dict(how)} in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
