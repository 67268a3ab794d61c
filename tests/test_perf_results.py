"""From records to result files, tables, plots and pages; and what is stored in perf/results."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from support import layer_results

from perf import __main__ as cli
from perf import cells, overview, plots, report, results, tables, training
from perf.cases import DECODE, DEEPSEEK, MIXTRAL, QWEN3, SONIC, TINY
from perf.suites import SUITES, function_of
from perf.targets import HOST_OURS, target
from perf.timing import Summary

LIMITS = {"cublas_8192_tflops": 780.0, "copy_tbps": 4.27, "launch_us": 4.7}
STAMP = {
    "commit": "0123456789abcdef", "command": "python -m perf forward", "date": "2026-01-01T00:00:00+00:00",
    "gpu": "NVIDIA H200", "sms": "132", "host": "x86_64", "driver": "580", "sm_clock_mhz": "1700",
    "sm_clock_max_mhz": "1980", "memory_clock_mhz": "3201", "power_w": "690", "temperature_c": "60",
    "versions": {"torch": "2.11.0"},
}  # fmt: skip
STORED = {path.stem: results.read(path) for path in sorted(results.RESULTS.glob("*.csv"))}
TUNING = {"quack tuned": {"dw1": {"config": "c", "timed": 40, "left_out": 4, "seconds": 2.5}}}


def times(**medians):
    return {name: dataclasses.asdict(Summary(us, us * 0.9, us * 1.1, 9)) for name, us in medians.items()}


def record(case, op, more=None, **medians):
    """Return a record of a contest whose routing is even."""
    routed = {"skew": {"max_over_mean": 1.0, "empty_experts": 0}, "active_experts": case.experts}
    return {"case": dataclasses.asdict(case), **routed, "op": op, **(more or {}), "times": times(**medians)}


def result(suite, *records):
    return results.make_result(suite, STAMP, LIMITS, list(records))


def backward(op, routing, us):
    case = dataclasses.replace(MIXTRAL, routing=routing)
    more = {"flop": training.flop(MIXTRAL, op), "bytes": training.bytes_moved(MIXTRAL, op, 8), "tuning": TUNING}
    return record(case, op, more, **{"glulam": us, "dense": 350.0, "quack tuned": 500.0})


def layer_of(tokens, **more):
    return {"name": "m", "tokens": tokens, "hidden": 128, "intermediate": 64, "experts": 8, "top_k": 2, **more}


def serving(op, tokens, **medians):
    work = {"flop": 10**6, "bytes": 10**8}
    return {"case": layer_of(tokens, world_experts=64), "op": op, **work, "times": times(**medians)}


def mhc(op, direction="forward", s=8192, **more):
    size = {"s": s, "b": 4, "n": 4, "c": 7168}
    medians = times(**{"glulam": 600.0, "torch.compile": 900.0})
    return {"op": op, "direction": direction, "size": size, "bytes": 2_349_000_000, **more, "difference": 0.01,
            "times": medians}  # fmt: skip


def across(kind, mode, **times):
    return {"kind": kind, "layer": "small", "tokens": 64, "mode": mode, "world": 2, "bytes": 3.6e6, "put_gbps": 360.0,
            "times": times}  # fmt: skip


TRANSFORMERS = {"model": "Qwen3", "tokens": 1, "mode": "graph"}
ENDS = {"dispatch": 20.0, "combine": 25.0, "both": 60.0}
ALONE = {"median_us": 3000.0, "mhz": 1400.0, "watts": 690.4, "capped": 1.0}
LORA = times(**{"the layer alone": 2000.0, "lora": 2500.0, "materialised": 5000.0})
TILES = {"model": "m", "op": "fc1", "routing": "uniform", "experts": 8, "n": 64, "k": 64}
PORTABLE = {"portable": 4000.0, "native": 3000.0, "torch": 5000.0, "mma.sync alone": 1000.0}
MMA = {"mma_flop": 5 * 10**11}
MEMORY = {"peak_bytes": {"glulam": 3e9, "torch": 4.5e9}, "saved_bytes": {"glulam": 1e9}, "needed_bytes": 1e9}
HOST = {"op": "host", "times": times(**{HOST_OURS: 12.5, "torch mlp (out allocated)": 50.0})}

MADE = {
    "forward": result(
        "forward",
        record(MIXTRAL, "fc1", glulam=2800.0, dense=2792.0, torch=4200.0),
        record(DECODE[0], "fc1", glulam=240.0, torch=400.0),
        record(MIXTRAL, "mlp", glulam=4000.0, dense=4100.0, torch=6000.0),
    ),
    "backward": result(
        "backward",
        *(backward(op, *of) for of in (("uniform", 400.0), ("half-empty", 440.0)) for op in training.KERNELS),
    ),
    "train": result(
        "train",
        record(QWEN3, "layer", {"flop": training.flop(QWEN3, "layer"), **MEMORY}, glulam=1500.0, torch=3000.0),
        {"op": "host", "times": times(layer=99.0)},
    ),
    "host": result("host", HOST, {"op": "differences", "times": {"allocating": {"median_us": 3.5}}}),
    "graph": result("graph", record(TINY, "mlp", {"replays_equal_to_eager": 4}, **{"glulam eager": 12.0})),
    "transformers": result(
        "transformers",
        {**TRANSFORMERS, "errors": {"glulam": 4e-3, "eager": 7e-3, "x": 5e-3}, "times": times(glulam=50.0, x=125.0)},
        {**TRANSFORMERS, "times": times(**{"x": 9000.0, "glulam": 8000.0, "glulam, mxfp4": 4000.0})},
    ),
    "distributed": result(
        "distributed",
        across("ends", "eager", symmetric={**ENDS, "graph": 30.0}, all_to_all={**ENDS, "both": 240.0}),
        across("layer", "eager", symmetric={"us": 100.0}, all_to_all={"us": 250.0}, **{"experts alone": {"us": 80.0}}),
        across("layer", "graph", symmetric={"us": 50.0}, **{"experts alone": {"us": 40.0}}),
    ),
    "power": result("power", {**record(MIXTRAL, "fc1", {"flop": MIXTRAL.flop("fc1")}), "times": {"glulam": ALONE}}),
    "frozen": result(
        "frozen",
        record(MIXTRAL, "dx", {"recipe": "mxfp4"}, **{"mxfp4": 100.0, "dequantised": 250.0, "bf16": 125.0}),
    ),
    "lora": result(
        "lora",
        {"case": layer_of(64), "recipe": "bf16", "rank": 16,
         "peak_bytes": dict.fromkeys(LORA, 2**30) | {"lora": 2**29}, "times": LORA},
    ),
    "fp8": result(
        "fp8",
        record(MIXTRAL, "mlp", **{"bf16": 3000.0, "mxfp8": 2000.0, "mxfp8_exact": 4000.0, "torch fp8": 2400.0}),
        record(DECODE[0], "mlp", mxfp8=50.0, mxfp4_weight_only=100.0),
    ),
    "serving": result(
        "serving",
        serving("bf16", 16, glulam=100.0, first=125.0, second=90.0),
        serving("bf16", 64, glulam=200.0, first=150.0),
        serving("mxfp8", 16, glulam=50.0, third=100.0),
    ),
    "portable": result(
        "portable",
        record(MIXTRAL, "mlp", MMA, **PORTABLE),
        record(DECODE[0], "mlp", MMA, **{**PORTABLE, "portable": 270.0, "portable mxfp8_weight_only": 180.0}),
    ),
    "mhc": result(
        "mhc", mhc("aggregate"), mhc("pre", "backward"), mhc("sinkhorn", s=64 * 8192, warp_instructions=80_000_000),
        {"op": "host", "times": times(bare=5.0)},
    ),
    "compare": result(
        "compare",
        record(MIXTRAL, "fc1", {"form": "grouped_glu", "flop": MIXTRAL.flop("fc1"), "bytes": MIXTRAL.bytes("fc1", 8)},
               dense=2792.0, t128=2800.0, t64=3000.0),
    ),
    "tiles": result(
        "tiles",
        {**TILES, "rows_per_expert": 1, "us": {"a": 5.0, "b": 4.0}},
        {**TILES, "rows_per_expert": 64, "us": {"b": 6.0}},
    ),
    "layer": layer_results.result(STAMP, LIMITS),
}  # fmt: skip
ALL = {**MADE, **STORED}


def tflops(case, op, us):
    return f"{case.flop(op) / us * 1e-6:.0f}"


def of_copy(us, bits):
    """Return the share of a device copy's rate that the bytes of Qwen3's decoding reach."""
    return f"{(128 * 3 * 2048 * 768 * bits / 8 + 2 * 512 * 2 * (2048 + 768)) / us * 1e-6 / LIMITS['copy_tbps']:.2f}"


OF_MMA = f"{MIXTRAL.flop('mlp') / 4000e-6 / 5e14:.2f}"
OF_PEAK = f"{MIXTRAL.flop('fc1') / 3000e-6 / (4096 * 132 * 1400e6):.2f}"
CELLS = [
    ("forward", 0, 0, 2, ("2800 ± 10.0 %", "687 TF/s (88 %)", "2792 (1.00x)", "4200 (1.50x)")),
    ("forward", 0, 1, -2, ("-", "400 (1.67x)")),
    ("forward", 2, 0, 0, ("Mixtral-8x7B", "uniform", "fc1", "dense", "0.997", "1.00")),
    ("forward", 2, 1, 0, ("Qwen3 decode", "uniform", "fc1", "device copy", "0.789", "0.92")),
    ("backward", 2, 0, -2, ("350 (0.88x)", "500 (1.25x)")),
    ("backward", 4, 0, 0, ("Mixtral-8x7B", "dglu", "400", "440", "1.10")),
    ("backward", 5, 0, 0, ("Mixtral-8x7B", "uniform", "dw1", "dense", "0.875", "0.90")),
    ("train", 0, 0, 2, ("1500 ± 10.0 %", "618 TF/s (79 %)", "3000 (2.00x)")),
    ("train", 1, 0, 1, ("3.00", "4.50", "1.00", "-", "1.00")),
    ("train", 2, 0, 0, ("layer", "99.0", "89.1", "108.9")),
    ("host", 1, 0, 0, ("allocating", "3.50")),
    ("graph", 0, 0, 1, ("uniform", "12.0", "4")),
    ("transformers", 0, 0, 4, ("125 (2.50x)", "4.0e-03 (5.0e-03)")),
    ("transformers", 1, 0, 4, ("9000 (1.12x)", "4000 (0.50x)", "-")),
    ("distributed", 0, 0, 0, ("small, 64", "10.0", "20.0 (0.50)", "25.0 (0.40)", "60.0", "30.0", "240.0")),
    ("distributed", 1, 0, 0, ("small, 64, eager", "100.0", "250.0", "2.50", "20.0", "1.60")),
    ("distributed", 1, 1, 1, ("50.0", "-", "-", "10.0", "1.60")),
    ("power", 0, 0, 1, ("fc1", "glulam", "3000", "641", "1400", "690", "100%", OF_PEAK)),
    ("frozen", 0, 0, 1, ("dx", "100 (2.50x, 1.25x)")),
    ("lora", 0, 0, 1, ("bf16", "2000", "2500", "1.25", "materialised 2.00x", "1024 / 512 / 1024")),
    ("fp8", 0, 0, 1, ("2000 (1.50x, 1.20x)", "4000 (0.75x, 0.60x)", "-", tflops(MIXTRAL, "mlp", 2000), "3000", "2400")),
    ("fp8", 0, 1, 1, ("50.0 (-, -)", "-", "100 (-, -)", tflops(DECODE[0], "mlp", 50), "-", "-")),
    ("fp8", 1, 0, 0, (DECODE[0].label, of_copy(50, 8), "-", of_copy(100, 4.25), "-")),
    ("fp8", 2, 0, 0, ("Mixtral-8x7B", "mxfp8_exact", "bf16", "0.750", "0.80")),
    ("serving", 0, 0, 3, ("125 (1.25x)", "90.0 (0.90x)")),
    ("serving", 0, 1, 3, ("150 (0.75x)", "-")),
    ("serving", 2, 0, 0, ("bf16", "first", "0.75", "1.00", "1 of 2")),
    ("serving", 2, 1, 0, ("bf16", "second", "0.90", "0.90", "0 of 1")),
    ("portable", 0, 0, 1, ("4000.0", "0.75", "1.25", OF_MMA, "-", "-")),
    ("portable", 0, 1, 1, ("270.0", "11.11", "18.52", "-", of_copy(270, 16), "1.50")),
    ("portable", 1, 0, 0, ("Qwen3 decode", "portable mxfp8_weight_only", "1.500", "1.60")),
    ("mhc", 0, 0, 3, ("600.0", "2.349", "0.92", "-", "900 (1.50)", "582", "0.01")),
    ("mhc", 0, 2, 6, ("0.13", "900 (1.50)", "-", "0.01")),  # 80e6 / (600 us, 132 SMs, 4 a cycle, 1980 MHz)
    ("compare", 0, 1, 0, ("t128", "2800*", "0.997", "687 TF/s (88 %)")),
    ("tiles", 0, 0, 0, ("a", "1.25", "-")),
]
"""Suite, table, row, first column, and the cells from there on."""


@pytest.mark.parametrize(("suite", "number", "row", "first", "wanted"), CELLS)
def test_cells_are_what_records_say(suite, number, row, first, wanted):
    assert tables.tables_of(MADE[suite])[number].rows[row][first:] == wanted


@pytest.mark.parametrize("name", ALL)
def test_results_survive_the_disk_and_their_tables_are_rectangular(tmp_path, name):
    path = tmp_path / "new" / "one.csv"
    results.write(ALL[name], path)
    (got,) = results.read_all(path.parent)
    assert all(got[field] == ALL[name][field] for field in ("suite", "stamp", "limits", "tuned"))
    made = tables.tables_of(got)
    assert made == tables.tables_of(ALL[name])
    assert all(table.rows and all(len(row) == len(table.header) for row in table.rows) for table in made)
    first = path.read_text()
    results.write(got, path)
    assert path.read_text() == first


def test_every_suite_has_a_function_tables_and_results():
    assert {*SUITES, *results.TRAINING} == set(tables.TABLES)
    assert {made["suite"] for made in ALL.values()} == set(tables.TABLES)
    assert all(callable(function_of(name)) for name in SUITES)
    with pytest.raises(ValueError, match="no tables for suite 'sideways'"):
        tables.tables_of({**MADE["forward"], "suite": "sideways"})


def test_a_file_of_results_has_a_line_a_contestant(tmp_path):
    both = {"case": {"name": "a, b"}, "op": "fc1", "losses": [1.0, 2.5], "ok": True}
    second = {**both, "op": "fc2"}
    none = {**both, "times": {}, "left_out": {"torch": "failed"}}
    first = {"times": {"glulam": {"us": 4.2712345}, "torch": {"us": 2e9}}, "left_out": {"torch 1.2": "failed\ntwice"}}
    path = tmp_path / "s.csv"
    results.write(
        results.make_result("s", {"gpu": "x: 1"}, {"copy_tbps": 4.2712345}, [both | first, second, none]), path
    )
    assert (
        path.read_text()
        == """\
# perf result, schema 2
# suite: s
# stamp.gpu: x: 1
# limits.copy_tbps: 4.2712
case.name,op,losses,ok,contestant,times.us,left_out
"a, b",fc1,[1 2.5],True,glulam,4.2712,
"a, b",fc1,[1 2.5],True,torch,2000000000,
"a, b",fc1,[1 2.5],True,torch 1.2,,failed twice
"a, b",fc2,[1 2.5],True,,,
"a, b",fc1,[1 2.5],True,torch,,failed
"""
    )
    got, other, last = results.read(path)["records"]
    assert got["left_out"] == {"torch 1.2": "failed twice"} and got["times"]["torch"] == {"us": 2e9}
    assert other == second and last == none and got["case"] == {"name": "a, b"}


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [("odd.csv", "a,b\n", "not a 'perf result"), ("odd.csv", "", "not a"), ("odd.json", '{"schema": 1}', "JSON")],
)
def test_a_file_of_another_kind_is_refused_by_name(tmp_path, name, content, why):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name} is {why}.*; measure it again"):
        results.read_all(tmp_path)


def test_default_path_names_suite_and_gpu():
    assert results.default_path("host", "NVIDIA H200").name == "host-h200.csv"


def test_numbers_are_read_in_what_bounds_the_case():
    assert cells.ratio(record(MIXTRAL, "fc1", glulam=2000.0, torch=3000.0), "torch") == 1.5  # above 1 we are faster
    assert cells.rate(record(MIXTRAL, "fc1"), 2825.0, LIMITS) == "681 TF/s (87 %)"
    assert cells.rate(record(DECODE[0], "fc1"), 214.0, LIMITS) == "3.78 TB/s (88 %)"
    assert [cells.microseconds(us) for us in (2825.4, 365.2, 24.31, 4.712)] == ["2825", "365", "24.3", "4.71"]


def test_targets_know_peers_routings_and_operations():
    def of(case, op, contestant, routing="uniform"):
        return target({"case": dataclasses.asdict(dataclasses.replace(case, routing=routing)), "op": op}, contestant)

    assert of(QWEN3, "fc1", "quack tuned") == 1.10 and of(QWEN3, "fc1", "quack tuned", "dirichlet") == 1.25
    assert of(QWEN3, "fc2", "dense") == 0.92 and of(QWEN3, "fc2", "torch") == 1.1
    assert of(DECODE[0], "fc2", "torch", "zipf") == 1.35 and of(QWEN3, "mlp", "torch") is None
    assert of(MIXTRAL, "dw2", "dense") == 0.9 and of(QWEN3, "dw2", "dense") is None
    assert of(SONIC, "layer", "torch") == 1.25 and of(DEEPSEEK, "layer", "torch") is None


# Pages, plots, console


def test_both_pages_hold_what_the_result_files_say():
    """Every number in them is one of perf/results/*.csv: they are as `python -m perf report` writes them."""
    kept, page = list(STORED.values()), report.README.read_text()
    assert report.fill(page, report.summary(kept)) == page
    assert report.results_page(kept) == (results.RESULTS / "README.md").read_text()


def test_report_fills_both_pages(tmp_path, monkeypatch):
    for suite, made in MADE.items():
        results.write(made, tmp_path / f"{suite}.csv")
    readme = tmp_path / "main.md"
    readme.write_text(f"# Before\n{report.BEGIN}\nold numbers\n{report.END}\nafter\n")
    monkeypatch.setattr(report, "write_plots", lambda *_: [])  # drawing takes half a minute
    report.write_report(tmp_path, readme)
    page, main = (tmp_path / "README.md").read_text(), readme.read_text()
    assert "| Mixtral-8x7B (E 8, H 4096, I 14336, T 8192) | uniform (1.0) | 2800 ± 10.0 % |" in page
    assert "python -m perf forward" in page and "012345678" in page and "780 TF/s" in page
    assert main.startswith("# Before\n") and main.endswith("\nafter\n") and "old numbers" not in main
    assert "](overview-h200.svg)" in page and "](perf/results/overview-h200.svg)" in main
    assert "QuACK was tuned for each of 1 cases and kernels" in page and "40 timed, 2 s with compiling" in page
    assert page.count(".svg") == 1


def test_report_without_results_says_so():
    assert "Nothing has been measured yet" in report.results_page([])
    assert "Nothing has been measured yet" in report.summary([MADE["graph"]])


@pytest.mark.parametrize("page", ["no marks", report.END + report.BEGIN])
def test_report_needs_its_marks(page):
    with pytest.raises(ValueError, match="needs the marks"):
        report.fill(page, "text")


DRAWN = {"plots/forward-h200.svg": b"Mixtral-8x7B", "plots/roofline-h200.svg": b"useful TF/s",
         "plots/layer-h200.svg": b"router GEMM", "overview-h200.svg": b"torch 4.00",
         "plots/megatron-alltoall-h200.svg": b"sequential"}  # fmt: skip


def test_plots_are_drawn_and_do_not_change(tmp_path):
    given = [MADE["forward"], MADE["layer"], MADE["host"], STORED["megatron-alltoall-h200"]]
    paths = plots.write_plots(given, tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in paths} == set(DRAWN)
    before = {path: path.read_bytes() for path in paths}
    assert all(b"<svg" in before[tmp_path / name] and text in before[tmp_path / name] for name, text in DRAWN.items())
    assert {path: path.read_bytes() for path in plots.write_plots(given, tmp_path)} == before


@pytest.mark.parametrize("suite", ["rows", "skew"])
def test_sweeps_are_drawn(tmp_path, suite):
    (path, *_) = plots.write_plots([{**MADE["forward"], "suite": suite}], tmp_path)
    assert b"Qwen3 decode, fc1" in path.read_bytes()


def test_without_results_there_are_no_plots_and_no_need_for_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plots.write_plots([MADE["graph"]], tmp_path) == []
    with pytest.raises(RuntimeError, match=r"drawing needs matplotlib .*; pip install 'glulam\[plots\]'"):
        plots.write_plots([MADE["forward"]], tmp_path)


def test_tables_show_on_a_console(capsys):
    for made in MADE.values():
        for table in tables.tables_of(made):
            cli.show(table, cli._console())
    assert "4200 (1.50x)" in capsys.readouterr().out


# The overview


def overview_results():
    """The result files that the overview is made of, of round times."""
    skewed, decode = dataclasses.replace(QWEN3, routing="dirichlet"), dataclasses.replace(QWEN3, name="Qwen3 decode")
    prefill = {"torch": 1000.0, "quack tuned": 500.0}
    yield result(
        "forward",
        record(skewed, "mlp", glulam=500.0, **prefill),
        record(QWEN3, "fc1", glulam=1.0, torch=900.0),
        record(QWEN3, "mlp", glulam=400.0, dense=1.0, **prefill),
    )
    yield result("decode", record(decode, "mlp", glulam=250.0, torch=500.0))
    yield result("fp8", record(QWEN3, "mlp", **{"mxfp8": 200.0, "bf16": 400.0, "torch fp8": 300.0}))
    yield MADE["train"]
    yield MADE["host"]
    yield result("mhc", mhc("pre"), mhc("aggregate", "backward"))


def test_the_overview_has_a_row_for_each_kind_of_work():
    made = list(overview_results())
    prefill, decode, fp8, train, host, streams = overview.overview_table(overview.overview(made)).rows
    reached = int(tflops(QWEN3, "mlp", 400))
    assert prefill[:2] == ("prefill: `grouped_mlp`, 32768 rows", "400") and prefill[2].startswith(f"{reached} TF/s (")
    assert prefill[3] == "torch 2.50x (2.00, 2.50); QuACK 1.25x (1.00, 1.25)"
    assert (decode[1], decode[3]) == ("250", "torch 2.00x (2.00, 2.00)")
    assert fp8[2:] == (f"{tflops(QWEN3, 'mlp', 200)} TF/s", "BF16 2.00x (2.00, 2.00); torch's FP8 1.50x (1.50, 1.50)")
    assert (train[1], train[3]) == ("1500", "torch 2.00x (2.00, 2.00)")
    assert host == ("host: until `grouped_mlp` returns", "12.5", "-", "torch 4.00x")
    assert streams[1:] == ("600", "3.92 TB/s (92 %)", "torch.compile 1.50x (1.50, 1.50)")


def test_the_overview_is_of_one_gpu():
    forward, *_ = overview_results()
    slower = result("forward", record(QWEN3, "mlp", glulam=999.0))
    slower["stamp"] = {**STAMP, "gpu": "NVIDIA H100"}
    assert [line.us for line in overview.overview([forward, MADE["host"], slower])][0] == 400.0
