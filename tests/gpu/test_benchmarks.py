"""Assumptions of the benchmarks: exported functions accept the arguments that perf passes, and samples are times."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from perf import layer
from perf.cases import FORWARD, TINY, TRAIN, LayerCase
from perf.contest import admitted
from perf.layer import make_layer
from perf.suites import layer as suite
from perf.suites.compare import OPERATIONS, candidates, contestants, contests, make_sets, open_bundles
from perf.timing import measure_device

pytestmark = pytest.mark.gpu

CASE = dataclasses.replace(TINY, rows=300, routing="dirichlet")
LAYERS = (LayerCase("prefill", 300, 512, 256, 8, 2, "dirichlet"), LayerCase("step", 5, 512, 256, 8, 1))


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_shipped_kernel_passes_the_check_of_a_comparison(op):
    for of in contests(candidates(open_bundles(()), ("*bf16*",)), (op,)):
        who = admitted(op, contestants(make_sets(CASE, op, of.spec), of.competing))
        assert set(who.calls) == {candidate.name for candidate in of.competing}


def test_a_larger_product_takes_longer():
    matrices = {size: torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for size in (1024, 4096)}
    calls = {str(size): lambda _, a=a: torch.mm(a, a) for size, a in matrices.items()}
    times = measure_device(calls, 0.1)
    assert 0 < 4 * times["1024"]["median_us"] < times["4096"]["median_us"]


@pytest.mark.parametrize("op", [FORWARD, TRAIN])
@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
def test_every_layer_passes_the_check_and_is_replayed(case, op):
    d, layers = make_layer(case), layer.layers()[:4]  # ours and torch's
    who = admitted(op, layer.contestants(d, op, layers))
    assert len(who.calls) == 4 and who.left_out == {}
    (record,) = [one for one in suite._measure_op(d, op, 0.0) if one["mode"] == suite.GRAPH]
    assert {one.name for one in layers} <= record["times"].keys()
    kept = suite.memory(layers[0], d, TRAIN)["kept"]
    assert kept >= 2 * (case.rows * 2 * case.intermediate + case.tokens * case.hidden)  # preactivation and result


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
def test_steps_and_parts_of_a_layer_run(case):
    d = make_layer(case)
    for op in (FORWARD, TRAIN):
        record = suite._measure_steps(d, op, 0.0)
        assert min(times["median_us"] for times in record["times"].values()) > 0
    with torch.no_grad():
        parts = [*suite.layer_parts(d), next(iter(suite.routing_parts()))]
        assert len(parts) >= 3 and len(suite._measure_parts(iter(parts), 0.0)) == len(parts)
