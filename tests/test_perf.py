"""The parts of perf that need no GPU: what is measured, how samples become numbers, how numbers become tables."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import shlex
import sys
import threading
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
from perf import (
    contestants,
    fp8,
    operations,
    readings,
    stamp,
    train_host,
    training,
)
from perf.cases import (
    DECODE,
    DEEPSEEK,
    MIXTRAL,
    OPS,
    PREFILL,
    QWEN3,
    SONIC,
    TINY,
    TOKEN,
    Case,
    backward_cases,
    decode_cases,
    forward_cases,
    graph_cases,
    rows_cases,
    select,
    skew_cases,
    train_cases,
)
from perf.options import Options, command_line
from perf.problem import MAX_COPIES, ROTATION_BYTES, TOKENS, copies_needed, make_problem, offsets
from perf.routing import ROUTINGS, apportion, group_sizes, skew
from perf.suites import portable, power, quantize
from perf.suites.compare import make_sets
from perf.suites.host import BARE_MLP, BARE_MM, BARE_NOTHING, KNOWN_ROWS, NEW_ROWS, WITHOUT_OUT, bare_items, derived
from perf.suites.train import HOST_ITEMS, needed_bytes, saved_bytes
from perf.targets import HOST_OURS
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
    for peer in DECODE:
        assert {case.routing for case in decode_cases() if case.name == peer.name} == {"uniform", "zipf"}


def test_sweeps_cover_their_ranges():
    assert [case.rows / case.experts for case in rows_cases()] == [2**doublings for doublings in range(13)]
    sizes = [skew(group_sizes(case)).max_over_mean for case in skew_cases() if case.name == QWEN3.name]
    assert sizes == sorted(sizes) and sizes[0] == 1.0 and sizes[-1] > 0.5 * QWEN3.experts
    assert {case.routing for case in backward_cases()} == {"uniform", "dirichlet", "half-empty"}
    assert {case.name for case in rows_cases("DeepSeek-V3 EP1")} == {"DeepSeek-V3 EP1"}
    assert {case.name for case in skew_cases("kimi")} == {"Kimi-K2 EP8"}


def test_select_keeps_what_matches_and_names_the_choices_otherwise():
    known = forward_cases() + decode_cases()
    assert {case.name for case in select(known, "mixtral")} == {"Mixtral-8x7B", "Mixtral decode", "Mixtral token"}
    assert {case.name for case in select(known, "qwen3 DECODE")} == {"Qwen3 decode"}
    assert {case.routing for case in select(known, "zipf")} == {"zipf"}
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


def test_tokens_of_a_case_share_a_layer_and_have_experts_of_their_own():
    case = dataclasses.replace(TINY, rows=2, routing="token:2")
    problem = make_problem(case, device="cpu")
    assert len(problem.sets) == TOKENS and problem.active_experts == 2
    assert len({b.w1.data_ptr() for b in problem.sets}) == 1
    chosen = [tuple(b.offs.diff(prepend=b.offs.new_zeros(1)).tolist()) for b in problem.sets]
    assert len(set(chosen)) > TOKENS // 2 and all(sorted(sizes) == [0] * 6 + [1, 1] for sizes in chosen)
    assert all(b.starts.tolist() == [0, *b.offs.tolist()] for b in problem.sets)
    assert list(chosen[0]) == problem.sizes
    for case in TOKEN:
        assert case in decode_cases() and case.decode
        assert sorted(group_sizes(case)) == [0] * (case.experts - case.rows) + [1] * case.rows


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
    assert training.flop(SONIC, "dgrad") == SONIC.flop("fc1")


@pytest.mark.parametrize("op", training.KERNELS)
def test_bytes_of_a_kernel_are_its_operands(op, monkeypatch):
    """As the same kernel is counted where kernels are compared, but for the row scale and its gradient."""
    fake_gpu.install(monkeypatch)
    case = dataclasses.replace(QWEN3, experts=4, rows=256)
    specs = {"dglu": GroupedDgluSpec(), "dgrad": GroupedMmSpec(transpose_w=True)}
    (made, *_) = make_sets(case, op, specs.get(op, GroupedWgradSpec()), "cpu")[:1]
    scales = 2 * 4 * case.rows if op == "dglu" else 0
    assert training.bytes_moved(case, op, 4) == operations.bytes_moved(made, 4) - scales
    assert training.flop(case, op) == operations.flop(made, case.rows)


def test_what_a_forward_saves_is_x_the_preactivation_and_the_scale():
    d = training_data()
    case = dataclasses.replace(TINY, routing="dirichlet")
    assert saved_bytes(training.our_layer, d) == needed_bytes(case)
    assert saved_bytes(training.torch_layer, d) > needed_bytes(case)


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


def test_bare_launches_compute_the_layer(monkeypatch):
    d = training_data()
    wanted = training.torch_layer(d)
    fake = fake_gpu.install(monkeypatch)
    bare = train_host.BareLaunches(d)
    assert fake.specs == [
        GroupedMlpSpec(GroupedGluSpec("bfloat16", "gated", "blocked", True, SMALL), GroupedMmSpec(tile=SMALL)),
        GroupedDgluSpec(tile=LARGE, dgrad=LARGE),
        GroupedWgradSpec(tile=WGRAD),
    ]
    for _ in range(2):
        assert training.relative_error(bare(), wanted) <= training.MAX_RELATIVE_ERROR


def test_autograd_alone_makes_the_gradients_of_a_layer():
    d = training_data()
    train_host.autograd_alone(d)
    assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in d.leaves)


def test_differences_of_training_are_those_of_the_medians():
    medians = {train_host.LAYER: 100.0, train_host.BARE: 30.0, train_host.AUTOGRAD: 45.0}
    times = {name: Summary(median, median, median, 3) for name, median in medians.items()}
    assert list(train_host.differences(times).values()) == [70.0, 25.0]


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
    monkeypatch.setattr(training, "contestants", lambda op, quack: {"glulam": ours, "torch": fails})
    with pytest.warns(UserWarning, match="dw1: torch is left out: RuntimeError: not on this GPU"):
        assert list(training.competing(training_data(), "dw1")) == ["glulam"]
    monkeypatch.setattr(training, "contestants", lambda op, quack: {"glulam": fails})
    with pytest.raises(RuntimeError, match="not on this GPU"):
        training.competing(training_data(), "dw1")


# Suites


def test_an_architecture_serves_while_it_is_measured(monkeypatch):
    found = []
    monkeypatch.setenv("GLULAM_ARCH", "sm_90a")
    monkeypatch.setattr(portable, "_forget", lambda: found.append(os.environ["GLULAM_ARCH"]))
    with pytest.raises(KeyError), portable.served_by("sm_90"):
        assert os.environ["GLULAM_ARCH"] == "sm_90" and os.environ["GLULAM_ALLOW_UNVALIDATED"] == "1"
        raise KeyError
    assert found == ["sm_90", "sm_90"] and os.environ["GLULAM_ARCH"] == "sm_90a"


def test_fp8_contestants_are_checked(monkeypatch):
    case = Case("small", 4, 64, 32, 40)
    problem = make_problem(case, device="cpu")
    for name in fp8.CONTESTANTS[:-1]:
        mlp = fp8.make(name, problem.sets)
        assert fp8.check(name, mlp, problem.sets[0]) <= fp8.MAX_RELATIVE_ERROR[name]
        assert fp8.calls(mlp, problem.sets)(3) is problem.sets[3 % len(problem.sets)].y
        with pytest.raises(RuntimeError, match=f"{name}: relative error"):
            fp8.check(name, lambda b: torch.zeros_like(b.y), problem.sets[0])
    x = torch.randn(5, 64)
    data, scale = fp8.quantise_rows(x)
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
    read, parse = threading.Semaphore(0), readings.parse

    def parsed(line):
        read.release()
        return parse(line)

    monkeypatch.setattr(readings, "parse", parsed)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="0"))
    with readings.follow_gpu() as taken:
        for _ in range(3):
            read.acquire()
        os.kill(int(process.read_text()), 0)
    assert len(taken.taken) == 3 and taken.mean(-math.inf, math.inf) == (1400.0, 690.5, 1.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(process.read_text()), 0)


def test_a_contestant_alone_is_timed_after_settling(monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(power.time, "monotonic", lambda: float(next(now)))
    events = itertools.cycle([2.0, 4.0])
    event = type("Event", (), {"record": int, "synchronize": int, "elapsed_time": lambda *_: next(events)})
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event())
    log = readings.Readings()
    log.taken = [(2.0, readings.Reading(1.0, 1.0, 1.0)), (8.0, readings.Reading(1400.0, 690.0, 1.0))]
    calls = []
    alone = power.run_alone(calls.append, 10.0, log)
    assert alone == {"median_us": 100.0, "mhz": 1400.0, "watts": 690.0, "capped": 1.0}  # of 100, 200, 100
    assert len(calls) == 7 * power.CALLS_PER_SAMPLE  # four samples of the settling time, three after it


def test_quantising_counts_every_byte_once():
    row, both = (quantize.Form("x", 64, 96, axis=axis) for axis in ("row", "both"))
    assert row.bytes == 64 * 96 * 3 + 64 * 3 and both.bytes == row.bytes + 64 * 96 + 64 * 3
    assert dataclasses.replace(row, dtype="float32").bytes == row.bytes + 2 * 64 * 96


def test_quantising_is_measured_in_every_form():
    forms = quantize.forms_of(MIXTRAL)
    assert len(set(forms)) == len(forms) == 18
    folds = quantize.folds_of(MIXTRAL)
    assert len(set(folds)) == len(folds) == 4
    elements = 8 * 2 * MIXTRAL.intermediate * MIXTRAL.hidden
    assert folds[0].bytes == 3 * elements + 8 * 2 * MIXTRAL.intermediate
    assert folds[3].bytes == 5 * elements + 8 * MIXTRAL.hidden


def test_a_wrong_fold_is_not_measured(monkeypatch):
    w, form = torch.randn(2, 32, 64), quantize.Fold("w", 64, 64, "float32", "col", experts=2)
    quantize.check(form, w)
    right = quantize.glulam.prepare_mxfp8_weight
    answers = iter((right(w[:1] * 3, axis="col"), right(w[:1], axis="col")))
    monkeypatch.setattr(quantize.glulam, "prepare_mxfp8_weight", lambda *_, **__: next(answers))
    with pytest.raises(RuntimeError, match="prepare_mxfp8_weight is wrong"):
        quantize.check(form, w)


@pytest.mark.parametrize("axis", ["row", "both"])
def test_a_wrong_quantiser_is_not_measured(axis, monkeypatch):
    x, form = torch.randn(40, 64), quantize.Form("x", 40, 64, "float32", axis)
    quantize.check(form, x)
    right = quantize.glulam.quantize_mxfp8
    answers = iter((right(x * 2, **form.options), right(x, **form.options)))
    monkeypatch.setattr(quantize.glulam, "quantize_mxfp8", lambda *_, **__: next(answers))
    with pytest.raises(RuntimeError, match="quantize_mxfp8 is wrong"):
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
    got = cli.chosen(cli.parser().parse_args(line.split()))
    assert got == Options(
        3.0, "Qwen3", ("fc1", "fc2"), specs=("a", "b*"), bundles=("x",), routings=("zipf",), rows_per_expert=(1, 64)
    )
    assert cli.chosen(cli.parser().parse_args(shlex.split(command_line("compare", got))[3:])) == got
    assert cli.chosen(cli.parser().parse_args(["forward"])) == Options()


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
    b = make_problem(TINY, device="cpu").sets[0]
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
