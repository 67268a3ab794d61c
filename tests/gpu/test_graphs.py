"""CUDA graphs: captured with one routing, replayed with others, compared with eager calls bit for bit."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.criterion import same_bits
from support.inputs import Case, make_case
from support.routing import catalogue, ends, one_takes_all

import glulam
from glulam.formats import prepared
from glulam.host import device as gpus
from glulam.host import experts, tickets, workspace

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def no_graph_is_garbage() -> None:
    """Collect garbage before each test: an old graph that is destroyed during a capture would crash the process."""
    gc.collect()


EXPERTS, HIDDEN, INTER = 8, 136, 96
ROWS = {"few rows": 300, "many rows": 1200}


def routings(rows: int) -> dict[str, list[int]]:
    """Return ten routings by name, all different from the captured one (equal groups over all rows)."""
    others = catalogue(rows - 11, EXPERTS)
    return {**others, "first_takes_all": one_takes_all(rows, EXPERTS, 0)}


def worst_case(rows: int) -> Case:
    return make_case([rows // EXPERTS] * EXPERTS, HIDDEN, INTER, tail=rows % EXPERTS, device="cuda")


def finite(c: Case) -> None:
    """Replace NaN in rows after the last group, because a replay may use any row."""
    c.x.nan_to_num_(nan=0.5)
    c.row_scale.nan_to_num_(nan=0.5)


Run = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]
"""A call: group sizes, and its outputs by name, to be written."""


def runs(c: Case) -> dict[str, tuple[dict[str, int], Run]]:
    """Return each operator's output widths and its call, by name."""
    lists = list(c.w1), list(c.w2), list(c.b1)

    def mlp(groups: dict[str, Any], out: dict[str, torch.Tensor]) -> None:
        glulam.grouped_mlp(c.x, c.w1, c.w2, b1=c.b1, b2=c.b2, row_scale=c.row_scale, out=out["y"], **groups)

    def mlp_of_lists(groups: dict[str, Any], out: dict[str, torch.Tensor]) -> None:
        glulam.grouped_mlp(c.x, lists[0], lists[1], b1=lists[2], out=out["y"], **groups)

    def mlp_alone(groups: dict[str, Any], out: dict[str, torch.Tensor]) -> None:
        y = glulam.grouped_mlp(c.x, c.w1, c.w2, **groups)
        out["y"].copy_(y)

    def glu(groups: dict[str, Any], out: dict[str, torch.Tensor]) -> None:
        _, preact = glulam.grouped_glu(c.x, c.w1, return_preact=True, out=out["act"], **groups)
        out["preact"].copy_(preact)

    def mm(groups: dict[str, Any], out: dict[str, torch.Tensor]) -> None:
        glulam.grouped_mm(c.x, c.w2, transpose_w=True, out=out["y"], **groups)

    return {
        "mlp": ({"y": HIDDEN}, mlp),
        "mlp of lists": ({"y": HIDDEN}, mlp_of_lists),
        "mlp that allocates": ({"y": HIDDEN}, mlp_alone),
        "glu with preact": ({"act": INTER, "preact": 2 * INTER}, glu),
        "mm transposed": ({"y": INTER}, mm),
    }


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def outputs(widths: dict[str, int], rows: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((rows, width), 7.0, dtype=torch.bfloat16, device="cuda") for name, width in widths.items()}


@pytest.mark.parametrize("warm", [False, True], ids=["first call captured", "called before"])
@pytest.mark.parametrize("form", ["offs", "splits"])
@pytest.mark.parametrize("size", ROWS)
@pytest.mark.parametrize("name", ["mlp", "mlp of lists", "mlp that allocates", "glu with preact", "mm transposed"])
def test_replay_equals_eager(name: str, size: str, form: str, warm: bool) -> None:
    rows = ROWS[size]
    c = worst_case(rows)
    finite(c)
    widths, run = runs(c)[name]
    groups = c.offs if form == "offs" else c.splits(torch.int64)
    replayed = outputs(widths, rows)
    if warm:
        run({form: groups}, replayed)
    graph = captured(lambda: run({form: groups}, replayed))
    for routing, sizes in routings(rows).items():
        values = ends(sizes) if form == "offs" else sizes
        groups.copy_(torch.tensor(values, dtype=groups.dtype))
        for out in replayed.values():
            out.fill_(7.0)
        graph.replay()
        eager = outputs(widths, rows)
        run({form: groups}, eager)
        used = sum(sizes)
        for output, result in replayed.items():
            assert same_bits(result[:used], eager[output][:used]), f"{routing}: {output}"
            assert used == 0 or bool((result[:used] != 7.0).any(dim=1).all()), f"{routing}: rows were not written"
            if name not in ("mlp that allocates", "glu with preact"):
                assert bool((result[used:] == 7.0).all()), f"{routing}: the tail was written"


@pytest.mark.parametrize("weights", ["packed", "list"])
def test_first_call_of_a_process_under_capture(weights: str) -> None:
    script = Path(__file__).with_name("fresh_capture.py")
    paths = [str(script.parents[1]), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    told = subprocess.run([sys.executable, str(script), weights], env=env, capture_output=True, text=True)
    assert told.returncode == 0 and told.stdout.strip() == "ok", told.stderr


def test_a_graph_owns_its_memory() -> None:
    """Eager calls that reuse, grow and drop workspaces, and lists that die, leave a graph's results alone."""
    c = worst_case(600)
    finite(c)
    offs, out = c.offs, torch.empty(600, HIDDEN, dtype=torch.bfloat16, device="cuda")

    def capture() -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        w1, w2 = list(c.w1), list(c.w2)
        glulam.grouped_mlp(c.x, w1, w2, offs=offs, out=out)
        want = out.clone()
        return captured(lambda: glulam.grouped_mlp(c.x, w1, w2, offs=offs, out=out)), want

    graph, want = capture()
    experts._tables.clear()
    gc.collect()
    larger = make_case([900] * EXPERTS, HIDDEN, 4 * INTER, device="cuda")
    glulam.grouped_mlp(larger.x, larger.w1, larger.w2, offs=larger.offs)
    workspace.forget()
    trash = [torch.full((1 << size,), -1, dtype=torch.int64, device="cuda") for size in range(3, 20) for _ in range(4)]
    out.fill_(7.0)
    graph.replay()
    torch.cuda.synchronize()
    del trash
    assert same_bits(out, want)


@pytest.fixture
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear all caches, as in a process before its first call."""
    workspace.forget()
    tickets.forget()
    monkeypatch.setattr(experts, "_tables", {})
    prepared.PREPARED.clear()


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "list"])
def test_graphs_of_torch_compile(
    packed: bool, recipe: str, nothing_kept: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It warms up without capture, in a pool of its own, and refuses a function that leaves memory there."""
    c = make_case([150] * EXPERTS, 256, 128, device="cuda")
    layer = glulam.nn.GroupedMLP(EXPERTS, 256, 128, packed=packed, recipe=recipe, device="cuda", dtype=c.x.dtype)
    layer.requires_grad_(False)
    captured: list[bool] = []
    real = gpus.is_capturing
    monkeypatch.setattr(gpus, "is_capturing", lambda: captured.append(real()) or captured[-1])
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    got = [compiled(c.x, offs=c.offs).clone() for _ in range(4)]
    assert any(captured), "nothing was captured"
    want = layer(c.x, offs=c.offs)
    assert bool(want.any()) and all(same_bits(y, want) for y in got)


def test_what_is_kept_comes_from_no_pool_of_the_caller(nothing_kept: None) -> None:
    c = make_case([150] * EXPERTS, 256, 128, device="cuda")
    w1, w2, offs, out = list(c.w1), list(c.w2), c.offs, torch.empty_like(c.x)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        mine = torch.empty(1000, device="cuda")
        for recipe in ("bf16", "mxfp8"):
            glulam.grouped_mlp(c.x, w1, w2, offs=offs, recipe=recipe, out=out)
    blocks = [block for segment in pool.snapshot(False) for block in segment["blocks"]]
    assert sum(block["requested_size"] for block in blocks if block["state"] == "active_allocated") == mine.nbytes


def test_host_splits_are_refused_under_capture() -> None:
    c = worst_case(64)
    glulam.grouped_mm(c.x, c.w1, splits=c.sizes)
    for splits in (c.sizes, torch.tensor(c.sizes)):
        with pytest.raises(glulam.CaptureError, match="pass a CUDA tensor"):
            captured(lambda splits=splits: glulam.grouped_mm(c.x, c.w1, splits=splits))
    torch.cuda.synchronize()
    assert glulam.grouped_mm(c.x, c.w1, splits=c.sizes).shape == (64, 2 * INTER)


def test_a_list_first_seen_under_capture_with_a_default_device() -> None:
    c = worst_case(300)
    finite(c)
    wanted = glulam.grouped_mm(c.x, c.w2.mT.contiguous(), offs=c.offs)
    listed, offs, graph = [one.clone() for one in c.w2.mT.contiguous()], c.offs, torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.device("cuda"), torch.cuda.graph(graph):
        y = glulam.grouped_mm(c.x, listed, offs=offs)
    graph.replay()
    assert same_bits(y[: c.rows], wanted[: c.rows])
