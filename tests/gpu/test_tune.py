"""Compiling and tuning on a GPU: right results, the time and files it takes, and a serving process that does neither.

Tests that compile are skipped if the compiler is not installed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checks import check_glu, check_mlp
from support.inputs import make_case

import glulam
from cute_kernels.specs import (
    GLU_LAYOUTS,
    GroupedDgluSpec,
    GroupedGluSpec,
    GroupedMlpSpec,
    GroupedMmSpec,
    GroupedWgradSpec,
)
from cute_kernels.tiles import TileConfig
from ffi_bridge import ToolchainError, build, cache, jit, loader
from glulam.choose import kernels, known, loadable
from glulam.choose import table as tables
from glulam.choose.problem import Problem
from glulam.choose.shipped import spec_on
from glulam.host import device
from glulam.tuner.bench import GpuBench
from glulam.tuner.candidates import candidates
from glulam.tuner.pool import CompilePool, default_jobs
from glulam.tuner.timing import interleave

pytestmark = pytest.mark.gpu

EXPERTS, IN, OUT = 16, 1024, 2048
MM = Problem("grouped_mm", "bfloat16", 0, EXPERTS, IN, 0, OUT)
OLD = TileConfig(64, 128, 64, 1, 2)


def can_compile() -> bool:
    try:
        build.check_prerequisites()
    except ToolchainError:
        return False
    return True


def served_arch() -> str:
    return device.gpu(torch.cuda.current_device()).arch


@pytest.fixture
def hopper() -> None:
    """Skip the test unless Hopper's own kernels are tested; for tests that name their tiles."""
    if served_arch() != "sm_90a":
        pytest.skip("of Hopper's own tiles")


needs_compiler = pytest.mark.skipif(not can_compile(), reason="needs nvidia-cutlass-dsl's compiler and a C compiler")


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Path for a tuned table; nothing is compiled, preferred or tuned."""
    monkeypatch.setenv(cache.ENV_CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv(known.ENV_TUNED, str(tmp_path / "tuned"))
    monkeypatch.setattr(jit, "_functions", {})
    monkeypatch.setattr(kernels, "_compiled", {})
    monkeypatch.setattr(loadable, "_from_cache", {})
    kernels.forget_choices()
    yield tmp_path
    kernels.forget_choices()


def serve(*arguments: Any) -> dict[str, Any]:
    script = Path(__file__).with_name("fresh_serving.py")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parents[1]), *sys.path])}
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def results(c: Any) -> list[torch.Tensor]:
    """Return the results of every operator that has a choice of tiles, on one case."""
    act, preact = glulam.grouped_glu(c.x, c.w1, offs=c.offs, bias=c.b1, return_preact=True)
    made = [
        glulam.grouped_mm(c.x, c.w1, offs=c.offs),
        glulam.grouped_mm(c.x, c.w2, offs=c.offs, transpose_w=True),
        glulam.grouped_glu(c.x, c.w1, offs=c.offs),
        act,
        preact,
        glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, row_scale=c.row_scale),
        *glulam.grouped_dglu(c.x, c.w2, preact, offs=c.offs, row_scale=c.row_scale)[:2],
    ]
    return [*(result[: c.rows] for result in made), glulam.grouped_wgrad(c.x, c.x, offs=c.offs)]


@needs_compiler
@pytest.mark.usefixtures("hopper")
def test_compiled_kernels_compute_what_shipped_ones_do() -> None:
    c = make_case([300, 0, 17, 64, 129], 256, 192, tail=5, device="cuda")
    want = results(c)
    forms: list[dict[str, Any]] = [
        {"op": "grouped_mm"},
        {"op": "grouped_mm", "transpose_w": True},
        {"op": "grouped_glu"},
        {"op": "grouped_glu", "save_preact": True},
        {"op": "grouped_mlp"},
    ]
    with CompilePool(default_jobs()) as pool:
        specs = [
            spec_on(problem, "sm_90a", OLD)
            for op, problem in (
                ("grouped_mm", MM),
                ("grouped_mm", dataclasses.replace(MM, transpose_w=True)),
                ("grouped_glu", Problem("grouped_glu", "bfloat16", 1, 1, 8, 8, 0, "swiglu")),
                ("grouped_glu", Problem("grouped_glu", "bfloat16", 1, 1, 8, 8, 0, "swiglu", save_preact=True)),
                ("grouped_mlp", Problem("grouped_mlp", "bfloat16", 1, 1, 8, 8, 8, "swiglu")),
            )
        ]
        specs += [GroupedDgluSpec(tile=OLD), GroupedWgradSpec(tile=OLD)]
        for spec in specs:
            pool.start(spec)
        for spec in specs:
            assert callable(pool.wait(spec)), spec.name
    for fields in forms:
        glulam.compile(**fields, tile=(64, 128, 64), cluster=(1, 2))
    for spec in specs[-2:]:
        glulam.compile(spec)
    assert glulam.explain("grouped_mm", c.x, c.w1, offs=c.offs).source == "jit"
    for got, wanted in zip(results(c), want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2 * float(wanted.float().abs().max()))


@needs_compiler
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("tile", [TileConfig(128, 192, 64, 2, 1, adaptive=True), TileConfig(64, 64, 64)])
def test_gated_tiles_with_chunks_of_32_columns(tile: TileConfig) -> None:
    """What no shipped kernel has, in every layout, plain and with all that an epilogue may do."""
    c = make_case([300, 0, 17, 64, 129], 256, 224, tail=5, device="cuda")
    specs: list[GroupedGluSpec | GroupedMlpSpec] = []
    for layout in GLU_LAYOUTS:
        fc1 = GroupedGluSpec("bfloat16", "swiglu", layout, False, tile)
        specs.append(GroupedMlpSpec(fc1, GroupedMmSpec(tile=tile)))
        specs.append(dataclasses.replace(fc1, save_preact=True))
    with CompilePool(default_jobs()) as pool:
        for spec in specs:
            pool.start(spec)
        for spec in specs:
            assert callable(pool.wait(spec)), spec.name
            glulam.compile(spec)
    for layout in GLU_LAYOUTS:
        for addends in ({}, {"bias": c.b1, "row_scale": c.row_scale}):
            made = glulam.grouped_glu(c.x, c.w1, offs=c.offs, return_preact=True, glu_layout=layout, **addends)
            check_glu(c, *made, ("swiglu", layout), **addends)
        more = {"b1": c.b1, "b2": c.b2, "row_scale": c.row_scale}
        y = glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, glu_layout=layout, **more)
        check_mlp(c, y, ("swiglu", layout), **more)
    assert glulam.explain("grouped_mlp", c.x, c.w1, c.w2, offs=c.offs).source == "jit"


@needs_compiler
@pytest.mark.usefixtures("hopper")
def test_what_a_new_kernel_takes(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's memory is a helper's, and from then on no call and no look into the cache starts a process."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    x, w = torch.randn(256, IN, device="cuda").bfloat16(), torch.randn(EXPERTS, OUT, IN, device="cuda").bfloat16()
    offs = torch.arange(1, EXPERTS + 1, device="cuda", dtype=torch.int32) * (256 // EXPERTS)
    want = glulam.grouped_mm(x, w, offs=offs)
    before = resident()
    spec = glulam.compile(op="grouped_mm", tile=(128, 192, 64), cluster=(1, 2))
    grown = resident() - before
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", lambda *_, **__: pytest.fail("a process was started"))
        got = glulam.grouped_mm(x, w, offs=offs)
        patch.setattr(loader, "_loaded", {})
        assert cache.find(spec) is not None
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.float().abs().max()))
    told = serve(OUT, IN)
    assert told["name"] == spec.name and told["source"] == "jit"
    assert grown < 32 << 20


@needs_compiler
def test_a_layer_is_tuned_and_served(places: Path) -> None:
    points = (1, 16, 128)
    report = glulam.tune(
        "grouped_mm",
        experts=EXPERTS,
        in_features=IN,
        out_features=OUT,
        rows_per_expert=points,
        budget_s=3,
        candidates=4,
    )
    (layer,) = report.layers
    assert [point.rows_per_expert for point in layer.points] == list(points)
    assert report.path.is_file() and report.path.parent == places / "tuned"
    x, w = (
        torch.randn(16 * EXPERTS, IN, device="cuda").bfloat16(),
        torch.randn(EXPERTS, OUT, IN, device="cuda").bfloat16(),
    )
    offs = torch.arange(1, EXPERTS + 1, device="cuda", dtype=torch.int32) * 16
    told = glulam.explain("grouped_mm", x, w, offs=offs)
    assert told.source == "tuned" and told.spec is not None
    assert told.spec.name == layer.points[1].chosen and str(report.path) in told.why
    want = torch.bmm(x.view(EXPERTS, 16, IN).float(), w.mT.float()).flatten(0, 1)
    got = glulam.grouped_mm(x, w, offs=offs).float()
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))
    assert serve(OUT, IN)["heavy"] == []


@needs_compiler
def test_what_was_tuned_is_not_slower_than_what_ships() -> None:
    """Measured again, after tuning, in turns."""
    report = glulam.tune(
        "grouped_mm", experts=EXPERTS, in_features=IN, out_features=OUT, rows_per_expert=(4, 256), budget_s=4
    )
    (layer,), bench = report.layers, GpuBench(torch.cuda.current_device())
    bench.load(dataclasses.replace(MM, rows=256 * EXPERTS))
    for point in layer.points:
        functions = {
            layer.kernels[name]: kernels.find(layer.kernels[name]).function for name in (point.chosen, point.shipped)
        }
        for routing in ("uniform", "dirichlet:0.5"):
            rows = int(point.rows_per_expert) * EXPERTS
            samplers = {s.name: f for s, f in bench.samplers(functions, rows, routing, 20.0).items()}
            times = interleave(samplers, 1.0, 15, 100)
            assert times[point.chosen].median_us < 1.03 * times[point.shipped].median_us


def test_a_table_serves_without_a_compiler(places: Path) -> None:
    """One whose kernels ship: it chooses the tile that the dispatcher would not."""
    problem = dataclasses.replace(MM, rows=16 * EXPERTS)
    shipped, other = candidates(problem, served_arch(), 0)
    us = {shipped.name: {"uniform": 2.0}, other.name: {"uniform": 1.0}}
    question = tables.layer_of(problem)
    layer = tables.Layer(
        question, {s.name: s for s in (shipped, other)}, (tables.Point(16, other.name, shipped.name, 2.0, us),)
    )
    stamp = tables.stamp_of(device.gpu(torch.cuda.current_device()).name)
    tables.write(places / "tuned" / "hand.json", [tables.section(stamp, layer)])
    x, w = torch.randn(256, IN, device="cuda").bfloat16(), torch.randn(EXPERTS, OUT, IN, device="cuda").bfloat16()
    offs = torch.arange(1, EXPERTS + 1, device="cuda", dtype=torch.int32) * 16
    told = glulam.explain("grouped_mm", x, w, offs=offs)
    assert (told.spec, told.source) == (other, "tuned")
    glulam.grouped_mm(x, w, offs=offs)
    served = serve(OUT, IN)
    assert (served["name"], served["source"], served["heavy"]) == (other.name, "tuned", [])


def test_a_serving_process_compiles_nothing(places: Path) -> None:
    """New numbers of rows and experts and new routings: no process, no compiler, no file, not even a folder."""
    shipped = candidates(dataclasses.replace(MM, rows=256), served_arch(), 0)[-1]
    known.prefer(shipped)
    before = {path: path.stat().st_mtime_ns for path in places.rglob("*")}
    told = serve(OUT, IN)
    assert (told["name"], told["heavy"], told["calls"]) == (shipped.name, [], 200)
    assert {path: path.stat().st_mtime_ns for path in places.rglob("*")} == before


@needs_compiler
def test_every_operator_can_be_tuned() -> None:
    shape: dict[str, Any] = {
        "experts": 8,
        "in_features": 256,
        "rows_per_expert": (8, 64),
        "budget_s": 0.5,
        "candidates": 2,
    }
    for op, more in (
        ("grouped_mm", {"out_features": 192, "transpose_w": True}),
        ("grouped_glu", {"intermediate": 192}),
        ("grouped_mlp", {"intermediate": 192, "activation": "silu"}),
        ("grouped_dglu", {"intermediate": 192}),
        ("grouped_wgrad", {"out_features": 192, "out_dtype": torch.float32}),
        ("grouped_mlp", {"intermediate": 192, "training": True}),
    ):
        report = glulam.tune(op, **shape, **more)
        assert all(len(layer.points) == 2 for layer in report.layers), op
        assert not [note for note in report.notes if "computes something else" in note], report.notes
        assert len(report.layers) == (3 if "training" in more else 1)
