"""The parts of perf that need no GPU: what is measured, how samples become numbers, how numbers become tables."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perf import __main__ as cli
from perf import contestants, report, results, stamp, tables, training
from perf.cases import (
    DECODE,
    DEEPSEEK,
    MIXTRAL,
    OPS,
    PREFILL,
    QWEN3,
    SONIC,
    TINY,
    Case,
    forward_cases,
    graph_cases,
    select,
    train_cases,
)
from perf.options import Options
from perf.problem import MAX_COPIES, ROTATION_BYTES, copies_needed, make_problem, offsets
from perf.routing import ROUTINGS, apportion, group_sizes, skew
from perf.suites import SUITES
from perf.suites.host import BARE_MLP, BARE_MM, BARE_NOTHING, WITH_OUT, WITHOUT_OUT, derived
from perf.suites.train import HOST_ITEMS
from perf.timing import Summary, interleave, percentile, summarise

# Cases


def test_flop_counts_the_useful_work():
    assert MIXTRAL.flop("fc1") == 2 * 8192 * 4096 * 2 * 14336
    assert MIXTRAL.flop("fc1") + MIXTRAL.flop("fc2") == MIXTRAL.flop("mlp")


def test_bytes_count_only_the_experts_that_get_rows():
    assert QWEN3.bytes("fc2", 3) - QWEN3.bytes("fc2", 2) == 2 * QWEN3.hidden * QWEN3.intermediate
    case = Case("one", 1, 8, 16, 4)
    assert case.bytes("fc1", 1) == 2 * (2 * 8 * 16 + 4 * 8 + 4 * 16)


def test_decode_is_told_from_prefill():
    assert all(case.decode for case in DECODE)
    assert not any(case.decode for case in PREFILL)


def test_default_cases_are_distinct_and_cover_both_routings():
    cases = forward_cases()
    assert len(set(cases)) == len(cases)
    for peer in PREFILL:
        assert {case.routing for case in cases if case.name == peer.name} == {"uniform", "dirichlet"}
    assert TINY in graph_cases()


def test_select_keeps_what_matches_and_names_the_choices_otherwise():
    assert {case.name for case in select(forward_cases(), "mixtral")} == {"Mixtral-8x7B", "Mixtral decode"}
    assert select(forward_cases(), None) == forward_cases()
    with pytest.raises(ValueError, match="matches no case; there are: .*Mixtral-8x7B"):
        select(forward_cases(), "llama")


# Routing


@given(st.integers(0, 5000), st.lists(st.floats(0.0, 100.0), min_size=1, max_size=64).filter(lambda w: sum(w) > 1e-3))
def test_apportion_sums_to_the_rows_and_stays_near_the_shares(rows, weights):
    sizes = apportion(rows, weights)
    assert sum(sizes) == rows
    assert all(abs(size - rows * weight / sum(weights)) <= 1 for size, weight in zip(sizes, weights, strict=True))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("case", [*PREFILL, *DECODE, TINY], ids=lambda case: case.name)
def test_group_sizes_sum_to_the_rows_and_repeat(routing, case):
    case = dataclasses.replace(case, routing=routing)
    sizes = group_sizes(case)
    assert len(sizes) == case.experts and sum(sizes) == case.rows and min(sizes) >= 0
    assert sizes == group_sizes(case)


def test_group_sizes_are_the_same_on_every_machine():
    assert group_sizes(dataclasses.replace(MIXTRAL, routing="dirichlet")) == MIXTRAL_DIRICHLET
    assert group_sizes(dataclasses.replace(TINY, routing="zipf")) == TINY_ZIPF


MIXTRAL_DIRICHLET = [2192, 379, 1390, 307, 653, 4, 1997, 1270]
TINY_ZIPF = [23, 3, 6, 12, 3, 5, 4, 8]


def test_routings_are_as_skewed_as_their_names_say():
    def max_over_mean(routing):
        return skew(group_sizes(dataclasses.replace(QWEN3, routing=routing))).max_over_mean

    assert max_over_mean("uniform") == 1.0
    assert max_over_mean("dirichlet") > 3.0
    assert max_over_mean("zipf") > 10.0
    assert max_over_mean("one") == QWEN3.experts


def test_seed_changes_a_random_routing():
    case = dataclasses.replace(QWEN3, routing="dirichlet")
    assert group_sizes(case) != group_sizes(dataclasses.replace(case, seed=1))


def test_unknown_routing_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="'zpif' is not known; choose one of: uniform"):
        group_sizes(dataclasses.replace(TINY, routing="zpif"))


def test_skew_of_nothing_is_nothing():
    assert skew([0, 0]).max_over_mean == 0.0
    assert skew([3, 0, 0]).empty_experts == 2


# Timing


def test_summary_is_the_median_and_the_outer_deciles():
    summary = summarise([float(i) for i in range(100, -1, -1)])
    assert summary == Summary(50.0, 10.0, 90.0, 101)
    assert summary.spread == pytest.approx(0.8)
    assert percentile([1.0, 2.0], 0.5) == 1.5
    assert summarise([3.0]) == Summary(3.0, 3.0, 3.0, 1)


class FakeClock:
    """Time that passes only while samples are taken."""

    def __init__(self):
        self.now, self.taken = 0.0, []

    def sampler(self, name, seconds):
        def sample():
            self.now += seconds
            self.taken.append(name)
            return seconds * 1e6

        return sample


def test_interleave_rotates_who_goes_first_and_stops_at_the_budget():
    clock = FakeClock()
    samplers = {name: clock.sampler(name, 1.0) for name in "abc"}
    times = interleave(samplers, budget_s=8.0, min_rounds=1, clock=lambda: clock.now)
    assert "".join(clock.taken) == "abcbcacab"
    assert {name: summary.samples for name, summary in times.items()} == {"a": 3, "b": 3, "c": 3}
    assert times["b"].median_us == 1e6


@pytest.mark.parametrize(("budget", "rounds"), [(0.0, 5), (1e9, 7)])
def test_interleave_keeps_within_its_bounds_on_rounds(budget, rounds):
    clock = FakeClock()
    times = interleave({"a": clock.sampler("a", 1.0)}, budget, 5, 7, clock=lambda: clock.now)
    assert times["a"].samples == rounds


# Data and contestants


@pytest.mark.parametrize("case", [*PREFILL, *DECODE, TINY], ids=lambda case: case.name)
def test_copies_keep_repeated_calls_out_of_the_cache(case):
    copies = copies_needed(case)
    assert 1 <= copies <= MAX_COPIES
    assert copies == MAX_COPIES or copies * case.bytes("fc2", case.experts) >= ROTATION_BYTES


def tiny_problem():
    return make_problem(dataclasses.replace(TINY, routing="zipf"), device="cpu")


def test_problem_has_the_shapes_that_the_operators_take():
    problem = tiny_problem()
    b = problem.sets[0]
    assert len(problem.sets) == copies_needed(problem.case)
    assert b.w1.shape == (8, 512, 512) and b.w2.shape == (8, 512, 256) and b.x.dtype == torch.bfloat16
    assert b.offs.dtype == torch.int32 and int(b.offs[-1]) == problem.case.rows
    assert b.starts.tolist() == [0, *b.offs.tolist()]
    assert torch.equal(b.x, tiny_problem().sets[0].x)
    assert not torch.equal(b.x, problem.sets[1].x)
    assert offsets([2, 0, 3], "cpu").tolist() == [2, 2, 5]


@pytest.mark.parametrize("op", OPS)
def test_torch_path_agrees_with_a_plain_loop(op):
    b = tiny_problem().sets[0]
    starts = b.starts.tolist()
    expected = torch.cat([_mlp_of_expert(b, op, e, starts[e], starts[e + 1]) for e in range(8)])
    got = getattr(contestants.TorchGrouped(), op)(b).double()
    assert float((got - expected).norm() / expected.norm()) < contestants.MAX_RELATIVE_ERROR


def _mlp_of_expert(b, op, expert, start, end):
    x, w1, w2 = b.x[start:end].double(), b.w1[expert].double(), b.w2[expert].double()
    gate, up = (x @ w1.T).chunk(2, dim=1)
    act = torch.nn.functional.silu(gate) * up
    return {"fc1": act, "fc2": b.mid[start:end].double() @ w2.T, "mlp": act @ w2.T}[op]


@pytest.mark.parametrize("op", OPS)
def test_our_operators_pass_the_check_that_precedes_timing(op):
    assert contestants.check(contestants.Glulam(), op, tiny_problem().sets[0]) <= contestants.MAX_RELATIVE_ERROR


@pytest.mark.parametrize("wrong", [lambda y: y * 1.1, lambda y: y.roll(1, 0), lambda y: y * float("nan")])
def test_a_wrong_contestant_is_not_timed(wrong):
    class Wrong(contestants.TorchGrouped):
        name = "wrong"

        def mlp(self, b):
            return wrong(contestants.TorchGrouped().mlp(b))

    with pytest.raises(RuntimeError, match="wrong mlp: relative error .* nothing was timed"):
        contestants.check(Wrong(), "mlp", tiny_problem().sets[0])


def test_layouts_of_w1_are_told_apart():
    class Mislabelled(contestants.TorchGrouped):
        def fc1(self, b):
            return contestants.TorchGrouped("interleaved").fc1(b)

    b = tiny_problem().sets[0]
    assert contestants.check(contestants.TorchGrouped("interleaved"), "fc1", b) == 0.0
    with pytest.raises(RuntimeError, match="fc1: relative error"):
        contestants.check(Mislabelled("concat"), "fc1", b)


def test_calls_rotate_through_the_buffers():
    class Spy(contestants.TorchGrouped):
        def mlp(self, b):
            return b.x

    sets = tiny_problem().sets[:2]
    call = contestants.calls(Spy(), "mlp", sets)
    assert [call(number) is sets[number % 2].x for number in range(3)] == [True] * 3


def test_quack_is_left_out_where_it_is_absent_or_unwanted(monkeypatch):
    names = ["glulam", "dense", "torch"]
    assert [library.name for library in contestants.libraries("off")] == names
    monkeypatch.setattr(contestants, "quack_version", lambda: None)
    assert [library.name for library in contestants.libraries("tuned")] == names


def test_a_quack_that_does_not_run_is_left_out_with_a_warning(monkeypatch):
    def broken(tuned):
        raise ImportError("needs another DSL")

    monkeypatch.setattr(contestants, "quack_version", lambda: "0.6.5")
    monkeypatch.setattr(contestants, "Quack", broken)
    with pytest.warns(UserWarning, match="QuACK is left out: ImportError: needs another DSL"):
        assert [library.name for library in contestants.libraries("default")] == ["glulam", "dense", "torch"]


# Training


def training_data(**changes):
    return training.make_data(dataclasses.replace(TINY, routing="dirichlet", **changes), device="cpu")


def test_train_cases_are_trained_layers():
    cases = train_cases()
    assert len(set(cases)) == len(cases) == 5 and SONIC in cases
    for case in (QWEN3, DEEPSEEK):
        assert {c.routing for c in cases if c.name == case.name} == {"uniform", "dirichlet"}
    assert SONIC.rows == 32768 * 8 and (SONIC.hidden, SONIC.intermediate, SONIC.experts) == (4096, 1024, 128)


def test_training_counts_three_forwards():
    assert training.flop(SONIC, "layer") == 3 * 6 * SONIC.rows * SONIC.hidden * SONIC.intermediate
    backward = sum(training.flop(SONIC, op) for op in ("dw1", "dw2"))
    assert 3 * backward == training.flop(SONIC, "layer")
    assert training.flop(SONIC, "dglu") == SONIC.flop("fc2")


@pytest.mark.parametrize("op", training.OPS)
def test_every_contestant_of_training_passes_the_check(op):
    errors = {name: error for name, (_, error) in training.competing(training_data(), op).items()}
    assert set(errors) == set(training.contestants(op)) and next(iter(errors)) == training.OURS
    assert max(errors.values()) <= training.MAX_RELATIVE_ERROR


@pytest.mark.parametrize("item", HOST_ITEMS)
def test_host_items_of_training_compute_the_layer(item):
    d = training_data()
    wanted = tuple(tensor.clone() for tensor in training.torch_layer(d))
    assert training.relative_error(HOST_ITEMS[item](d), wanted) <= training.MAX_RELATIVE_ERROR


def test_gradients_of_a_layer_do_not_add_up_over_calls():
    d = training_data()
    first = [tensor.clone() for tensor in training.our_layer(d)]
    assert all(map(torch.equal, first, training.our_layer(d)))


@pytest.mark.parametrize("part", range(5))
def test_one_wrong_gradient_is_not_timed(part):
    def wrong(d):
        return tuple(t * 1.1 if i == part else t for i, t in enumerate(training.torch_layer(d)))

    d = training_data()
    with pytest.raises(RuntimeError, match="wrong layer: relative error .* nothing was timed"):
        training.check(d, "layer", "wrong", wrong, training.expected(d, "layer"))


@pytest.mark.parametrize(("op", "parts"), [("layer", (2, 3)), ("dw1", (0,)), ("dw2", (0,))])
def test_only_torch_may_leave_the_gradients_of_empty_experts_unwritten(op, parts):
    d = training_data(rows=6)
    empty = d.sizes.index(0)
    torchs = training.contestants(op)[training.TORCH]

    def unwritten(d):
        results = tuple(tensor.clone() for tensor in torchs(d))
        for part in parts:
            results[part][empty] = float("nan")
        return results

    wanted = tuple(tensor.clone() for tensor in training.expected(d, op))
    assert training.check(d, op, training.TORCH, unwritten, wanted) <= training.MAX_RELATIVE_ERROR
    with pytest.raises(RuntimeError, match="relative error nan"):
        training.check(d, op, training.OURS, unwritten, wanted)


def test_not_a_number_is_the_largest_error():
    one, nan = torch.ones(2), torch.full((2,), float("nan"))
    error = training.relative_error((one * 9, nan, one), (one, one, one))
    assert error != error


def test_a_failing_peer_of_training_is_left_out_but_we_are_not(monkeypatch):
    def fails(d):
        raise RuntimeError("not on this GPU")

    ours = training.contestants("dw1")[training.OURS]
    monkeypatch.setattr(training, "contestants", lambda op: {"glulam": ours, "torch": fails})
    with pytest.warns(UserWarning, match="dw1: torch is left out: not on this GPU"):
        assert list(training.competing(training_data(), "dw1")) == ["glulam"]
    monkeypatch.setattr(training, "contestants", lambda op: {"glulam": fails})
    with pytest.raises(RuntimeError, match="not on this GPU"):
        training.competing(training_data(), "dw1")


# Results, tables, report


def times(**medians):
    return {name: dataclasses.asdict(Summary(us, us * 0.9, us * 1.1, 9)) for name, us in medians.items()}


def forward_record(case, op, **medians):
    return {
        "case": dataclasses.asdict(case),
        "skew": {"max_over_mean": 1.0, "empty_experts": 0},
        "active_experts": case.experts,
        "copies": 1,
        "op": op,
        "errors": {},
        "times": times(**medians),
    }


LIMITS = {"cublas_8192_tflops": 780.0, "copy_tbps": 4.27, "launch_us": 4.7}
STAMP = {
    "commit": "0123456789abcdef",
    "command": "python -m perf forward",
    "date": "2026-01-01T00:00:00+00:00",
    "gpu": "NVIDIA H200",
    "sms": 132,
    "host": "x86_64",
    "driver": "580",
    "sm_clock_mhz": "1700",
    "sm_clock_max_mhz": "1980",
    "memory_clock_mhz": "3201",
    "power_w": "690",
    "temperature_c": "60",
    "versions": {"torch": "2.11.0"},
}


def forward_result():
    records = [
        forward_record(MIXTRAL, "fc1", glulam=2800.0, dense=2792.0, torch=4200.0),
        forward_record(DECODE[0], "fc1", glulam=200.0, torch=300.0),
        forward_record(MIXTRAL, "mlp", glulam=4000.0, dense=4100.0, torch=6000.0),
    ]
    return results.make_result("forward", STAMP, LIMITS, records)


HOST_MEDIANS = {BARE_NOTHING: 1.0, BARE_MM: 6.0, BARE_MLP: 10.0, WITH_OUT: 12.5, WITHOUT_OUT: 16.0}


def host_result():
    summaries = {name: Summary(us, us, us, 3) for name, us in HOST_MEDIANS.items()}
    records = [{"item": name, **dataclasses.asdict(summary)} for name, summary in summaries.items()]
    return results.make_result("host", STAMP, LIMITS, [*records, {"derived": derived(summaries)}])


def graph_result():
    record = {
        "case": dataclasses.asdict(TINY),
        "skew": {"max_over_mean": 1.0, "empty_experts": 0},
        "layers": 32,
        "replays_equal_to_eager": 4,
        "times": times(**{"glulam eager": 12.0, "glulam replay": 6.0}),
    }
    return results.make_result("graph", STAMP, LIMITS, [record])


def train_record(op, **medians):
    return {
        "case": dataclasses.asdict(QWEN3),
        "skew": {"max_over_mean": 1.0, "empty_experts": 0},
        "op": op,
        "flop": training.flop(QWEN3, op),
        "errors": {},
        "times": times(**medians),
    }


def train_result():
    layer = {**train_record("layer", glulam=1500.0, torch=3000.0), "peak_bytes": {"glulam": 3e9, "torch": 4.5e9}}
    kernels = [train_record(op, glulam=400.0, dense=350.0) for op in training.OPS if op != "layer"]
    host = [{"item": name, **dataclasses.asdict(Summary(99.0, 98.0, 100.0, 3))} for name in HOST_ITEMS]
    return results.make_result("train", STAMP, LIMITS, [layer, *kernels, *host])


def mhc_result():
    record = {
        "op": "aggregate",
        "direction": "forward",
        "size": {"s": 8192, "b": 4, "n": 4, "c": 7168},
        "bytes": 2_349_000_000,
        "difference": 0.01,
        "times": times(**{"glulam": 600.0, "torch.compile": 900.0}),
    }
    backward = {**record, "op": "pre", "direction": "backward"}
    host = {"item": "bare aggregate", **dataclasses.asdict(Summary(5.0, 4.9, 5.1, 3))}
    return results.make_result("mhc", STAMP, LIMITS, [record, backward, host])


def test_mhc_table_shows_the_share_of_the_copy_bandwidth():
    (row, _), _ = (table.rows for table in tables.tables_of(mhc_result())[:2])
    assert row[3:] == ("600.0", "2.349", "0.92", "900 (1.50)", "582", "0.01")


ALL_RESULTS = {
    "forward": forward_result,
    "host": host_result,
    "graph": graph_result,
    "train": train_result,
    "mhc": mhc_result,
}


def test_every_suite_has_tables_and_a_command():
    assert set(ALL_RESULTS) == set(SUITES) == set(tables.TABLES) == set(cli.SUITE_NAMES)


def test_a_ratio_above_one_means_that_we_are_faster():
    record = forward_record(MIXTRAL, "fc1", glulam=2000.0, torch=3000.0)
    assert tables.ratio(record, "torch") == 1.5


def test_rates_are_read_in_what_bounds_the_case():
    assert tables.rate(forward_record(MIXTRAL, "fc1"), 2825.0, LIMITS) == "681 TF/s (87 %)"
    assert tables.rate(forward_record(DECODE[0], "fc1"), 214.0, LIMITS) == "3.78 TB/s (88 %)"


def test_forward_table_shows_times_ratios_and_gaps():
    fc1, mlp = tables.forward_tables(forward_result())
    assert fc1.header[-2:] == ("dense us", "torch us")
    assert fc1.rows[0][2:] == ("2800 ± 10.0 %", "687 TF/s (88 %)", "2792 (1.00x)", "4200 (1.50x)")
    assert fc1.rows[1][-2:] == ("-", "300 (1.50x)")
    assert len(mlp.rows) == 1


def test_train_tables_show_rates_ratios_and_peaks():
    layer, dw1, dw2, dglu, host = tables.train_tables(train_result())
    assert layer.header[-3:] == ("torch us", "glulam peak GB", "torch peak GB")
    assert layer.rows[0][2:] == ("1500 ± 10.0 %", "618 TF/s (79 %)", "3000 (2.00x)", "3.00", "4.50")
    assert dw1.header[-1] == "dense us" and dw1.rows[0][-2:] == ("515 TF/s (66 %)", "350 (0.88x)")
    assert [row[1] for row in host.rows] == ["99.0"] * len(HOST_ITEMS)


def test_host_differences_are_what_the_front_adds():
    differences = dict(tables.host_tables(host_result())[1].rows)
    assert differences["glulam.grouped_mlp above two bare launches"] == "0.50"
    assert differences["glulam.grouped_mlp above one bare call that makes both"] == "2.50"
    assert differences["the output's allocation"] == "3.50"


def test_microseconds_keep_three_digits():
    assert [tables.microseconds(us) for us in (2825.4, 365.2, 24.31, 4.712)] == ["2825", "365", "24.3", "4.71"]


@pytest.mark.parametrize("suite", ALL_RESULTS)
def test_tables_are_rectangular(suite):
    for table in tables.tables_of(ALL_RESULTS[suite]()):
        assert table.rows and all(len(row) == len(table.header) for row in table.rows)


def test_unknown_suite_has_no_tables():
    with pytest.raises(ValueError, match="no tables for suite 'backward'"):
        tables.tables_of({**forward_result(), "suite": "backward"})


def test_results_survive_the_disk(tmp_path):
    result = forward_result()
    result["limits"]["copy_tbps"] = 4.2712345
    results.write(result, tmp_path / "new" / "forward.json")
    (got,) = results.read_all(tmp_path / "new")
    assert got["limits"]["copy_tbps"] == 4.2712
    assert got["stamp"] == result["stamp"] and got["suite"] == "forward"
    assert tables.tables_of(got)[:2] == tables.tables_of(result)[:2]


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 0}'])
def test_a_file_of_another_kind_is_refused_by_name(tmp_path, content):
    path = tmp_path / "odd.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="odd.json .*; measure it again"):
        results.read(path)


def test_default_path_names_suite_and_gpu():
    assert results.default_path("host", "NVIDIA H200").name == "host-h200.json"


def test_report_fills_both_pages(tmp_path):
    for suite, make in ALL_RESULTS.items():
        results.write(make(), tmp_path / f"{suite}.json")
    readme = tmp_path / "main.md"
    readme.write_text(f"# Before\n{report.BEGIN}\nold numbers\n{report.END}\nafter\n")
    report.write_report(tmp_path, readme)
    page, main = (tmp_path / "README.md").read_text(), readme.read_text()
    assert "| Mixtral-8x7B (E 8, H 4096, I 14336, T 8192) | uniform (1.0) | 2800 ± 10.0 % |" in page
    assert "python -m perf forward" in page and "012345678" in page and "780 TF/s" in page
    assert main.startswith("# Before\n") and main.endswith("\nafter\n")
    assert "old numbers" not in main and "4200 (1.50x)" in main and "2.50" in main
    assert "3000 (2.00x)" in main and "grouped_wgrad" in page and "grouped_wgrad" not in main
    report.write_report(tmp_path, readme)
    assert readme.read_text() == main


def test_report_without_results_says_so(tmp_path):
    assert "Nothing has been measured yet" in report.results_page([])
    assert "Nothing has been measured yet" in report.summary([])


@pytest.mark.parametrize("page", ["no marks", report.END + report.BEGIN])
def test_report_needs_its_marks(page):
    with pytest.raises(ValueError, match="needs the marks"):
        report.fill(page, "text")


def test_the_readme_has_the_marks():
    page = report.README.read_text()
    assert report.fill(page, "x").count("x") >= 1


# Stamp and command line


def test_commit_outside_a_checkout_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(stamp, "ROOT", tmp_path)
    assert stamp.git_commit() == stamp.UNKNOWN


def test_versions_name_what_a_time_depends_on():
    versions = stamp.versions()
    assert versions["torch"] == torch.__version__
    assert {"glulam", "apache-tvm-ffi", "nvidia-cutlass-dsl", "cuda", "kernel sources", "quack"} <= set(versions)


def test_measuring_without_a_gpu_is_one_clear_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["perf", "forward"])
    assert cli.main() == 1
    assert capsys.readouterr().err.startswith("perf: measuring needs a CUDA GPU;")


def test_the_stamped_command_is_what_to_run_again():
    assert cli.command_line("forward", Options()) == "python -m perf forward"
    chosen = Options(budget_s=5.0, case="Qwen3 decode", quack="tuned")
    assert cli.command_line("host", chosen) == "python -m perf host --budget 5.0 --case 'Qwen3 decode' --quack tuned"


def test_report_command_writes_the_pages(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("perf.report.write_report", lambda: [tmp_path / "README.md"])
    monkeypatch.setattr(sys, "argv", ["perf", "report"])
    assert cli.main() == 0
    assert "wrote" in capsys.readouterr().out


def test_tables_show_on_a_console(capsys):
    for make in ALL_RESULTS.values():
        for table in tables.tables_of(make()):
            cli.show(table, cli._console())
    assert "4200 (1.50x)" in capsys.readouterr().out
