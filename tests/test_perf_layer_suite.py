"""`python -m perf layer`: its records, from steps and parts of a layer to tables, a plot and the command line."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import sys
import types

import pytest
import torch
from support import layer_results

import glulam
from perf import __main__ as cli
from perf import cells, layer, layer_parts, layer_plots, layer_stages, tables, training
from perf.layer_cases import FORWARD, TRAIN, LayerCase
from perf.layer_data import make_layer
from perf.layer_reference import expected
from perf.options import Options, command_line
from perf.suites import layer as suite
from perf.timing import Summary

CASE = LayerCase("small", 70, 64, 32, 5, 2, "zipf")
TOP_1 = LayerCase("top-1", 70, 64, 32, 4, 1)
STEP = LayerCase("step", 3, 64, 32, 8, 2)  # of decoding, with empty experts
LIMITS = {"cublas_8192_tflops": 780.0, "copy_tbps": 4.27, "launch_us": 4.7}


def data(case=CASE):
    return make_layer(case, device="cpu")


# Steps and parts


@pytest.mark.parametrize("case", [CASE, TOP_1, STEP])
@pytest.mark.parametrize("op", [FORWARD, TRAIN])
def test_steps_make_up_the_layer(case, op):
    """The last of the forward is the result; the last of the backward x's gradient."""
    d = data(case)
    made = {name: call() for name, call in layer_stages.stages(d, op).items()}
    wanted = expected(d, TRAIN)
    results = [(made["combine"], wanted[0])]
    if op == TRAIN:
        d_router, d_x = made["backward of router GEMM"]
        results += [(d_router, wanted[2]), (d_x, wanted[1])]
        results += [(made["backward of FC1: dw1"], wanted[3]), (made["backward of FC2: dw2"], wanted[4])]
        assert not made["FC1"][0].requires_grad
    assert list(made)[:2] == ["router GEMM", "route"]
    assert training.relative_error(*zip(*results, strict=True)) <= layer.MAX_RELATIVE_ERROR


class WithIndices:
    """The operators as they are where the backward's read tokens by index, played by copies."""

    def __init__(self):
        self.api = glulam

    def __getattr__(self, name):
        return getattr(self.api, name)

    def grouped_dglu(self, dy, w2, preact, *, rows=None, **given):
        return self.api.grouped_dglu(dy if rows is None else dy[rows], w2, preact, **given)

    def grouped_wgrad(self, dy, x, *, dy_rows=None, x_rows=None, **given):
        dy, x = dy if dy_rows is None else dy[dy_rows], x if x_rows is None else x[x_rows]
        return self.api.grouped_wgrad(dy, x, **given)


def test_steps_without_copies_where_operators_read_by_index(monkeypatch):
    api, d = WithIndices(), data()
    assert layer_stages.by_index(api)
    monkeypatch.setitem(sys.modules, "glulam", api)
    made = {name: call() for name, call in layer_stages.stages(d, TRAIN).items()}
    assert not any("permute" in name and name != "backward of permute" for name in made)
    wanted = expected(d, TRAIN)
    weights = made["backward of FC1: dw1"], made["backward of FC2: dw2"]
    assert training.relative_error(weights, wanted[3:]) <= layer.MAX_RELATIVE_ERROR


@pytest.fixture
def untimed(monkeypatch):
    """The suite on the CPU: every contestant is called, and takes 100 us, 101 us, ...; a graph is its call."""

    def summaries(names):
        return {name: Summary(100.0 + i, 99.0, 101.0, 3) for i, name in enumerate(names)}

    def measure_device(calls, *rest):
        for number, call in itertools.product(range(2), calls.values()):
            call(number)
        return summaries(calls)

    def interleave(samplers, *rest):
        for sample in samplers.values():
            sample()
        return summaries(samplers)

    def sampler(call, *rest, **options):
        return lambda: float(bool(call()) or 1)

    def capture(run, pool):
        return types.SimpleNamespace(replay=run)

    monkeypatch.setattr(suite, "measure_device", measure_device)
    monkeypatch.setattr(suite, "interleave", interleave)
    monkeypatch.setattr(suite, "host_sampler", sampler)
    monkeypatch.setattr(suite, "device_sampler", lambda call: sampler(lambda: call(0)))
    monkeypatch.setattr(suite, "capture", capture)
    monkeypatch.setattr(suite, "make_layer", data)
    monkeypatch.setattr(glulam, "preload", lambda: 0)
    monkeypatch.setattr(suite, "routing_parts", lambda: layer_parts.routing_parts("cpu"))
    monkeypatch.setattr(layer_parts, "ROUTED_TOKENS", (1, 64))
    monkeypatch.setattr(suite, "layer_cases", lambda *_: [CASE, STEP, dataclasses.replace(STEP, routing="zipf")])
    monkeypatch.setattr(suite, "PUBLISHED", (STEP,))
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    allocated = itertools.count(0, 1000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(allocated))


def test_the_suite_measures_every_operation(untimed):
    records = suite.run_layer(Options(9.0))
    assert {record["op"] for record in records} == set(suite.OPS)
    timed = [(r["case"]["name"], r["case"]["routing"], r["op"], r["mode"]) for r in records if "mode" in r]
    assert len(timed) == len(set(timed)) == 3 * 2 * 2
    for record in (r for r in records if "mode" in r):
        assert list(record["times"]) == [layer.OURS, layer.FLOOR, layer.SORTED, layer.TORCH]
        assert ("memory" in record) == (record["mode"] == suite.EAGER) and not record["left_out"]
    held = [r["memory"] for r in records if "memory" in r]
    assert all(set(m) == {layer.OURS, layer.SORTED, layer.TORCH} for m in held)
    assert held[0][layer.OURS] == {"peak": 1000} and held[1][layer.OURS] == {"peak": 1000, "kept": 1000}
    assert [(r["case"]["routing"], r["of"]) for r in records if r["op"] == "stages"] == [
        ("uniform", FORWARD),
        ("uniform", TRAIN),
    ]
    parts = [r["part"] for r in records if r["op"] == "parts"]
    by_index = ["FC1", "FC1, preactivation kept", "dglu", "dw1", "dw2"]
    assert parts == by_index + 2 * ["route", "Routing.from_topk"]
    for table in tables.tables_of({"suite": "layer", "limits": LIMITS, "records": records}):
        assert table.rows and all(len(row) == len(table.header) for row in table.rows)


def test_only_what_is_asked_for_is_measured(untimed):
    assert {r["op"] for r in suite.run_layer(Options(ops=("forward",)))} == {FORWARD}
    with pytest.raises(ValueError, match="--op 'fc1' is not known here; choose among: forward, train, stages, parts"):
        suite.run_layer(Options(ops=("fc1",)))


def test_many_tokens_are_not_replayed(untimed, monkeypatch):
    monkeypatch.setattr(suite, "GRAPH_TOKENS", CASE.tokens - 1)
    records = suite.run_layer(Options(ops=("forward",)))
    assert [r["mode"] for r in records] == ["eager", "eager", "graph", "eager", "graph"]


def test_who_cannot_be_captured_is_left_out_of_replays(untimed, monkeypatch):
    def no_capture(run, pool):
        raise RuntimeError("capture failed")

    monkeypatch.setattr(suite, "capture", no_capture)
    with pytest.warns(UserWarning, match="forward, graph: torch is left out: RuntimeError: capture failed"):
        records = suite.run_layer(Options(ops=("forward",)))
    graph = [r for r in records if r["mode"] == "graph"]
    assert graph and all(r["times"] == {} and r["left_out"][layer.OURS] for r in graph)


def test_parts_by_index_wait_for_operators_that_take_them(untimed, monkeypatch):
    with torch.no_grad():
        assert [p.name for p in layer_parts._gemm_parts(glulam, data())][:2] == ["FC1", "FC1, preactivation kept"]
        parts = list(layer_parts._gemm_parts(WithIndices(), data()))
        assert [p.name for p in parts][2:] == ["dglu", "dw1", "dw2"]
        for part in parts:
            record = suite._part_record(part, 1.0)
            assert list(record["times"]) == [layer_parts.BY_INDEX, layer_parts.SORTED]
            assert record["difference"] <= layer.MAX_RELATIVE_ERROR


def test_moving_rows_is_checked_against_the_data(untimed):
    with torch.no_grad():
        for part in layer_parts._moving_parts(glulam, data()):
            assert suite._part_record(part, 1.0)["difference"] < 0.01
            assert part.bytes == 2 * (CASE.tokens + CASE.rows) * CASE.hidden
            broken = dataclasses.replace(part, wanted=part.wanted * 1.1)
            with pytest.warns(UserWarning, match=f"{part.name}: relative error 0.09"):
                assert suite._part_record(broken, 1.0) is None


# Tables and plot


def shown():
    return {table.title: table for table in tables.tables_of(layer_results.result({}, LIMITS))}


def test_tables_show_times_rates_and_who_was_wrong():
    forward = next(table for title, table in shown().items() if "forward (`route`" in title)
    assert forward.header[3:] == ("glulam us", "rate (of limit)", "MLP alone us", "torch us", "SonicMoE us")
    eager, graph, sonic = forward.rows
    tflops = layer_results.QWEN3.flop(FORWARD) / 1250 * 1e-6
    assert eager[2:4] == ("eager", "1250 ± 10.0 %") and eager[4].startswith(f"{tflops:.0f} TF/s (")
    assert eager[5:] == ("900 (0.72x)", "2000 (1.60x)", "wrong")
    assert graph[2:] == ("graph", "1000 ± 10.0 %", graph[4], "900 (0.90x)", "failed", "-")
    assert sonic[3:] == ("wrong", "-", "-", "9000", "-")
    assert ("SonicMoE", "wrong, relative error 0.4") in [row[-2:] for row in shown()["Left out"].rows]


def test_tables_show_memory_steps_and_parts():
    found = shown()
    memory = found["Memory, GB: kept after the forward, and the peak of a call"]
    assert [row[3:] for row in memory.rows] == [("-", "-", "0.500", "0.900"), ("0.125", "-", "2.000", "-")]
    steps, train = (table for title, table in found.items() if title.startswith("Where our time goes"))
    assert steps.rows[0][1:] == ("100", "50.0", "500", "250", "50.0", "950", "1000")
    assert steps.rows[1][-1] == "-"  # where ours was wrong, there is no whole
    assert train.rows[0][-2:] == ("1900", "3000")
    by_index = found["Operators that read tokens by index, against the same on sorted rows"]
    assert by_index.rows[0][-2:] == ("380", "0.950")
    assert found["Moving rows"].rows[0][2:] == ("2.00", "2.00 TB/s (47 %)", "1.00 (0.50x)")
    assert found["Routing in a graph, 8 of 128 experts a token"].rows == [("512", "4.50", "3.00")]


def test_the_plot_is_of_what_was_measured_as_a_whole():
    result = layer_results.result({}, LIMITS)
    (forward,) = layer_plots.groups_of(result, FORWARD)
    assert forward.stages["FC1"] == 0.5 and forward.peers == {"MLP alone": 0.9}
    (train,) = layer_plots.groups_of(result, TRAIN)
    assert train.peers == {"torch": 2.0}
    assert cells.OURS not in train.peers


# Command line


def test_the_command_line_of_the_suite():
    line = "layer --op forward,parts --routing uniform --published"
    got = cli.chosen(cli.parser().parse_args(shlex.split(line)))
    assert got == Options(ops=("forward", "parts"), routings=("uniform",), published=True)
    assert command_line("layer", got) == f"python -m perf {line}"
    for line, part in {"layer": False, "layer --published": True, "layer --routing zipf": True}.items():
        assert cli._is_part(cli.parser().parse_args(line.split())) == part
    assert not cli._is_part(cli.parser().parse_args(["tiles", "--routing", "zipf"]))
