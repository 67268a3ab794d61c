"""The tuner on a bench with made-up times: the measurements, decisions and stored results."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_bench import GPU, FakeBench, FakeMakes
from support.fake_gpu import SM_COUNT, exported

import glulam
from cute_kernels.chains import signature_of
from cute_kernels.sm90.configs import LARGE, SMALL, TILES
from cute_kernels.specs import GroupedMlpSpec, Spec
from cute_kernels.tiles import TileConfig
from ffi_bridge import CompileError
from glulam.choose import choose, kernels, known, loadable
from glulam.choose import table as tables
from glulam.choose.problem import Problem
from glulam.choose.shipped import families_of, family_of, shipped_choice, shipped_specs
from glulam.choose.table import Point
from glulam.host import device
from glulam.host.tickets import NUM_COUNTERS
from glulam.tuner import candidates as space
from glulam.tuner import entry, report, routing
from glulam.tuner.session import Options, decide
from glulam.tuner.tensors import launches_of, num_bytes, of_rows
from glulam.tuner.timing import Summary
from perf.results import RESULTS, read

pytest_plugins = ["support.fixtures"]

ARCH = "sm_90a"
MM = Problem("grouped_mm", "bfloat16", 0, 16, 1024, 0, 2048)
MLP = Problem("grouped_mlp", "bfloat16", 0, 16, 1024, 512, 1024, "silu")
DECODED_WEIGHTS = ("mxfp8_weight_only", "mxfp4_weight_only")
PROBLEMS = {
    "mm": MM,
    "mm transposed": dataclasses.replace(MM, transpose_w=True),
    "glu": Problem("grouped_glu", "bfloat16", 0, 16, 1024, 512, 0, "swiglu"),
    "glu transposed": Problem("grouped_glu", "bfloat16", 0, 16, 1024, 512, 0, "geglu", "interleaved", transpose_w=True),
    "glu preact": Problem("grouped_glu", "bfloat16", 0, 16, 1024, 512, 0, "geglu", save_preact=True),
    "mlp preact": Problem("grouped_mlp", "float16", 0, 16, 1024, 512, 1024, "swiglu", save_preact=True),
    "mlp transposed": Problem("grouped_mlp", "float16", 0, 16, 1024, 512, 1024, "swiglu", transpose_w=True),
    "mlp": MLP,
    **{f"mlp, {name}": dataclasses.replace(MLP, operands=name, fc2_operands=name) for name in DECODED_WEIGHTS},
    "dglu": Problem("grouped_dglu", "bfloat16", 0, 16, 1024, 512, 0, "swiglu"),
    "dglu transposed": Problem("grouped_dglu", "bfloat16", 0, 16, 1024, 512, 0, "geglu", transpose_w=True),
    "dglu and dgrad": Problem("grouped_dglu", "bfloat16", 0, 16, 1024, 512, 1024, "swiglu"),
    "wgrad": Problem("grouped_wgrad", "bfloat16", 0, 16, 1024, 0, 2048, out_dtype="float32"),
    "both wgrads": Problem("grouped_wgrad", "bfloat16", 0, 16, 1024, 512, 1024, "swiglu", out_dtype="bfloat16"),
}
OPTIONS = Options((1, 16, 256), budget_s=0.5)


def interrupted_at(rows_per_expert: int, us: float = 100.0) -> Any:
    """Return a time of all steps, of which the seventh at this number of rows is interrupted by the user."""
    steps = itertools.count()

    def time(spec: Spec, rows: int, routing: str) -> float:
        if rows == rows_per_expert * MM.experts and next(steps) > 5:
            raise KeyboardInterrupt
        return us

    return time


def slow_but(spec_us: dict[TileConfig, float], other: float = 100.0) -> Any:
    return lambda spec, rows, routing: spec_us.get(spec.tile, other)


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Path of the only tuned table, with an empty cache; every kernel counts as loadable."""
    table = tmp_path / "table.json"
    monkeypatch.setenv("GLULAM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(known.ENV_TUNED, str(table))
    monkeypatch.setattr(loadable, "is_loadable", lambda spec: True)
    kernels.forget_choices()
    yield table
    kernels.forget_choices()


def test_the_estimate_counts_the_compile_processes(
    places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loadable, "is_loadable", lambda spec: False)
    seconds = []
    for jobs in (1, 8):
        bench = FakeBench(lambda *_: 100.0)
        entry.run([MM], bench, FakeMakes(jobs=jobs), OPTIONS, places.with_name(f"{jobs}.json"), True, clock=bench.clock)
        (found,) = re.findall(r"about (\d+) s", capsys.readouterr().err)
        seconds.append(int(found))
    assert seconds[0] > seconds[1]


def tune(bench: FakeBench, places: Path, problem: Problem = MM, makes: Any = None, options: Options = OPTIONS) -> Any:
    return entry.run([problem], bench, makes or FakeMakes(), options, places, clock=bench.clock)


def layer_of(section: dict[str, Any]) -> dict[str, Any]:
    return section["layers"][0]


def candidate(problem: Problem, rows: int) -> Spec:
    """Return a candidate spec that does not ship."""
    return space.candidates(dataclasses.replace(problem, rows=rows), ARCH)[-1]


def rows_of(problem: Problem, average: float) -> Problem:
    return dataclasses.replace(problem, rows=int(average * problem.experts))


class TestCandidates:
    @pytest.mark.parametrize("name", PROBLEMS)
    @pytest.mark.parametrize("average", [1, 64, 4096])
    def test_are_what_ships_and_then_the_models_best(self, name: str, average: int) -> None:
        problem = rows_of(PROBLEMS[name], average)
        found = space.candidates(problem, ARCH)
        more = space.DEFAULT_COUNT if problem.operands == "16bit" else 0  # decoders have the tiles that ship
        assert len(set(found)) == len(found) == len(shipped_specs(problem, ARCH)) + more
        assert found[0] == choose(problem, ARCH).spec
        assert {family_of(spec) for spec in found} <= set(families_of(problem, ARCH))
        ranks = list(space.ranked(problem, ARCH))
        others = [ranks.index(spec) for spec in found if spec not in shipped_specs(problem, ARCH)]
        assert others == sorted(others) and (not more or others[0] < 3)

    def test_two_gemms_may_have_two_tiles(self) -> None:
        specs = itertools.chain.from_iterable(
            space.candidates(rows_of(PROBLEMS["mlp"], average), ARCH) for average in (4, 64, 256)
        )
        assert any(isinstance(spec, GroupedMlpSpec) and spec.fc1.tile != spec.fc2.tile for spec in specs)

    def test_pruning_keeps_the_best_of_measured_tiles(self) -> None:
        """Of eight tiles measured on ten models, those among the candidates hold one that is nearly the best."""
        losses = []
        for record in read(RESULTS / "tiles-h200.csv")["records"]:
            gated = record["op"] == "fc1"
            problem = Problem(
                op="grouped_glu" if gated else "grouped_mm", dtype="bfloat16", experts=record["experts"],
                rows=record["rows_per_expert"] * record["experts"], in_features=record["k"],
                intermediate=record["n"] // 2 if gated else 0, out_features=0 if gated else record["n"],
                activation="swiglu" if gated else "none", transpose_w=record["op"] == "dgrad",
            )  # fmt: skip
            kept = {spec.tile.name for spec in space.candidates(problem, ARCH)}  # type: ignore[union-attr]
            us = record["us"]
            losses.append(min(us[name] for name in us if name in kept) / min(us.values()))
        assert sum(losses) / len(losses) < 1.01 and max(losses) < 1.2


class TestDecisions:
    def test_a_faster_kernel_is_chosen_and_the_gain_reported(self, places: Path) -> None:
        fast = candidate(MM, 16 * 16)
        report = tune(FakeBench(slow_but({fast.tile: 80.0})), places)  # type: ignore[union-attr]
        (layer,) = report.layers
        by_rows = {point.rows_per_expert: point for point in layer.points}
        assert sorted(by_rows) == [1, 16, 256]
        assert by_rows[16].chosen == fast.name and by_rows[16].gain == pytest.approx(1.25)
        assert by_rows[16].shipped == choose(rows_of(MM, 16), ARCH).spec.name
        assert 1 < report.gain <= 1.25 and "1.25" in repr(report) and fast.name in repr(report)

    def test_one_that_is_slower_under_one_routing_is_not(self, places: Path) -> None:
        fast = candidate(MM, 16 * 16)

        def us(spec: Spec, rows: int, routing: str) -> float:
            return 100.0 if spec != fast else 60.0 if routing == "uniform" else 103.0

        (layer,) = tune(FakeBench(us), places).layers
        assert all(point.chosen == point.shipped and point.gain == 1 for point in layer.points)

    @pytest.mark.parametrize("noise", [0.002, 0.02, 0.1])
    def test_noise_alone_changes_nothing(self, places: Path, noise: float) -> None:
        (layer,) = tune(FakeBench(lambda *_: 100.0, noise), places).layers
        assert all(point.chosen == point.shipped for point in layer.points)

    def test_the_rule(self) -> None:
        a, b = space.candidates(rows_of(MM, 16), ARCH)[:2]

        def times(*pairs: tuple[float, float], spread: float = 0.0) -> Any:
            sides = [{a: Summary(x, x * (1 - spread), x * (1 + spread), 9), b: Summary(y, y, y, 9)} for x, y in pairs]
            return dict(enumerate(sides))

        assert decide(times((100, 95), (100, 95)), a, b).chosen == b
        assert decide(times((100, 99.5), (100, 99.5)), a, b).chosen == a
        assert decide(times((100, 95), (100, 95), spread=0.08), a, b).chosen == a
        assert decide(times((100, 80), (100, 102)), a, b).chosen == a
        assert decide(times((100, 80), (100, 100.5)), a, b).chosen == b
        assert decide(times((100, 80), (100, 80)), a, b).gain == pytest.approx(1.25)


class TestSession:
    def test_samples_take_the_budget_and_little_more(self, places: Path) -> None:
        bench = FakeBench(lambda *_: 200.0)
        tune(bench, places)
        assert 0.2 * OPTIONS.budget_s < bench.now < 1.2 * OPTIONS.budget_s
        assert bench.loaded == [256 * MM.experts]
        assert {(rows, name) for rows, name, _ in bench.contests} == {
            (average * MM.experts, name) for average in (1, 16, 256) for name in routing.ROUTINGS
        }

    def test_what_fails_or_is_wrong_is_left_out(self, places: Path) -> None:
        bad = {spec for a in (1, 16, 256) for spec in space.candidates(rows_of(MM, a), ARCH)[len(TILES) :]}
        first, *others = sorted(bad, key=lambda spec: spec.name)
        bench = FakeBench(lambda spec, *_: 1.0 if spec in bad else 100.0, wrong=lambda spec: spec in others)
        report = tune(bench, places, makes=FakeMakes(lambda spec: spec == first))
        assert all(point.chosen == point.shipped for point in report.layers[0].points)
        assert f"left out: {first.name}: no room" in report.notes and len(report.notes) == len(bad)

    def test_without_the_shipped_kernel_there_is_nothing_to_compare_with(self, places: Path) -> None:
        with pytest.raises(CompileError, match="no room"):
            tune(FakeBench(lambda *_: 1.0), places, makes=FakeMakes(lambda spec: True))

    def test_sizes_beyond_the_memory_are_left_out(self, places: Path) -> None:
        report = tune(FakeBench(lambda *_: 100.0, memory_rows=16 * 16), places)
        assert [point.rows_per_expert for point in report.layers[0].points] == [1, 16]
        assert "256 rows an expert are left out" in report.notes[0]
        with pytest.raises(ValueError, match="nothing is left to measure: 1 rows"):
            tune(FakeBench(lambda *_: 100.0, memory_rows=1), places)

    def test_an_interrupted_run_goes_on_where_it_was(self, places: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            tune(FakeBench(interrupted_at(256)), places)
        (section,) = tables.read(places)
        (layer,) = section.layers.values()
        assert [point.rows_per_expert for point in layer.points] == [1, 16]

        again = FakeBench(lambda *_: 50.0)
        report = tune(again, places)
        assert {rows for rows, *_ in again.contests} == {256 * MM.experts}
        assert [point.rows_per_expert for point in report.layers[0].points] == [1, 16, 256]
        assert report.layers[0].points[0].mean_us(report.layers[0].points[0].shipped) == pytest.approx(100)

        fresh = FakeBench(lambda *_: 50.0)
        tune(fresh, places)
        assert len(fresh.contests) >= 6, "a finished run was taken for an unfinished one"

    @pytest.mark.parametrize(
        "change",
        [
            lambda section: layer_of(section)["unfinished"].update(asked="something else"),
            lambda section: layer_of(section)["unfinished"].update(rows=[3.0]),
            lambda section: layer_of(section).update(unfinished=None),
            lambda section: layer_of(section)["problem"].update(experts=8),
            lambda section: section["stamp"]["versions"].update(glulam="0.0.1"),
        ],
    )
    def test_only_the_same_run_goes_on(self, places: Path, change: Callable[[Any], None]) -> None:
        """Points of other commands, problems and versions, and of runs that ended, are measured anew."""
        with pytest.raises(KeyboardInterrupt):
            tune(FakeBench(interrupted_at(16)), places)
        data = json.loads(places.read_text())
        assert layer_of(data["sections"][0])["unfinished"]["rows"] == [1.0]
        change(data["sections"][0])
        places.write_text(json.dumps(data))
        again = FakeBench(lambda *_: 50.0)
        tune(again, places)
        assert {rows for rows, *_ in again.contests} == {average * MM.experts for average in (1, 16, 256)}
        held = next(section for section in tables.read(places) if not section.stamp.unlike(tables.stamp_of(GPU)))
        layer = held.layers[tables.layer_key(MM)]
        assert layer.unfinished is None and layer.points[0].mean_us(layer.points[0].shipped) == pytest.approx(50)

    def test_points_of_earlier_runs_stay_and_are_not_taken_for_measured(self, places: Path) -> None:
        tune(FakeBench(lambda *_: 100.0), places, options=Options((4, 256), budget_s=0.1))
        with pytest.raises(KeyboardInterrupt):
            tune(FakeBench(interrupted_at(16, 70.0)), places)
        again = FakeBench(lambda *_: 50.0)
        report = tune(again, places)
        assert {rows for rows, *_ in again.contests} == {average * MM.experts for average in (16, 256)}
        assert [point.rows_per_expert for point in report.layers[0].points] == [1, 16, 256]
        (section,) = tables.read(places)
        (layer,) = section.layers.values()
        us = [point.mean_us(point.shipped) for point in layer.points]
        assert us == pytest.approx([70, 100, 50, 50])

    def test_every_operator_can_be_tuned(self, places: Path) -> None:
        for problem in PROBLEMS.values():
            (layer,) = tune(FakeBench(lambda *_: 100.0), places, problem).layers
            assert layer.problem == tables.layer_of(problem) and len(layer.points) == 3
        (section,) = tables.read(places)
        assert len(section.layers) == len(PROBLEMS)


class TestArguments:
    def test_refusals(self) -> None:
        shape = {"experts": 8, "in_features": 64, "out_features": 64}
        for words, call in (
            ("op is 'conv'", lambda: glulam.tune("conv", **shape)),
            ("grouped_glu needs intermediate, got 0", lambda: glulam.tune("grouped_glu", **shape)),
            ("in_features is 60", lambda: glulam.tune("grouped_mm", **{**shape, "in_features": 60})),
            ("training is of a grouped_mlp", lambda: glulam.tune("grouped_mm", training=True, **shape)),
            (
                "training has no transpose_w; leave it out",
                lambda: glulam.tune("grouped_mlp", intermediate=64, training=True, transpose_w=True, **shape),
            ),
        ):
            with pytest.raises(ValueError, match=words):
                call()

    @pytest.mark.parametrize(
        ("name", "values"),
        {
            "op": ["conv", None, 3, []],
            "experts": [0, -1, "8", None, True, 8.0, 1 << 40],
            "in_features": [-8, "64", None, 60],
            "out_features": [-8, "64", 1.5],
            "rows_per_expert": [0, "16", None, (), (0,), (-1,), (1.5,), ("a",), (True,)],
            "dtype": ["float32", 3, None, torch.float32],
            "transpose_w": ["yes", None, 1],
            "save_preact": [True, 0],
            "training": ["no"],
            "budget_s": [0, -1, float("nan"), float("inf"), "9", None, True],
            "candidates": [-1, "8", 1.5, None],
            "jobs": [0, -1, "2", True],
            "device": ["gpu", "cpu", True, 1.5, -1],
            "out": [3, b"x"],
            "progress": ["yes"],
        }.items(),
    )
    def test_an_argument_that_is_wrong_is_named(self, name: str, values: list[Any]) -> None:
        right = {"op": "grouped_mm", "experts": 8, "in_features": 64, "out_features": 64}
        for value in values:
            arguments = {**right, name: value}
            with pytest.raises((ValueError, TypeError), match=f"tune: .*{name}"):
                glulam.tune(arguments.pop("op"), **arguments)  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", ["activation", "glu_layout"])
    def test_so_is_one_of_an_activation(self, name: str) -> None:
        for value in ("swish", None, 3, ["swiglu"]):
            with pytest.raises(ValueError, match=f"tune: {name}="):
                glulam.tune("grouped_glu", experts=8, in_features=64, intermediate=64, **{name: value})  # type: ignore[arg-type]

    def test_there_is_nothing_to_tune_on_a_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(glulam.UnsupportedDevice, match="no CUDA GPU"):
            glulam.tune("grouped_mm", experts=8, in_features=64, out_features=64)

    def test_training_asks_what_a_training_plan_asks(self, fake_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Problem] = []
        serving = kernels.serving
        monkeypatch.setattr(kernels, "serving", lambda problem, gpu: asked.append(problem) or serving(problem, gpu))
        x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
        w1 = torch.randn(4, 96, 64, dtype=torch.bfloat16, requires_grad=True)
        w2 = torch.randn(4, 64, 48, dtype=torch.bfloat16, requires_grad=True)
        offs = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
        y = glulam.grouped_mlp(x, w1, w2, offs=offs)
        y.backward(torch.ones_like(y))
        shape = Problem("grouped_mlp", "bfloat16", 0, 4, 64, 48, 64, "swiglu")
        wanted = {tables.layer_key(problem) for problem in entry.problems_of("tune", shape, training=True)}
        assert {tables.layer_key(problem) for problem in asked} == wanted

    @pytest.mark.parametrize("name", PROBLEMS)
    def test_kernels_get_the_arguments_that_they_take(self, name: str, fake_gpu: Any) -> None:
        problem = dataclasses.replace(PROBLEMS[name], experts=3, rows=40, in_features=96, intermediate=32)
        if problem.op in ("grouped_mm",) or name == "wgrad":
            problem = dataclasses.replace(problem, intermediate=0)
        if problem.out_features:
            problem = dataclasses.replace(problem, out_features=96)
        specs = space.candidates(problem, ARCH)
        assert len({signature_of(spec) for spec in specs}) == 1, "they are passed the same"
        made = launches_of(problem, device.gpu(0), "cpu")
        results = [result for bare in made for result in bare.results]
        offs = torch.tensor([5, 5, 33], dtype=torch.int32)
        for rows in (40, 33):
            for result in results:
                result.zero_()
            for bare in made:
                exported(specs[0])(*of_rows(bare, rows, offs))
            assert all(bool(result.any()) and bool(result.isfinite().all()) for result in results)
            assert not any(result[33:].any() for result in results if len(result) == 40)

    def test_the_size_of_a_set_is_known_before_it_is_made(self) -> None:
        problem = rows_of(MM, 16)
        t, k, n = problem.rows, problem.in_features, problem.out_features
        gpu = device.Gpu(GPU, ARCH, SM_COUNT)
        beside = 4 * problem.experts + 4 * NUM_COUNTERS
        assert num_bytes(problem, gpu) == 2 * (t * k + problem.experts * n * k + t * n) + beside

    @pytest.mark.parametrize("name", PROBLEMS)
    def test_the_size_of_a_set_is_that_of_its_tensors(self, name: str, fake_gpu: Any) -> None:
        problem = rows_of(dataclasses.replace(PROBLEMS[name], experts=3), 4)
        made = launches_of(problem, device.gpu(0), "cpu")
        tensors = [tensor for bare in made for tensor in (*bare.memory, *bare.results)]
        assert num_bytes(problem, device.gpu(0)) == sum(tensor.nbytes for tensor in tensors)


class TestTable:
    def test_the_dispatcher_takes_what_was_tuned(self, places: Path) -> None:
        fast = candidate(MM, 16 * 16)
        tune(FakeBench(slow_but({fast.tile: 80.0})), places)  # type: ignore[union-attr]
        told = choose(rows_of(MM, 16), ARCH, GPU)
        assert (told.spec, told.is_tuned) == (fast, True)
        assert str(places) in told.why and "80 us" in told.why and "1.25 times as long" in told.why
        for other in (rows_of(MM, 5000), dataclasses.replace(rows_of(MM, 16), experts=17)):
            assert not choose(other, ARCH, GPU).is_tuned
        assert not choose(rows_of(MM, 16), ARCH).is_tuned, "without a GPU's name no table holds"

    def test_its_numbers_are_written_out(self) -> None:
        point = Point(1048576, "a", "b", 2.0, {"a": {"u": 123456.0}, "b": {"u": 246912.4}})
        layer = tables.Layer(tables.layer_of(MM), {}, (point, dataclasses.replace(point, rows_per_expert=1.5)))
        assert [row[:3] for row in report.rows_of(layer)] == [
            ("1048576", "246912", "123456"),
            ("1.5", "246912", "123456"),
        ]

    def test_between_sizes_times_are_interpolated(self, places: Path) -> None:
        a, b = space.candidates(rows_of(MM, 16), ARCH)[-2:]
        ship = choose(rows_of(MM, 16), ARCH).spec
        points = (
            Point(4, a.name, ship.name, 1.2, {a.name: {"u": 10}, b.name: {"u": 20}, ship.name: {"u": 12}}),
            Point(64, b.name, ship.name, 1.2, {a.name: {"u": 60}, b.name: {"u": 40}, ship.name: {"u": 48}}),
        )
        layer = tables.Layer(tables.layer_of(MM), {spec.name: spec for spec in (a, b, ship)}, points)
        tables.write(places, [tables.section(tables.stamp_of(GPU), layer)])
        chosen = {average: choose(rows_of(MM, average), ARCH, GPU) for average in (1, 2, 4, 8, 40, 64, 128, 200)}
        assert [chosen[n].spec for n in (2, 4, 8)] == [a] * 3 and [chosen[n].spec for n in (40, 64, 128)] == [b] * 3
        assert not chosen[1].is_tuned and not chosen[200].is_tuned

    def test_one_for_another_gpu_or_version_is_ignored_with_one_line(self, places: Path) -> None:
        fast = candidate(MM, 16 * 16)
        tune(FakeBench(slow_but({fast.tile: 80.0})), places)  # type: ignore[union-attr]
        with pytest.warns(RuntimeWarning, match=f"measured on {GPU}, this is NVIDIA H100; run `glulam tune`") as seen:
            told = choose(rows_of(MM, 16), ARCH, "NVIDIA H100")
            choose(rows_of(MM, 1), ARCH, "NVIDIA H100")
        assert len(seen) == 1 and not told.is_tuned and told.why_not[-1] == str(seen[0].message)
        data = json.loads(places.read_text())
        data["sections"][0]["stamp"]["versions"]["glulam"] = "0.0.1"
        places.write_text(json.dumps(data))
        kernels.forget_choices()
        with pytest.warns(RuntimeWarning, match="measured with glulam 0.0.1, installed is"):
            assert not choose(rows_of(MM, 16), ARCH, GPU).is_tuned

    @pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": "glulam-tuned", "schema": 99, "sections": []}'])
    def test_a_damaged_one_is_ignored_with_one_line(self, places: Path, content: str) -> None:
        places.write_text(content)
        with pytest.warns(RuntimeWarning, match="is no table of tuned kernels.*it is ignored"):
            assert not choose(rows_of(MM, 16), ARCH, GPU).is_tuned
        bench = FakeBench(lambda *_: 100.0)
        with pytest.raises(ValueError, match="is no table"):
            tune(bench, places)
        assert places.read_text() == content and not bench.contests, "measured for nothing"

    def test_a_kernel_that_is_not_compiled_here_is_passed_over(
        self, places: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fast = candidate(MM, 16 * 16)
        tune(FakeBench(slow_but({fast.tile: 80.0})), places)  # type: ignore[union-attr]
        monkeypatch.setattr(loadable, "is_loadable", lambda spec: spec != fast)
        with pytest.warns(
            RuntimeWarning, match=f"{fast.name} is not compiled on this machine.*compile --tuned"
        ) as seen:
            told = [choose(rows_of(MM, 16), ARCH, GPU) for _ in range(3)]
        assert len(seen) == 1 and told[0].spec == shipped_choice(rows_of(MM, 16), ARCH).spec

    def test_tables_merge(self, places: Path, tmp_path: Path) -> None:
        tune(FakeBench(lambda *_: 100.0), places, options=Options((1, 16), budget_s=0.1))
        tune(FakeBench(lambda *_: 50.0), tmp_path / "b.json", options=Options((16, 64), budget_s=0.1))
        tune(FakeBench(lambda *_: 50.0, gpu="NVIDIA Other"), tmp_path / "c.json")
        sections = tables.merged(
            [s for name in (places, tmp_path / "b.json", tmp_path / "c.json") for s in tables.read(name)]
        )
        assert [section.stamp.gpu for section in sections] == [GPU, "NVIDIA Other"]
        (layer,) = sections[0].layers.values()
        assert [point.rows_per_expert for point in layer.points] == [1, 16, 64]
        assert layer.points[1].mean_us(layer.points[1].shipped) == pytest.approx(50)
        tables.write(tmp_path / "all.json", sections)
        assert tables.read(tmp_path / "all.json") == sections
        assert str(tmp_path) not in (tmp_path / "all.json").read_text(), "a table holds no path"

    def test_places(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv(known.ENV_TUNED, f"{tmp_path}:{tmp_path / 'x.json'}")
        assert known.locations() == [tmp_path, tmp_path / "x.json"]
        assert entry.default_table(GPU) == tmp_path / "nvidia-fake.json"
        monkeypatch.setenv(known.ENV_TUNED, "")
        assert known.tables() == []
        with pytest.raises(ValueError, match="is empty"):
            entry.default_table(GPU)
        monkeypatch.delenv(known.ENV_TUNED)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        assert known.locations() == [tmp_path / "glulam" / "tuned"]

    def test_choosing_with_a_table_is_quiet_and_pure(self, places: Path) -> None:
        fast = candidate(MM, 16 * 16)
        tune(FakeBench(slow_but({fast.tile: 80.0})), places)  # type: ignore[union-attr]
        choose(rows_of(MM, 16), ARCH, GPU)
        places.unlink()  # it was read, once
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert {choose(rows_of(MM, 16), ARCH, GPU).spec for _ in range(3)} == {fast}


def test_routings_are_those_of_the_benchmarks() -> None:
    for name in routing.ROUTINGS:
        sizes = routing.group_sizes(1000, 7, name)
        assert sum(sizes) == 1000 and len(sizes) == 7 and sizes == routing.group_sizes(1000, 7, name)
    assert max(routing.group_sizes(1000, 7, "uniform")) == 143
    assert max(routing.group_sizes(1000, 7, "dirichlet:0.5")) > 300
    with pytest.raises(ValueError, match="routing is 'zipf'"):
        routing.group_sizes(1, 1, "zipf")


def test_shipped_tiles_always_take_part() -> None:
    found = space.candidates(rows_of(MM, 16), ARCH, 1)
    assert {LARGE, SMALL} <= {spec.tile for spec in found}  # type: ignore[union-attr]
