"""Swapped tiles that do not ship but `glulam.compile` accepts: their kernels neither spill nor serialise wgmma."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_kernels.sm90.budget import ACROSS_REGISTERS, ALONG_REGISTERS, LAUNCH_REGISTERS, LOAD_REGISTERS, registers
from cute_kernels.sm90.configs import LARGE, TILES_W8, WGRAD
from cute_kernels.specs import GroupedGluSpec, GroupedMmSpec, GroupedWgradSpec
from cute_kernels.tiles import TileConfig
from ffi_bridge.resources import KernelResources
from ffi_bridge.worker import Worker

pytestmark = pytest.mark.bundle  # ten kernels to compile, which no call of the front depends on

OTHERS = [
    TileConfig(m=32, n=256, k=128, schedule="swapped"),
    TileConfig(m=64, n=128, k=128, schedule="swapped"),
    TileConfig(m=32, n=256, k=128, schedule="swapped_single"),
    TileConfig(m=16, n=256, k=128, schedule="swapped_single"),
    TileConfig(m=128, n=128, k=128, schedule="swapped_single"),
]


@pytest.mark.parametrize("tile", OTHERS, ids=lambda tile: tile.name)
def test_compiles_without_complaints(tile: TileConfig, tmp_path: Path) -> None:
    assert tile not in TILES_W8
    fc1 = GroupedGluSpec(tile=tile, operands="mxfp8_exact")
    with Worker(tmp_path) as worker:
        fc2 = GroupedMmSpec(tile=tile, operands="mxfp8_weight_only")
        kernels = [kernel for spec in (fc1, fc2) for kernel in worker.compile(spec).kernels]
    assert len(kernels) == 2
    assert [kernel.complaints for kernel in kernels] == [(), ()]
    if (tile.warpgroups, tile.ctas_per_sm) in LAUNCH_REGISTERS:
        assert all(has_registers(kernel, tile, LOAD_REGISTERS) for kernel in kernels)


def has_registers(kernel: KernelResources, tile: TileConfig, of_load: int) -> bool:
    """Return True if the launch allocates the registers that setmaxnreg redistributes; if not, warpgroups wait
    forever.
    """
    load, mma = registers(tile, of_load)
    return kernel.registers * (1 + tile.warpgroups) >= load + tile.warpgroups * mma


@pytest.mark.parametrize(
    ("spec", "of_load"),
    [(GroupedMmSpec(tile=LARGE), ALONG_REGISTERS), (GroupedWgradSpec(tile=WGRAD), ACROSS_REGISTERS)],
    ids=["grouped_mm", "grouped_wgrad"],
)
def test_a_kernel_has_the_registers_that_its_load_warps_leave(
    spec: GroupedMmSpec | GroupedWgradSpec, of_load: int, tmp_path: Path
) -> None:
    with Worker(tmp_path) as worker:
        (kernel,) = worker.compile(spec).kernels
    assert has_registers(kernel, spec.tile, of_load)
