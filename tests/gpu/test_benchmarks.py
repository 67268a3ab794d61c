"""What the benchmarks rest on: exported functions take the arguments that perf gives them, and samples are times."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from perf import layer, layer_parts, layer_stages
from perf.cases import TINY
from perf.layer_cases import FORWARD, TRAIN, LayerCase
from perf.layer_data import make_layer
from perf.operations import OPERATIONS
from perf.suites import layer as suite
from perf.suites.compare import candidates, checked, contests, make_sets, open_bundles
from perf.timing import measure_device

pytestmark = pytest.mark.gpu

CASE = dataclasses.replace(TINY, rows=300, routing="dirichlet")
LAYERS = (LayerCase("prefill", 300, 512, 256, 8, 2, "dirichlet"), LayerCase("step", 5, 512, 256, 8, 1))


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_shipped_kernel_passes_the_check_of_a_comparison(op):
    for _, spec, group in contests(candidates(open_bundles(()), ("*bf16*",)), (op,)):
        sets = make_sets(CASE, op, spec)
        assert set(checked(sets, group)) == {candidate.name for candidate in group}


def test_a_larger_product_takes_longer():
    matrices = {size: torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for size in (1024, 4096)}
    calls = {str(size): lambda _, a=a: torch.mm(a, a) for size, a in matrices.items()}
    times = measure_device(calls, 0.1)
    assert 0 < 4 * times["1024"].median_us < times["4096"].median_us


@pytest.mark.parametrize("op", [FORWARD, TRAIN])
@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
def test_every_layer_passes_the_check_and_is_replayed(case, op):
    d = make_layer(case)
    found = layer.admitted(d, op, layer.contestants()[:4])  # ours and torch's
    assert len(found.contestants) == 4 and found.left_out == {}
    record = suite._time(d, op, suite.GRAPH, found, 0.0)
    assert len(record["times"]) == 4 and not record["left_out"]
    kept = suite.memory(found.contestants[0], d, TRAIN)["kept"]
    assert kept >= 2 * (case.rows * 2 * case.intermediate + case.tokens * case.hidden)  # preactivation and result


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
def test_steps_and_parts_of_a_layer_run(case):
    d = make_layer(case)
    for op in (FORWARD, TRAIN):
        record = suite._stages_record(d, op, layer_stages.stages(d, op), 0.0)
        assert min(times["median_us"] for times in record["times"].values()) > 0
    with torch.no_grad():
        parts = list(layer_parts.layer_parts(d))
        assert len(parts) >= 2 and all(suite._part_record(part, 0.0) for part in parts)
        assert suite._part_record(next(iter(layer_parts.routing_parts())), 0.0)
