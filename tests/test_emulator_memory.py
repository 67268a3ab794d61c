"""The emulator's device memory: real addresses of the process, of which only registered ranges are accessible."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from emulator.by_hand import launch
from emulator.emulated_gpu import live_storages
from emulator.faults import Fault
from emulator.memory import Memory

PLACE = 1 << 40  # where no test looks: extents are checked before memory is touched


def lanes_of(address):
    return np.uint64(address) + np.arange(32, dtype=np.uint64) * np.uint64(4)


def test_tensors_are_read_and_written_where_they_lie():
    memory, x, y = Memory(), torch.arange(32, dtype=torch.int32), np.zeros(32, np.int32)
    memory.allow(x.data_ptr(), 128, "x", writable=False)
    memory.allow(y.ctypes.data, 128, "y")

    def copy(u, m):
        u.store_global(lanes_of(y.ctypes.data), 4, u.load_global(lanes_of(x.data_ptr()), 4, 1, m), m)

    launch(copy, memory=memory)
    assert (y == np.arange(32)).all()


@pytest.mark.parametrize(
    ("offset", "size", "write", "message"),
    [
        (400, 4, False, "0 bytes after the end of x"),
        (-4, 4, False, "4 bytes before x"),
        (398, 4, False, "not allocated"),
        (2, 4, False, "not a multiple of 4"),
        ((1 << 64) - PLACE - 4, 4, False, "not allocated"),
        (0, 4, True, "read-only"),
    ],
)
def test_an_access_outside_of_an_extent_is_a_fault_that_names_it(offset, size, write, message):
    memory = Memory()
    memory.allow(PLACE, 400, "x", writable=False)
    memory.allow(2 * PLACE, 4096, "y")
    memory.place(np.full(32, PLACE + 396, np.uint64), 4, "ld")
    addresses = np.full(32, PLACE, np.uint64)
    addresses[7] = PLACE + offset
    with pytest.raises(Fault, match=message):
        memory.place(addresses, size, "ld", write)


def test_lanes_may_reach_several_extents_but_no_access_two():
    memory = Memory()
    memory.allow(PLACE, 20, "a")
    memory.allow(PLACE + 20, 12, "b")
    memory.place(np.array([PLACE + 16, PLACE + 20], np.uint64), 4, "ld")
    with pytest.raises(Fault, match="not allocated"):
        memory.place(np.array([PLACE + 16], np.uint64), 8, "ld")


def test_overlapping_extents_stay_until_both_are_forgotten():
    memory = Memory()
    memory.allow(PLACE, 64, "whole", writable=False)
    memory.allow(PLACE + 32, 16, "part")
    part = np.array([PLACE + 32], np.uint64)
    memory.place(part, 4, "st", write=True)
    with pytest.raises(Fault, match="read-only"):
        memory.place(part - np.uint64(4), 4, "st", write=True)
    memory.allow(PLACE + 8, 8, "other part")
    memory.place(np.array([PLACE], np.uint64), 16, "ld", width=8)  # of whole, across the other part's beginning
    memory.forget(PLACE + 8)
    memory.forget(PLACE + 32)
    memory.place(part, 4, "ld")
    memory.forget(PLACE)
    with pytest.raises(Fault, match="no memory is registered"):
        memory.place(part, 4, "ld")


def test_buffers_are_poisoned_and_guarded():
    memory = Memory()
    address = memory.alloc(100)
    assert (memory.array(address, np.uint8, 100) == 0xFF).all()
    for outside in (address + 100, address - 1):
        with pytest.raises(Fault, match="not allocated"):
            memory.place(np.array([outside], np.uint64), 1, "ld")


def test_looking_for_tensors_disturbs_no_thread_that_builds_a_tuple() -> None:
    """A tuple that grows may have one owner: whoever finds it among the collector's objects must let go at once."""
    live_storages()  # from now on only young objects are looked at, few enough for iterators to keep them all
    tensor, found, looking = torch.zeros(3), list[bool](), [True, True]

    def look(me: int) -> None:
        try:
            found.extend(tensor.data_ptr() in live_storages() for _ in range(300))
        finally:
            looking[me] = False

    def build() -> int:
        built = 0
        while any(looking):
            built += len(tuple(str(each) for each in range(40)))
        return built

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as threads:
            lookers = [threads.submit(look, me) for me in range(2)]
            assert threads.submit(build).result() > 0
            for each in lookers:
                each.result()
    finally:
        sys.setswitchinterval(interval)
    assert len(found) == 600 and all(found)
