"""The emulator's machine: shared memory, faults, barriers and scheduling, for kernels written as Python blocks."""

import numpy as np
import pytest
from emulator.by_hand import initialise, lane, launch, make, nothing, shared, wait
from emulator.faults import Fault
from emulator.machine import run_together
from emulator.memory import Memory
from emulator.observer import Observer

SEEDS = range(6)

# shared memory


@pytest.mark.parametrize("address", [0x400 + 8192, 0x3F0, 0x402, 0x400 + (1 << 24)])
def test_shared_accesses_out_of_bounds_misaligned_or_of_no_cta_are_faults(address):
    with pytest.raises(Fault, match="shared"):
        launch(lambda u, m: u.load_shared(np.full(32, address, np.uint32), 4, 1, m))


def test_one_access_may_reach_shared_memory_of_several_ctas():
    seen = {}

    def store(u, m):
        numbers = np.arange(32, dtype=np.uint32)
        address = shared(0) + (numbers % 2 << 24) + numbers // 2 * 16
        u.store_shared(address, 4, (numbers, numbers + 100), m)
        low, high = u.load_shared(address, 4, 2, m)
        assert (low == numbers).all() and (high == numbers + 100).all()

    def check(u, m):
        seen[u.cta.rank] = u.cta.words[4][:64].reshape(16, 4).copy()

    blocks = [(lambda u, m: store(u, m) if u.cta.rank == 0 else None, ("cluster_arrive", None, None)),
              (nothing, ("cluster_wait", None, None)), check]  # fmt: skip
    launch(*blocks, cluster=(2, 1, 1))
    for rank in range(2):
        assert (seen[rank][:, 0] == np.arange(rank, 32, 2)).all()
        assert (seen[rank][:, 1] == np.arange(rank, 32, 2) + 100).all()
        assert (seen[rank][:, 2:] == 0xFFFFFFFF).all()


# faults


def test_a_fault_names_kernel_cta_warp_and_block():
    def bad(u, m):
        if u.cta.linear == 1:
            u.load_global(np.full(32, 64, np.uint64), 4, 1, m)

    with pytest.raises(Fault) as caught:
        launch(nothing, bad, grid=(2, 1, 1))
    assert all(text in str(caught.value) for text in ("kernel, CTA (1, 0, 0), warp 0, block 1", "not allocated"))


@pytest.mark.parametrize("seed", range(3))
def test_a_deadlock_is_reported_with_what_every_warp_waits_for(seed):
    with pytest.raises(Fault, match=r"(?s)deadlock.*warp 0.*mbarrier 0x400: phase 0, 1 of 1 arrivals"):
        launch(initialise((0, 1)), wait(1, 0), seed=seed)
    with pytest.raises(Fault, match=r"(?s)deadlock.*warp 0: waits at named barrier 3: 32 of 64 threads"):
        launch((nothing, ("bar_sync", None, [3, 64])), seed=seed)


def test_a_kernel_without_end_is_stopped_with_its_state():
    with pytest.raises(Fault, match=r"(?s)did not end within 1000 steps.*32 lanes in block 0"):
        launch((nothing, ("bra", None, 0)), most_steps=1000)


# barriers and warps


def test_named_barriers_check_their_numbers():
    def counts(u, m):
        u.b32[0] = 128 if u.first_warp else 96

    with pytest.raises(Fault, match="used with (128|96) threads while others wait for (128|96)"):
        launch((counts, ("bar_sync", None, [1, "b32[0]"])), threads=96)
    with pytest.raises(Fault, match="33 threads are not"):
        launch((nothing, ("bar_sync", None, [1, 33])))
    with pytest.raises(Fault, match="there are 16"):
        launch((nothing, ("bar_sync", None, [16])))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_named_barrier_orders_writes_before_reads(seed):
    seen = []
    address = shared(0) + np.arange(32, dtype=np.uint32) * 4

    def write(u, m):
        if u.first_warp == 3:
            u.store_shared(address, 4, (np.arange(32, dtype=np.uint32),), m)

    def read(u, m):
        seen.extend(u.load_shared(address, 4, 1, m))

    launch((write, ("bar_sync", None, [0])), read, threads=128, seed=seed)
    assert len(seen) == 4
    assert all((row == np.arange(32)).all() for row in seen)


@pytest.mark.parametrize(("op", "expected"), [("popc", 40), ("and", False), ("or", True)])
def test_a_reduction_over_a_barrier_sees_all_threads(op, expected):
    seen = []

    def predicate(u, m):
        u.p[1] = u.thread < 40

    to = ("b32", 3) if op == "popc" else ("p", 3)
    end = ("bar_red", None, [0, None, op, to, (1, False)])
    launch((predicate, end), lambda u, m: seen.append(getattr(u, to[0])[3].copy()), threads=64)
    assert len(seen) == 2
    assert all((row == expected).all() for row in seen)


def test_lanes_that_diverged_meet_at_a_warp_barrier():
    order = []

    def half(u, m):
        u.p[0] = np.arange(32) < 16

    def note(name):
        return lambda u, m: order.append((name, 32 if m is True else int(m.sum())))

    # Half of the lanes come to the barrier, block 2, from a later block: the others must wait.
    launch((half, ("bra", (0, False), 4)), note("high"), (nothing, ("warp_sync", None, [-1])),
           (note("all"), ("bra", None, 5)), (note("low"), ("bra", None, 2)))  # fmt: skip
    assert order == [("high", 16), ("low", 16), ("all", 32)]


def test_barrier_cluster_needs_arrive_and_wait_by_turns():
    with pytest.raises(Fault, match="without an arrive before"):
        launch((nothing, ("cluster_wait", None, None)))
    with pytest.raises(Fault, match="twice without a wait"):
        launch((nothing, ("cluster_arrive", None, None)), (nothing, ("cluster_arrive", None, None)))


@pytest.mark.parametrize("seed", range(3))
def test_barriers_do_not_wait_for_threads_that_have_exited(seed):
    passed = []

    def leaves(u, m):
        u.p[0] = u.first_warp == 1

    launch((leaves, ("exit", (0, False), None)), (nothing, ("bar_sync", None, [0])),
           (nothing, ("cluster_arrive", None, None)), (nothing, ("cluster_wait", None, None)),
           lambda u, m: passed.append(u.cta.rank), threads=64, cluster=(2, 1, 1), seed=seed)  # fmt: skip
    assert sorted(passed) == [0, 1]


def test_setmaxnreg_may_not_ask_for_more_than_the_launch_reserved():
    def change(high):
        def block(u, m):
            u.setmaxnreg(*(("inc", high) if u.first_warp < 8 else ("dec", 40)))

        return block

    launch(change(232), threads=384)  # 8 warps of 232 and 4 of 40 are 12 of 168
    with pytest.raises(Fault, match="the launch reserved 168"):
        launch(change(240), threads=384)
    launch(change(96), threads=384, ctas_per_sm=2)  # of 80
    with pytest.raises(Fault, match="the launch reserved 80"):
        launch(change(104), threads=384, ctas_per_sm=2)
    with pytest.raises(Fault, match="setmaxnreg.dec of 200 in a warp that has 168"):
        launch(lambda u, m: u.setmaxnreg("dec", 200), threads=384)


def test_shuffles_and_votes():
    def block(u, m):
        a, lanes = np.arange(32, dtype=np.uint32), np.arange(32)
        down, there = u.shfl("down", a, np.uint32(3), np.uint32(31))
        assert (down == np.where(lanes < 29, lanes + 3, lanes)).all() and (there == (lanes < 29)).all()
        assert (u.shfl("bfly", a, np.uint32(5), np.uint32(31))[0] == lanes ^ 5).all()
        assert (u.shfl("idx", a, np.uint32(2), np.uint32(8 << 8 | 31))[0] == 2 | lanes & 8).all()
        assert (u.shfl("up", a, np.uint32(1), np.uint32(0))[0] == np.maximum(lanes - 1, 0)).all()
        odd = lanes % 2 == 1
        assert (u.vote("ballot", odd, True) == 0xAAAAAAAA).all() and u.vote("any", odd, lanes > 30).all()
        assert u.vote("all", odd, odd).all() and not u.vote("uni", odd, True).any()
        assert (u.elect(lanes >= 4) == (lanes == 4)).all() and (u.elect_lane(lanes >= 4) == 4).all()
        assert (u.match_any(a % 4, True) == np.uint32(0x11111111) << a % 4).all()
        assert (u.redux("add", a, lanes < 4) == 6).all()

    launch(block)


# mbarriers


def test_an_mbarriers_phase_ends_when_arrivals_and_bytes_have_come():
    states = []

    def look(u):
        states.append(tuple(bool(u.mbar_try(shared(0), np.uint32(parity), True)[0]) for parity in range(2)))

    def block(u, m):
        one = lane(u)
        look(u)
        u.mbar_arrive(shared(0), np.uint32(96), True, one)  # one arrival, and 96 bytes
        token = u.mbar_arrive(shared(0), np.uint32(1), False, one)
        assert not u.mbar_test(shared(0), token, one)[0]
        u.mbar_complete(shared(0), np.uint32(64), one)
        look(u)
        u.mbar_complete(shared(0), np.uint32(32), one)
        look(u)
        assert u.mbar_test(shared(0), token, one)[0]
        u.mbar_complete(shared(0), np.uint32(16), one)  # bytes may come before they are expected
        u.mbar_arrive(shared(0), np.uint32(2), False, one)
        look(u)
        u.mbar_expect(shared(0), np.uint32(16), one)
        look(u)
        u.spun = False

    launch(initialise((0, 2)), block)
    assert states == [(False, True), (False, True), (True, False), (True, False), (False, True)]


def test_registers_that_were_not_written_differ_by_seed():
    def read(seed: int) -> tuple:
        seen = []
        launch(lambda u, m: seen.append((u.p[0, 0], u.s16[0, 0], u.s32[0, 0], u.f32[0, 0], u.s64[0, 0])), seed=seed)
        return tuple(seen[0])

    (false, *positive), (true, *negative) = read(0), read(1)
    assert not false and true
    for one, other in zip(positive, negative, strict=True):
        assert np.isnan(one) and np.isnan(other) if isinstance(one, np.float32) else one > 0 > other


def test_misuse_of_mbarriers_is_a_fault():
    with pytest.raises(Fault, match="1 arrivals more than the 2 expected"):
        launch(initialise((0, 2)), lambda u, m: u.mbar_arrive(shared(0), np.uint32(3), False, lane(u)))
    with pytest.raises(Fault, match="was not initialised"):
        launch(initialise((0, 2)), lambda u, m: u.mbar_arrive(shared(8), np.uint32(1), False, lane(u)))
    with pytest.raises(Fault, match="misaligned"):
        launch(initialise((4, 2)))

    def again(u, m):
        u.mbar_arrive(shared(0), np.uint32(1), False, lane(u))
        u.mbar_init(shared(0), np.uint32(2), lane(u))

    with pytest.raises(Fault, match="where one is and was not invalidated"):
        launch(initialise((0, 2)), again)
    with pytest.raises(Fault, match="where one is and was not invalidated"):
        launch(lambda u, m: u.mbar_init(shared(0), np.uint32(2), lane(u) | lane(u, 1)))
    with pytest.raises(Fault, match="parities are 0 and 1"):
        launch(initialise((0, 2)), lambda u, m: u.mbar_try(shared(0), np.uint32(2), lane(u)))

    def invalidated(u, m):
        u.mbar_inval(shared(0), lane(u))
        u.mbar_try(shared(0), np.uint32(0), lane(u))

    with pytest.raises(Fault, match="was not initialised"):
        launch(initialise((0, 2)), invalidated)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_mbarrier_of_another_cta_lets_its_warps_go(seed):
    done = []

    def arrive(u, m):
        u.mbar_arrive(shared(0, 1 - u.cta.rank), np.uint32(1), False, lane(u, 5), True)

    begin, end = initialise((0, 2)), ("cluster_arrive", None, None)
    launch(begin, (nothing, end), (nothing, ("cluster_wait", None, None)), arrive, wait(4, 0),
           (lambda u, m: done.append(u.cta.rank), end), (nothing, ("cluster_wait", None, None)),
           cluster=(2, 1, 1), threads=64, seed=seed)  # fmt: skip
    assert sorted(done) == [0, 0, 1, 1]


def test_shared_memory_of_a_cta_that_has_ended_is_out_of_reach():
    def late(u, m):
        u.p[0] = u.cta.rank == 0

    def reach(u, m):
        u.spun = bool(u.machine.running[0].ctas[0].threads)
        u.p[0] = not u.spun

    with pytest.raises(Fault, match="all of whose threads have exited"):
        launch((late, ("bra", (0, False), 3)), (reach, ("bra", (0, True), 1)),
               lambda u, m: u.load_shared(np.full(32, shared(0), np.uint32), 4, 1, m), cluster=(2, 1, 1))  # fmt: skip


# launches


def test_launches_that_wait_for_each_other_run_together():
    memory = Memory()
    words = memory.put(np.zeros(2, np.uint32))

    def kernel(mine, theirs, value):
        def post(u, m):
            u.store_global(np.full(32, words + 4 * mine, np.uint64), 4, (np.full(32, value, np.uint32),), m)

        def look(u, m):
            (got,) = u.load_global(np.full(32, words + 4 * theirs, np.uint64), 4, 1, m)
            u.p[0] = got != 0
            u.spun = True

        return [(look, ("bra", (0, True), 0)), post] if mine else [post, (look, ("bra", (0, True), 1))]

    run_together([make(*kernel(0, 1, 7), memory=memory), make(*kernel(1, 0, 9), memory=memory, seed=1)])
    assert memory.array(words, np.uint32, 2).tolist() == [7, 9]
    memory.array(words, np.uint32, 2)[:] = 0
    with pytest.raises(Fault, match="deadlock: no launch can move"):
        run_together([make(*kernel(1, 0, 9), memory=memory) for _ in range(2)])


def test_resident_clusters_run_at_once():
    memory = Memory()
    word = memory.put(np.zeros(1, np.uint32))
    address = np.full(32, word, np.uint64)

    def count(u, m):
        u.atomic("global", "add", address, np.uint32, lane(u), np.ones(32, np.uint32))

    def look(u, m):
        u.p[0] = u.load_global(address, 4, 1, m)[0] == 2
        u.spun = True

    blocks = [count, (look, ("bra", (0, True), 1))]
    launch(*blocks, memory=memory, grid=(2, 1, 1), resident=2)
    memory.array(word, np.uint32, 1)[:] = 0
    with pytest.raises(Fault, match="deadlock"):
        launch(*blocks, memory=memory, grid=(2, 1, 1))


def test_an_observer_hears_of_accesses_and_synchronisation():
    heard = []

    class Notes(Observer):
        def write(self, space, cta, places, size, agent):
            heard.append(("write", space, size))

        def read(self, space, cta, places, size, agent):
            heard.append(("read", space, size))

        def release(self, agent, thing):
            heard.append(("release", thing[0] if isinstance(thing, tuple) else type(thing).__name__))

        def acquire(self, agent, thing):
            heard.append(("acquire", thing[0] if isinstance(thing, tuple) else type(thing).__name__))

    address = np.full(32, shared(64), np.uint32)

    def arrive(u, m):
        u.store_shared(address, 4, (np.zeros(32, np.uint32),), m)
        u.mbar_arrive(shared(0), np.uint32(1), False, lane(u))

    launch(initialise((0, 1)), arrive, wait(2, 0), lambda u, m: u.load_shared(address, 4, 1, m), observer=Notes())
    heard = [note for note in heard if note[1] != "init"]
    assert heard == [("release", "NamedBarrier"), ("acquire", "NamedBarrier"), ("write", "shared", 4),
                     ("release", "mbarrier"), ("acquire", "mbarrier"), ("read", "shared", 4)]  # fmt: skip
