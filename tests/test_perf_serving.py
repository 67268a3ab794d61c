"""`python -m perf serving` on the CPU: its cases, data, contestants and checks, with stand-ins for GPU code."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types

import pytest
import torch
from support import fake_humming

import glulam
from perf import serving, serving_humming
from perf.cases import SERVING, SERVING_RECIPES, ServingCase
from perf.contest import admitted
from perf.serving import error, expected, in_format, make_batch, make_weights
from perf.suites import serving as suite

SMALL = ServingCase("small", 9, 128, 256, 4, 2)
PART = ServingCase("part", 21, 128, 128, 4, 3, world_experts=16)  # tokens without an expert here, and empty experts
ODD = ServingCase("odd", 5, 160, 96, 3, 2)  # widths that blocks of 128 do not divide


def _loaded(package):
    """Return a package's loaded modules except its native library, which a process can load only once."""
    names = [name for name in sys.modules if name.partition(".")[0] == package and "._C" not in name]
    return {name: sys.modules[name] for name in names}


@pytest.fixture
def rows(monkeypatch):
    """Module perf.serving_rows, loaded with Triton's interpreter, together with a fresh Triton, whose functions check
    for it at import.
    """
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    compiled = _loaded("triton")
    for name in [*compiled, "perf.serving_rows"]:
        sys.modules.pop(name, None)
    yield importlib.import_module("perf.serving_rows")
    for name in [*_loaded("triton"), "perf.serving_rows"]:
        sys.modules.pop(name, None)
    sys.modules.update(compiled)


def results(experts, case):
    """Return a call, its batch and the expected result."""
    given, ready = in_format(experts.weights, *make_weights(case, "cpu"))
    call = experts.make(case, *(ready if experts.name == "glulam" else given))
    b = make_batch(case, "cpu")
    return call, b, expected(b, *given)


# Cases and data


def test_cases_are_four_models_from_a_token_to_a_prefill():
    assert len(SERVING) == len(set(SERVING)) == 4 * 6
    parts = [case for case in SERVING if case.is_part]
    assert {(case.experts, case.world, case.top_k) for case in parts} == {(32, 256, 8)}
    assert all("E 32 of 256" in case.label for case in parts)
    assert {case.top_k for case in SERVING if not case.is_part} == {8, 4, 2}


def test_work_counts_the_rows_that_have_an_expert_here():
    work = PART.work("mxfp4_weight_only", rows=10, active_experts=2)
    assert work["flop"] == 6 * 10 * 128 * 128
    assert work["bytes"] == 2 * (2 * 10 * 128 + 2 * 10 * 128) + 3 * 2 * 128 * 128 * 4.25 / 8


def test_a_batch_has_choices_of_experts_here_and_elsewhere():
    b = make_batch(PART, "cpu")
    assert b.ids.dtype == b.world_ids.dtype == torch.int32 and b.weights.dtype == torch.float32
    assert torch.equal(b.ids, torch.where(b.world_ids < 4, b.world_ids, -1)) and (b.ids < 0).all(1).any()
    assert torch.equal(b.expert_map[b.world_ids.long()], b.ids)
    torch.testing.assert_close(b.weights.sum(1), torch.ones(PART.tokens))
    assert make_batch(SMALL, "cpu").expert_map is None


@pytest.mark.parametrize("seed", range(8))
def test_a_single_token_has_an_expert_here(seed):
    b = make_batch(dataclasses.replace(PART, tokens=1, seed=seed), "cpu")
    assert len(b.here) >= 1 and len(set(b.world_ids[0].tolist())) == PART.top_k


def test_compared_tokens_include_the_first_and_the_last():
    assert serving.compared(3) == [0, 1, 2] and serving.compared(1) == [0]
    many = serving.compared(8192)
    assert len(set(many)) == 64 and (many[0], many[-1]) == (0, 8191)


def test_the_reference_is_a_plain_loop():
    w1, w2 = make_weights(PART, "cpu")
    b = make_batch(PART, "cpu")
    y = torch.zeros(PART.tokens, PART.hidden, dtype=torch.float64)
    for token, choice in (b.ids >= 0).nonzero().tolist():
        expert = b.ids[token, choice]
        gate, up = (w1[expert].double() @ b.x[token].double()).chunk(2)
        act = gate * torch.sigmoid(gate) * up
        y[token] += b.weights[token, choice].double() * (w2[expert].double() @ act)
    assert y.abs().max() > 0.5
    torch.testing.assert_close(expected(b, w1, w2).double(), y, atol=1e-4, rtol=0)


# Contestants


@pytest.mark.parametrize("case", [SMALL, PART, ODD], ids=lambda case: case.name)
@pytest.mark.parametrize("recipe", SERVING_RECIPES)
def test_our_recipes_pass_the_check_that_precedes_timing(recipe, case):
    mine = serving.ours(recipe)
    call, b, reference = results(mine, case)
    assert 0 < error(call(b), reference) <= mine.bound
    assert torch.equal(call(b), b.out)


WRONG = {
    "other experts": lambda call: lambda b: call(dataclasses.replace(b, ids=torch.where(b.ids >= 0, 3 - b.ids, -1))),
    "weights left out": lambda call: lambda b: call(dataclasses.replace(b, weights=torch.ones_like(b.weights))),
    "nothing written": lambda call: lambda b: b.out,
    "the last token left out": lambda call: lambda b: call(b).index_fill_(0, torch.tensor([len(b.x) - 1]), 0.0),
}


def measured(experts, wrap=lambda call: call):
    """Return the contestants timed on SMALL, with each call replaced by `wrap(call)`."""
    call, b, _ = results(experts, SMALL)
    model = suite.Model(SMALL)
    return admitted("here", suite.contestants(model, [(experts, wrap(call))], b))


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Run the suite on the CPU, with a graph replaced by its call."""
    monkeypatch.setattr(suite, "make_weights", lambda case: make_weights(case, "cpu"))
    monkeypatch.setattr(suite, "capture", lambda run, pool: run)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_result_is_not_timed(on_the_cpu, wrong):
    mine = serving.ours("mxfp8")  # of the wider bound
    assert list(measured(mine).errors) == ["glulam"]
    with pytest.raises(RuntimeError, match="here: glulam: wrong, relative error .*; nothing was timed"):
        measured(mine, WRONG[wrong])
    with pytest.warns(UserWarning, match="here: peer is left out: wrong, relative error"):
        assert not measured(dataclasses.replace(serving.ours("bf16"), name="peer"), WRONG[wrong]).calls


def test_a_wrong_replay_is_not_timed(on_the_cpu, monkeypatch):
    """As of a graph that reads memory which is gone: calls are right, replays are not."""

    def capture(run, pool):
        result = run()
        return lambda: result

    monkeypatch.setattr(suite, "capture", capture)
    with pytest.raises(RuntimeError, match="glulam: wrong, relative error nan"):
        measured(serving.ours("bf16"))


def test_only_peers_of_a_recipe_compete(on_the_cpu, monkeypatch):
    def fails(*given):
        raise ValueError("no kernel")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    mine = serving.ours("bf16")
    peers = [dataclasses.replace(mine, name="good"), dataclasses.replace(mine, name="fails", make=fails),
             dataclasses.replace(mine, name="elsewhere", recipes=("fp8_block",))]  # fmt: skip
    with pytest.warns(UserWarning, match="small: fails is left out: ValueError: no kernel"):
        found = suite.Model(SMALL).competing("bf16", peers)
    assert [experts.name for experts, _ in found] == ["glulam", "good"]


def test_a_package_that_is_absent_or_broken_is_left_out(monkeypatch):
    monkeypatch.setattr(serving, "PACKAGES", {"no_such_package": "", "torch": "no_such_module"})
    with pytest.warns() as seen:
        assert serving.find_peers([], SERVING_RECIPES) == []
    absent, broken = (str(warning.message) for warning in seen)
    assert absent == "no_such_package is left out: it is not installed" and broken.startswith("torch is left out: Mod")


# Humming: what stands around its GEMMs, and the calls


@pytest.mark.parametrize("block", [4, 12, 16])
def test_blocks_have_the_rows_of_one_expert(rows, block):
    b = make_batch(dataclasses.replace(PART, tokens=70, seed=3), "cpu")
    routing = glulam.Routing.from_topk(b.ids, b.weights, PART.experts, world_experts=PART.world)
    sorted_ids, expert_ids, total = rows.align(routing, block)
    counts = [(b.ids == expert).sum().item() for expert in range(PART.experts)]
    assert total.item() == sum(-(-count // block) for count in counts) * block
    assert max(counts) > block  # an expert with several blocks
    seen = []
    for number in range(total.item() // block):
        choices = sorted_ids[number * block : (number + 1) * block]
        there = choices[choices < b.ids.numel()]
        assert len(there) and (choices[len(there) :] == b.ids.numel()).all()
        assert (b.ids.flatten()[there.long()] == expert_ids[number]).all()
        seen += there.tolist()
    assert sorted(seen) == (b.ids.flatten() >= 0).nonzero().flatten().tolist()


@pytest.mark.parametrize("by_choice", [True, False])
def test_weighted_sums_skip_choices_without_a_row(rows, by_choice):
    b = make_batch(PART, "cpu")
    y = torch.randn(b.ids.numel(), 1100).bfloat16()  # two programs a token
    places = b.ids if by_choice else torch.where(b.ids >= 0, torch.randperm(b.ids.numel()).view_as(b.ids), -1).int()
    read = torch.arange(b.ids.numel()).view_as(b.ids) if by_choice else places.long()
    y[sorted(set(range(len(y))) - set(read[places >= 0].tolist()))] = float("nan")
    terms = y.double()[read] * b.weights.double()[..., None]
    wanted = terms.masked_fill((places < 0)[..., None], 0).sum(1)
    out = torch.full((PART.tokens, 1100), float("nan")).bfloat16()
    got = rows.weighted_sums(y, places, b.weights, out, by_choice=by_choice)
    torch.testing.assert_close(got.double(), wanted, atol=1e-6, rtol=2**-7)  # the interpreter rounds towards 0


@pytest.mark.parametrize("case", [SMALL, PART], ids=lambda case: case.name)
@pytest.mark.parametrize("scheme", serving_humming.SCHEMES, ids=lambda scheme: scheme.name)
def test_humming_is_called_as_its_gemms_read_it(rows, scheme, case, monkeypatch):
    fake_humming.install(monkeypatch)
    properties = types.SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    serving_humming.plan.cache_clear()
    (experts,) = (one for one in serving_humming.peers([case], scheme.recipes) if one.name == scheme.name)
    gemm = "grouped_contiguous" if case.is_part else "indexed"
    assert {(name, len(tiles)) for _, name, tiles in fake_humming.Kernel.compiled} == {(gemm, 1)}  # not the larger tile
    call, b, reference = results(experts, case)
    assert 0 < error(call(b), reference) < serving.ROWS_16_BITS  # the fake does not round rows


def test_a_contestant_reads_one_format():
    for scheme in serving_humming.SCHEMES:
        assert {scheme.weights, *scheme.recipes} <= set(SERVING_RECIPES)
