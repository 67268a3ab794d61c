"""Swapped tiles that do not ship, for `glulam.compile`: they neither spill nor have their wgmma serialised."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_kernels.sm90.configs import TILES_W8
from cute_kernels.specs import GroupedGluSpec, GroupedMlpSpec, GroupedMmSpec, TileConfig
from ffi_bridge.worker import Worker


@pytest.mark.parametrize(("m", "n"), [(16, 256), (64, 128)])
def test_compiles_without_complaints(m: int, n: int, tmp_path: Path) -> None:
    tile = TileConfig(m=m, n=n, k=128, schedule="swapped")
    assert tile not in TILES_W8
    fc1 = GroupedGluSpec(tile=tile, operands="mxfp8_exact")
    with Worker(tmp_path) as worker:
        kernels = worker.compile(GroupedMlpSpec(fc1, GroupedMmSpec(tile=tile, operands="mxfp8_weight_only"))).kernels
    assert len(kernels) == 2
    assert [kernel.complaints for kernel in kernels] == [(), ()]
