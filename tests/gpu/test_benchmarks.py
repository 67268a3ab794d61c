"""What the benchmarks rest on: exported functions take the arguments that perf gives them, and samples are times."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from perf.cases import TINY
from perf.operations import OPERATIONS
from perf.suites.compare import candidates, checked, contests, make_sets, open_bundles
from perf.timing import measure_device

pytestmark = pytest.mark.gpu

CASE = dataclasses.replace(TINY, rows=300, routing="dirichlet")


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_shipped_kernel_passes_the_check_of_a_comparison(op):
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for _, spec, group in contests(candidates(open_bundles(()), ("*bf16*",)), (op,)):
        sets = make_sets(CASE, op, spec)
        assert set(checked(sets, group, sms)) == {candidate.name for candidate in group}


def test_a_larger_product_takes_longer():
    matrices = {size: torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for size in (1024, 4096)}
    calls = {str(size): lambda _, a=a: torch.mm(a, a) for size, a in matrices.items()}
    times = measure_device(calls, 0.1)
    assert 0 < 4 * times["1024"].median_us < times["4096"].median_us
