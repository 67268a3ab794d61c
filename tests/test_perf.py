"""The parts of perf that need no GPU: what is measured, how samples become numbers, how numbers become tables."""

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
from cute_kernels.sm90.configs import LARGE, SMALL, WGRAD
from cute_kernels.specs import GroupedDgluSpec, GroupedGluSpec, GroupedMlpSpec, GroupedMmSpec, GroupedWgradSpec
from perf import __main__ as cli
from perf import contest, mlp, quack, quantised, readings, stamp
from perf.cases import (
    CASES,
    DECODE,
    KERNELS,
    LAYER,
    MIXTRAL,
    OPS,
    PREFILL,
    QWEN3,
    SONIC,
    TINY,
    TOKEN,
    Case,
    cases_of,
    select,
)
from perf.contest import Contestant, admitted
from perf.options import Options, chosen, command_line
from perf.routing import ROUTINGS, apportion, group_sizes, routed
from perf.suites import compare, portable, quantize, train
from perf.suites import mlp as suite
from perf.suites.host import BARE_MLP, BARE_MM, BARE_NOTHING, KNOWN_ROWS, NEW_ROWS, WITHOUT_OUT, bare_items, derived
from perf.targets import HOST_OURS
from perf.timing import Summary, interleave

# Cases


def test_flop_counts_the_useful_work():
    assert MIXTRAL.flop("fc1") == 2 * 8192 * 4096 * 2 * 14336
    assert MIXTRAL.flop("fc1") + MIXTRAL.flop("fc2") == MIXTRAL.flop("mlp")


def test_bytes_count_only_the_experts_that_get_rows():
    assert QWEN3.bytes("fc2", 3) - QWEN3.bytes("fc2", 2) == 2 * QWEN3.hidden * QWEN3.intermediate
    case = Case("one", 1, 8, 16, 4)
    assert case.bytes("fc1", 1) == 2 * (2 * 8 * 16 + 4 * 8 + 4 * 16)


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


def test_routings_are_as_skewed_as_their_names_say():
    skews = {routing: max_over_mean(dataclasses.replace(QWEN3, routing=routing)) for routing in ROUTINGS}
    assert skews["uniform"] == 1.0 and skews["dirichlet"] > 3.0 and skews["zipf"] > 10.0
    assert skews["one"] == QWEN3.experts
    assert routed([0, 0])["skew"]["max_over_mean"] == 0.0 and routed([3, 0, 0])["skew"]["empty_experts"] == 2


def test_seed_changes_a_random_routing():
    case = dataclasses.replace(QWEN3, routing="dirichlet")
    assert group_sizes(case) != group_sizes(dataclasses.replace(case, seed=1))


def test_a_routing_may_have_a_parameter():
    def sizes(routing):
        return group_sizes(dataclasses.replace(QWEN3, routing=routing))

    assert sizes("zipf:1.0") == sizes("zipf") and sizes("dirichlet:0.5") == sizes("dirichlet")
    assert sizes("zipf:0") == sizes("uniform")
    with pytest.raises(ValueError, match="uniform has no parameter"):
        sizes("uniform:2")
    with pytest.raises(ValueError, match="'much' is not a number, as in 'zipf:1.0'"):
        sizes("zipf:much")


def test_half_of_the_experts_may_be_empty():
    sizes = group_sizes(dataclasses.replace(QWEN3, routing="half-empty"))
    assert sizes.count(0) == QWEN3.experts // 2 and set(sizes) == {0, 2 * QWEN3.rows // QWEN3.experts}


def test_unknown_routing_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="'zpif' is not known; choose one of: uniform"):
        group_sizes(dataclasses.replace(TINY, routing="zpif"))


# Timing


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


def buffers(**changes):
    return mlp.make_buffers(dataclasses.replace(TINY, **{"routing": "zipf", **changes}), device="cpu")


def training_data(**changes):
    return mlp.make_training(dataclasses.replace(TINY, routing="dirichlet", **changes), device="cpu")


@pytest.mark.parametrize("case", [*PREFILL, *DECODE, TINY], ids=lambda case: case.name)
def test_copies_keep_repeated_calls_out_of_the_cache(case):
    moved = case.bytes("fc2", case.experts)
    assert mlp.copies_needed(moved) == mlp.MAX_COPIES or mlp.copies_needed(moved) * moved >= mlp.ROTATION_BYTES


def test_tokens_of_a_case_share_a_layer_and_have_experts_of_their_own():
    sets = buffers(rows=2, routing="token:2")
    assert len(sets) == mlp.TOKENS and len({b.w1.data_ptr() for b in sets}) == 1
    chosen = [tuple(b.sizes) for b in sets]
    assert len(set(chosen)) > mlp.TOKENS // 2 and all(sorted(sizes) == [0] * 6 + [1, 1] for sizes in chosen)
    for case in TOKEN:
        assert sorted(group_sizes(case)) == [0] * (case.experts - case.rows) + [1] * case.rows


def test_buffers_have_the_shapes_that_the_operators_take():
    first, second, *_ = buffers()
    assert first.w1.shape == (8, 512, 512) and first.w2.shape == (8, 512, 256) and first.x.dtype == torch.bfloat16
    assert first.offs.dtype == torch.int32 and first.starts.tolist() == [0, *first.offs.tolist()]
    assert first.sizes == group_sizes(dataclasses.replace(TINY, routing="zipf"))
    assert torch.equal(first.x, buffers()[0].x) and not torch.equal(first.x, second.x)


@pytest.mark.parametrize("op", OPS)
def test_torch_path_agrees_with_a_plain_loop(op):
    b = buffers()[0]
    starts = b.starts.tolist()
    wanted = torch.cat([_mlp_of_expert(b, op, e, starts[e], starts[e + 1]) for e in range(8)])
    (got,) = mlp.expected(b, op)
    assert float((got.double() - wanted).norm() / wanted.norm()) < mlp.FORWARD_ERROR


def _mlp_of_expert(b, op, expert, start, end):
    x, w1, w2 = b.x[start:end].double(), b.w1[expert].double(), b.w2[expert].double()
    gate, up = (x @ w1.T).chunk(2, dim=1)
    act = torch.nn.functional.silu(gate) * up
    return {"fc1": act, "fc2": b.mid[start:end].double() @ w2.T, "mlp": act @ w2.T}[op]


@pytest.mark.parametrize("op", mlp.OPERATIONS)
def test_every_contestant_passes_the_check_that_precedes_timing(op):
    sets = buffers() if op in OPS else [training_data()]
    with torch.no_grad():
        found = admitted("tiny", mlp.contestants(op, sets))
    assert list(found.calls) == list(mlp.OPERATIONS[op]) and not found.left_out
    assert max(found.errors.values()) <= (mlp.FORWARD_ERROR if op in OPS else mlp.BACKWARD_ERROR)


@pytest.mark.parametrize("wrong", [lambda y: y * 1.1, lambda y: y.roll(1, 0), lambda y: y * float("nan")])
@pytest.mark.parametrize("name", [mlp.TORCH, mlp.OURS])
def test_a_wrong_contestant_is_not_timed(monkeypatch, wrong, name):
    right = mlp.OPERATIONS["mlp"][name]
    monkeypatch.setitem(mlp.OPERATIONS["mlp"], name, lambda b: wrong(right(b)))
    if name == mlp.OURS:
        with pytest.raises(RuntimeError, match="tiny: glulam: wrong, relative error .* nothing was timed"):
            admitted("tiny", mlp.contestants("mlp", buffers()))
    else:
        with pytest.warns(UserWarning, match="tiny: torch is left out: wrong, relative error"):
            assert list(admitted("tiny", mlp.contestants("mlp", buffers())).calls) == ["glulam", "dense"]


def test_a_failing_peer_is_left_out_but_we_are_not():
    def fails():
        raise OSError("no such\nkernel")

    right = Contestant("right", lambda: lambda number: number)
    with pytest.warns(UserWarning, match="here: peer is left out: OSError: no such kernel"):
        found = admitted("here", [Contestant("peer", fails), right])
    assert list(found.calls) == ["right"] and found.left_out == {"peer": "OSError: no such kernel"}
    assert found.errors == {}
    with pytest.raises(OSError, match="no such"):
        admitted("here", [Contestant("ours", fails, required=True)])
    with pytest.warns(UserWarning, match="left out"):
        admitted("here", [Contestant("ours", fails, required=True, unless=(OSError,))])


def test_layouts_of_w1_are_told_apart():
    b = buffers()[0]
    layouts = (mlp.CONCAT, mlp.INTERLEAVED, mlp.LINEAR_FIRST)
    results = [mlp.expected(b, "fc1", layout) for layout in layouts]
    assert all((contest.relative_error(a, b) > 0.5) == (a is not b) for a in results for b in results)


def test_calls_rotate_through_the_buffers():
    call = contest.rotating(lambda text: text * 2, ["a", "b"])
    assert [call(number) for number in range(3)] == ["aa", "bb", "aa"]


def test_quack_is_left_out_where_it_is_absent_unwanted_or_broken(monkeypatch):
    def broken(mode):
        raise ImportError("needs another DSL")

    monkeypatch.setattr(quack, "quack_version", lambda: None)
    assert quack.find_quack("off") is quack.find_quack("tuned") is None
    monkeypatch.setattr(quack, "quack_version", lambda: "0.6.5")
    monkeypatch.setattr(quack, "Quack", broken)
    monkeypatch.setattr(quack, "make_buffers", lambda case: mlp.make_buffers(case, device="cpu"))
    with pytest.warns(UserWarning, match="QuACK is left out: ImportError: needs another DSL"):
        assert quack.find_quack("default") is None


# Training


def test_training_counts_three_forwards():
    assert SONIC.flop(LAYER) == 3 * 6 * SONIC.rows * SONIC.hidden * SONIC.intermediate
    assert 3 * (SONIC.flop("dw1") + SONIC.flop("dw2")) == SONIC.flop(LAYER)


@pytest.mark.parametrize("op", KERNELS)
def test_bytes_of_a_kernel_are_its_operands(op, monkeypatch):
    """As the same kernel is counted where kernels are compared, but for the row scale and its gradient."""
    fake_gpu.install(monkeypatch)
    case = dataclasses.replace(QWEN3, experts=4, rows=256)
    specs = {"dglu": GroupedDgluSpec(), "dgrad": GroupedMmSpec(transpose_w=True)}
    (made,) = compare.make_sets(case, op, specs.get(op, GroupedWgradSpec()), 1, "cpu")
    scales = 2 * 4 * case.rows if op == "dglu" else 0
    assert made.work(4) == {"flop": case.flop(op), "bytes": case.bytes(op, 4) + scales}


def test_what_a_forward_saves_is_x_the_preactivation_and_the_scale():
    d = training_data()
    needed = train.needed_bytes(dataclasses.replace(TINY, routing="dirichlet"))
    assert train.saved_bytes(mlp.our_layer, d) == needed < train.saved_bytes(mlp.torch_layer, d)


def test_host_items_of_training_compute_the_layer(monkeypatch):
    d = training_data()
    wanted = tuple(tensor.clone() for tensor in mlp.torch_layer(d))
    for call in (mlp.our_layer, train.our_operators):
        assert contest.relative_error(call(d), wanted) <= mlp.BACKWARD_ERROR
    train.autograd_alone(d)
    assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in d.leaves)
    fake = fake_gpu.install(monkeypatch)
    bare = train.BareLaunches(d)
    assert fake.specs == [
        GroupedMlpSpec(GroupedGluSpec("bfloat16", "gated", "blocked", True, SMALL), GroupedMmSpec(tile=SMALL)),
        GroupedDgluSpec(tile=LARGE, dgrad=LARGE),
        GroupedWgradSpec(tile=WGRAD),
    ]
    for _ in range(2):
        assert contest.relative_error(bare(), wanted) <= mlp.BACKWARD_ERROR


def test_differences_of_training_are_those_of_the_medians():
    medians = {train.OURS: 100.0, train.BARE: 30.0, train.AUTOGRAD: 45.0}
    found = train.differences({name: Summary(median, median, median, 3) for name, median in medians.items()})
    assert [summary.median_us for summary in found.values()] == [70.0, 25.0]


def test_gradients_of_a_layer_do_not_add_up_over_calls():
    d = training_data()
    first = [tensor.clone() for tensor in mlp.our_layer(d)]
    assert all(map(torch.equal, first, mlp.our_layer(d)))


@pytest.mark.parametrize("part", range(5))
def test_one_wrong_gradient_is_not_timed(monkeypatch, part):
    def wrong(d):
        return tuple(t * 1.1 if i == part else t for i, t in enumerate(mlp.torch_layer(d)))

    monkeypatch.setitem(mlp.OPERATIONS, LAYER, {mlp.OURS: wrong, mlp.TORCH: mlp.torch_layer})
    with pytest.raises(RuntimeError, match="wrong, relative error .* nothing was timed"):
        admitted("layer", mlp.contestants(LAYER, [training_data()]))


@pytest.mark.parametrize(("op", "parts"), [(LAYER, (2, 3)), ("dw1", (0,)), ("dw2", (0,))])
def test_only_torch_may_leave_the_gradients_of_empty_experts_unwritten(monkeypatch, op, parts):
    d = training_data(rows=6)
    torchs = mlp.OPERATIONS[op][mlp.TORCH]

    def unwritten(d):
        results = tuple(tensor.detach().clone() for tensor in contest.listed(torchs(d)))
        for part in parts:
            results[part][d.sizes.index(0)] = float("nan")
        return results

    monkeypatch.setitem(mlp.OPERATIONS, op, {mlp.TORCH: unwritten})
    monkeypatch.setattr(mlp, "expected", lambda d, op, layout: mlp._with_zeros(d, op, contest.listed(torchs(d))))
    assert list(admitted("here", mlp.contestants(op, [d])).errors) == [mlp.TORCH]
    monkeypatch.setitem(mlp.OPERATIONS, op, {mlp.OURS: unwritten})
    with pytest.raises(RuntimeError, match="relative error nan"):
        admitted("here", mlp.contestants(op, [d]))


def test_errors_are_the_largest_of_all_tensors_and_added_up_in_parts(monkeypatch):
    wanted = torch.randn(7, 6)
    got = wanted.clone()
    got[5] *= 1.5
    whole = contest.relative_error((wanted, got), (wanted, wanted))
    monkeypatch.setattr(contest, "PART_ELEMENTS", 13)
    assert contest.relative_error(got, wanted) == pytest.approx(whole) and whole > 0.01
    got[6, 0] = torch.nan
    error = contest.relative_error((wanted * 9, got, wanted), (wanted, wanted, wanted))
    assert error != error


# Suites


def test_an_architecture_serves_while_it_is_measured(monkeypatch):
    found = []
    monkeypatch.setenv("GLULAM_ARCH", "sm_90a")
    monkeypatch.setattr(portable, "_forget", lambda: found.append(os.environ["GLULAM_ARCH"]))
    with pytest.raises(KeyError), portable.served_by("sm_90"):
        assert os.environ["GLULAM_ARCH"] == "sm_90" and os.environ["GLULAM_ALLOW_UNVALIDATED"] == "1"
        raise KeyError
    assert found == ["sm_90", "sm_90"] and os.environ["GLULAM_ARCH"] == "sm_90a"


def test_recipes_are_checked():
    sets = mlp.make_buffers(Case("small", 4, 64, 32, 40), device="cpu")
    found = admitted("small", quantised.contestants(quantised.CONTESTANTS[:-1], sets))
    assert list(found.errors) == list(quantised.CONTESTANTS[:-1])
    assert found.calls["mxfp8"](3) is sets[3 % len(sets)].y
    assert quantised.error(torch.zeros_like(sets[0].y), sets[0]) == 1.0
    x = torch.randn(5, 64)
    data, scale = quantised.quantise_rows(x)
    assert float((data.float() * scale[:, None] - x).norm() / x.norm()) < 0.04


def test_readings_are_averaged_over_their_time():
    now = itertools.count()
    taken = readings.Readings()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readings.time, "monotonic", lambda: float(next(now)))
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
    with readings.follow_gpu() as taken:
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
    log = readings.Readings()
    log.taken = [(2.0, readings.Reading(1.0, 1.0, 1.0)), (8.0, readings.Reading(1400.0, 690.0, 1.0))]
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


def test_differences_of_host_times_are_what_the_front_adds():
    medians = {BARE_NOTHING: 1.0, BARE_MM: 6.0, BARE_MLP: 10.0, HOST_OURS: 12.5, WITHOUT_OUT: 16.0, KNOWN_ROWS: 17.0}
    found = derived({name: Summary(us, us, us, 3) for name, us in {**medians, NEW_ROWS: 47.0}.items()})
    assert list(found.values()) == [4.0, 1.0, 0.5, 2.5, 3.5, 30.0]


# Stamp and command line


def test_commit_outside_a_checkout_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(stamp, "ROOT", tmp_path)
    assert stamp.git_commit() == stamp.UNKNOWN


def test_a_stamp_of_a_cpu_asks_for_no_gpu():
    made = stamp.make_stamp("python examples/train_moe.py", "abc", "cpu")
    assert (made["commit"], made["gpu"]) == ("abc", "CPU") and made["versions"]["torch"] == torch.__version__


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
    assert command_line("forward", Options()) == "python -m perf forward"
    chosen = Options(budget_s=5.0, case="Qwen3 decode", quack="off")
    assert command_line("host", chosen) == "python -m perf host --budget 5.0 --case 'Qwen3 decode' --quack off"


def test_the_command_line_fills_the_options():
    line = "compare --specs a,b* --bundle x --case Qwen3 --op fc1,fc2 --routing zipf --rows-per-expert 1,64 --budget 3"
    got = chosen(cli.parser().parse_args(line.split()))
    assert got == Options(
        3.0, "Qwen3", ("fc1", "fc2"), specs=("a", "b*"), bundles=("x",), routings=("zipf",), rows_per_expert=(1, 64)
    )
    assert chosen(cli.parser().parse_args(shlex.split(command_line("compare", got))[3:])) == got
    assert chosen(cli.parser().parse_args(["forward"])) == Options()


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("forward", False),
        ("host --quack off", False),
        ("backward --budget 3", False),
        ("backward --op dw1", True),
        ("rows --case Kimi-K2", True),
        ("compare --specs a", True),
    ],
)
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


def test_report_command_writes_the_pages(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("perf.report.write_report", lambda: [tmp_path / "README.md"])
    monkeypatch.setattr(sys, "argv", ["perf", "report"])
    assert cli.main() == 0
    assert "wrote" in capsys.readouterr().out


def test_bare_launches_of_a_layer_compute_it(monkeypatch):
    fake = fake_gpu.install(monkeypatch)
    b = buffers(routing="uniform")[0]
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


def test_the_command_line_of_the_suite():
    line = "layer --op forward,parts --routing uniform --published"
    got = chosen(cli.parser().parse_args(shlex.split(line)))
    assert got == Options(ops=("forward", "parts"), routings=("uniform",), published=True)
    assert command_line("layer", got) == f"python -m perf {line}"
    for line, part in {"layer": False, "layer --published": True, "layer --routing zipf": True}.items():
        assert cli._is_part(cli.parser().parse_args(line.split())) == part
    assert not cli._is_part(cli.parser().parse_args(["tiles", "--routing", "zipf"]))
