"""Models of the protocols between a persistent GEMM's warp roles, one by one: their waits and arrivals at barriers.

Each function models the table in its kernel's docstring. With `broken` it breaks the protocol in a named way, which the
search must detect. There are `n` items, more than twice the number of slots, so that a wait can meet the phase two
rounds earlier.
"""

from __future__ import annotations

from .barriers import Machine, Pipeline, Role

LOADS, SCHEDULER, EPILOGUE_LOADS, GATHER, SCALES, MMA, DECODE, EPILOGUE = (
    "TMA loads", "scheduler", "epilogue loads", "gather", "bring scales", "MMA", "decode", "epilogue"
)  # fmt: skip


WARPS = "warps"
"""The named barrier of a warpgroup's warps."""
PAIR = range(2)
"""The CTAs of a cluster."""


def produce(role: Role, to: Pipeline, number: int) -> None:
    """Append the steps that write one item into a slot."""
    role.acquire(to, number)
    role.write(to, number)
    role.commit(to, number)


def bring(role: Role, to: Pipeline, number: int) -> None:
    """Append the steps that load an item's first part by a copy. The role announces the copy's bytes to the barrier."""
    role.acquire(to, number)
    role.commit(to, number)
    role.send(to, number)


def consume(role: Role, of: Pipeline, number: int) -> None:
    """Append the steps that wait for an item, use it and release its slot."""
    role.await_full(of, number)
    role.use(of, number)
    role.release(of, number)


def ring(n: int = 5, slots: int = 2, consumers: tuple[str, ...] = (LOADS, MMA), broken: str = "") -> Machine:
    """Model `schedule.work.WorkRing`: the scheduler passes tiles to all other warps.

    broken: the fault to build in. "few arrivals": the empty barrier expects one arrival too few; "no wait": the
    scheduler does not wait for an empty slot; "early": it commits before it writes; "parity": it waits for the wrong
    parity.
    """
    made = Machine()
    ring = made.pipeline("ring", slots, full=1, empty=len(consumers) - (broken == "few arrivals"))
    scheduler = made.role(SCHEDULER)
    for tile in range(n):
        if broken != "no wait":
            scheduler.acquire(ring, tile, parity=0 if broken == "parity" else 1)
        if broken == "early":
            scheduler.commit(ring, tile)
            scheduler.write(ring, tile)
        else:
            scheduler.write(ring, tile)
            scheduler.commit(ring, tile)
    for name in consumers:
        consumer = made.role(name)
        for tile in range(n):
            consume(consumer, ring, tile)
    return made


def stages(n: int = 5, slots: int = 2, gathers: str = "", broken: str = "") -> Machine:
    """Model the stages of one CTA's mainloop: weights come by TMA, rows of x by TMA or by the role `gathers`.

    broken: "bytes": a full barrier does not count them; "released early": a stage is released before its MMAs have
    ended; "one gatherer": the gathering role does not wait for an empty slot.
    """
    made = Machine()
    counted = 2 - (broken == "bytes")
    stages = made.pipeline("stages", slots, full=1 + counted, empty=2, parts=2)
    loads = made.role(LOADS)
    for k_tile in range(n):
        bring(loads, stages, k_tile)
        if not gathers:
            loads.send(stages, k_tile, part=1)
    if gathers:
        gather = made.role(gathers)
        for k_tile in range(n):
            if broken != "one gatherer":
                gather.acquire(stages, k_tile)
            gather.send(stages, k_tile, part=1)
    for _ in range(2):
        mma = made.role(MMA)
        for k_tile in range(n):
            mma.await_full(stages, k_tile)
            if broken == "released early":
                mma.release(stages, k_tile)
                mma.use(stages, k_tile)
            else:
                mma.use(stages, k_tile)
                mma.release(stages, k_tile)
    return made


def shared_stages(n: int = 3, slots: int = 1, broken: str = "") -> Machine:
    """Model the stages of a cluster of two CTAs. Each CTA loads half of every tile into both CTAs.

    broken: "own room": a CTA waits only for its own stage to be empty; "no tail": a CTA ends before its peer's last
    arrivals.
    """
    made = Machine()
    stages = _stages_of_pair(made, slots, empty=1 if broken == "own room" else 2)
    for cta in PAIR:
        loads, mma = made.role(LOADS, cta), made.role(MMA, cta)
        for k_tile in range(n):
            _load_for_both(loads, stages, k_tile)
        if broken != "no tail":
            _tail(loads, stages[cta], n)
        for k_tile in range(n):
            mma.await_full(stages[cta], k_tile)
            mma.use(stages[cta], k_tile)
            for to in (cta,) if broken == "own room" else PAIR:
                mma.release(stages[to], k_tile)
    return made


def _stages_of_pair(made: Machine, slots: int, empty: int = 2) -> list[Pipeline]:
    return [made.pipeline("stages", slots, full=3, empty=empty, cta=cta, parts=2) for cta in PAIR]


def _load_for_both(loads: Role, stages: list[Pipeline], k_tile: int) -> None:
    """Append the load of a CTA's half of a k-tile into both CTAs."""
    mine = stages[loads.cta]
    loads.acquire(mine, k_tile)
    loads.commit(mine, k_tile)
    for to in stages:
        loads.send(to, k_tile, part=loads.cta)


def _tail(loads: Role, stages: Pipeline, n: int) -> None:
    """Append waits until all stages of n k-tiles are empty."""
    for k_tile in range(n, n + stages.slots):
        loads.acquire(stages, k_tile)


def turns(tiles: int = 4, k_tiles: int = 2, slots: int = 2, role: str = MMA, broken: str = "") -> Machine:
    """Model pingpong: two warpgroups take alternate tiles, with all k-tiles in one pipeline (`sm90/turns.py`).

    broken: "no turns": the warpgroups do not wait for each other.
    """
    made = Machine()
    stages = made.pipeline("stages", slots, full=2, empty=1)
    turn = [made.named("turns") for _ in range(2)]
    loads = made.role(LOADS)
    for k_tile in range(tiles * k_tiles):
        bring(loads, stages, k_tile)
    for index in range(2):
        mma = made.role(role)
        if index == 1 and broken != "no turns":
            mma.arrive(turn[0])
        for tile in range(index, tiles, 2):
            if broken != "no turns":
                mma.sync(turn[index])
            for k_tile in range(tile * k_tiles, (tile + 1) * k_tiles):
                consume(mma, stages, k_tile)
            if broken != "no turns":
                mma.arrive(turn[1 - index])
    return made


def loads(chunks: int = 5, slots: int = 2, role: str = MMA, broken: str = "") -> Machine:
    """Model tensors that an epilogue loads beside its accumulators and overwrites with results
    (`sm90/epilogue/preact.py`).

    Two warps read a slot and write their results there. Then the storing warp starts a store of the slot, and releases
    the slot after the store has read it.

    broken: "freed early": the slot is released before the store has read it; "alone": the barrier between the two warps
    is missing.
    """
    made = Machine()
    loads = made.pipeline("loads", slots, full=2, empty=1, parts=1)
    both = made.named(WARPS)
    load = made.role(EPILOGUE_LOADS)
    for chunk in range(chunks):
        bring(load, loads, chunk)
    for stores in (True, False):
        warp = made.role(role)
        for chunk in range(chunks):
            warp.await_full(loads, chunk)
            warp.read(loads, chunk)
            if broken == "freed early" and stores:
                warp.release(loads, chunk)
            warp.read(loads, chunk)
            if broken != "alone":
                warp.sync(both)
            if stores:
                warp.read(loads, chunk)  # the bulk store, until its group has read the slot
                if broken != "freed early":
                    warp.release(loads, chunk)
    return made


def tickets(n: int = 3, slots: int = 2, broken: str = "") -> Machine:
    """Model tickets that the first CTA of a cluster draws and sends to the second (`schedule/tickets.py`).

    Each ticket except the last is a tile, here of one k-tile, which each CTA loads for both. So the first CTA must stay
    until the second has multiplied its last tile, and until the second has acknowledged all tickets except the last.

    broken: "no wait": the first sends without an empty slot; "released last": the second also acknowledges its last
    ticket; "no tail": see `shared_stages`.
    """
    made = Machine()
    # Full in the second CTA, empty in the first.
    broadcast = made.pipeline("broadcast", slots, full=2, empty=1, cta=1)
    for slot in range(slots):
        made.barriers[broadcast.empty(slot)] = made.barriers[broadcast.empty(slot)]._replace(cta=0)
    stages = _stages_of_pair(made, slots=1)
    for cta in PAIR:
        ring = made.pipeline("ring", 1, full=1, empty=1, cta=cta)
        scheduler, loads, mma = (made.role(name, cta) for name in (SCHEDULER, LOADS, MMA))
        for ticket in range(n):
            is_tile = ticket < n - 1
            if cta == 0:
                if broken != "no wait":
                    scheduler.acquire(broadcast, ticket)
                scheduler.send(broadcast, ticket)
            else:
                scheduler.commit(broadcast, ticket)
                scheduler.await_full(broadcast, ticket)
                scheduler.read(broadcast, ticket)
                if is_tile or broken == "released last":
                    scheduler.release(broadcast, ticket)
            if is_tile:
                produce(scheduler, ring, ticket)
                loads.await_full(ring, ticket)
                loads.read(ring, ticket)
                loads.release(ring, ticket)
                _load_for_both(loads, stages, ticket)
                mma.await_full(stages[cta], ticket)
                for to in stages:
                    mma.release(to, ticket)
        if broken != "no tail":
            _tail(loads, stages[cta], n - 1)
    return made


def decoded(
    tiles: int = 2, k_tiles: int = 3, slots: int = 3, warpgroups: int = 2, room: int = 2, broken: str = ""
) -> Machine:  # fmt: skip
    """Model packed weights that warpgroups decode, in turns, into a second ring (`sm90/mainloop/decoded_fp8.py`).

    The second ring has room for `room` k-tiles. The protocol holds if warpgroups <= room <= slots.

    broken: "rows forgotten": the MMA's own arrival at a stage is not counted; "turns by tile": each tile's turns begin
    with the same warpgroup; "no room": decoding does not wait for an empty slot; "packed first": decoding waits for the
    packed weights before the slot, so nothing proves that the stage's previous phase has ended.
    """
    made = Machine()
    counted = 1 if broken == "rows forgotten" else 2
    stages = made.pipeline("stages", slots, full=2, empty=counted)
    ring = made.pipeline("decoded", room, full=1, empty=1)
    loads = made.role(LOADS)
    numbers = range(tiles * k_tiles)
    for number in numbers:
        bring(loads, stages, number)
    for rank in range(warpgroups):
        decode = made.role(DECODE)
        for number in numbers:
            turn = number % k_tiles if broken == "turns by tile" else number
            if turn % warpgroups != rank:
                continue
            if broken == "packed first":
                decode.await_full(stages, number)
            if broken != "no room":
                decode.acquire(ring, number)
            if broken != "packed first":
                decode.await_full(stages, number)
            decode.read(stages, number)
            decode.write(ring, number)
            decode.commit(ring, number)
            decode.release(stages, number)
    mma = made.role(MMA)
    for number in numbers:
        mma.await_full(stages, number)
        mma.await_full(ring, number)
        mma.use(stages, number)
        mma.use(ring, number)
        mma.release(ring, number)
        mma.release(stages, number)
    return made


def decoding(tiles: int = 3, k_tiles: int = 3, slots: int = 2, broken: str = "") -> Machine:
    """Model weights that warpgroups decode, in turns, into the stages themselves (`sm90/mainloop/decoded_lines.py`).

    broken: "no wait": decoding does not wait for an empty slot; "turns by tile": each tile's turns begin with the same
    warpgroup; "all stages": each warpgroup also waits for the other's slots, whose phase may be over before it waits.
    """
    made = Machine()
    stages = made.pipeline("stages", slots, full=3, empty=1, parts=2)
    numbers = range(tiles * k_tiles)
    loads = made.role(LOADS)
    for number in numbers:
        bring(loads, stages, number)
    for rank in range(2):
        decode = made.role(DECODE)
        for number in numbers:
            turn = number % k_tiles if broken == "turns by tile" else number
            is_mine = turn % 2 == rank
            if broken != "no wait" and (is_mine or broken == "all stages"):
                decode.acquire(stages, number)
            if is_mine:
                decode.write(stages, number, part=1)
                decode.commit(stages, number)
    mma = made.role(MMA)
    for number in numbers:
        consume(mma, stages, number)
    return made


def shared_depth(
    tiles: int = 4, k_tiles: int = 3, slots: int = 2, splits: int = 2, buffers: int = 2, broken: str = ""
) -> Machine:  # fmt: skip
    """Model warpgroups that share the depth of every tile and then exchange sums (`sm90/split_depth.py`).

    broken: "no barrier": sums are read before all are written; "on the way": a warpgroup takes the next tile's k-tiles
    before the others have ended this tile's.
    """
    made = Machine()
    stages = made.pipeline("stages", slots, full=2, empty=1)
    barrier = made.named("sums", splits)
    sums = Pipeline(-1, made.cells, buffers, splits)
    made.cells += buffers * splits
    loads = made.role(LOADS)
    for number in range(tiles * k_tiles):
        bring(loads, stages, number)
    for rank in range(splits):
        mma = made.role(MMA)
        for tile in range(tiles):
            for number in range(tile * k_tiles + rank, (tile + 1) * k_tiles, splits):
                consume(mma, stages, number)
            mma.write(sums, tile, part=rank)
            is_last = tile == tiles - 1
            if broken != "no barrier" and (broken != "on the way" or is_last):
                mma.sync(barrier)
            if tile % splits == rank and (broken != "on the way" or is_last):
                mma.use(sums, tile)
    return made


def accumulators(tiles: int = 5, broken: str = "") -> Machine:
    """Model two accumulators in tensor memory, one for each warpgroup that runs epilogues (`sm100/persistent.py`).

    broken: "freed early": an accumulator is released before the last slab is read; "no commit": a warpgroup is
    signalled before its MMAs ended.
    """
    made = Machine()
    two = made.pipeline("accumulators", 2, full=1, empty=1)
    mma = made.role(MMA)
    for tile in range(tiles):
        mma.acquire(two, tile)
        if broken == "no commit":
            mma.commit(two, tile)
            mma.write(two, tile)
        else:
            mma.send(two, tile)  # MMAs end some time later, and a commit arrives then
    for index in range(2):
        epilogue = made.role(EPILOGUE)
        for tile in range(index, tiles, 2):
            epilogue.await_full(two, tile)
            epilogue.read(two, tile)
            if broken == "freed early":
                epilogue.release(two, tile)
                epilogue.read(two, tile)
            else:
                epilogue.read(two, tile)
                epilogue.release(two, tile)
    return made


Table = dict[str, tuple[set[str], set[str]]]
"""By role: (the barriers that it waits for, the barriers that it signals)."""


def hopper() -> Table:
    """Return the barriers by role of `sm90/persistent.py`. A test compares them with the table in its docstring."""
    of_ring = ring(consumers=(LOADS, EPILOGUE_LOADS, GATHER, MMA, DECODE))
    return _table(of_ring, stages(), stages(gathers=GATHER), turns(), shared_depth(), loads(), decoding(), decoded())


def blackwell() -> Table:
    """Return the barriers by role of `sm100/persistent.py`. A test compares them with the table in its docstring."""
    of_ring = ring(consumers=(LOADS, EPILOGUE_LOADS, MMA, EPILOGUE, GATHER, SCALES))
    by_role = (stages(gathers=role) for role in (GATHER, SCALES))
    made = _table(of_ring, stages(), *by_role, accumulators(), loads(role=EPILOGUE))
    of_turns = _table(turns(role=EPILOGUE))[EPILOGUE]  # at the slots of epilogues: what they guard there is no stage
    for mine, turn in zip(made[EPILOGUE], of_turns, strict=True):
        mine |= turn & {"turns"}
    return made


def _table(*machines: Machine) -> Table:
    """Merge the tables of several machines. Barriers among WARPS are left out."""
    found: Table = {}
    for machine in machines:
        for role, sides in machine.table().items():
            for mine, names in zip(found.setdefault(role, (set(), set())), sides, strict=True):
                mine |= names - {WARPS}
    for _, signals in found.values():
        signals.discard("ring (empty)")
    return found
