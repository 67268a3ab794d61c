"""Ticket counters of kernels: owned by a thread, stream or graph, and never shared by two calls that may overlap."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from support.fake_gpu import FakeGpu
from support.memory import memory

from cute_kernels.chains import signature_of, stages_of
from ffi_bridge import profiles
from glulam.host import device as gpus
from glulam.host import tickets
from glulam.host.tickets import MAX_GRAPH_SETS, NUM_COUNTERS
from glulam.host.workspace import MAX_STREAMS

pytest_plugins = ["support.fixtures"]

CPU = torch.device("cpu")


class Capture:
    """Number of the current graph capture, in a mutable attribute."""

    number = 1


@pytest.mark.parametrize("arch", ["sm_90a", "sm_90"])
def test_every_kernel_that_draws_tickets_has_a_counter(arch: str) -> None:
    """A kernel's counter is the one at its place in the call."""
    places = [
        place
        for spec in profiles.shipped_specs(arch)
        for place, stage in enumerate(stages_of(spec))
        if "tickets" in signature_of(stage).names
    ]
    assert 0 < max(places) < NUM_COUNTERS


@pytest.fixture(autouse=True)
def capture(monkeypatch: pytest.MonkeyPatch, fake_gpu: FakeGpu) -> Iterator[Capture]:
    capture = Capture()
    monkeypatch.setattr(gpus, "capture_id", lambda: capture.number)
    tickets.forget()
    yield capture
    tickets.forget()


def counters(index: int = 0) -> int:
    address = tickets.counters(CPU, index)
    assert not address or memory(address, NUM_COUNTERS, dtype=torch.int32).tolist() == [0] * NUM_COUNTERS
    return address


def of_another_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(counters()))
    thread.start()
    thread.join()
    return found[0]


def differ_by_a_set(addresses: list[int]) -> bool:
    ordered = sorted(addresses)
    return all(above - below >= tickets.SET_BYTES for below, above in zip(ordered, ordered[1:], strict=False))


def test_a_stream_of_a_device_and_a_thread_have_their_own(fake_gpu: FakeGpu) -> None:
    mine = [counters(0), counters(1), of_another_thread()]
    assert counters(0) == mine[0] and counters(1) == mine[1]
    fake_gpu.stream = 7
    assert all(mine) and differ_by_a_set([*mine, counters(0)])


def test_streams_are_bounded(fake_gpu: FakeGpu) -> None:
    for stream in range(3 * MAX_STREAMS):
        fake_gpu.stream = stream
        counters(0)
        counters(1)
    assert tickets.stats().streams == 2 * MAX_STREAMS


def test_streams_of_a_capture_have_their_own(fake_gpu: FakeGpu, capture: Capture) -> None:
    eager = counters()
    fake_gpu.stream, fake_gpu.capturing = 5, True
    first = [counters(), of_another_thread()]
    fake_gpu.stream = 6
    first.append(counters())
    assert counters() == first[2]
    capture.number = 2
    second = counters()
    fake_gpu.capturing = False
    assert all(first) and differ_by_a_set([eager, *first, second, counters()])


def test_those_of_captures_are_never_given_twice(fake_gpu: FakeGpu, capture: Capture) -> None:
    """Graphs may be replayed at any time, so captures that have long ended keep theirs; in the end there are none."""
    counters()
    fake_gpu.stream, fake_gpu.capturing = 5, True
    given = []
    for capture.number in range(MAX_GRAPH_SETS + 3):
        given.append(counters())
    assert given[-3:] == [0, 0, 0] and all(given[:-3]) and differ_by_a_set(given[:-3])
    assert tickets.stats().captured <= MAX_STREAMS


def test_a_first_call_under_capture_has_none_unless_prepared(fake_gpu: FakeGpu, capture: Capture) -> None:
    fake_gpu.stream, fake_gpu.capturing = 5, True
    assert counters() == 0 and not tickets.stats().of_graphs
    fake_gpu.capturing = False
    tickets.prepare(CPU, 0)
    fake_gpu.capturing, capture.number = True, 2
    assert counters() != 0


def test_what_is_forgotten_stays_the_graphs_own(fake_gpu: FakeGpu, capture: Capture) -> None:
    tickets.prepare(CPU, 0)
    fake_gpu.stream, fake_gpu.capturing = 5, True
    before, memory = counters(), tickets.stats().of_graphs[0]
    tickets.forget()
    assert tickets.stats() == (0, 0, {}) and counters() == 0
    fake_gpu.capturing = False
    tickets.prepare(CPU, 0)
    start = tickets.stats().of_graphs[0].data_ptr()
    assert memory.data_ptr() == before and not start <= before < start + memory.nbytes
