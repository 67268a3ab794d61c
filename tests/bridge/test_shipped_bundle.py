"""Bundles of the profile `full`: shipped kernels do not spill, have no serialised wgmma, and fit the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_kernels.architectures import ARCHS
from cute_kernels.specs import to_dict
from ffi_bridge import Bundle, build, load, profiles
from ffi_bridge.loader import packaged_root
from ffi_bridge.objects import Store
from ffi_bridge.progress import Progress
from ffi_bridge.resources import KernelResources
from toys import cubin, library_in

pytestmark = pytest.mark.bundle

MAX_REGISTERS = 255  # a thread
APART = 24  # of so many functions, one is compiled again


BUILT = [arch for arch in profiles.CONFIGS if arch == profiles.DEFAULT or (packaged_root() / arch).is_dir()]


@pytest.fixture(scope="module", params=BUILT)
def bundle(request: pytest.FixtureRequest) -> Bundle:
    """A bundle that was built here. Raises BundleMissing, which fails every test, if the bundle of sm_90a was not
    built.
    """
    return load(request.param, packaged_root())


def test_holds_the_shipped_specs(bundle: Bundle) -> None:
    specs = profiles.shipped_specs(bundle.manifest.arch)
    shipped = {spec.name: to_dict(spec) for spec in (*specs, *profiles.all_stages(specs))}
    assert {name: function.spec for name, function in bundle.manifest.functions.items()} == shipped


def test_every_kernel_is_within_bounds(bundle: Bundle) -> None:
    most = ARCHS[bundle.manifest.arch].smem_bytes

    def fits(kernel: KernelResources) -> bool:
        return 0 < kernel.registers <= MAX_REGISTERS and kernel.static_smem + kernel.dynamic_smem <= most

    kernels = [(name, k) for name, function in bundle.manifest.functions.items() for k in function.kernels]
    stages = profiles.all_stages(profiles.shipped_specs(bundle.manifest.arch))
    assert {name for name, _ in kernels} == {stage.name for stage in stages}
    assert [kernel for kernel in kernels if not fits(kernel[1])] == []


def test_no_kernel_spills_or_has_its_wgmma_serialised(bundle: Bundle) -> None:
    allowed = profiles.allowed_diagnostics(bundle.manifest.arch)
    complaints = {
        name: {complaint for kernel in function.kernels for complaint in kernel.complaints}
        for name, function in bundle.manifest.functions.items()
    }
    assert {n: c for n, c in complaints.items() if c - set(allowed.get(n, ()))} == {}


def test_every_function_can_be_had(bundle: Bundle) -> None:
    assert all(callable(bundle.function(name)) for name in bundle.names())


def test_a_sample_compiled_again_has_the_same_device_code(bundle: Bundle, tmp_path: Path) -> None:
    """With nothing to take from: the tests' store of objects is empty."""
    library = library_in(bundle.folder).read_bytes()
    stages = profiles.all_stages(profiles.shipped_specs(bundle.manifest.arch))[::APART]
    again = build.compile_all(stages, Store(), tmp_path, build.default_jobs(), Progress("again", len(stages)))
    assert len(again) == len(stages)
    assert [made.name for made in again if cubin(made.object_file.read_bytes()) not in library] == []
    assert [made.name for made in again if made.kernels != bundle.manifest.functions[made.name].kernels] == []
