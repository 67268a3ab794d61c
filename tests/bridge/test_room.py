"""Registers and shared memory of every kernel fit its GPU, for each architecture except sm_90a, which
test_shipped_bundle.py checks.

Kernels with tcgen05 instructions, which no GPU has run yet, must also pass `support.ptx_lint`, and fit as well when
compiled without a construct (`cute_kernels/plain.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from emulator.ptx import Kernel
from support.compiled import SAMPLED, parsed, resources_of, sample
from support.ptx_lint import lint

from cute_kernels import plain
from cute_kernels.architectures import ARCHS, CONSTRUCTS
from cute_kernels.specs import Spec
from ffi_bridge import profiles
from ffi_bridge.resources import KernelResources

pytestmark = pytest.mark.bundle

SM_REGISTERS, THREAD_REGISTERS, REGISTERS_UNIT = 64 * 1024, 255, 8
WARPGROUP, EPILOGUES = 128, 2
MOST_SPILLED = 96
"""Bytes that a thread of a plain kernel may spill. `profiles.allowed_diagnostics` lets all of them spill."""
SPECS = [spec for arch in SAMPLED for spec in sample(arch)]
WITH_TENSOR_MEMORY = [spec for spec in SPECS if ARCHS[spec.arch].folder == "sm100"]


def _of(specs: Iterable[Spec]) -> list[object]:
    return [pytest.param(spec, id=spec.name) for spec in specs]


def _kernels(spec: Spec) -> list[tuple[Kernel, KernelResources]]:
    """Return the PTX and the resources of each kernel of a function."""
    taken = {each.name: each for each in resources_of(spec)}
    found = [(kernel, taken.pop(kernel.name)) for kernel in parsed(spec)]
    assert found and not taken
    return found


def _threads(kernel: Kernel) -> int:
    assert kernel.threads is not None, kernel.name
    return math.prod(kernel.threads)


def test_the_sample_has_functions_of_every_architecture() -> None:
    for arch in SAMPLED:
        assert sum(spec.arch == arch for spec in SPECS) >= 14
    assert {spec.arch for spec in WITH_TENSOR_MEMORY} == {"sm_100a", "sm_103a"}


@pytest.mark.parametrize("spec", _of(SPECS))
def test_no_kernel_spills_or_waits(spec: Spec) -> None:
    allowed = profiles.allowed_diagnostics(spec.arch).get(spec.name, ())
    for kernel in resources_of(spec):
        assert [kernel.describe(each) for each in kernel.complaints if each not in allowed] == [], kernel.name


@pytest.mark.parametrize("spec", _of(SPECS))
def test_a_kernel_fits_on_an_sm(spec: Spec) -> None:
    for kernel, taken in _kernels(spec):
        most = SM_REGISTERS // (_threads(kernel) * kernel.ctas_per_sm) // REGISTERS_UNIT * REGISTERS_UNIT
        assert 0 < taken.registers <= min(most, THREAD_REGISTERS), kernel.name
        assert taken.static_smem + taken.dynamic_smem <= ARCHS[spec.arch].smem_bytes, kernel.name


@pytest.mark.parametrize("spec", _of(WITH_TENSOR_MEMORY))
def test_warpgroups_share_the_registers_that_a_launch_reserves(spec: Spec) -> None:
    """Both warpgroups of epilogues execute the setmaxnreg.inc, each of the others its own dec. A larger sum hangs."""
    for kernel, taken in _kernels(spec):
        warpgroups = _threads(kernel) // WARPGROUP
        less, more = (
            [ins.args[0].value for ins in kernel.code if ins.op.startswith(f"setmaxnreg.{way}.")]
            for way in ("dec", "inc")
        )
        assert (len(less), len(more)) == (warpgroups - EPILOGUES, 1), kernel.name
        assert sum(less) + EPILOGUES * sum(more) <= warpgroups * taken.registers, kernel.name


@pytest.mark.parametrize("spec", _of(WITH_TENSOR_MEMORY))
def test_the_lint_finds_nothing(spec: Spec) -> None:
    for kernel, _ in _kernels(spec):
        assert lint(kernel) == [], kernel.name


@pytest.mark.parametrize("constructs", [*CONSTRUCTS, ",".join(CONSTRUCTS)])
@pytest.mark.parametrize("spec", _of(spec for spec in WITH_TENSOR_MEMORY if spec.arch == "sm_100a"))
def test_a_plain_kernel_fits_as_well(spec: Spec, constructs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plain.ENV, constructs)
    assert all(kernel.spill_stores <= MOST_SPILLED for kernel in resources_of(spec))
    test_no_kernel_spills_or_waits(spec)
    test_a_kernel_fits_on_an_sm(spec)
    test_warpgroups_share_the_registers_that_a_launch_reserves(spec)
    test_the_lint_finds_nothing(spec)
