"""The parts of perf that need no GPU: what is measured, how samples become numbers, how numbers become tables."""

from __future__ import annotations

import dataclasses
import functools
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
from support import fake_gpu, layer_results

import glulam
from cute_kernels.sm90.configs import LARGE, SMALL, WGRAD
from cute_kernels.specs import GroupedDgluSpec, GroupedGluSpec, GroupedMlpSpec, GroupedMmSpec, GroupedWgradSpec
from perf import __main__ as cli
from perf import (
    cells,
    contestants,
    fp8,
    operations,
    overview,
    plots,
    readings,
    report,
    results,
    stamp,
    tables,
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
from perf.suites import SUITES, portable, power, quantize
from perf.suites.compare import make_sets
from perf.suites.host import BARE_MLP, BARE_MM, BARE_NOTHING, KNOWN_ROWS, NEW_ROWS, WITHOUT_OUT, bare_items, derived
from perf.suites.train import HOST_ITEMS, needed_bytes, saved_bytes
from perf.targets import HOST_OURS, target
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
    with pytest.warns(UserWarning, match="dw1: torch is left out: not on this GPU"):
        assert list(training.competing(training_data(), "dw1")) == ["glulam"]
    monkeypatch.setattr(training, "contestants", lambda op, quack: {"glulam": fails})
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
    "sms": "132",
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


HOST_MEDIANS = {
    BARE_NOTHING: 1.0, BARE_MM: 6.0, BARE_MLP: 10.0, HOST_OURS: 12.5, WITHOUT_OUT: 16.0, KNOWN_ROWS: 17.0,
    NEW_ROWS: 47.0,
}  # fmt: skip


def host_result():
    summaries = {name: Summary(us, us, us, 3) for name, us in HOST_MEDIANS.items()}
    differences = {name: {"median_us": us} for name, us in derived(summaries).items()}
    items = {"op": "host", "times": {name: dataclasses.asdict(summary) for name, summary in summaries.items()}}
    return results.make_result("host", STAMP, LIMITS, [items, {"op": "differences", "times": differences}])


def graph_result():
    record = {
        "case": dataclasses.asdict(TINY),
        "skew": {"max_over_mean": 1.0, "empty_experts": 0},
        "layers": 32,
        "replays_equal_to_eager": 4,
        "times": times(**{"glulam eager": 12.0, "glulam replay": 6.0}),
    }
    return results.make_result("graph", STAMP, LIMITS, [record])


def transformers_result():
    block = {
        "model": "Qwen3-30B-A3B", "tokens": 1, "mode": "graph",
        "errors": {"glulam": 4e-3, "eager": 7e-3, "grouped_mm": 5e-3},
        "times": times(glulam=50.0, grouped_mm=125.0),
    }  # fmt: skip
    step = {"model": "gpt-oss-120b, 4 layers", "tokens": 128, "mode": "decoding step, graph"}
    step["times"] = times(**{"grouped_mm": 9000.0, "glulam": 8000.0, "glulam, mxfp4_weight_only": 4000.0})
    return results.make_result("transformers", STAMP, LIMITS, [block, step])


def distributed_result():
    times = {"dispatch": 20.0, "combine": 25.0, "both": 60.0}
    ends = {
        "kind": "ends", "layer": "small", "tokens": 64, "bytes": 3.6e6, "put_gbps": 360.0, "world": 2,
        "times": {"symmetric": {**times, "graph": 30.0}, "all_to_all": {**times, "both": 240.0}},
    }  # fmt: skip
    layer = {
        "kind": "layer", "layer": "small", "tokens": 64, "mode": "forward", "world": 2,
        "times": {"symmetric": {"us": 100.0}, "all_to_all": {"us": 250.0}, "experts alone": {"us": 80.0}},
    }  # fmt: skip
    graph = {**layer, "mode": "forward, graph", "times": {"symmetric": {"us": 50.0}, "experts alone": {"us": 40.0}}}
    return results.make_result("distributed", STAMP, LIMITS, [ends, layer, graph])


def test_experts_across_gpus_are_shown_beside_links_and_the_other_transport():
    ends, layers, _ = tables.tables_of(distributed_result())
    assert ends.rows == [("small, 64", "10.0", "20.0 (0.50)", "25.0 (0.40)", "60.0", "30.0", "240.0")]
    assert layers.rows[0] == ("small, 64, forward", "100.0", "250.0", "2.50", "20.0", "1.60")
    assert layers.rows[1] == ("small, 64, forward, graph", "50.0", "-", "-", "10.0", "1.60")


def test_blocks_of_transformers_are_shown_beside_its_own():
    block, step, _ = tables.tables_of(transformers_result())
    assert block.rows[0][:3] == ("Qwen3-30B-A3B", "1", "graph") and block.rows[0][4:] == (
        "125 (2.50x)",
        "4.0e-03 (5.0e-03)",
    )
    assert step.rows[0][4:] == ("9000 (1.12x)", "4000 (0.50x)", "-")


def power_result():
    alone = {"median_us": 3000.0, "mhz": 1400.0, "watts": 690.4, "capped": 1.0}
    record = {"case": dataclasses.asdict(MIXTRAL), "op": "fc1", "flop": MIXTRAL.flop("fc1"), "times": {"glulam": alone}}
    gradient = {**record, "op": "dw2", "flop": training.flop(MIXTRAL, "dw2")}
    return results.make_result("power", STAMP, LIMITS, [record, gradient])


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
    memory = {"peak_bytes": {"glulam": 3e9, "torch": 4.5e9}, "saved_bytes": {"glulam": 1e9}, "needed_bytes": 1e9}
    layer = {**train_record("layer", glulam=1500.0, torch=3000.0), **memory}
    host = {"op": "host", "times": times(**dict.fromkeys(HOST_ITEMS, 99.0))}
    return results.make_result("train", STAMP, LIMITS, [layer, host])


def curves_result(suite="training-curves"):
    size = {"layers": 8, "width": 512, "heads": 8, "experts": 16, "top_k": 2, "intermediate": 768, "context": 512}
    setup = {"size": size, "batch": 64, "steps": 2, "learning_rate": 1e-3, "dtype": "bfloat16"}
    run = {"run": "torch", "loss": [3.0, 2.0], "loss_at_end": 2.0, "held_out": 2.125, "step_ms": 25.0}
    other = {**run, "run": "glulam", "step_ms": 20.0, "distance": {"mean": 0.0012, "largest": 0.025}}
    return results.make_result(suite, STAMP, {}, [run, other, {"setup": setup, "window": 20}])


TUNING = {"quack tuned": {"dw1": {"config": "c", "timed": 40, "left_out": 4, "seconds": 2.5}}}


def backward_result():
    records = []
    for routing, us in {"uniform": 400.0, "half-empty": 440.0}.items():
        case = dataclasses.replace(MIXTRAL, routing=routing)
        for op in training.KERNELS:
            record = train_record(op, **{"glulam": us, "dense": 350.0, "quack tuned": 500.0})
            moved = training.bytes_moved(MIXTRAL, op, 8)
            records.append({**record, "case": dataclasses.asdict(case), "bytes": moved, "tuning": TUNING})
    return results.make_result("backward", STAMP, LIMITS, records)


def sweep_result(suite, cases):
    records = []
    for number, case in enumerate(cases):
        us = 100.0 + number
        record = forward_record(case, "fc1", glulam=us, torch=2 * us, **({} if case.decode else {"dense": us}))
        records.append({**record, "skew": dataclasses.asdict(skew(group_sizes(case)))})
    return results.make_result(suite, STAMP, LIMITS, records)


def compare_result():
    record = {
        **forward_record(MIXTRAL, "fc1", dense=2792.0, t128x256=2800.0, t64x256=3000.0),
        "form": "grouped_glu_bf16",
        "flop": MIXTRAL.flop("fc1"),
        "bytes": MIXTRAL.bytes("fc1", 8),
    }
    return results.make_result("compare", STAMP, LIMITS, [record])


def quantize_result():
    medians = times(glulam=60.0, copy=55.0)
    summaries = {name: Summary(**summary) for name, summary in medians.items()}
    records = [
        quantize.make_record(form, summaries) for form in (*quantize.forms_of(MIXTRAL), *quantize.folds_of(MIXTRAL))
    ]
    return results.make_result("quantize", STAMP, LIMITS, records)


def fp8_result():
    medians = {"bf16": 3000.0, "mxfp8": 2000.0, "mxfp8_exact": 4000.0, "torch fp8": 2400.0}
    record = forward_record(MIXTRAL, "mlp", **medians)
    decode = forward_record(DECODE[0], "mlp", mxfp8=50.0, mxfp4_weight_only=100.0)
    return results.make_result("fp8", STAMP, LIMITS, [record, decode])


def frozen_result():
    medians = {"mxfp4_weight_only": 100.0, "dequantised": 250.0, "bf16": 125.0}
    record = {**forward_record(MIXTRAL, "dx through w1", **medians), "recipe": "mxfp4_weight_only"}
    return results.make_result("frozen", STAMP, LIMITS, [record])


def lora_result():
    times = {name: {"median_us": us, "low_us": us, "high_us": us, "samples": 9}
             for name, us in (("the layer alone", 2000.0), ("lora", 2500.0), ("materialised", 5000.0))}  # fmt: skip
    case = {"name": "m", "tokens": 64, "hidden": 128, "intermediate": 64, "experts": 8, "top_k": 2}
    peaks = dict.fromkeys(times, 2**30) | {"lora": 2**29}
    record = {"case": case, "recipe": "bf16", "rank": 16, "peak_bytes": peaks, "times": times}
    return results.make_result("lora", STAMP, LIMITS, [record])


def test_the_lora_table_shows_both_ratios_and_memory():
    table, _ = tables.tables_of(lora_result())
    assert table.rows[0][1:] == ("bf16", "2000", "2500", "1.25", "materialised 2.00x", "1024 / 512 / 1024")


def test_the_frozen_table_shows_both_ratios():
    table, _ = tables.tables_of(frozen_result())
    assert table.rows[0][1:] == ("dx through w1", "100 (2.50x, 1.25x)")


def test_the_fp8_table_shows_both_ratios_and_what_is_missed():
    table, decoding, missed, _ = tables.tables_of(fp8_result())
    mixtral, decode = table.rows
    tflops = f"{MIXTRAL.flop('mlp') / 2000 * 1e-6:.0f}"
    assert mixtral[1:] == ("2000 (1.50x, 1.20x)", "4000 (0.75x, 0.60x)", "-", tflops, "3000", "2400")
    assert decode[1:3] == ("50.0 (-, -)", "-")
    weights, rows = 128 * 3 * 2048 * 768, 2 * 512 * 2 * (2048 + 768)
    eight, four = ((weights * bits / 8 + rows) / us * 1e-6 / LIMITS["copy_tbps"] for bits, us in ((8, 50), (4.25, 100)))
    assert decoding.rows == [(DECODE[0].label, f"{eight:.2f}", "-", f"{four:.2f}", "-")]
    assert missed.rows == [
        ("Mixtral-8x7B", "mxfp8_exact", "bf16", "0.750", "0.80"),
        ("Qwen3 decode", "mxfp4_weight_only", "device copy", f"{four:.3f}", "0.82"),
    ]


def serving_result():
    case = {"name": "m", "tokens": 16, "hidden": 128, "intermediate": 64, "experts": 8, "top_k": 2, "world_experts": 64}
    record = {"case": case, "op": "bf16", "flop": 10**6, "bytes": 10**8, "errors": {}}
    first = {**record, "times": times(glulam=100.0, first=125.0, second=90.0)}
    large = {**record, "case": {**case, "tokens": 64}, "times": times(glulam=200.0, first=150.0)}
    other = {**record, "op": "mxfp8", "times": times(glulam=50.0, third=100.0)}
    return results.make_result("serving", STAMP, LIMITS, [first, large, other])


def test_the_serving_tables_show_each_peer_and_its_least_ratio():
    bf16, mxfp8, summary, _ = tables.tables_of(serving_result())
    assert bf16.rows[0][0] == "m (N 16, H 128, I 64, E 8 of 64, K 2)" and "TB/s" in bf16.rows[0][2]
    assert bf16.rows[0][3:] == ("125 (1.25x)", "90.0 (0.90x)") and bf16.rows[1][3:] == ("150 (0.75x)", "-")
    assert len(mxfp8.rows) == 1 and mxfp8.rows[0][3:] == ("100 (2.00x)",)
    assert summary.rows == [
        ("bf16", "first", "0.75", "1.00", "1 of 2"),
        ("bf16", "second", "0.90", "0.90", "0 of 1"),
        ("mxfp8", "third", "2.00", "2.00", "1 of 1"),
    ]


def portable_result():
    medians = {"portable": 4000.0, "native": 3000.0, "torch": 5000.0, "mma.sync alone": 1000.0}
    prefill = forward_record(MIXTRAL, "mlp", **medians)
    decode = forward_record(DECODE[0], "mlp", **{**medians, "portable": 270.0, "portable mxfp8_weight_only": 180.0})
    return results.make_result("portable", STAMP, LIMITS, [{**r, "mma_flop": 5 * 10**11} for r in (prefill, decode)])


def test_the_portable_table_shows_shares_of_limits_and_what_is_missed():
    table, missed, _ = tables.tables_of(portable_result())
    prefill, decode = table.rows
    of_mma = MIXTRAL.flop("mlp") / 4000e-6 / 5e14
    moved = 2 * (128 * 3 * 2048 * 768 + 2 * 512 * (2048 + 768))
    of_copy = moved / 270e-6 * 1e-12 / LIMITS["copy_tbps"]
    assert prefill[1:] == ("4000.0", "0.75", "1.25", f"{of_mma:.2f}", "-", "-") and 0.5 < of_mma < 1.5
    assert decode[1:] == ("270.0", "11.11", "18.52", "-", f"{of_copy:.2f}", "1.50") and 0.9 < of_copy < 1.1
    assert missed.rows == [("Qwen3 decode", "portable mxfp8_weight_only", "1.500", "1.60")]


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
    many = {**record, "op": "sinkhorn", "size": {**record["size"], "s": 64 * 8192}, "warp_instructions": 80_000_000}
    host = {"op": "host", "times": times(**{"bare aggregate": 5.0})}
    return results.make_result("mhc", STAMP, LIMITS, [record, backward, many, host])


def test_mhc_table_shows_the_share_of_the_copy_bandwidth():
    (row, _, many), _ = (table.rows for table in tables.tables_of(mhc_result())[:2])
    assert row[3:] == ("600.0", "2.349", "0.92", "-", "900 (1.50)", "582", "0.01")
    assert many[6:] == ("0.13", "900 (1.50)", "-", "0.01")  # 80e6 / (600 us, 132 SMs, 4 a cycle, 1980 MHz)


def tiles_result():
    records = [
        {
            "model": "m",
            "op": op,
            "routing": "uniform",
            "experts": 8,
            "n": 64,
            "k": 64,
            "rows_per_expert": rows,
            "us": us,
        }
        for op in ("fc1", "dgrad")
        for rows, us in ((1, {"a": 5.0, "b": 4.0}), (64, {"b": 6.0}))
    ]
    return results.make_result("tiles", STAMP, LIMITS, records)


ALL_RESULTS = {
    "forward": forward_result,
    "decode": lambda: sweep_result("decode", decode_cases()),
    "rows": lambda: sweep_result("rows", rows_cases()),
    "skew": lambda: sweep_result("skew", skew_cases()),
    "backward": backward_result,
    "host": host_result,
    "graph": graph_result,
    "train": train_result,
    **{suite: functools.partial(curves_result, suite) for suite in results.TRAINING},
    "power": power_result,
    "quantize": quantize_result,
    "fp8": fp8_result,
    "frozen": frozen_result,
    "lora": lora_result,
    "serving": serving_result,
    "portable": portable_result,
    "mhc": mhc_result,
    "transformers": transformers_result,
    "distributed": distributed_result,
    "layer": lambda: layer_results.result(STAMP, LIMITS),
    "compare": compare_result,
    "tiles": tiles_result,
}


def test_every_suite_has_tables_and_a_command():
    everything = set(ALL_RESULTS)
    assert everything == {*SUITES, *results.TRAINING} == set(tables.TABLES) == {*cli.SUITE_NAMES, *results.TRAINING}


def test_power_is_shown_with_the_share_of_peak_at_its_clock():
    (table, _) = tables.tables_of(power_result())
    flop = 2 * MIXTRAL.rows * MIXTRAL.hidden * 2 * MIXTRAL.intermediate
    share = flop / 3000e-6 / (4096 * int(STAMP["sms"]) * 1400e6)
    readings = "1400", "690", "100%"
    assert table.rows[0][1:] == ("fc1", "glulam", "3000", "641", *readings, f"{share:.2f}") and 0.5 < share < 1
    assert table.rows[1][1:] == ("dw2", "glulam", "3000", "321", *readings, f"{share / 2:.2f}")


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
    quantize.check_fold(form, w)
    right = quantize.glulam.prepare_mxfp8_weight
    answers = iter((right(w[:1] * 3, axis="col"), right(w[:1], axis="col")))
    monkeypatch.setattr(quantize.glulam, "prepare_mxfp8_weight", lambda *_, **__: next(answers))
    with pytest.raises(RuntimeError, match="prepare_mxfp8_weight is wrong"):
        quantize.check_fold(form, w)


@pytest.mark.parametrize("axis", ["row", "both"])
def test_a_wrong_quantiser_is_not_measured(axis, monkeypatch):
    x, form = torch.randn(40, 64), quantize.Form("x", 40, 64, "float32", axis)
    quantize.check(form, x)
    right = quantize.glulam.quantize_mxfp8
    answers = iter((right(x * 2, **form.options), right(x, **form.options)))
    monkeypatch.setattr(quantize.glulam, "quantize_mxfp8", lambda *_, **__: next(answers))
    with pytest.raises(RuntimeError, match="quantize_mxfp8 is wrong"):
        quantize.check(form, x)


def test_a_ratio_above_one_means_that_we_are_faster():
    record = forward_record(MIXTRAL, "fc1", glulam=2000.0, torch=3000.0)
    assert cells.ratio(record, "torch") == 1.5


def test_rates_are_read_in_what_bounds_the_case():
    assert cells.rate(forward_record(MIXTRAL, "fc1"), 2825.0, LIMITS) == "681 TF/s (87 %)"
    assert cells.rate(forward_record(DECODE[0], "fc1"), 214.0, LIMITS) == "3.78 TB/s (88 %)"


def test_forward_table_shows_times_ratios_and_gaps():
    fc1, mlp, missed = tables.forward_tables(forward_result())
    assert fc1.header[-2:] == ("dense us", "torch us")
    assert fc1.rows[0][2:] == ("2800 ± 10.0 %", "687 TF/s (88 %)", "2792 (1.00x)", "4200 (1.50x)")
    assert fc1.rows[1][-2:] == ("-", "300 (1.50x)")
    assert len(mlp.rows) == 1
    assert missed.rows == [("Mixtral-8x7B", "uniform", "fc1", "dense", "0.997", "1.00")]
    slow = forward_record(DECODE[0], "fc1", glulam=240.0, torch=400.0)
    (missed,) = tables.below_target({**forward_result(), "records": [slow]})
    assert missed.rows == [("Qwen3 decode", "uniform", "fc1", "device copy", "0.789", "0.92")]


def test_train_tables_show_rates_ratios_and_memory():
    layer, memory, host = tables.train_tables(train_result())
    assert layer.rows[0][2:] == ("1500 ± 10.0 %", "618 TF/s (79 %)", "3000 (2.00x)")
    assert memory.header[1:] == ("glulam peak", "torch peak", "glulam saved", "torch saved", "x, h and s")
    assert memory.rows[0][1:] == ("3.00", "4.50", "1.00", "-", "1.00")
    assert [row[1] for row in host.rows] == ["99.0"] * len(HOST_ITEMS)


def test_curves_table_shows_how_far_runs_lie_from_the_first():
    (table,) = tables.tables_of(curves_result())
    assert "64 x 512 bytes in bfloat16" in table.title and "E 16, K 2" in table.title
    assert table.rows[0] == ("torch", "2.0000", "2.1250", "25.0", "-", "-")
    assert table.rows[1] == ("glulam", "2.0000", "2.1250", "20.0", "1.2e-03", "2.5e-02")


def test_backward_tables_show_kernels_and_the_price_of_empty_experts():
    dglu, dgrad, dw1, dw2, half, missed = tables.backward_tables(backward_result())
    assert dw1.header[-2:] == ("dense us", "quack tuned us") and dw1.rows[0][-2:] == ("350 (0.88x)", "500 (1.25x)")
    assert half.rows[0] == ("Mixtral-8x7B", "dglu", "400", "440", "1.10") and len(half.rows) == 4
    assert ("Mixtral-8x7B", "uniform", "dw1", "dense", "0.875", "0.90") in missed.rows
    assert not any(row[3] == "quack tuned" for row in missed.rows)


def test_targets_know_peers_routings_and_operations():
    def of(case, op, contestant, routing="uniform"):
        return target({"case": dataclasses.asdict(dataclasses.replace(case, routing=routing)), "op": op}, contestant)

    assert of(QWEN3, "fc1", "quack tuned") == 1.10 and of(QWEN3, "fc1", "quack tuned", "dirichlet") == 1.25
    assert of(QWEN3, "fc2", "dense") == 0.92 and of(QWEN3, "fc2", "torch") == 1.1
    assert of(DECODE[0], "fc2", "torch", "zipf") == 1.35 and of(QWEN3, "mlp", "torch") is None
    assert of(MIXTRAL, "dw2", "dense") == 0.9 and of(QWEN3, "dw2", "dense") is None
    assert of(SONIC, "layer", "torch") == 1.25 and of(TINY, "fc1", "torch") is None


def test_host_differences_are_what_the_front_adds():
    differences = dict(tables.host_tables(host_result())[1].rows)
    assert differences["glulam.grouped_mlp above two bare launches"] == "0.50"
    assert differences["glulam.grouped_mlp above one bare call that makes both"] == "2.50"
    assert differences["the output's allocation"] == "3.50"
    assert differences["a number of rows that is new"] == "30.00"


def test_microseconds_keep_three_digits():
    assert [cells.microseconds(us) for us in (2825.4, 365.2, 24.31, 4.712)] == ["2825", "365", "24.3", "4.71"]


@pytest.mark.parametrize("suite", ALL_RESULTS)
def test_tables_are_rectangular(suite):
    for table in tables.tables_of(ALL_RESULTS[suite]()):
        assert table.rows and all(len(row) == len(table.header) for row in table.rows)


def test_unknown_suite_has_no_tables():
    with pytest.raises(ValueError, match="no tables for suite 'sideways'"):
        tables.tables_of({**forward_result(), "suite": "sideways"})


@pytest.mark.parametrize("suite", ALL_RESULTS)
def test_results_survive_the_disk(tmp_path, suite):
    result = ALL_RESULTS[suite]()
    results.write(result, tmp_path / "new" / "one.csv")
    (got,) = results.read_all(tmp_path / "new")
    for field in ("suite", "stamp", "limits", "tuned"):
        assert got[field] == result[field]
    assert tables.tables_of(got) == tables.tables_of(result)
    results.write(got, tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text() == (tmp_path / "new" / "one.csv").read_text()


def test_a_file_of_results_has_a_line_a_contestant(tmp_path):
    record = {"case": {"name": "a, b"}, "op": "fc1", "losses": [1.0, 2.5], "ok": True}
    second = {**record, "op": "fc2"}
    first = {"times": {"glulam": {"us": 4.2712345}, "torch": {"us": 2e9}}, "left_out": {"torch 1.2": "failed\ntwice"}}
    result = results.make_result("s", {"gpu": "x: 1"}, {"copy_tbps": 4.2712345}, [{**record, **first}, second])
    results.write(result, tmp_path / "s.csv")
    assert (
        (tmp_path / "s.csv").read_text()
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
"""
    )
    first_got, second_got = results.read(tmp_path / "s.csv")["records"]
    assert first_got["left_out"] == {"torch 1.2": "failed twice"} and first_got["times"]["torch"] == {"us": 2e9}
    assert second_got == second and first_got["case"] == {"name": "a, b"}


def test_tiles_table_shows_the_time_over_the_fastest():
    fc1, _ = tables.tiles_tables(tiles_result())
    assert fc1.header[1:] == ("1", "64") and fc1.rows == [("a", "1.25", "-"), ("b", "1.00", "1.00")]


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


def test_report_fills_both_pages(tmp_path, monkeypatch):
    for suite, make in ALL_RESULTS.items():
        results.write(make(), tmp_path / f"{suite}.csv")
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


PLOTS = ["backward", "decode", "forward", "layer", *results.TRAINING, "roofline", "rows", "skew"]


def test_plots_are_drawn_and_do_not_change(tmp_path):
    all_results = [make() for make in ALL_RESULTS.values()]
    paths = plots.write_plots(all_results, tmp_path)
    overview_path, drawn = tmp_path / "overview-h200.svg", tmp_path / "plots"
    assert {*paths} == {overview_path, *(drawn / f"{stem}-h200.svg" for stem in PLOTS)}
    before = {path: path.read_bytes() for path in paths}
    assert all(b"<svg" in content and len(content) > 2000 for content in before.values())
    assert b"Mixtral-8x7B" in before[drawn / "forward-h200.svg"]
    assert b"useful TF/s" in before[drawn / "roofline-h200.svg"]
    assert b"torch 2.00" in before[overview_path]
    plots.write_plots([forward_result(), host_result()], tmp_path)
    assert (drawn / "forward-h200.svg").read_bytes() == before[drawn / "forward-h200.svg"]


def test_without_results_there_are_no_plots_and_no_need_for_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plots.write_plots([graph_result()], tmp_path) == []
    with pytest.raises(RuntimeError, match=r"drawing needs matplotlib .*; pip install 'glulam\[plots\]'"):
        plots.write_plots([forward_result()], tmp_path)


def test_report_without_results_says_so(tmp_path):
    assert "Nothing has been measured yet" in report.results_page([])
    assert "Nothing has been measured yet" in report.summary([graph_result()])


@pytest.mark.parametrize("page", ["no marks", report.END + report.BEGIN])
def test_report_needs_its_marks(page):
    with pytest.raises(ValueError, match="needs the marks"):
        report.fill(page, "text")


def test_both_pages_hold_what_the_result_files_say():
    """Every number in them is one of perf/results/*.csv: they are as `python -m perf report` writes them."""
    kept, page = results.read_all(), report.README.read_text()
    assert report.fill(page, report.summary(kept)) == page
    assert report.results_page(kept) == (results.RESULTS / "README.md").read_text()


def qwen3_results():
    """The result files that the overview is made of, of round times."""
    uniform, skewed = QWEN3, dataclasses.replace(QWEN3, routing="dirichlet")
    decode = dataclasses.replace(QWEN3, name="Qwen3 decode", rows=512)
    prefill = {"torch": 1000.0, "quack tuned": 500.0}
    yield (
        "forward",
        [
            forward_record(skewed, "mlp", glulam=500.0, **prefill),
            forward_record(uniform, "fc1", glulam=1.0, torch=900.0),
            forward_record(uniform, "mlp", glulam=400.0, dense=1.0, **prefill),
        ],
    )
    yield "decode", [forward_record(decode, "mlp", glulam=250.0, torch=500.0)]
    yield "fp8", [forward_record(uniform, "mlp", **{"mxfp8": 200.0, "bf16": 400.0, "torch fp8": 300.0})]
    yield "train", [train_record("layer", glulam=1500.0, torch=3000.0)]


def test_the_overview_has_a_row_for_each_kind_of_work():
    made = [results.make_result(suite, STAMP, LIMITS, records) for suite, records in qwen3_results()]
    host, streams = host_result(), mhc_result()
    host["records"][0]["times"]["torch mlp (out allocated)"] = {"median_us": 50.0}
    streams["records"][1]["direction"] = "forward"
    lines = overview.overview([*made, host, streams])
    prefill, decode, fp8_row, train, host, mhc = overview.overview_table(lines).rows
    tflops = QWEN3.flop("mlp") / 400 * 1e-6
    assert prefill[:2] == ("prefill: `grouped_mlp`, 32768 rows", "400") and prefill[2].startswith(
        f"{tflops:.0f} TF/s ("
    )
    assert prefill[3] == "torch 2.50x (2.00, 2.50); QuACK 1.25x (1.00, 1.25)"
    assert (decode[1], decode[3]) == ("250", "torch 2.00x (2.00, 2.00)")
    assert fp8_row[1:] == ("200", f"{2 * tflops:.0f} TF/s", "BF16 2.00x (2.00, 2.00); torch's FP8 1.50x (1.50, 1.50)")
    assert (train[1], train[3]) == ("1500", "torch 2.00x (2.00, 2.00)")
    assert host == ("host: until `grouped_mlp` returns", "12.5", "-", "torch 4.00x")
    assert mhc[1:] == ("600", "3.92 TB/s (92 %)", "torch.compile 1.50x (1.50, 1.50)")


def test_the_overview_is_of_one_gpu():
    ((suite, records), *_), other = qwen3_results(), {**STAMP, "gpu": "NVIDIA H100"}
    one = results.make_result(suite, STAMP, LIMITS, records)
    slower = [forward_record(QWEN3, "mlp", glulam=999.0)]
    lines = overview.overview([one, host_result(), results.make_result("forward", other, LIMITS, slower)])
    assert [line.us for line in lines][0] == 400.0


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
    monkeypatch.setattr(cli, "measure", lambda arguments: forward_result())
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


def test_tables_show_on_a_console(capsys):
    for make in ALL_RESULTS.values():
        for table in tables.tables_of(make()):
            cli.show(table, cli._console())
    assert "4200 (1.50x)" in capsys.readouterr().out


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
