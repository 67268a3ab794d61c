"""How a GEMM cuts its work: tiles, clusters and warpgroups, and which of them a thread's registers allow."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

SCHEDULES = {
    "cooperative": "coop", "pingpong": "pp", "swapped": "swap", "swapped_single": "swap1", "warps": "warps",
    "tensor_memory": "tm",
}  # fmt: skip
# Float32 accumulators a thread can hold beside an epilogue, and in turns, where a forward's takes them chunk by chunk.
MAX_ACCUMULATORS, MAX_TURN_ACCUMULATORS = 128, 192
PINGPONG_WARPGROUPS = 2
TILE_M = (64, 128)
TILE_N = (64, 128, 192, 256)
# Of a swapped tile: the columns of a wgmma are rows of x, and a warpgroup has one or two slabs of weight rows.
SWAPPED_TILE_M = (16, 32, 64, 128, 256)
SWAPPED_TILE_N = (128, 256)
SWAPPED_SLABS = {"swapped": 2, "swapped_single": 1}
# Tiles with an accumulator in tensor memory: 128 lanes; the columns of two accumulators are a power of two.
TENSOR_MEMORY_TILE_M, TENSOR_MEMORY_TILE_N = (128,), (128, 256)
# Of warps that share a tile: one slab of 64 rows, of which the first 16 are some, or two.
WARPS_TILE_M, WARPS_TILE_N = (16, 128), (128,)
# One 128-byte row of an operand's shared memory, by the width of an element.
TILE_K = {16: 64, 8: 128}
CLUSTERS = ((1, 1), (2, 1), (1, 2))
TILES = dict.fromkeys(SWAPPED_SLABS, (SWAPPED_TILE_M, SWAPPED_TILE_N)) | {
    "warps": (WARPS_TILE_M, WARPS_TILE_N), "tensor_memory": (TENSOR_MEMORY_TILE_M, TENSOR_MEMORY_TILE_N),
}  # fmt: skip
"""Rows and weight rows of a tile, by schedules that have their own; these have no clusters."""


class SpecError(ValueError):
    """A spec that no kernel can be built from; the message names the field and the valid choices."""


def require(field: str, value: Any, valid: Any) -> None:
    if value not in valid:
        choices = ", ".join(str(v) for v in valid)
        raise SpecError(f"{field}={value!r} is not supported; choose one of: {choices}")


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """How one kernel cuts its work: CTA tile (rows, weight rows, depth), cluster and warpgroup schedule.

    m: rows, in slabs of 64. n: columns of one wgmma, in chunks of the epilogue. k: one 128-byte swizzle row
    of an operand. A cluster shares weight tiles (cluster_m) or row tiles (cluster_n) by multicast.
    cooperative: MMA warpgroups share a tile, a slab each. pingpong: two warpgroups have a tile each and take turns, so
    that the epilogue of one hides behind the MMAs of the other. swapped: weights are the rows of the MMA and rows of x
    its columns, y^T = w x^T; MMA warpgroups share a tile, 128 of its n weight rows each. swapped_single: 64 each.
    warps: four warps share a tile, without TMA or wgmma, 16 rows of each slab to a warp; of a tile of 16 rows each
    multiplies a quarter of the depth.
    tensor_memory: one warp multiplies every tile into one of two accumulators in tensor memory (Blackwell's tcgen05).
    Two warpgroups have an accumulator each, and finish every other tile while the next one is multiplied.
    adaptive: the two CTAs of a (2, 1) cluster share a weight tile and take neighbouring row tiles; where a group has an
    odd row tile, they share that and take neighbouring weight tiles, so that neither is idle.
    """

    m: int = 128
    n: int = 256
    k: int = 64
    cluster_m: int = 1
    cluster_n: int = 1
    schedule: str = "cooperative"
    adaptive: bool = False

    def __post_init__(self) -> None:
        require("schedule", self.schedule, SCHEDULES)
        heights, widths = TILES.get(self.schedule, (TILE_M, TILE_N))
        require("tile m", self.m, heights)
        require("tile n", self.n, widths)
        require("tile k", self.k, TILE_K.values())
        clusters = CLUSTERS[:1] if self.schedule in TILES else CLUSTERS
        require("cluster (m, n)", (self.cluster_m, self.cluster_n), clusters)
        if self.adaptive and (self.cluster_m, self.cluster_n) != (2, 1):
            raise SpecError(f"an adaptive cluster is one of (2, 1), not ({self.cluster_m}, {self.cluster_n})")
        check_accumulators(self, MAX_TURN_ACCUMULATORS if self.takes_turns else self.max_accumulators)

    @property
    def takes_turns(self) -> bool:
        """True if each of two warpgroups has every other tile alone."""
        return self.schedule in ("pingpong", "tensor_memory")

    @property
    def by_warps(self) -> bool:
        return self.schedule == "warps"

    @property
    def in_tensor_memory(self) -> bool:
        """True if accumulators are in tensor memory."""
        return self.schedule == "tensor_memory"

    @property
    def swapped(self) -> bool:
        return self.schedule in SWAPPED_SLABS

    @property
    def mma_rows(self) -> int:
        """Rows of the tile as the MMA has them."""
        return self.n if self.swapped else self.m

    @property
    def mma_n(self) -> int:
        """Columns of one wgmma."""
        return self.m if self.swapped else self.n

    @property
    def warpgroups_per_tile(self) -> int:
        """MMA warpgroups that share a tile."""
        if self.swapped:
            return self.n // (SWAPPED_SLABS[self.schedule] * 64)
        return 1 if self.takes_turns or self.by_warps else self.m // 64

    @property
    def warpgroups(self) -> int:
        """MMA warpgroups of a CTA."""
        return PINGPONG_WARPGROUPS if self.takes_turns else self.warpgroups_per_tile

    @property
    def ctas_per_sm(self) -> int:
        """Two of a small swapped tile, so that one decodes while the other stores or waits for its first loads."""
        return 2 if self.schedule == "swapped_single" and (self.m, self.n) == (16, 128) else 1

    @property
    def slabs(self) -> int:
        """Slabs of 64 rows of the MMA that a warpgroup has of its tile."""
        return math.ceil(self.mma_rows / 64) // self.warpgroups_per_tile

    @property
    def slab_step(self) -> int:
        """Rows from a slab's first to the next slab's. Row r of a tile is in lane r of tensor memory, a warp has 32
        lanes, and slab s the lanes 16 s to 16 s + 15 of each warp's.
        """
        return 16 if self.in_tensor_memory else 64

    @property
    def accumulators(self) -> int:
        """That a thread holds at once: of its slabs, or of the one that it has read from tensor memory."""
        return (1 if self.in_tensor_memory else self.slabs) * self.mma_n // 2

    @property
    def max_accumulators(self) -> int:
        """Of a thread with the longest epilogues. Four MMA warpgroups have less than half the registers of two: 64
        spill.
        """
        return MAX_ACCUMULATORS if self.warpgroups <= 2 else MAX_ACCUMULATORS // 4

    @property
    def box_rows(self) -> int:
        """Rows of one load: a tile of 16 has two such boxes, one of 64 four, a larger one of 64 rows each.

        Any multiple of the 8 rows of a swizzle atom would do. In a tile of 64, 8 are as fast as 16 where a group has
        few rows, and 0.5 % slower where it has 64.
        """
        return 8 if self.m <= 16 else 16 if self.m <= 64 else 64

    @property
    def chunk_columns(self) -> int:
        """Columns that an epilogue of rows stores at a time: as many as cut both halves of a gated tile."""
        return 64 if self.n % 128 == 0 else 32

    @property
    def cluster_size(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def row_sharers(self) -> int:
        """CTAs that share a row tile, always or, in an adaptive cluster, at times."""
        return self.cluster_size if self.adaptive else self.cluster_n

    def padded(self, m: int, n: int) -> int:
        """Elements of the clusters' tiles that cover an m x n result."""
        height, width = self.m * self.cluster_m, self.n * self.cluster_n
        return math.ceil(m / height) * height * math.ceil(n / width) * width

    @property
    def name(self) -> str:
        cluster = f"c{self.cluster_m}x{self.cluster_n}{'a' if self.adaptive else ''}"
        return f"t{self.m}x{self.n}x{self.k}_{cluster}_{SCHEDULES[self.schedule]}"


def check_accumulators(tile: TileConfig, most: int) -> None:
    if tile.accumulators > most:
        mma_n, other = ("m", "n") if tile.swapped else ("n", "m")
        raise SpecError(
            f"a {tile.schedule} tile of {tile.m} x {tile.n} has {tile.accumulators} accumulators a thread, more "
            f"than {most}; choose tile {mma_n}={most * 2 // tile.slabs} or a smaller {other}"
        )
