"""A race check: two accesses to one place, one of them a write, must be ordered in every schedule.

It is not enough that the emulated schedule orders them. The check keeps vector clocks after FastTrack (Flanagan and
Freund, 2009). An agent is a warp, the copies of its cp.async, or an operation of the async proxy; operations that
several lanes of a warp issue by one instruction are one agent. Memory is kept by granules of 16 bytes, split if
accesses are smaller. These events order accesses ("from A, to B": A before B), by section of the PTX ISA:
    "Memory Consistency Model: Causality Order", "Release and Acquire Patterns": st.release, atom.acq_rel, or a fence
        and a relaxed access, to ld.acquire, or a relaxed access and a fence, that reads the same word.
    "Morally strong operations": atom, red, .relaxed, .acquire, .release, .volatile do not race with each other.
    "Asynchronous operations", "Async proxy": an operation begins after its issue. It sees writes of the generic proxy
        that a fence.proxy.async follows, by the writer or by a thread that synchronised with it. Generic reads need
        none: their mbarrier arrive is enough before the next copy. Its completion needs no proxy fence.
    "mbarrier": arrivals and complete_tx of a phase, to waits that see this phase ended. mbarrier.init is a write that
        all uses must be ordered after, by a barrier, or fence.mbarrier_init and a relaxed one.
    "bar, barrier": from all that arrive to all that wait. "barrier.cluster": the same; arrive.relaxed releases the
        accesses that a fence before it covered.
    "cp.async.wait_group", "cp.async.bulk.wait_group" (.read: its reads), "wgmma.wait_group": to the waiting warp.
    "griddepcontrol": a launch that its host function lets begin early knows of the launch before it after .wait, and of
        older ones, too, if that launch was not early or has waited itself. It knows of older ones from its beginning if
        all CTAs of the launch before had waited when they let it begin (.launch_dependents).
    Ranks (`launch_beside`): launches of a stream are in order; those of others are ordered by words in memory.
    "tcgen05 memory consistency": operations that one warp issues are in order; commit is complete_tx; tcgen05.ld is an
        operation that tcgen05.wait::ld waits for.
    "wgmma.fence": on every path, a wgmma.fence lies between an access to a wgmma's registers and the wgmma.
    "Cluster": shared memory exists until all threads of its CTA have exited, so accesses by other CTAs and by
        asynchronous operations must come before.
    "bar.warp.sync": one lane that arrives at an mbarrier, or copies, releases the accesses that other lanes of its warp
        made before the last bar.warp.sync, or before another barrier.
Not modelled: scopes (.cta is as wide as .sys); tcgen05.wait::st, tcgen05.fence, alloc and dealloc; .relaxed mbarrier
instructions (taken for .release, .acquire); the tensormap proxy; two lanes of one warp that are ordered by a word in
memory; strong accesses to words that overlap in part; in units of several warps, mbarriers and operations (kernels that
have them step warp by warp). Lanes may store the same to one place by one instruction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from .engines.asynchronous import Operation
from .race_agents import ALL, ASYNC_GLOBAL, ASYNC_SHARED, CLOCK, SHIFT, Agent, Copying, LoneLane, Operating, Warp
from .race_lanes import COPIES, LONE, SEVERAL, WHOLE, Lanes, Unsynchronised
from .race_memory import READ, STRONG_READ, STRONG_WRITE, WRITE, Access, Conflict, Shadow, States
from .race_orders import LAUNCH_BEFORE, LAUNCH_EARLIER, Orders, Race

__all__ = ["Race", "Races"]

REGION = 20  # global memory is kept in pieces of 1 << REGION bytes
TENSOR_BYTES = 128 * 512 * 4
ROWS_OF = {"global": ASYNC_GLOBAL, "shared": ASYNC_SHARED, "tensor": ALL}


class Races(Orders):
    """Observer of launches that checks all memory accesses, and raises Race for the first pair that nothing orders."""

    def __init__(self) -> None:
        super().__init__()
        self._states = States(self.proxied)
        self._global: dict[int, Shadow] = {}  # by address >> REGION
        self._shadows: dict[tuple[str, Any], Shadow] = {}

    def begin(self, early: bool) -> None:
        """Clear the shadow memory; with `early`, keep the previous launch's accesses as accesses of one agent."""
        states = States(self.proxied)
        if early:
            numbers = self._states.before(states, (LAUNCH_BEFORE, LAUNCH_EARLIER))
            for shadow in self._global.values():
                shadow.replace(numbers)
                shadow.forget_lanes()
        else:
            self._global.clear()
        self._states = states
        self._shadows.clear()

    def close(self) -> None:
        """Free all memory and agents."""
        self.forget()
        self._global.clear()
        self._shadows.clear()

    def follow(self, machine: Any, written: Iterable[tuple[int, int]]) -> None:
        """Begin a launch while another one still runs.

        written: (address, bytes) of the memory that the other launch writes.
        """
        self.launch(machine, early=True)
        state = self._states.number((LAUNCH_BEFORE << SHIFT | 1, (), (), ()))
        for address, size in written:
            for region in range(address >> REGION, (address + size - 1 >> REGION) + 1):
                self._region(region).fill(state, address, address + size)

    def read(self, space: str, cta: Any, places: np.ndarray, size: int, agent: Any) -> None:
        """Check a read."""
        self._access(READ, space, cta, places, size, agent)

    def write(self, space: str, cta: Any, places: np.ndarray, size: int, agent: Any) -> None:
        """Check a write."""
        self._access(WRITE, space, cta, places, size, agent)

    def atomic(self, space: str, cta: Any, places: np.ndarray, size: int, agent: Any) -> None:
        """Check an atomic operation."""
        self._access(STRONG_WRITE, space, cta, places, size, agent)

    def overwritten(self, agent: Any) -> None:
        """Raise Race: it is undefined which lane's value remains."""
        text = self.places[self.place(agent)].text
        raise Race(f"race: lanes store different values to one place by one instruction ({text})")

    def _access(self, kind: int, space: str, cta: Any, places: np.ndarray, size: int, agent: Any) -> None:
        if not places.size:
            return
        at = places.reshape(-1)
        at = at if at.dtype == np.int64 else at.astype(np.int64)
        if space == "tensor":
            at = at * 4
        row, place = ROWS_OF[space], None
        if isinstance(agent, Operation):
            who = self.operations[agent]
            parts = [(Access(kind, row, [who], who.place), at)]
        else:
            unit = getattr(agent, "unit", agent)
            number = self.place(unit)
            place = self.places[number]
            if place.strong:
                kind = STRONG_READ if kind == READ else STRONG_WRITE
            parts = list(self._parts(Access(kind, row, [], number), unit, agent, at))
            if space != "tensor":
                self._check_lanes(kind, space, cta, at, size, agent)
            if place.strong:
                for access, where in parts:
                    for one, mine in zip(access.agents, where.reshape(len(access.agents), -1), strict=True):
                        self.through(one, {(space, cta, word) for word in mine.tolist()}, place)
        for access, where in parts:
            if space == "shared":
                self.touch(cta, access.agents, access.place)
            for step in range(0, size, 16):
                self._check(access, space, cta, where + step if step else where, min(size - step, 16))
        if place is not None and place.releases:
            for warp in self.acting(agent):
                warp.tick()

    def _parts(self, access: Access, unit: Any, agent: Any, at: np.ndarray):
        """Yield the accesses of the active warps, and their places.

        If all these warps have equally many places, there is one access for all of them.
        """
        warps = self.of(unit)
        if len(warps) == 1:
            warp = warps[0]
            yield access.by([Copying(warp) if agent is not unit else warp.lone if self.alone(unit) else warp]), at
            return
        acts = agent.acting if agent is not unit else np.arange(unit.n) if unit.acting is True else unit.acting
        lanes = np.flatnonzero(acts) if acts.dtype == bool else acts
        counts = np.bincount(lanes >> 5, minlength=len(warps))
        which = np.flatnonzero(counts)
        agents = [warps[i] if agent is unit else Copying(warps[i]) for i in which]
        if (counts[which] == counts[which[0]]).all():
            yield access.by(agents), at
            return
        for i, who in zip(which, agents, strict=True):
            yield access.by([who]), at[lanes >> 5 == i]

    def _check_lanes(self, kind: int, space: str, cta: Any, at: np.ndarray, size: int, agent: Any) -> None:
        """Check an access against other lanes' accesses, in the same warps."""
        unit = getattr(agent, "unit", agent)
        acts = agent.acting
        acting = np.arange(unit.n) if acts is True else np.flatnonzero(acts) if acts.dtype == bool else acts
        which, lane = acting >> 5, acting & 31
        if acting.size != at.size:  # ldmatrix and stmatrix, by all lanes of a warp
            which = np.repeat(np.unique(which), at.size // np.unique(which).size)
            lane = np.full(at.size, SEVERAL)
        warps = self.of(unit)
        who = COPIES if agent is not unit else LONE if len(warps) == 1 and self.alone(unit) else WHOLE
        lanes = Lanes(warps, which, lane, who, kind in (STRONG_READ, STRONG_WRITE))
        for here, shadow in self._shadows_of(space, cta, at):
            try:
                shadow.lanes.access(lanes.of(here), kind in (WRITE, STRONG_WRITE), at[here] - shadow.base, size)
            except Unsynchronised as found:
                conflict = Conflict(warps[int(which[0])], found.epoch, found.was_read, ALL)
                conflict.of_lanes = True
                conflict.offset, conflict.place = found.offset, shadow.last(found.offset, found.was_read)
                raise self._race(conflict, kind, self.place(unit), space, cta, shadow.base) from None

    def _shadows_of(self, space: str, cta: Any, at: np.ndarray) -> Iterator[tuple[Any, Shadow]]:
        """Yield (indices, shadow) for each shadow memory that contains some of the places."""
        shadow = self._shadow(space, cta, at)
        if shadow is not None:
            yield slice(None), shadow
            return
        for region in np.unique(at >> REGION).tolist():
            yield at >> REGION == region, self._region(region)

    def _check(self, access: Access, space: str, cta: Any, at: np.ndarray, size: int) -> None:
        shadow = self._shadow(space, cta, at)
        if shadow is None:
            parts = len(access.agents)
            owners = np.repeat(np.arange(parts), at.size // parts)
            for region in np.unique(at >> REGION):
                for part in range(parts):
                    here = at[(at >> REGION == region) & (owners == part)]
                    if here.size:
                        self._check(access.by([access.agents[part]]), space, cta, here, size)
            return
        try:
            shadow.access(self._states, access, at - shadow.base if shadow.base else at, size)
        except Conflict as conflict:
            raise self._race(conflict, access.kind, access.place, space, cta, shadow.base) from None

    def _shadow(self, space: str, cta: Any, at: np.ndarray) -> Shadow | None:
        """Return the shadow memory that contains all places; None if global places lie in several."""
        if space == "global":
            region = at.item(0) >> REGION
            if int(at.min()) >> REGION != region or int(at.max()) >> REGION != region:
                return None
            return self._region(region)
        found = self._shadows.get((space, cta))
        if found is None:
            found = self._shadows[space, cta] = Shadow(cta.size if space == "shared" else TENSOR_BYTES)
        return found

    def _region(self, region: int) -> Shadow:
        found = self._global.get(region)
        if found is None:
            found = self._global[region] = Shadow(1 << REGION, region << REGION)
        return found

    # reports
    def _race(self, conflict: Conflict, kind: int, place: int, space: str, cta: Any, base: int) -> Race:
        at = base + conflict.offset
        where = f"global memory at {at:#x}"
        if space == "shared":
            where = f"shared memory of CTA {cta.id} at offset {at:#x}"
        elif space == "tensor":
            where = f"tensor memory of CTA {cta.id}, lane {at // 2048}, column {at % 2048 // 4}"
        agent, other = conflict.agent, conflict.epoch
        place_there = self.labels[other][1] if other in self.labels else conflict.place
        last = "the last such access: " if conflict.was_read and other not in self.labels else ""
        did = "written" if kind in (WRITE, STRONG_WRITE) else "read"
        race = Race(
            f"race: {where} is {did} by {self.name(agent.epoch)} ({self.places[place].text}); not ordered after "
            f"the {'read' if conflict.was_read else 'write'} by {self.name(other)} "
            f"({last}{self.places[place_there].text}). {self._remedy(conflict, agent)}"
        )
        race.before = at if other >> SHIFT in (LAUNCH_BEFORE, LAUNCH_EARLIER) else None
        return race

    def _remedy(self, conflict: Conflict, agent: Agent) -> str:
        """Return text that says what would order the two accesses."""
        number = conflict.epoch >> SHIFT
        if number in (LAUNCH_BEFORE, LAUNCH_EARLIER):
            return "griddepcontrol.wait before the access, by the warp or by one that it waits for, would order them."
        if conflict.row != ALL:
            return "They are ordered but for a fence.proxy.async, by the writer or after waiting for it."
        if self.names[number].startswith("cp.async of"):
            return "cp.async.wait_group by the copying warp, then a barrier for others, would order them."
        if self.proxied[number]:
            return self._end_of(self.labels[conflict.epoch])
        if conflict.of_lanes:
            return "bar.warp.sync between the accesses of two lanes would order them."
        issuer = agent.issuer if isinstance(agent, Operating) else agent
        issuer = issuer.warp if isinstance(issuer, LoneLane) else issuer
        if isinstance(issuer, Warp) and number in (
            issuer.number,
            issuer.lone.number,
        ):  # the operation was under way already
            return self._end_of(self.labels.get(agent.epoch, ("cp.async", 0)))
        here = issuer.cta if isinstance(issuer, Warp) else None
        warps = [warp for warps in self.warps.values() for warp in warps if number in (warp.number, warp.lone.number)]
        there = warps[0].cta if warps else None
        if warps and agent.knows(warps[0].lone.number << SHIFT | conflict.epoch & CLOCK):
            return "bar.warp.sync, before one lane arrives or copies for the others, would order them."
        if there is not None and (here is None or here is there):
            return "bar.sync, or an mbarrier's arrival and a wait for its phase, would order them."
        if here is not None and there is not None and here.cluster is there.cluster:
            return "barrier.cluster, or an mbarrier's arrival and a wait for its phase, would order them."
        return "A release and an acquire of one word, or the end of the launch, would order them."

    def _end_of(self, label: tuple[str, int]) -> str:
        """Return text that says which instruction waits for an operation."""
        if label[0].startswith("wgmma"):
            return "wgmma.wait_group by its warps, then an arrival that the other waits for, would order them."
        if label[0].startswith("tcgen05.ld"):
            return "tcgen05.wait::ld by its warp, then an arrival that the other waits for, would order them."
        if "bulk_group" in self.places[label[1]].text:
            return "cp.async.bulk.wait_group by its thread, then a barrier for others, would order them."
        return "A wait for the mbarrier's phase that its completion ends would order them."
