"""Kernels whose clusters draw tiles from ticket counters: the same bits in any order, and counters that are zero
afterwards.
"""

from __future__ import annotations

import threading

import pytest
import torch
from support.checks import check_mlp, check_mm
from support.criterion import same_bits
from support.inputs import Case, make_case, poisoned
from support.launches import groups_of, launch
from support.routing import spread, zipf
from torch import Tensor

import glulam
from cute_kernels.sm90.configs import LARGE
from cute_kernels.specs import GroupedMmSpec
from cute_kernels.stages import draws_tickets
from glulam.host import device as gpus
from glulam.host import tickets

pytestmark = pytest.mark.gpu

HIDDEN, INTER = 808, 808  # deep enough for tickets
OFFS, SPLITS_INT32 = 0, 1
SIZES = {
    "light groups between heavy ones": [10, 300, 64, 700, 1, 65, 0, 129, 33, 500] * 4,
    "a few light groups": [1500, 3, 1400, 1600],
    "light groups alone": [64, 1, 0, 30] * 20,
    "heavy groups alone": [65, 700, 129] * 5,
    "fewer tiles than clusters": [100, 0, 7],
    "no rows": [0, 0, 0],
    "many windows, skewed": zipf(9000, 300),
    "many windows, even": spread(300 * 66, 300),
}


def case(sizes: list[int]) -> Case:
    return make_case(sizes, HIDDEN, INTER, tail=13, device="cuda")


def product(c: Case, w: Tensor, transpose_w: bool, counters: Tensor | None, groups: Tensor, form: int = OFFS) -> Tensor:
    """Launch grouped_mm on the large tile, regardless of the dispatcher's choice."""
    y = poisoned(c.x.shape[0], c.w1.shape[1], c.x)
    spec = GroupedMmSpec("bfloat16", transpose_w, LARGE)
    launch(spec, x=c.x, w=w, y=y, **groups_of(groups, form), tickets=counters)
    return y


@pytest.fixture
def counters() -> Tensor:
    assert draws_tickets(GroupedMmSpec(tile=LARGE))
    return tickets.new_counters("cuda")


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_any_order_gives_the_same_bits(name: str, transpose_w: bool, counters: Tensor) -> None:
    c = case(SIZES[name])
    w = c.w1.mT.contiguous() if transpose_w else c.w1
    for groups, form in ((c.offs, OFFS), (c.splits(), SPLITS_INT32)):
        drawn, dealt = (product(c, w, transpose_w, each, groups, form) for each in (counters, None))
        assert not bool(counters.any()) and same_bits(drawn, dealt)
        check_mm(c, w, drawn, transpose_w=transpose_w)


def test_sizes_that_exceed_the_buffer_leave_counters_at_zero(counters: Tensor) -> None:
    c = case(SIZES["light groups between heavy ones"])
    rows = c.x.shape[0]
    for sizes in ([rows] * 40, [-5, rows, 2**31 - 1, 60], [2**30, 0, 64]):
        product(c, c.w1, False, counters, torch.tensor(sizes, dtype=torch.int32, device="cuda"), SPLITS_INT32)
        assert not bool(counters.any())
    check_mm(c, c.w1, product(c, c.w1, False, counters, c.offs))


def layers() -> list[tuple[Case, Tensor]]:
    """Return two layers' cases and their results."""
    cases = [case(SIZES[name]) for name in ("light groups between heavy ones", "heavy groups alone")]
    wanted = [glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs) for c in cases]
    for c, y in zip(cases, wanted, strict=True):
        check_mlp(c, y)
    torch.cuda.synchronize()
    return [(c, y[: c.rows].clone()) for c, y in zip(cases, wanted, strict=True)]


def is_right(c: Case, y: Tensor, wanted: Tensor) -> bool:
    return bool(same_bits(y[: c.rows].contiguous(), wanted))


def call(c: Case) -> Tensor:
    return glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs)


def test_streams_do_not_share_counters() -> None:
    both = layers()
    streams = [torch.cuda.Stream() for _ in both]
    got: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for (c, _), stream, results in zip(both, streams, got, strict=True):
            with torch.cuda.stream(stream):
                results.append(call(c))
    torch.cuda.synchronize()
    assert all(is_right(c, y, wanted) for (c, wanted), results in zip(both, got, strict=True) for y in results)


def test_threads_do_not_share_counters() -> None:
    both = layers()
    right: list[bool] = []

    def run(c: Case, wanted: Tensor) -> None:
        with torch.no_grad():
            right.extend(is_right(c, call(c), wanted) for _ in range(20))

    threads = [threading.Thread(target=run, args=layer) for layer in both]
    for action in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            action(thread)
    assert len(right) == 40 and all(right)


def captured(c: Case, offs: Tensor, y: Tensor) -> torch.cuda.CUDAGraph:
    """Capture a graph of two calls on each of two streams, which may run concurrently."""
    graph, here, other = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=here):
        other.wait_stream(here)
        for stream, half in ((here, y[0]), (other, y[1])):
            with torch.cuda.stream(stream):
                for _ in range(2):
                    glulam.grouped_mlp(c.x, c.w1, c.w2, offs=offs, out=half)
        here.wait_stream(other)
    return graph


def test_graphs_do_not_share_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two layers, replayed on two streams beside eager calls on a third, over and over."""
    if gpus.gpu(torch.cuda.current_device()).arch != "sm_90a":
        pytest.skip("portable kernels deal their tiles")
    both = layers()
    taken: list[int] = []
    real = tickets.counters
    monkeypatch.setattr(tickets, "counters", lambda *where: taken.append(real(*where)) or taken[-1])
    outputs = [torch.zeros(2, *c.x.shape, dtype=c.x.dtype, device="cuda") for c, _ in both]
    offs = [c.offs for c, _ in both]
    graphs = [captured(c, ends, y) for (c, _), ends, y in zip(both, offs, outputs, strict=True)]
    assert len(taken) == 8 and len(set(taken)) == 4 and all(taken)
    streams = [torch.cuda.Stream() for _ in both]
    torch.cuda.synchronize()
    got = []
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        got.append(call(both[0][0]))
    torch.cuda.synchronize()
    assert all(is_right(both[0][0], y, both[0][1]) for y in got)
    for (c, wanted), y in zip(both, outputs, strict=True):
        assert is_right(c, y[0], wanted) and is_right(c, y[1], wanted)
    counters = torch.stack([memory.any() for memory in tickets.stats().of_graphs.values()])
    assert not bool(counters.any())
