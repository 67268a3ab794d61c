"""Ordering in the race check: the agents' clocks, and how synchronisation passes them on; see races.py."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np

from .cta import NamedBarrier
from .engines.asynchronous import Operation
from .engines.mbarrier import Mbarrier
from .faults import Fault
from .observer import Observer
from .race_agents import (
    ALL,
    ASYNC_GLOBAL,
    ASYNC_SHARED,
    CLOCK,
    FEWEST,
    FOREVER,
    INITS,
    ROWS,
    SHIFT,
    Agent,
    LoneLane,
    Operating,
    Warp,
    join,
    longer,
)
from .race_registers import unfenced

OPCODE = re.compile(r"(?:^|[\s{;])(ld|st|atom|red)\.(\S*)")
ORDERED = re.compile(r"\b(volatile|relaxed|acquire|release|acq_rel|mmio)\b")
MEMORY_FENCES = ("membar", "fence.acq_rel", "fence.sc", "fence.acquire", "fence.release")
PROXY_ROWS = {"fence.proxy.async": (ASYNC_SHARED, ASYNC_GLOBAL), "fence.proxy.async.global": (ASYNC_GLOBAL,)}
IN_ORDER = ("wgmma", "tcgen05")  # operations of a warp that are done in the order of their issue
LAUNCH_BEFORE, LAUNCH_EARLIER = 1, 2  # numbers of agents that did all of the launch before this one, and before that


class Race(Fault):
    """Raised for two accesses to one place that nothing orders.

    Attributes:
        before: the global address, if the earlier access is from the previous launch; else None.
    """

    before: int | None = None


class Place:
    """An instruction: its text and, for a load, store or atomic, its memory ordering."""

    def __init__(self, text: str):
        self.text = text
        opcode, rest = found.groups() if (found := OPCODE.search(text)) else ("", "")
        words = set(ORDERED.findall(rest))
        self.loads, self.stores = opcode in ("ld", "atom", "red"), opcode in ("st", "atom", "red")
        self.strong = bool(words) or opcode in ("atom", "red")
        self.releases, self.acquires = bool(words & {"release", "acq_rel"}), bool(words & {"acquire", "acq_rel"})


class _Phases:
    """Clocks released at an mbarrier, in the current phase and in all ended phases, and the epoch of its init."""

    def __init__(self) -> None:
        self.phase = self.init = 0
        self.arriving: np.ndarray | None = None
        self.ended: np.ndarray | None = None

    def at(self, phase: int) -> None:
        """Move clocks released in phases before `phase` to the ended ones."""
        if phase > self.phase:
            self.ended, self.arriving = join(self.ended, self.arriving), None
            self.phase = phase


class Orders(Observer):
    """Agents and their clocks, for successive launches (`launch`) or launches on several streams (`launch_beside`)."""

    def __init__(self) -> None:
        self.places: list[Place] = [Place("")]
        self._place_numbers: dict[tuple, int] = {}
        self._kernels = ("", "")  # names of the last two launches' kernels
        self._frees: dict[Any, bool] = {}  # by CTA: had it waited for the launch before when it let the next one begin
        self._early = self._waited = False  # of the last launch: could it begin early, and has it waited
        self._ends_older = True  # if the launch before the last has ended, have all older ones
        self.proxied: list[bool] = []  # by an agent's number: is it of the async proxy
        self.forget()

    def forget(self) -> None:
        """Remove all agents."""
        self.proxied[:] = [False] * 3
        self.names: list[str] = ["", *(f"the launch of {name} before" for name in self._kernels)]
        self.labels: dict[int, tuple[str, int]] = {}  # an operation's epoch -> its opcode and place
        self.warps: dict[Any, list[Warp]] = {}
        self.operations: dict[Operation, Operating] = {}
        self._base = np.zeros((ROWS, FEWEST), np.int64)
        self._streams: dict[Any, Any] = {}  # the last machine of each
        self._begun: dict[Any, tuple[np.ndarray, np.ndarray]] = {}  # a launch -> clocks: when it began, and before it
        self._phases: dict[Mbarrier, _Phases] = {}
        self._meetings: dict[Any, np.ndarray] = {}  # clocks that were released at a barrier of a CTA or cluster
        self._words: dict[tuple, np.ndarray] = {}
        self._owners: dict[Mbarrier, Any] = {}  # an mbarrier -> its CTA
        self._touched: dict[Any, dict[int, tuple[int, int]]] = {}  # by CTA and agent's number: last epoch, its place

    def launch(self, machine: Any, early: bool = False) -> None:
        """Begin a launch after all others.

        early: it may begin as soon as all CTAs of the previous launch have allowed it, or ended.
        """
        _check_registers(machine.kernel)
        self.begin(early)
        earlier_ended = all(self._frees.values()) and self._ends_older
        self._ends_older = not self._early or (self._waited and self._ends_older)
        self._early, self._waited = early, False
        self._frees.clear()
        self.forget()
        self._kernels = (machine.kernel.name, self._kernels[0])
        if not early:
            self._base[:, LAUNCH_BEFORE] = FOREVER
        if not early or earlier_ended:
            self._base[:, LAUNCH_EARLIER] = FOREVER

    def launch_beside(self, machine: Any, early: bool, stream: Any) -> None:
        """Begin a launch after its stream's earlier launches, and concurrent with other streams' launches.

        It is for ranks that write to each other's memory.
        """
        _check_registers(machine.kernel)
        last = self._streams.get(stream)
        begun, before = self._begun.pop(last, (self._base, self._base))
        done = before.copy()
        for unit in [unit for unit in self.warps if unit.machine is last]:
            for warp in self.warps.pop(unit):
                done = join(longer(done, warp.copier + 1), warp.clock)
                done[ALL, warp.copier] = warp.copies
        for operation in [each for each in self.operations if each.unit.machine is last]:
            done = join(done, self.operations.pop(operation).clock)
        done[:] = done[ALL]
        waited = [self._frees.pop(cta) for cta in list(self._frees) if cta.machine is last]
        base = (before if all(waited) else begun).copy() if early else done.copy()
        base[:, LAUNCH_BEFORE] = 0 if early else FOREVER
        self._begun[machine] = base, done
        self._streams[stream] = machine

    def begin(self, early: bool) -> None:
        """Called before a launch. `early`: accesses of the previous launch may still race."""

    # agents
    def _number(self, name: str, proxied: bool) -> int:
        self.proxied.append(proxied)
        self.names.append(name)
        return len(self.names) - 1

    def of(self, unit: Any) -> list[Warp]:
        """Return a unit's warps."""
        found = self.warps.get(unit)
        if found is None:
            found = self.warps[unit] = []
            for index in range(unit.first_warp, unit.first_warp + unit.warps):
                name = f"{unit.machine.kernel.name}, CTA {unit.cta.id} warp {index}"
                numbers = [self._number(each, False) for each in (name, f"cp.async of {name}", name)]
                base = self._begun[unit.machine][0] if unit.machine in self._begun else self._base
                found.append(Warp(*numbers, base.copy(), unit.cta, index))
        return found

    def acting(self, unit: Any) -> list[Warp]:
        """Return the active warps of a unit."""
        warps = self.of(unit)
        if len(warps) == 1 or unit.acting is True:
            return warps
        return [warps[i] for i in np.flatnonzero(unit.mask(unit.acting).any(1))]

    @staticmethod
    def alone(unit: Any) -> bool:
        """Return True if only one lane of each warp is active."""
        return unit.acting is not True and int(unit.mask(unit.acting).sum(1).max()) == 1

    def place(self, unit: Any) -> int:
        """Return a number for the running instruction, identified by a line of the block's generated function."""
        frame = sys._getframe(2)
        while frame is not None and not frame.f_code.co_name.startswith("block_"):
            frame = frame.f_back
        key = (frame.f_code, frame.f_lineno) if frame is not None else (unit.machine.kernel.name, unit.block)
        found = self._place_numbers.get(key)
        if found is None:
            found = self._place_numbers[key] = len(self.places)
            text = unit.machine.program.places.get(frame.f_lineno, "") if frame is not None else ""
            self.places.append(Place(text or f"in {unit.machine.block_name(unit.block)}"))
        return found

    # the observer's calls
    def release(self, agent: Any, thing: Any) -> None:
        """Release an agent's clock through `thing`, or record the operation that it issues."""
        if isinstance(thing, Operation):
            if agent is not thing:
                self._issue(agent, thing)
        elif isinstance(thing, NamedBarrier):
            self._arrive(agent, thing, False)
        elif thing[0] == "mbarrier":
            phases = self._phases_of(*thing[1:], agent)
            acting, cta = self._each(agent), self._owners[thing[1]]
            if isinstance(agent, Operation):
                self.touch(cta, acting, acting[0].place)
            elif agent.cta is not cta:
                self.touch(cta, [warp.lone for warp in acting] if self.alone(agent) else acting, self.place(agent))
            for each in acting:
                given = each.handed_on(self.alone(agent)) if isinstance(each, Warp) else each.clock
                phases.arriving = join(phases.arriving, given)
                each.tick()
        elif thing[0] == "grid":
            waited = all(warp.clock[ALL, LAUNCH_BEFORE] == FOREVER for warp in self.acting(agent))
            self._frees.setdefault(agent.cta, waited)
        elif thing[0] == "init":
            self._phases.setdefault(thing[1], _Phases()).init = self.acting(agent)[0].epoch
            self._owners[thing[1]] = agent.cta
        elif thing[0] == "copies":
            for warp in self.acting(agent):
                warp.groups.append(warp.copies)
                warp.copies += 1
        else:
            self._arrive(agent, thing, ".relaxed" in _last_of(agent))

    def acquire(self, agent: Any, thing: Any) -> None:
        """Acquire the clock that was released through `thing`."""
        if isinstance(thing, Operation):
            if agent is not thing:
                for each in self._each(agent):
                    each.learn(self.operations[thing].clock)
        elif isinstance(thing, NamedBarrier) or thing[0] == "cluster":
            for warp in self.acting(agent):
                warp.learn(self._meetings[thing])
        elif thing[0] == "mbarrier":
            phases = self._phases_of(thing[1], thing[2] + 1, agent)
            for each in self._each(agent):
                each.learn(phases.ended)
                if isinstance(each, Warp):
                    each.learn_of_lanes(phases.ended)
        elif thing[0] == "grid":
            self._waited = True
            ended = [LAUNCH_BEFORE, LAUNCH_EARLIER] if self._ends_older else [LAUNCH_BEFORE]
            for warp in self.acting(agent):
                warp.clock[:, ended] = FOREVER
                warp.learn(self._begun.get(thing[1], (None, None))[1])
                warp.memo = {}
        elif thing[0] == "copies":
            for warp in self.acting(agent):
                self._wait_for_copies(warp, thing[1])

    def fence(self, agent: Any, kind: str) -> None:
        """Order a warp's accesses, or its proxies' accesses."""
        for warp in self.acting(agent):
            if kind == "bar.warp.sync":
                warp.synchronise()
            elif kind.startswith("fence.mbarrier_init"):
                warp.fence_rows((INITS,))
            elif kind.startswith("fence.proxy.async"):
                warp.fence_rows(PROXY_ROWS.get(kind, (ASYNC_SHARED,)))
            elif kind.startswith(MEMORY_FENCES):
                if not kind.startswith("fence.release"):
                    warp.learn(warp.unfenced)
                if not kind.startswith("fence.acquire"):
                    warp.before_fence = warp.clock.copy()
                    warp.tick()

    # the end of shared memory
    def touch(self, cta: Any, agents: list[Any], place: int) -> None:
        """Record accesses to a CTA's shared memory or mbarriers by agents for which the CTA's end does not wait."""
        for agent in agents:
            if not (isinstance(agent, (Warp, LoneLane)) and agent.cta is cta):
                self._touched.setdefault(cta, {})[agent.number] = agent.epoch, place

    def end(self, cta: Any) -> None:
        """Raise Race if the shared memory of an ended CTA may still be accessed, in some order."""
        known = None
        for unit in cta.units:
            for warp in self.of(unit):
                known = join(known, warp.clock)
        for epoch, place in self._touched.pop(cta, {}).values():
            number = epoch >> SHIFT
            if number >= known.shape[1] or known.item(ALL, number) < epoch & CLOCK:
                raise Race(
                    f"race: shared memory of CTA {cta.id} is used by {self.name(epoch)} ({self.places[place].text}); "
                    "not ordered before the CTA's end. A wait for the mbarrier's phase, or barrier.cluster, before a "
                    "thread of the CTA exits would order them."
                )

    def _each(self, agent: Any) -> list[Any]:
        return [self.operations[agent]] if isinstance(agent, Operation) else self.acting(agent)

    def _phases_of(self, barrier: Mbarrier, phase: int, agent: Any) -> _Phases:
        phases = self._phases.setdefault(barrier, _Phases())
        phases.at(phase)
        for each in self._each(agent) if phases.init else ():
            if not each.knows(phases.init) and not each.knows(phases.init, INITS):
                raise Race(
                    f"race: {barrier.name} is used by {self.name(each.epoch)}, which is not ordered after its "
                    f"mbarrier.init by {self.name(phases.init)}. A bar.sync, or fence.mbarrier_init and "
                    "barrier.cluster, would order them."
                )
        return phases

    def name(self, epoch: int) -> str:
        """Return text for the agent of an epoch; an operation's includes its instruction."""
        what = self.labels.get(epoch, ("",))[0]
        return f"{what} of {self.names[epoch >> SHIFT]}" if what else self.names[epoch >> SHIFT]

    def _arrive(self, unit: Any, thing: Any, relaxed: bool) -> None:
        clock = self._meetings.get(thing)
        for warp in self.acting(unit):
            if relaxed:
                inits = np.zeros_like(warp.clock)
                inits[INITS] = warp.clock[INITS]
                clock = join(join(clock, inits), warp.before_fence)
            else:
                clock = join(clock, warp.clock)
            warp.synchronise()
        self._meetings[thing] = clock

    # asynchronous work
    def _issue(self, unit: Any, operation: Operation) -> None:
        warps = self.acting(unit)
        first, what = warps[0], operation.what
        kind = next((kind for kind in IN_ORDER if what.startswith(kind)), None)
        place = self.place(unit)
        issue = unit.machine.steps, place
        if first.issued.get(what, (None, None))[0] == issue:  # by another lane, whose instruction it is as well
            self.operations[operation] = first.issued[what][1]
            return
        clock = first.handed_on(self.alone(unit)).copy()
        for warp in warps[1:]:
            clock = join(clock, warp.clock)
        if what.startswith("cp.async.mbarrier.arrive"):
            for warp in warps:
                clock[ALL, warp.copier] = warp.copies
                warp.copies += 1
        number, now = self._slot(first, kind)
        if kind in first.last:
            clock = join(clock, first.last[kind].clock)
        agent = Operating(number, now, clock, first, place)
        self.operations[operation] = agent
        self.labels[agent.epoch] = what, place
        first.issued[what] = issue, agent
        if kind:
            first.last[kind] = agent
        for warp in warps:
            warp.tick()

    def _slot(self, warp: Warp, kind: str | None) -> tuple[int, int]:
        """Return an agent number and clock for a new operation, ordered after the number's last use."""
        if kind in warp.last:
            return warp.last[kind].number, warp.last[kind].now + 1
        for number, now in warp.slots.items() if kind is None else ():
            if warp.clock.shape[1] > number and warp.clock.item(ALL, number) >= now:
                break
        else:
            number, now = self._number(self.names[warp.number], True), 0
        if kind is None:
            warp.slots[number] = now + 1
        return number, now + 1

    @staticmethod
    def _wait_for_copies(warp: Warp, left: int | None) -> None:
        done = 0
        if left is None:
            done, warp.copies = warp.copies, warp.copies + 1
        elif len(warp.groups) > left:
            done = warp.groups[len(warp.groups) - 1 - left]
        if done > warp.clock.item(ALL, warp.copier):
            warp.clock[ALL, warp.copier] = done
            warp.memo = {}

    # words that strong accesses go through
    def through(self, agent: Agent, words: set, place: Place) -> None:
        """Pass clocks on through words that a warp's strong access is about to read or write."""
        agent = agent.warp if isinstance(agent, LoneLane) else agent
        if not isinstance(agent, Warp):
            return
        for word in words if place.loads else ():
            found = self._words.get(word)
            if found is not None and place.acquires:
                agent.learn(found)
            elif found is not None:
                agent.unfenced = join(agent.unfenced, found)
        if not place.stores:
            return
        given = agent.clock if place.releases else agent.before_fence
        for word in words:
            if place.loads:  # an atomic goes on with the release sequence
                self._words[word] = join(self._words.get(word), given)
            else:
                self._words[word] = join(None, given)


def _check_registers(kernel: Any) -> None:
    found = unfenced(kernel)
    if found is not None:
        raise Race(
            f"race: {kernel.name}, line {found.line}: {found.text}: its registers may be accessed before it with no "
            "wgmma.fence between, which would order them."
        )


def _last_of(unit: Any) -> str:
    """Return the opcode of the instruction that ended a unit's block."""
    machine = unit.machine
    end = sum(count for _, count, _ in machine.blocks[: unit.block + 1])
    return machine.kernel.code[end - 1].op if end <= len(machine.kernel.code) else ""
