"""Every suite that runs on one GPU, from its cases to its file, on small CPU cases; contestants are checked."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from support import played_gpu

from perf import cases, results, tables, timing
from perf.cases import FORWARD, KERNELS, OPS, TRAIN, Case, LayerCase, ServingCase
from perf.contest import admitted, relative_error
from perf.layer import MAX_RELATIVE_ERROR, expected, make_layer
from perf.options import Options
from perf.quantised import CONTESTANTS
from perf.stamp import Reading
from perf.suites import function_of, layer, mhc, mlp, serving
from perf.targets import MMA_ALONE, NATIVE, PORTABLE, PORTABLE_MXFP8

LIMITS = {"cublas_8192_tflops": 780.0, "copy_tbps": 4.27, "launch_us": 4.7}
STAMP = {"gpu": "NVIDIA H200", "sms": "132", "sm_clock_max_mhz": "1980"}
PREFILL = Case("prefill", 3, 64, 64, 200, "dirichlet")
DECODE = Case("decode", 4, 128, 128, 60)
TOKEN = Case("token", 4, 64, 64, 2, "token:2")
LAYER = LayerCase("layer", 70, 64, 32, 5, 2, "zipf")
STEP = LayerCase("step", 3, 64, 32, 8, 2)
SERVED = [ServingCase("served", tokens, 128, 128, 4, 2, world_experts=8) for tokens in (9, 1)]
SMALL = mhc.Size(2, 3, 4, 128)
EVERY = ["glulam", "dense", "torch"]


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs a suite on small cases and returns its records."""
    small = dict.fromkeys(cases.CASES, (PREFILL, DECODE))
    others = {"decode": (DECODE, TOKEN), "power": (PREFILL,), "lora": (LAYER,)}
    monkeypatch.setattr(cases, "CASES", {**small, **others})
    monkeypatch.setattr(layer, "layer_cases", lambda *_: [LAYER, STEP])
    monkeypatch.setattr(layer, "PUBLISHED", (STEP,))
    monkeypatch.setattr(layer, "ROUTED_TOKENS", (1, 64))
    monkeypatch.setattr(serving, "SERVING", SERVED)
    monkeypatch.setattr(mhc, "CASES", [case._replace(sizes=(SMALL,) * len(case.sizes)) for case in mhc.CASES])
    monkeypatch.setattr(mhc, "_measure_host", lambda _: [{"op": "host", "times": {}}])
    for module, name in ((layer, "MAX_CALLS"), (layer, "PART_CALLS"), (layer, "MIN_ROUNDS"), (timing, "WARM_UP_CALLS")):
        monkeypatch.setattr(module, name, 1)
    readings = SimpleNamespace(mean=lambda *_: Reading(1400.0, 690.0, 1.0))
    monkeypatch.setattr(mlp, "follow_gpu", lambda: contextlib.nullcontext(readings))

    def measured(suite, **options):
        with played_gpu.install(monkeypatch):
            return function_of(suite)(Options(budget_s=0.0, quack="off", **options))

    return measured


RECIPES = ["mxfp8_weight_only", "mxfp4_weight_only"]
BY_WEIGHT = ["dx through w1", "dx through w2", "forward and backward"]
WANTED = {
    "forward": [("prefill", op, EVERY) for op in OPS] + [("decode", op, ["glulam", "torch"]) for op in OPS],
    "decode": [(name, op, ["glulam", "torch"]) for name in ("decode", "token") for op in OPS],
    "backward": [("prefill", op, EVERY) for op in KERNELS] + [("decode", op, ["glulam", "torch"]) for op in KERNELS],
    "train": [(name, "layer", ["glulam", "torch"]) for name in ("prefill", "decode")],
    "power": [("prefill", op, EVERY) for op in ("fc1", *KERNELS)],
    "portable": [
        ("prefill", "mlp", [PORTABLE, NATIVE, "torch", MMA_ALONE]),
        ("decode", "mlp", [PORTABLE, NATIVE, PORTABLE_MXFP8, "torch", MMA_ALONE]),
    ],
    "lora": [
        ("layer", "bf16", ["the layer alone", "lora", "materialised"]),
        ("layer", "mxfp4_weight_only", ["the layer alone", "lora", "dequantised"]),
    ],
    "serving": [("served", recipe, ["glulam"]) for recipe in cases.SERVING_RECIPES for _ in SERVED],
}  # fmt: skip


@pytest.mark.parametrize("suite", WANTED)
@pytest.mark.filterwarnings("ignore:(humming|vllm) is left out")
def test_a_suite_has_a_record_a_case_and_operation(run, suite):
    records = run(suite)
    got = [(r["case"]["name"], r["op"] if "op" in r else r["recipe"], list(r["times"])) for r in records]
    assert got == WANTED[suite]
    assert_tables(suite, records)


def assert_tables(suite, records):
    """Check that a suite's records give tables, with one cell per heading in each row."""
    made = tables.tables_of({**results.make_result(suite, STAMP, LIMITS, records)})
    assert all(table.rows and all(len(row) == len(table.header) for row in table.rows) for table in made)


@pytest.mark.filterwarnings("ignore:.*torch fp8 is left out")
def test_recipes_are_measured_by_name(run):
    records = run("fp8")
    assert [list(record["errors"]) for record in records] == 2 * [list(CONTESTANTS[:-1])]
    assert list(run("fp8", ops=("bf16", "mxfp8"))[0]["errors"]) == ["bf16", "mxfp8"]
    with pytest.raises(ValueError, match="--op 'int4' is not known here"):
        run("fp8", ops=("int4",))


def test_gradients_through_frozen_weights_are_measured(run):
    records = run("frozen", case="decode")
    assert [record["op"] for record in records] == BY_WEIGHT * (len(records) // 3)
    for record in records:
        assert list(record["times"]) == [record["recipe"], "dequantised", "bf16"]
        assert 0 <= record["errors"][record["recipe"]] <= 0.01
    assert set(RECIPES) <= {record["recipe"] for record in records}


def test_quantising_is_measured_in_every_form(run):
    records = run("quantize", case="prefill")
    assert len({tuple(map(str, list(r.values())[:-1])) for r in records}) == len(records) == 22
    row = next(r for r in records if (r["axis"], r["dtype"], r["rows"]) == ("row", "bfloat16", PREFILL.rows))
    elements = PREFILL.rows * PREFILL.hidden
    assert row["bytes"] == 3 * elements + elements // 32
    folds = [r for r in records if "experts" in r]
    elements = 3 * 2 * 64 * 64
    assert [r["bytes"] for r in folds] == [3 * elements + 384, 3 * elements + 192, 5 * elements + 384,
                                           5 * elements + 192]  # fmt: skip
    assert all(list(r["times"]) == ["glulam", "copy"] for r in records)


def test_hyper_connections_agree_with_torch(run):
    records = run("mhc")
    runs = [(case.op, way) for case in mhc.CASES for _ in case.sizes for way in ("forward", "backward")]
    runs.remove(("boundary, x in MXFP8", "backward"))
    assert [(r["op"], r["direction"]) for r in records[:-1]] == runs
    assert max(record["difference"] for record in records[:-1]) < 0.05
    vectors, numbers = 2 * SMALL.tokens * SMALL.c, 4 * SMALL.tokens
    weight = 4 * 24 * 4 * SMALL.c
    moved = {(r["op"], r["direction"]): r["bytes"] for r in records[:-1]}
    assert moved["aggregate", "forward"] == 5 * vectors + 4 * numbers
    assert moved["boundary", "forward"] - moved["boundary, x in MXFP8", "forward"] == vectors - SMALL.tokens * 33 * 4
    assert moved["project", "backward"] == 8 * vectors + 48 * numbers + 2 * weight
    assert [r["warp_instructions"] > 0 for r in records[:4]] == [True] * 4 and not records[4]["warp_instructions"]


def test_the_layer_is_measured_in_every_way(run):
    records = run("layer")
    timed = [(r["case"]["name"], r["op"], r["mode"]) for r in records if "mode" in r]
    assert timed == [(name, op, mode) for name in ("layer", "step") for op in ("forward", "train")
                     for mode in ("eager", "graph")]  # fmt: skip
    for record in (r for r in records if "mode" in r):
        assert list(record["times"]) == ["glulam", "MLP alone", "sorted by torch", "torch"] and not record["left_out"]
        assert ("memory" in record) == (record["mode"] == "eager")
    assert records[0]["memory"]["glulam"] == {"peak": 2000}
    assert [r["of"] for r in records if r["op"] == "stages"] == ["forward", "train"]
    parts = [r["part"] for r in records if r["op"] == "parts"]
    by_index = ["FC1", "FC1, preactivation kept", "dglu", "dw1", "dw2"]
    assert parts == by_index + 2 * ["route", "Routing.from_topk"]
    assert_tables("layer", records)


@pytest.mark.filterwarnings("ignore:.*is left out")
def test_who_cannot_be_captured_is_left_out_of_replays(run, monkeypatch):
    def no_capture(run, pool=None):
        raise RuntimeError("capture failed")

    install = played_gpu.install

    def uncaptured(patch):
        mode = install(patch)
        patch.setattr(timing, "capture", no_capture)
        return mode

    monkeypatch.setattr(played_gpu, "install", uncaptured)
    with pytest.warns(UserWarning, match="forward, graph: torch is left out: RuntimeError: capture failed"):
        records = run("layer", ops=("forward",))
    graphs = [record for record in records if record["mode"] == "graph"]
    assert graphs and all(record["times"] == {} and record["left_out"]["glulam"] for record in graphs)


def test_l2_is_read_over_before_each_sample(monkeypatch):
    events, sizes = [], []
    evicting = SimpleNamespace(sum=lambda: events.append("read"))
    played_gpu.install(monkeypatch)
    monkeypatch.setattr(torch, "zeros", lambda size, device: sizes.append(4 * size) or evicting)
    sample = timing.flushed_sampler(lambda number: events.append("replay"))
    events.clear()
    assert sample() == 1000.0 and events == ["read", "replay"]
    assert sizes == [4 * played_gpu.PROPERTIES.L2_cache_size]


def test_the_budget_is_what_all_samples_take(run, monkeypatch):
    asked = []
    monkeypatch.setattr(mlp, "measure_device", lambda calls, budget_s: asked.append(budget_s) or {})
    monkeypatch.setattr(cases, "CASES", {"forward": (PREFILL, DECODE)})
    with played_gpu.install(monkeypatch):
        function_of("forward")(Options(budget_s=8.0, quack="off"))
    assert sum(asked) == pytest.approx(8.0) and len(asked) == 6


@pytest.mark.parametrize("case", [LAYER, STEP])
@pytest.mark.parametrize("op", [FORWARD, TRAIN])
@torch.no_grad()
def test_steps_make_up_the_layer(case, op):
    """The last of the forward is the result; the last of the backward x's gradient."""
    d = make_layer(case, device="cpu")
    made = {name: call() for name, call in layer.steps_of(d, op).items()}
    wanted = expected(d, TRAIN)
    results = [(made["combine"], wanted[0])]
    if op == TRAIN:
        d_router, d_x = made["backward of router GEMM"]
        results += [(d_router, wanted[2]), (d_x, wanted[1])]
        results += [(made["backward of FC1: dw1"], wanted[3]), (made["backward of FC2: dw2"], wanted[4])]
    assert list(made)[:2] == ["router GEMM", "route"]
    assert relative_error(*zip(*results, strict=True)) <= MAX_RELATIVE_ERROR


@torch.no_grad()
def test_parts_are_checked_against_the_data():
    parts = list(layer.layer_parts(make_layer(LAYER, device="cpu")))
    by_index = ["FC1", "FC1, preactivation kept", "dglu", "dw1", "dw2"]
    assert [part.name for part in parts] == [*by_index, "permute", "combine"]
    for part in parts:
        who = admitted("here", part.contestants())
        assert list(who.calls) == list(part.calls) and max(who.errors.values()) < 0.01
        if part.bytes:
            assert part.bytes == 2 * (LAYER.tokens + LAYER.rows) * LAYER.hidden
            broken = dataclasses.replace(part, wanted=part.wanted * 1.1)
            with pytest.warns(UserWarning, match="glulam is left out: wrong, relative error 0.09"):
                assert list(admitted("here", broken.contestants()).calls) == [layer.COPY]
