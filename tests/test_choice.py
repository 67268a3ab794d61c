"""Tile choice: the rule against stored measurements that it was not fitted to, the shipped table, and their limits."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from cute_kernels.arch import Gemm
from cute_kernels.sm90 import cost, policy
from cute_kernels.sm90.configs import LARGE, SMALL, TILES
from cute_kernels.sm90.cost import EVEN, SKEWED
from cute_kernels.tiles import TileConfig
from glulam.choose import choose, known, shipped
from glulam.choose import estimates as times
from glulam.choose.estimates import MODELLED, Curve, Measured, estimates
from glulam.choose.problem import Problem, ProblemGemm
from perf import choices
from perf.cases import OTHER_MODELS, PREFILL
from perf.results import RESULTS, read

ARCH = "sm_90a"
RESULT = read(RESULTS / "tiles-h200.csv")
RECORDS: list[dict[str, Any]] = RESULT["records"]
FITTED = {"Mixtral-8x7B", "Qwen3-30B-A3B", "DeepSeek-V3 EP1", "DeepSeek-V3 EP8", "gpt-oss-120b"}
MODELS = {record["model"] for record in RECORDS}
HELD_OUT = MODELS - FITTED


class Point(NamedTuple):
    model: str
    op: str
    routing: str
    rows_per_expert: int


SLOW = Point("Mixtral-8x22B", "dgrad", "uniform", 64)
"""Point at which the rule's tile was 19 % slower for one routing, in one of two measurements."""
OPS = {"fc1": "grouped_glu", "fc2": "grouped_mm", "dgrad": "grouped_mm"}


def gemm_of(record: dict[str, Any]) -> Gemm:
    stored = record["n"] // 2 if record["op"] == "fc1" else record["n"]
    return Gemm(record["rows_per_expert"] * record["experts"], record["experts"], record["n"], record["k"], stored)


def problem_of(record: dict[str, Any], rows: int | None = None) -> Problem:
    """Return a problem that runs the record's GEMM."""
    gated = record["op"] == "fc1"
    return Problem(
        op=OPS[record["op"]],
        dtype="bfloat16",
        rows=record["rows_per_expert"] * record["experts"] if rows is None else rows,
        experts=record["experts"],
        in_features=record["k"],
        intermediate=record["n"] // 2 if gated else 0,
        out_features=0 if gated else record["n"],
        activation="swiglu" if gated else "none",
        transpose_w=record["op"] == "dgrad",
    )


def by_size(models: set[str]) -> Iterator[list[dict[str, Any]]]:
    """Yield groups of records with the same (operation, model, rows per expert), one record per routing."""
    key = lambda r: (r["op"], r["model"], r["rows_per_expert"])  # noqa: E731
    chosen = sorted((record for record in RECORDS if record["model"] in models), key=key)
    return (list(group) for _, group in itertools.groupby(chosen, key))


def mean_us(records: list[dict[str, Any]], tile: TileConfig) -> float:
    return math.exp(sum(math.log(record["us"][tile.name]) for record in records) / len(records))


def by_rule(gemm: Gemm) -> TileConfig:
    return min(TILES, key=lambda tile: cost.time_us(gemm, tile))


def loss(records: list[dict[str, Any]], tile: TileConfig) -> float:
    """Return the measured time on a tile over the time on the fastest shipped one."""
    return mean_us(records, tile) / min(mean_us(records, other) for other in TILES)


class TestRule:
    @pytest.mark.parametrize("models", [FITTED, HELD_OUT], ids=["fitted", "held out"])
    def test_is_within_a_tenth_of_the_best_shipped_tile(self, models: set[str]) -> None:
        """On the mean of the routings, and on each of them, which the host cannot tell apart."""
        groups = list(by_size(models))
        means = [loss(group, by_rule(gemm_of(group[0]))) for group in groups]
        assert max(means) < 1.05 and sum(means) / len(means) < 1.002
        for routing in ("uniform", "dirichlet"):
            one = [[record for record in group if record["routing"] == routing] for group in groups]
            losses = [loss(records, by_rule(gemm_of(records[0]))) for records in one if records]
            assert sum(losses) / len(losses) < 1.01
            for records, lost in zip((records for records in one if records), losses, strict=True):
                is_slow = tuple(records[0][name] for name in SLOW._fields) == SLOW
                assert lost < (1.20 if is_slow else 1.10), records[0]

    def test_half_of_the_shapes_are_held_out(self) -> None:
        assert {case.name for case in (*PREFILL, *OTHER_MODELS)} == MODELS
        assert len(HELD_OUT) == len(FITTED) == 5
        assert {record["rows_per_expert"] for record in RECORDS} == {1 << d for d in range(13)}

    def test_a_threshold_on_rows_alone_does_worse(self) -> None:
        """Else the model would be a detour."""
        groups = list(by_size(MODELS))
        ours = sum(loss(group, by_rule(gemm_of(group[0]))) for group in groups)
        for threshold in (8, 16, 32, 64):
            picks = (SMALL if group[0]["rows_per_expert"] <= threshold else LARGE for group in groups)
            assert ours < sum(loss(group, pick) for group, pick in zip(groups, picks, strict=True))

    def test_times_are_near_the_measured_ones(self) -> None:
        errors = [
            math.log(cost.routed_us(gemm_of(record), LARGE, record["routing"]) / record["us"][LARGE.name])
            for record in RECORDS
            if record["model"] in HELD_OUT
        ]
        assert math.sqrt(sum(error**2 for error in errors) / len(errors)) < 0.15

    def test_few_rows_take_the_small_tile_many_the_large_one_with_one_switch(self) -> None:
        rng = random.Random(0)
        for _ in range(200):
            experts, columns, depth = (
                rng.choice([1, 2, 4, 8, 32, 128, 256]),
                64 * rng.randint(4, 300),
                64 * rng.randint(4, 200),
            )
            chosen = [by_rule(Gemm(experts << d, experts, columns, depth, columns)) for d in range(13)]
            switches = sum(a != b for a, b in itertools.pairwise(chosen))
            assert chosen[-1] == LARGE and switches <= 1, (experts, columns, depth)

    def test_a_layer_too_small_to_fill_the_gpu_takes_the_small_tile(self) -> None:
        """Measured once on 8 experts, H 512, I 256: 11 to 28 % faster at 1 to 256 rows an expert."""
        for average in (1, 8, 32, 64, 128, 256):
            assert by_rule(Gemm(8 * average, 8, 512, 512, 256)) == by_rule(Gemm(8 * average, 8, 512, 256, 512)) == SMALL

    @pytest.mark.parametrize("rows", [1, 2, 4, 8, 30])
    def test_a_few_tokens_take_the_small_tile(self, rows: int) -> None:
        """Fewer rows than experts are in no table."""
        for model in (model for model in (*PREFILL, *OTHER_MODELS) if rows < model.experts):
            sizes = {"experts": model.experts, "n": 2 * model.intermediate, "k": model.hidden}
            told = choose(problem_of({"op": "fc1", **sizes}, rows), ARCH)
            assert told.spec.tile == SMALL and MODELLED in told.why

    def test_time_grows_with_the_work(self) -> None:
        for tile in TILES:
            for gemm in (Gemm(512, 8, 4096, 2048, 4096), Gemm(65536, 64, 1024, 1024, 512)):
                us = cost.time_us(gemm, tile)
                assert us > cost.H200.launch_us
                for change in ({"rows": 8}, {"columns": 4}, {"depth": 4}):
                    ((name, factor),) = change.items()
                    grown = {**vars(gemm), name: factor * getattr(gemm, name)}
                    assert cost.time_us(Gemm(**grown), tile) > 1.2 * us

    @pytest.mark.parametrize("height", [64, 128, 256])
    @pytest.mark.parametrize("average", [0.25, 1, 8, 64, 100, 1000])
    def test_row_tiles_are_those_of_drawn_routings(self, height: int, average: float) -> None:
        rng, experts, rounds = random.Random(1), 1000, 10
        tiles = active = 0
        for _ in range(rounds):
            shares = [rng.gammavariate(0.5, 1.0) for _ in range(experts)]
            sizes = [round(average * experts * share / sum(shares)) for share in shares]
            tiles += sum(-(-size // height) for size in sizes)
            active += sum(size > 0 for size in sizes)
        assert cost.row_tiles(average, height, SKEWED) == pytest.approx(tiles / rounds / experts, rel=0.02)
        assert cost.active_share(average, SKEWED) == pytest.approx(active / rounds / experts, rel=0.02)
        assert cost.row_tiles(average, height, EVEN) == (average if average < 1 else -(-average // height))


class TestTable:
    def test_the_shipped_table_is_that_of_the_stored_result(self) -> None:
        held = policy.MEASURED.read_text()
        assert held == choices.text(choices.make_table(RESULT))
        assert json.loads(held)["stamp"]["gpu"] == times.measured(ARCH).gpu == "NVIDIA H200"

    def test_it_holds_every_shipped_tile_for_every_model(self) -> None:
        curves = times.measured(ARCH).curves
        assert len(curves) == 3 * len(MODELS)
        assert all({tile.name for tile in TILES} <= curve.us.keys() for curve in curves.values())

    def test_measured_shapes_get_the_fastest_tile(self) -> None:
        for group in by_size(MODELS):
            told = choose(problem_of(group[0]), ARCH)
            assert loss(group, told.spec.tile) < 1.001
            assert "measured on NVIDIA H200" in told.why

    def test_between_measured_numbers_of_rows_lies_a_line(self) -> None:
        curve = Curve([1, 4, 16], {"t": [10.0, 20.0, 80.0]})
        assert [curve.at("t", rows) for rows in (1, 4, 16)] == pytest.approx([10, 20, 80])
        assert curve.at("t", 2) == pytest.approx(10 * math.sqrt(2)) and curve.at("t", 8) == pytest.approx(40)
        assert curve.at("t", 0.5) is curve.at("t", 17) is curve.at("u", 4) is None

    def test_a_layer_is_measured_or_modelled_as_a_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        parts = (ProblemGemm("glu", Gemm(32, 8, 64, 64, 32)), ProblemGemm("nt", Gemm(32, 8, 64, 32, 64)))
        curves = {parts[0].key: Curve([1, 8], {LARGE.name: [3.0, 4.0], SMALL.name: [2.0, 2.0]})}
        monkeypatch.setattr(times, "measured", lambda arch: Measured("a GPU", curves))
        assert {found.source for found in estimates(parts, TILES, ARCH)} == {MODELLED}
        curves[parts[1].key] = Curve([1, 8], {LARGE.name: [5.0, 5.0], SMALL.name: [7.0, 7.0]})
        best, other = estimates(parts, TILES, ARCH)
        assert (best.tile, other.tile) == (LARGE, SMALL) and other.us == pytest.approx(9)
        assert best.us == pytest.approx(5 + 3 * (4 / 3) ** (2 / 3)) and best.source == "measured on a GPU"

    def test_other_shapes_and_architectures_are_modelled(self) -> None:
        record = RECORDS[0]
        assert MODELLED in choose(problem_of({**record, "k": record["k"] + 64}), ARCH).why
        assert MODELLED in choose(problem_of(record, rows=record["experts"] // 2), ARCH).why

    def test_only_a_result_of_the_sweep_makes_a_table(self, tmp_path: Any) -> None:
        with pytest.raises(ValueError, match="a result of suite 'forward'"):
            choices.write_table(RESULTS / "forward-h200.csv", tmp_path)
        path = choices.write_table(path=tmp_path / "new" / "measured.json")
        assert path.read_text() == policy.MEASURED.read_text()


class TestPurity:
    def test_the_host_knows_all_that_decides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Numbers and names in, the same choice out, and not a question to torch."""
        for module in (times, cost, policy, known, shipped):
            assert not any(getattr(value, "__name__", "").startswith("torch") for value in vars(module).values())
        for name in ("is_available", "current_device", "synchronize", "get_device_properties"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("asked the device"))
        for rows in (0, 1, 100, 2**25):
            problem = Problem("grouped_mlp", "float16", rows, 7, 72, 40, 72, "geglu")
            assert choose(problem, ARCH) == choose(problem, ARCH)

    def test_training_and_inference_choose_by_the_same_gemm(self) -> None:
        plain = Problem("grouped_glu", "bfloat16", 4096, 16, 1024, 512, 0, "swiglu")
        saving = Problem("grouped_glu", "bfloat16", 4096, 16, 1024, 512, 0, "swiglu", save_preact=True)
        (one,), (other,) = plain.parts, saving.parts
        assert one.key == other.key == ("glu", 16, 1024, 1024)
        assert (one.gemm.stored, other.gemm.stored) == (512, 512 + 1024)

    def test_a_transposed_weight_is_a_family_of_its_own(self) -> None:
        problem = Problem("grouped_mm", "bfloat16", 64, 4, 128, 0, 256, transpose_w=True)
        assert problem.parts == (ProblemGemm("nn", Gemm(64, 4, 256, 128, 256)),)
        mlp = Problem("grouped_mlp", "bfloat16", 64, 4, 128, 96, 256, "silu")
        assert mlp.parts == (ProblemGemm("glu", Gemm(64, 4, 96, 128, 96)), ProblemGemm("nt", Gemm(64, 4, 256, 96, 256)))
