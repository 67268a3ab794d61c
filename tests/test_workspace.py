"""The workspace between the two GEMMs: its owner, lifetime and size."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from support.fake_gpu import FakeGpu

from glulam.host import workspace
from glulam.host.workspace import ALIGNMENT_BYTES, GRANULE, MAX_STREAMS, MAX_VIEWS, MatrixLayout, MatrixLayouts

pytest_plugins = ["support.fixtures"]


@pytest.fixture(autouse=True)
def fresh(fake_gpu: FakeGpu) -> Iterator[None]:
    workspace.forget()
    yield
    workspace.forget()


def layout(rows: int = 3, columns: int = 8, index: int = 0, dtype: torch.dtype = torch.bfloat16) -> MatrixLayout:
    return MatrixLayout((rows, columns), dtype, torch.device("cpu"), index)


def test_the_same_memory_again() -> None:
    one, other = layout(), layout(2)
    first = workspace.take(one)
    assert first.shape == (3, 8) and first.dtype == torch.bfloat16 and first.is_contiguous()
    assert workspace.take(one) is first
    assert workspace.take(other).data_ptr() == first.data_ptr()
    assert workspace.take(layout(dtype=torch.float16)).dtype == torch.float16


def test_each_stream_has_its_own(fake_gpu: FakeGpu) -> None:
    shared = layout()
    addresses = set()
    for stream in range(4):
        fake_gpu.stream = stream
        addresses.add(workspace.take(shared).data_ptr())
    addresses.add(workspace.take(layout(index=1)).data_ptr())
    assert len(addresses) == 5


def test_each_thread_has_its_own() -> None:
    """PlanMaker releases the GIL: another thread's call may come between the two launches of one."""
    shared = layout()
    mine = workspace.take(shared)
    theirs: list[int] = []
    thread = threading.Thread(target=lambda: theirs.append(workspace.take(shared).data_ptr()))
    thread.start()
    thread.join()
    assert theirs and theirs[0] != mine.data_ptr()


def test_grows_and_then_serves_smaller_ones() -> None:
    small, large = layout(8, 64), layout(GRANULE // 64, 64)
    before = workspace.take(small)
    grown = workspace.take(large)
    assert grown.shape == (GRANULE // 64, 64)
    after = workspace.take(small)
    assert after.data_ptr() == grown.data_ptr() and after is not before
    (buffer,) = workspace.stats().buffers.values()
    assert buffer.nbytes == 2 * GRANULE, "bytes of the large one"


def test_streams_are_bounded(fake_gpu: FakeGpu) -> None:
    for stream in range(3 * MAX_STREAMS):
        fake_gpu.stream = stream
        workspace.take(layout())
        workspace.take(layout(index=1))
    kept = workspace.stats().buffers
    assert kept.keys() == {(index, stream) for index in (0, 1) for stream in range(2 * MAX_STREAMS, 3 * MAX_STREAMS)}


def test_views_are_bounded() -> None:
    for rows in range(3 * MAX_VIEWS):
        workspace.take(layout(rows))
        assert workspace.stats().num_views <= MAX_VIEWS


def test_capture_takes_memory_of_its_own(fake_gpu: FakeGpu) -> None:
    kept = workspace.take(layout())
    fake_gpu.stream, fake_gpu.capturing = 5, True
    shared = layout()
    captured = workspace.take(shared)
    assert captured.data_ptr() != kept.data_ptr()
    assert workspace.take(shared) is not captured
    assert (0, 5) not in workspace.stats().buffers


def test_no_rows() -> None:
    assert workspace.take(layout(0)).shape == (0, 8)


def test_several_at_once_lie_apart(fake_gpu: FakeGpu) -> None:
    several = MatrixLayouts(layout(), 5, layout(2, dtype=torch.float32))
    for capturing in (False, True):
        fake_gpu.stream, fake_gpu.capturing = 5 * capturing, capturing
        first, address, last = workspace.take(several)
        begins = [first.data_ptr(), address, last.data_ptr()]
        assert begins == [begins[0] + part * ALIGNMENT_BYTES for part in range(3)]
        assert (first.shape, last.shape, last.dtype) == ((3, 8), (2, 8), torch.float32)
    fake_gpu.stream, fake_gpu.capturing = 0, False
    assert workspace.take(several) is workspace.take(several)


def test_what_is_forgotten_is_given_back() -> None:
    workspace.take(layout())
    assert workspace.stats().num_views == 1 and workspace.stats().buffers[0, 0].nbytes == GRANULE
    workspace.forget()
    assert workspace.stats() == ({}, 0)
