"""From records to result files, tables, plots and pages; and the files stored in perf/results."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from examples import training_curves
from glulam.tuner.timing import Summary
from perf import __main__ as cli
from perf import cells, report, results, tables
from perf.cases import DECODE, DEEPSEEK, MIXTRAL, PUBLISHED, QWEN3, SONIC, ServingCase
from perf.suites import SUITES, function_of
from perf.targets import HOST_OURS, target

LIMITS = {"cublas_8192_tflops": 780.0, "copy_tbps": 4.27, "launch_us": 4.7}
STAMP = {
    "commit": "0123456789abcdef", "command": "python -m perf forward", "date": "2026-01-01", "gpu": "NVIDIA H200",
    "driver": "580", "sm_clock_mhz": "1700", "sm_clock_max_mhz": "1980", "power_w": "690",
    "versions": {"torch": "2.11.0"},
}  # fmt: skip
LAYER = PUBLISHED[1]
STORED = {path.stem: results.read(path) for path in sorted(results.RESULTS.glob("*.csv"))}
TUNING = {"dw1": {"config": "c", "timed": 40, "seconds": 2.5}}


def times(**medians):
    return {name: dataclasses.asdict(Summary(us, us * 0.9, us * 1.1, 9)) for name, us in medians.items()}


def record(case, op, more=None, **medians):
    """Return a record of a contest whose routing is even."""
    routed = {"skew": {"max_over_mean": 1.0, "empty_experts": 0}, "active_experts": case.experts}
    return {"case": dataclasses.asdict(case), **routed, "op": op, **(more or {}), "times": times(**medians)}


def result(suite, *records):
    return results.make_result(suite, STAMP, LIMITS, list(records))


def serving(op, tokens, **medians):
    case = ServingCase("m", tokens, 128, 64, 8, 2, world_experts=64)
    return record(case, op, {"flop": 10**6, "bytes": 10**8}, **medians)


def layer(mode, left_out, case=LAYER, **medians):
    return {**record(case, "forward", {"flop": case.flop("forward"), "mode": mode}, **medians), "left_out": left_out}


def compared(routing, **medians):
    work = {"form": "grouped_glu", "flop": MIXTRAL.flop("fc1"), "bytes": MIXTRAL.bytes("fc1", 8)}
    return record(dataclasses.replace(MIXTRAL, routing=routing), "fc1", work, **medians)


HOST = {"op": "host", "times": times(**{HOST_OURS: 12.5, "torch mlp (out allocated)": 50.0})}
TRAINED = {"flop": QWEN3.flop("layer"), "tuning": TUNING}
MADE = {
    "forward": result(
        "forward",
        record(MIXTRAL, "fc1", glulam=2800.0, dense=2792.0, torch=4200.0),
        record(DECODE[0], "fc1", glulam=240.0, torch=400.0),
        record(MIXTRAL, "mlp", glulam=4000.0, dense=4100.0, torch=6000.0),
    ),
    "train": result("train", record(QWEN3, "layer", TRAINED, glulam=1500.0, torch=3000.0)),
    "host": result("host", HOST, {"op": "differences", "times": {"allocating": {"median_us": 3.5}}}),
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
    "compare": result(
        "compare",
        compared("uniform", dense=2792.0, t128=2800.0, t64=3000.0),
        compared("zipf", dense=2792.0, t64=2792.0),
    ),
    "layer": result(
        "layer",
        layer("eager", {"SonicMoE": "wrong, relative error 0.4"}, glulam=1250.0, torch=2000.0),
        layer("graph", {"torch": "RuntimeError: no capture"}, glulam=1000.0),
        layer("eager", {"glulam": "wrong, relative error nan"}, PUBLISHED[0], torch=9000.0),
    ),
}  # fmt: skip
"""Results of suites that perf/results has none of, and those with cells that its results do not show."""
ALL = {**MADE, **STORED}


def tflops(case, op, us):
    return f"{case.flop(op) / us * 1e-6:.0f}"


def of_copy(us, bits):
    """Return the share of a device copy's rate that the bytes of Qwen3's decoding reach."""
    return f"{(128 * 3 * 2048 * 768 * bits / 8 + 2 * 512 * 2 * (2048 + 768)) / us * 1e-6 / LIMITS['copy_tbps']:.2f}"


CELLS = [
    ("forward", 0, 0, 2, ("2800 ± 10.0 %", "687 TF/s (88 %)", "2792 (1.00x)", "4200 (1.50x)")),
    ("forward", 0, 1, -2, ("-", "400 (1.67x)")),
    ("forward", 2, 0, 0, ("Mixtral-8x7B", "uniform", "fc1", "dense", "0.997", "1.00")),
    ("forward", 2, 1, 0, ("Qwen3 decode", "uniform", "fc1", "device copy", "0.789", "0.92")),
    ("fp8", 0, 0, 1, ("2000 (1.50x, 1.20x)", "4000 (0.75x, 0.60x)", "-", tflops(MIXTRAL, "mlp", 2000), "3000", "2400")),
    ("fp8", 0, 1, 1, ("50.0 (-, -)", "-", "100 (-, -)", tflops(DECODE[0], "mlp", 50), "-", "-")),
    ("fp8", 1, 0, 0, (DECODE[0].label, of_copy(50, 8), "-", of_copy(100, 4.25), "-")),
    ("fp8", 2, 0, 0, ("Mixtral-8x7B", "mxfp8_exact", "bf16", "0.750", "0.80")),
    ("serving", 0, 0, 3, ("125 (1.25x)", "90.0 (0.90x)")),
    ("serving", 0, 1, 3, ("150 (0.75x)", "-")),
    ("serving", 2, 0, 0, ("bf16", "first", "0.75", "1.00", "1 of 2")),
    ("serving", 2, 1, 0, ("bf16", "second", "0.90", "0.90", "0 of 1")),
    ("compare", 0, 0, 0, ("dense", "2792", "-", "689 TF/s (88 %)", "2792", "-", "689 TF/s (88 %)")),
    ("compare", 0, 1, 0, ("t128", "2800*", "0.997", "687 TF/s (88 %)", "-", "-", "-")),
    ("compare", 0, 2, 0, ("t64", "3000", "0.931", "641 TF/s (82 %)", "2792*", "1.000", "689 TF/s (88 %)")),
    ("layer", 0, 0, 2, ("eager", "1250 ± 10.0 %", "247 TF/s (32 %)", "2000 (1.60x)", "wrong")),
    ("layer", 0, 1, 2, ("graph", "1000 ± 10.0 %", "309 TF/s (40 %)", "failed", "-")),
    ("layer", 0, 2, 2, ("eager", "wrong", "-", "9000", "-")),
    ("layer", 1, 0, 4, ("SonicMoE", "wrong, relative error 0.4")),
]
"""Suite, table, row, first column, and the cells from there on."""


@pytest.mark.parametrize(("suite", "number", "row", "first", "wanted"), CELLS)
def test_cells_are_what_records_say(suite, number, row, first, wanted):
    assert tables.tables_of(MADE[suite])[number].rows[row][first:] == wanted


@pytest.mark.parametrize("name", ALL)
def test_results_survive_the_disk_and_their_tables_are_rectangular_and_show(tmp_path, name, capsys):
    path = tmp_path / "new" / "one.csv"
    results.write(ALL[name], path)
    (got,) = results.read_all(path.parent)
    assert all(got[field] == ALL[name][field] for field in ("suite", "stamp", "limits", "tuned"))
    made = tables.tables_of(got)
    assert made == tables.tables_of(ALL[name])
    assert all(table.rows and all(len(row) == len(table.header) for row in table.rows) for table in made)
    for table in made:
        cli.show(table, cli._console())
    assert made[0].header[0] in capsys.readouterr().out
    first = path.read_text()
    results.write(got, path)
    assert path.read_text() == first


def test_every_suite_has_a_function_tables_and_results():
    assert {*SUITES, *results.TRAINING, "graph"} == set(tables.TABLES)
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


@pytest.mark.parametrize("content", ["a,b\n", ""])
def test_a_file_of_another_kind_is_refused_by_name(tmp_path, content):
    (tmp_path / "odd.csv").write_text(content)
    with pytest.raises(ValueError, match="odd.csv is not a 'perf result.*; measure it again"):
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


def test_all_pages_hold_what_the_result_files_say():
    """Every number in them is one of perf/results/*.csv: they are as `python -m perf report` writes them."""
    kept = list(STORED.values())
    assert set(report.FILLED) == {report.README, report.SERVING}
    for path, text in report.FILLED.items():
        assert report.fill(path.read_text(), text(kept)) == path.read_text() and report.NOTHING not in text(kept)
    assert report.results_page(kept) == (results.RESULTS / "README.md").read_text()


def test_report_fills_its_pages(tmp_path, monkeypatch):
    for suite, made in MADE.items():
        results.write(made, tmp_path / f"{suite}.csv")
    readme = tmp_path / "main.md"
    readme.write_text(f"# Before\n{report.BEGIN}\nold numbers\n{report.END}\nafter\n")
    monkeypatch.setattr(report, "save", lambda draw, path: path.touch())
    report.write_report(tmp_path, {readme: report.summary})
    page, main = (tmp_path / "README.md").read_text(), readme.read_text()
    assert "| Mixtral-8x7B (E 8, H 4096, I 14336, T 8192) | uniform (1.0) | 2800 ± 10.0 % |" in page
    assert "python -m perf forward" in page and "012345678" in page and "780 TF/s" in page
    assert main.startswith("# Before\n") and main.endswith("\nafter\n") and "old numbers" not in main
    assert "](overview-h200.svg)" in page and "](perf/results/overview-h200.svg)" in main
    assert "QuACK was tuned for each of 1 cases and kernels" in page and "40 timed, 2 s with compiling" in page
    assert page.count(".svg") == 1 and (tmp_path / "overview-h200.svg").exists()


def test_report_without_results_says_so():
    assert "Nothing has been measured yet" in report.results_page([])
    assert "Nothing has been measured yet" in report.summary([MADE["compare"]])
    assert "Nothing has been measured yet" in report.peers_of_serving([MADE["forward"]])


@pytest.mark.parametrize("page", ["no marks", report.END + report.BEGIN])
def test_report_needs_its_marks(page):
    with pytest.raises(ValueError, match="needs the marks"):
        report.fill(page, "text")


def test_plots_are_drawn_and_do_not_change(tmp_path):
    overview_of = report.overview([MADE["forward"], MADE["host"]])
    draws = {
        "overview.svg": (lambda: report.draw_overview(overview_of), b"torch 4.00"),
        "curves.svg": (lambda: training_curves.draw(STORED["megatron-alltoall-h200"]), b"sequential"),
    }
    for name, (draw, text) in draws.items():
        report.save(draw, tmp_path / name)
        before = (tmp_path / name).read_bytes()
        assert b"<svg" in before and text in before
        report.save(draw, tmp_path / name)
        assert (tmp_path / name).read_bytes() == before


def test_without_matplotlib_drawing_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match=r"drawing needs matplotlib .*; pip install 'glulam\[plots\]'"):
        report.save(lambda: report.draw_overview([]), tmp_path / "overview.svg")
    results.write(MADE["compare"], tmp_path / "compare.csv")
    (tmp_path / "main.md").write_text(report.BEGIN + report.END)
    assert len(report.write_report(tmp_path, {tmp_path / "main.md": report.summary})) == 2  # the pages, and no plot


# The overview


def test_the_overview_is_of_one_gpu():
    skewed = dataclasses.replace(QWEN3, routing="dirichlet")
    slower = result("forward", record(QWEN3, "mlp", glulam=999.0))
    slower["stamp"] = {**STAMP, "gpu": "NVIDIA H100"}
    prefill = result(
        "forward",
        record(skewed, "mlp", glulam=500.0, torch=1000.0),
        record(QWEN3, "mlp", **{"glulam": 400.0, "torch": 1000.0, "quack tuned": 500.0}),
    )
    first, host = report.overview([prefill, MADE["host"], slower])
    assert (first.us, first.peers) == (400.0, {"torch": [2.5, 2.0, 2.5], "QuACK": [1.25, 1.25]})
    assert (host.us, host.peers) == (12.5, {"torch": [4.0]})
