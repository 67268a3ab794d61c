"""Run a launch on the CPU: a grid of clusters of CTAs.

A seeded scheduler steps the units (warps that step together) in one of three kinds of order.
"""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np

from . import translate
from .cta import Cluster, Cta
from .engines.asynchronous import advance
from .faults import Fault
from .memory import Memory
from .observer import Observer
from .ptx import Kernel
from .stepping import step
from .warps import Unit

# By seed modulo 3: units by chance; by priorities, with asynchronous work at once; by priorities, as late as may be.
ORDERS = (("random", 0.3), ("priority", 1.0), ("priority", 0.0))
DEMOTIONS = 0.02  # how often a priority changes, so that no unit runs ahead for ever
MOST_STEPS = 10_000_000


class Machine:
    """One launch of a kernel.

    Args:
        kernel: the parsed kernel. program: its translation; None: translate now.
        memory: device memory. params: the parameters' bytes.
        grid, block, cluster: sizes. dynamic: bytes of dynamic shared memory.
        unit_warps: warps that step together; 0: a whole CTA. Kernels whose warps have roles need 1.
        seed: seed of the schedule and of all other random choices.
        most_steps: number of basic blocks after which the launch is stopped.
        observer: object that is told of accesses and synchronisation.
        resident: number of clusters that run at the same time.
    """

    def __init__(
        self, kernel: Kernel, memory: Memory, grid: Sequence[int], block: Sequence[int], dynamic: int, params: bytes,
        cluster: Sequence[int] = (1, 1, 1), unit_warps: int = 0, seed: int = 0,
        program: translate.Translation | None = None, most_steps: int = MOST_STEPS, observer: Observer | None = None,
        resident: int = 1,
    ):  # fmt: skip
        self.kernel, self.memory, self.dynamic, self.params = kernel, memory, dynamic, params
        self.grid, self.block, self.cluster = tuple(grid), tuple(block), tuple(cluster)
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise Fault(f"{kernel.name}: grid {self.grid} is not a multiple of the cluster {self.cluster}")
        if int(np.prod(self.block)) % 32:
            raise Fault(f"{kernel.name}: block {self.block} is not a multiple of 32 threads")
        self.clusters = tuple(g // c for g, c in zip(self.grid, self.cluster, strict=True))
        self.unit_warps, self.observer, self.resident, self.most_steps = unit_warps, observer, resident, most_steps
        self.program = program or translate.translate(kernel)
        self.blocks = self.program.blocks
        self.random = random.Random(seed)
        self.order, self.haste = ORDERS[seed % len(ORDERS)]
        self.has_negative_registers = bool(seed % 2)  # before they are written
        self.reached: set[int] = set()  # blocks that ran
        self.steps = self.instructions = 0
        self.seconds = 0.0
        self.pending: list = []  # operations of the running CTAs that were not done
        self.running: list[Cluster] = []
        self.waits = False  # nothing moved for so long that only another launch can help

    # the grid
    def coordinates(self, linear: int) -> tuple[int, int, int]:
        """Return a CTA's coordinates in the grid."""
        x, y, _ = self.grid
        return linear % x, linear // x % y, linear // (x * y)

    def _by_cluster(self) -> list[list[int]]:
        def number(linear: int) -> tuple[int, ...]:
            return tuple(i // c for i, c in zip(self.coordinates(linear), self.cluster, strict=True))[::-1]

        linears = sorted(range(int(np.prod(self.grid))), key=number)
        return [list(group) for _, group in groupby(linears, number)]

    # running
    def run(self) -> float:
        """Run the launch to its end; return the seconds it took."""
        begin = time.perf_counter()
        with np.errstate(all="ignore"):
            for _ in self.turns():
                if self.waits:
                    raise Fault(f"deadlock: nothing can move\n{self.state()}")
        self.seconds = time.perf_counter() - begin
        return self.seconds

    def turns(self) -> Iterator[None]:
        """Run the launch, one unit's turn for each iteration.

        `waits` is True while the launch cannot continue by itself, without another launch.
        """
        ahead = self._by_cluster()
        spinning: set[Unit] = set()
        idle = 0
        while ahead or self.running:
            while ahead and len(self.running) < self.resident:
                cluster = Cluster(self, ahead.pop(0), self.unit_warps)
                self.running.append(cluster)
                for unit in cluster.units:
                    unit.priority = self.random.random()
            ready = [unit for cluster in self.running for unit in cluster.units if unit.groups]
            progress = False
            if ready and self.order == "random":
                progress = step(self, self.random.choice(ready))
            elif ready:  # who has the highest priority runs as far ahead of the others as it can
                unit = max([u for u in ready if u not in spinning] or ready, key=attrgetter("priority"))
                progress = step(self, unit)
                spinning = set() if progress else spinning | {unit}
                if self.random.random() < DEMOTIONS:
                    unit.priority = self.random.random() - 1
            if self.pending and (not progress or self.random.random() < self.haste):
                advance(self)
                progress, spinning = True, set()
            self._retire()
            idle = 0 if progress else idle + 1
            self.waits = idle > 200 + 20 * len(ready)
            if self.steps > self.most_steps:
                raise Fault(f"{self.kernel.name} did not end within {self.most_steps} steps\n{self.state()}")
            yield
        while self.pending:
            advance(self)

    def _retire(self) -> None:
        """Check and remove clusters whose threads have all exited."""
        for cluster in [c for c in self.running if not any(cta.threads for cta in c.ctas)]:
            self.running.remove(cluster)
            for cta in cluster.ctas:
                try:
                    cta.check_end()
                    if self.observer is not None:
                        self.observer.end(cta)
                except Fault as fault:
                    raise fault.located(f"{self.kernel.name}, CTA {cta.id}, at its end") from None
            if not self.pending:
                cluster.dissolve()

    def happens_at_once(self) -> bool:
        """Return True, at random, if asynchronous work that needs no copy engine should run at its issue."""
        return self.random.random() < self.haste

    # reports
    def place(self, unit: Unit, block: int) -> str:
        """Return text that names a unit and a basic block."""
        last = unit.first_warp + unit.warps - 1
        warps = f"warp {last}" if unit.warps == 1 else f"warps {unit.first_warp}..{last}"
        return f"{self.kernel.name}, CTA {unit.cta.id}, {warps}, {self.block_name(block)}"

    def block_name(self, block: int) -> str:
        """Return text for a basic block: its number, the PTX lines of its instructions, and the first of them."""
        if block >= len(self.blocks):
            return f"block {block} (the end)"
        begin = sum(count for _, count, _ in self.blocks[:block])
        code = self.kernel.code[begin : begin + self.blocks[block][1]]
        if not code:
            return f"block {block}"
        return f"block {block} (PTX {code[0].line}..{code[-1].line}, from {code[0].op} to {code[-1].op})"

    def fault(self, error: Exception, unit: Unit) -> Fault:
        """Convert an error in a unit's block to a Fault that names the PTX line."""
        fault = error if isinstance(error, Fault) else Fault(f"{type(error).__name__}: {error}")
        where = f"in {self.place(unit, unit.block)}"
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.name.startswith("block_") and frame.lineno is not None:
                lines = self.program.source.splitlines()
                text = lines[frame.lineno - 1].strip() if frame.lineno <= len(lines) else ""
                where += f": {self.program.places.get(frame.lineno, text)}"
        return fault.located(where)

    def state(self) -> str:
        """Return text that says where all warps are that have not exited, and what they wait for."""
        lines = []
        for unit in [unit for cluster in self.running for unit in cluster.units]:
            for at, lanes in unit.groups:
                waits = f", last waited for {unit.waits_for}" if unit.waits_for is not None else ""
                lines.append(f"  {self._who(unit)}: {int(lanes.sum())} lanes in {self.block_name(at)}{waits}")
            for kind, which in unit.blocked:
                lines.append(f"  {self._who(unit)}: waits at {kind} {which}{self._barrier(unit.cta, kind, which)}")
        return "\n".join([*lines, f"  {len(self.pending)} asynchronous operations are pending"])

    @staticmethod
    def _who(unit: Unit) -> str:
        return f"CTA {unit.cta.id} warp {unit.first_warp}" + (f"+{unit.warps - 1}" if unit.warps > 1 else "")

    @staticmethod
    def _barrier(cta: Cta, kind: str, which: int) -> str:
        if kind != "named barrier":
            return ""
        barrier = cta.barriers[which]
        return f": {barrier.arrived} of {barrier.wanted or cta.threads} threads arrived"


def run_together(machines: Sequence[Machine], seed: int = 0) -> None:
    """Run launches concurrently, as on ranks whose kernels wait for words from each other."""
    chance = random.Random(seed)
    running = {machine: machine.turns() for machine in machines}
    with np.errstate(all="ignore"):
        while running:
            machine = chance.choice(list(running))
            try:
                next(running[machine])
            except StopIteration:
                del running[machine]
                for other in running:
                    other.waits = False
            if running and all(other.waits for other in running):
                states = "\n".join(f"{other.kernel.name}:\n{other.state()}" for other in running)
                raise Fault(f"deadlock: no launch can move\n{states}")


__all__ = ["Fault", "Machine", "Memory", "run_together"]
