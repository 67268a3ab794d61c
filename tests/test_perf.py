"""The parts of perf that need no GPU: suites' cases, statistics of samples, and tables."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import shlex
import sys
import time
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import fake_gpu

import glulam
from glulam.tuner.timing import Summary, interleave, summarise
from perf import __main__ as cli
from perf import mlp, quantised, stamp
from perf.cases import CASES, DECODE, MIXTRAL, PREFILL, QWEN3, SONIC, TINY, TOKEN, Case, cases_of, select
from perf.options import Options, chosen, command_line
from perf.routing import ROUTINGS, apportion, group_sizes, routed
from perf.suites import mlp as suite
from perf.suites import portable, quantize
from perf.suites.host import BARE_MLP, BARE_MM, BARE_NOTHING, bare_items

# Cases


def test_work_is_counted_once():
    assert MIXTRAL.flop("fc1") == 2 * 8192 * 4096 * 2 * 14336
    assert MIXTRAL.flop("fc1") + MIXTRAL.flop("fc2") == MIXTRAL.flop("mlp")
    case = Case("one", 4, 8, 16, 4)
    assert case.bytes("fc1", 1) == 2 * (2 * 8 * 16 + 4 * 8 + 4 * 16)
    assert case.bytes("fc2", 3) - case.bytes("fc2", 2) == 2 * 8 * 16  # only experts that get rows


def test_cases_of_suites_are_distinct_and_cover_their_routings():
    assert all(case.decode for case in (*DECODE, *TOKEN)) and not any(case.decode for case in PREFILL)
    routings = {"forward": {"uniform", "dirichlet"}, "backward": {"uniform", "dirichlet", "half-empty"}}
    for name, wanted in routings.items():
        assert len(set(CASES[name])) == len(CASES[name])
        for peer in PREFILL:
            assert {case.routing for case in CASES[name] if case.name == peer.name} == wanted
    assert SONIC in CASES["train"] and SONIC.rows == 32768 * 8


def test_sweeps_cover_their_ranges():
    assert [case.rows / case.experts for case in cases_of("rows", None)] == [2**doublings for doublings in range(13)]
    sizes = [max_over_mean(case) for case in cases_of("skew", None) if case.name == QWEN3.name]
    assert sizes == sorted(sizes) and sizes[0] == 1.0 and sizes[-1] > 0.5 * QWEN3.experts
    assert {case.name for case in cases_of("rows", "DeepSeek-V3 EP1")} == {"DeepSeek-V3 EP1"}
    assert {case.name for case in cases_of("skew", "kimi")} == {"Kimi-K2 EP8"}


def max_over_mean(case):
    return routed(group_sizes(case))["skew"]["max_over_mean"]


def test_select_keeps_what_matches_and_names_the_choices_otherwise():
    known = [*CASES["forward"], *CASES["decode"]]
    assert {case.name for case in select(known, "mixtral")} == {"Mixtral-8x7B", "Mixtral decode", "Mixtral token"}
    assert {case.name for case in select(known, "qwen3 DECODE")} == {"Qwen3 decode"}
    assert {case.routing for case in select(known, "zipf")} == {"zipf"}
    assert select(known, None) == known
    with pytest.raises(ValueError, match="matches no case; there are: .*Mixtral-8x7B"):
        cases_of("forward", "llama")


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


def sizes(routing, **changes):
    return group_sizes(dataclasses.replace(QWEN3, routing=routing, **changes))


def test_routings_are_as_skewed_as_their_names_say():
    skews = {routing: max_over_mean(dataclasses.replace(QWEN3, routing=routing)) for routing in ROUTINGS}
    assert skews["uniform"] == 1.0 and skews["dirichlet"] > 3.0 and skews["zipf"] > 10.0
    assert max_over_mean(dataclasses.replace(QWEN3, routing="token:1")) == QWEN3.experts
    assert routed([0, 0])["skew"]["max_over_mean"] == 0.0 and routed([3, 0, 0])["skew"]["empty_experts"] == 2
    half = sizes("half-empty")
    assert half.count(0) == QWEN3.experts // 2 and set(half) == {0, 2 * QWEN3.rows // QWEN3.experts}


def test_a_routing_may_have_a_parameter():
    assert sizes("zipf:1.0") == sizes("zipf") and sizes("dirichlet:0.5") == sizes("dirichlet")
    assert sizes("zipf:0") == sizes("uniform") and sizes("zipf") != sizes("zipf", seed=1)


@pytest.mark.parametrize(
    ("routing", "why"),
    [
        ("uniform:2", "uniform has no parameter"),
        ("zipf:much", "'much' is not a number, as in 'zipf:1.0'"),
        ("zpif", "'zpif' is not known; choose one of: uniform"),
    ],
)
def test_a_routing_that_makes_no_sense_is_refused_with_the_choices(routing, why):
    with pytest.raises(ValueError, match=why):
        sizes(routing)


# Timing


def test_a_summary_is_the_median_and_the_outer_deciles():
    assert summarise([float(i) for i in range(100, -1, -1)]) == Summary(50.0, 10.0, 90.0, 101)


class FakeClock:
    """A clock that advances only while samples are taken."""

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


# Suites


def test_an_architecture_serves_while_it_is_measured(monkeypatch):
    found = []
    monkeypatch.setenv("GLULAM_ARCH", "sm_90a")
    monkeypatch.setattr(portable, "_forget", lambda: found.append(os.environ["GLULAM_ARCH"]))
    with pytest.raises(KeyError), portable.served_by("sm_90"):
        assert os.environ["GLULAM_ARCH"] == "sm_90" and os.environ["GLULAM_ALLOW_UNVALIDATED"] == "1"
        raise KeyError
    assert found == ["sm_90", "sm_90"] and os.environ["GLULAM_ARCH"] == "sm_90a"


def test_rows_are_quantised_to_fp8():
    x = torch.randn(5, 64)
    data, scale = quantised.quantise_rows(x)
    assert float((data.float() * scale[:, None] - x).norm() / x.norm()) < 0.04


def test_readings_are_averaged_over_their_time():
    now = itertools.count()
    taken = stamp.Readings()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stamp.time, "monotonic", lambda: float(next(now)))
        taken.follow(iter(["1400, 690.5, Active", "[N/A], 1, Active", "1500, 700.5, Not Active", "9, 9, Active"]))
    assert taken.mean(0.0, 1.0) == (1450.0, 695.5, 0.5)
    with pytest.raises(RuntimeError, match="nvidia-smi gave none of"):
        taken.mean(5.0, 6.0)


def test_the_gpu_is_followed_until_the_block_ends(tmp_path, monkeypatch):
    smi, process = tmp_path / "nvidia-smi", tmp_path / "process"
    smi.write_text(f"#!/bin/sh\necho $$ > {process}\nyes '1400, 690.50, Active' | head -n 3\nexec sleep infinity\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="0"))
    with stamp.follow_gpu() as taken:
        while len(taken.taken) < 3:
            time.sleep(0.01)
        os.kill(int(process.read_text()), 0)
    assert len(taken.taken) == 3 and taken.mean(-math.inf, math.inf) == (1400.0, 690.5, 1.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(process.read_text()), 0)


def test_a_contestant_alone_is_timed_after_settling(monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(suite.time, "monotonic", lambda: float(next(now)))
    events = itertools.cycle([2.0, 4.0])
    event = type("Event", (), {"record": int, "synchronize": int, "elapsed_time": lambda *_: next(events)})
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event())
    log = stamp.Readings()
    log.taken = [(2.0, stamp.Reading(1.0, 1.0, 1.0)), (8.0, stamp.Reading(1400.0, 690.0, 1.0))]
    calls = []
    alone = suite.run_alone(calls.append, 10.0, log)
    assert alone == {"median_us": 100.0, "mhz": 1400.0, "watts": 690.0, "capped": 1.0}  # of 100, 200, 100
    assert len(calls) == 7 * suite.CALLS_PER_SAMPLE  # four samples of the settling time, three after it


@pytest.mark.parametrize("form", [
    quantize.Form("x", 40, 64, "float32"), quantize.Form("x", 40, 64, "float32", "both"),
    quantize.Form("w", 64, 64, "float32", "col", experts=2),
])  # fmt: skip
def test_a_wrong_quantiser_is_not_measured(form, monkeypatch):
    x = torch.randn(form.shape)
    quantize.check(form, x)
    name = "prepare_mxfp8_weight" if form.experts else "quantize_mxfp8"
    right, part = form.call, x[:1] if form.experts else x
    answers = iter((right(part * 3), right(part)))
    monkeypatch.setattr(quantize.Form, "call", lambda *_: next(answers))
    with pytest.raises(RuntimeError, match=f"{name} is wrong"):
        quantize.check(form, x)


# Stamp and command line


def test_commit_outside_a_checkout_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(stamp, "ROOT", tmp_path)
    assert stamp.git_commit() == stamp.UNKNOWN


def test_a_stamp_of_a_cpu_asks_for_no_gpu_and_names_what_a_time_depends_on():
    made = stamp.make_stamp("python examples/train_moe.py", "abc", "cpu")
    assert (made["commit"], made["gpu"]) == ("abc", "CPU") and made["versions"]["torch"] == torch.__version__
    assert {"glulam", "apache-tvm-ffi", "nvidia-cutlass-dsl", "cuda", "kernel sources", "quack"} <= set(
        made["versions"]
    )


def test_measuring_without_a_gpu_is_one_clear_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["perf", "forward"])
    assert cli.main() == 1
    assert capsys.readouterr().err.startswith("perf: measuring needs a CUDA GPU;")


def test_the_stamped_command_is_what_to_run_again():
    assert command_line("forward", Options()) == "python -m perf forward"
    chosen = Options(budget_s=5.0, case="Qwen3 decode", quack="off")
    assert command_line("host", chosen) == "python -m perf host --budget 5.0 --case 'Qwen3 decode' --quack off"


LINES = {
    "compare --specs a,b* --bundle x --case Qwen3 --op fc1,fc2 --routing zipf --rows-per-expert 1,64": Options(
        case="Qwen3", ops=("fc1", "fc2"), specs=("a", "b*"), bundles=("x",), routings=("zipf",), rows_per_expert=(1, 64)
    ),
    "layer --op forward,parts --routing uniform --published": Options(
        ops=("forward", "parts"), routings=("uniform",), published=True
    ),
    "forward": Options(),
}
PARTS = ("backward --op dw1", "rows --case Kimi-K2", "compare --specs a", "layer --published", "layer --routing zipf")
WHOLE = ("forward", "host --quack off", "backward --budget 3", "layer", "tiles --routing zipf")


@pytest.mark.parametrize("line", LINES)
def test_the_command_line_fills_the_options(line):
    got = chosen(cli.parser().parse_args(line.split()))
    assert got == LINES[line]
    suite, *_ = line.split()
    assert chosen(cli.parser().parse_args(shlex.split(command_line(suite, got))[3:])) == got


@pytest.mark.parametrize(("line", "part"), [*((p, True) for p in PARTS), *((w, False) for w in WHOLE)])
def test_a_part_of_a_suite_does_not_replace_its_results(monkeypatch, capsys, tmp_path, line, part):
    written = []
    monkeypatch.setattr(
        cli, "measure", lambda arguments: {"suite": "graph", "stamp": {"gpu": "x"}, "limits": {}, "records": []}
    )
    monkeypatch.setattr(cli, "write", lambda result, path: written.append(path))
    monkeypatch.setattr(sys, "argv", ["perf", *line.split()])
    assert cli.main() == 0
    assert bool(written) != part and ("not written" in capsys.readouterr().out) == part
    monkeypatch.setattr(sys, "argv", ["perf", *line.split(), "--out", str(tmp_path / "kept.csv")])
    assert cli.main() == 0 and written[-1] == tmp_path / "kept.csv"


def test_a_warning_is_one_line():
    text = cli.one_line(UserWarning("quack is left out:\n  no such kernel"), UserWarning, "perf/x.py", 7)
    assert text == "perf: quack is left out: no such kernel\n"


def test_bare_launches_of_a_layer_compute_it(monkeypatch):
    fake = fake_gpu.install(monkeypatch)
    b = mlp.make_buffers(TINY, device="cpu")[0]
    items = bare_items(b)
    wanted_mlp = glulam.grouped_mlp(b.x, b.w1, b.w2, offs=b.offs)
    wanted_mm = glulam.grouped_mm(b.mid, b.w2, offs=b.offs)
    for name, wanted in ((BARE_MLP, wanted_mlp), (BARE_MM, wanted_mm)):
        b.y.fill_(math.nan)
        items[name]()
        assert b.y.equal(wanted)
    fake.launches.clear()
    items[BARE_NOTHING]()
    assert len(fake.launches) == 1 and b.y.equal(wanted_mm)
