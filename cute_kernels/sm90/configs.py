"""The specs that a Hopper bundle ships. Plain Python: importing this imports no compiler."""

from __future__ import annotations

from itertools import product

from ..specs import (
    DTYPES,
    GATED,
    GLU_LAYOUTS,
    MHC_KERNELS,
    STREAM_COUNTS,
    STREAM_DTYPES,
    UNGATED,
    GroupedDgluSpec,
    GroupedGluSpec,
    GroupedMlpSpec,
    GroupedMmSpec,
    GroupedWgradSpec,
    MhcSpec,
    Spec,
    TileConfig,
)

ARCH = "sm_90a"
# Two CTAs share a row tile: as fast as sharing a weight tile while groups are large (0.998 and 1.001 of dense cuBLAS
# on uniform Mixtral-8x7B), and no CTA idles where a group's last row tile is odd (0.94 against 0.87 under skew).
LARGE = TileConfig(m=128, n=256, k=64, cluster_n=2)
# Few rows an expert: half the rows, and a deeper pipeline of weight tiles.
SMALL = TileConfig(m=64, n=256, k=64)
TILES = (LARGE, SMALL)
# The epilogue of the backward holds accumulators, preactivations and three results: 256 columns would spill.
DGLU = TileConfig(m=128, n=128, k=64, cluster_m=2)
# Weight gradients have no ragged tiles, so two CTAs may share the wider operand tile.
WGRAD = TileConfig(m=128, n=256, k=64, cluster_m=2)


def activation_forms() -> list[tuple[str, str]]:
    """Every (activation, glu_layout) that has code of its own."""
    return [*product(GATED, GLU_LAYOUTS), *((a, "concat") for a in UNGATED)]


def shipped_specs() -> list[Spec]:
    """Every spec of the bundle, in a fixed order: a build of the same sources is byte-identical."""
    specs: list[Spec] = []
    for tile, dtype in product(TILES, DTYPES):
        fc2 = GroupedMmSpec(dtype, False, tile)
        specs += [fc2, GroupedMmSpec(dtype, True, tile)]
        for activation, layout in activation_forms():
            fc1 = GroupedGluSpec(dtype, activation, layout, False, tile)
            specs += [fc1, GroupedGluSpec(dtype, activation, layout, True, tile), GroupedMlpSpec(fc1, fc2)]
    for dtype in DTYPES:
        specs += [GroupedWgradSpec(dtype, dtype, WGRAD), GroupedWgradSpec(dtype, "float32", WGRAD)]
        specs += [GroupedDgluSpec(dtype, activation, layout, DGLU) for activation, layout in activation_forms()]
    return specs + mhc_specs()


def mhc_specs() -> list[Spec]:
    """Every hyper-connection kernel: for each number of streams and, but for Sinkhorn's, each dtype of theirs."""
    kernels = product(MHC_KERNELS, STREAM_DTYPES, STREAM_COUNTS)
    return [MhcSpec(*choice) for choice in kernels if "sinkhorn" not in choice[0] or choice[1] == "float32"]
