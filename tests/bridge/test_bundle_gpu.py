"""Functions of a bundle on a GPU: right results, launched on the caller's stream."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_kernels.specs import GroupedMmSpec
from ffi_bridge import jit, load
from toys import TOY_SPECS, TOY_TRACER

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("spec", TOY_SPECS, ids=lambda spec: spec.op)
def test_functions_run_on_the_current_stream(toy_bundle: Path, spec: GroupedMmSpec) -> None:
    import torch

    add = load("sm_90a", toy_bundle).function(spec.name)
    x, y = torch.randn(2, 100_003, device="cuda")
    z = torch.full_like(x, torch.nan)
    add(x, y, z, 0)  # loads, launches nothing
    torch.cuda.synchronize()
    assert z.isnan().all()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # a launch on any other stream would read x before it is doubled
        x.mul_(2)
        add(x, y, z, 1)
    side.synchronize()
    assert torch.equal(z, x + y)


def test_a_jitted_function_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv(jit.ENV_CACHE, str(tmp_path))
    add = jit.get(GroupedMmSpec("float16"), tracer=TOY_TRACER)
    x, y = torch.randn(2, 1000, device="cuda")
    z = torch.full_like(x, torch.nan)
    add(x, y, z, 1)
    assert torch.equal(z, x + y)
