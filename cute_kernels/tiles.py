"""How a GEMM cuts its work: tiles, clusters and warpgroups, and which of them a thread's registers allow."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

# Float32 accumulators a thread can hold beside an epilogue, and in turns, where a forward's takes them chunk by chunk.
MAX_ACCUMULATORS, MAX_TURN_ACCUMULATORS = 128, 192
PINGPONG_WARPGROUPS = 2
SLAB_ROWS = 64
"""Rows of the MMA that a warpgroup computes at once."""
TILE_M = (64, 128)
TILE_N = (64, 128, 192, 256)
# One 128-byte row of an operand's shared memory, by the width of an element.
TILE_K = {16: 64, 8: 128}
CLUSTERS = ((1, 1), (2, 1), (1, 2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the warps of a CTA share its tiles, and which tiles it can have.

    Attributes:
        short: its name in names of specs.
        heights, widths: rows and weight rows of a tile. clusters: (m, n) of these.
        slabs: slabs that an MMA warpgroup has of a tile. None: all of them.
        warpgroups: MMA warpgroups that take turns, with a tile each; 1: they share a tile.
        swapped: whether weights are the rows of the MMA and rows of x its columns.
        by_warps: whether warps multiply, without TMA or wgmma.
        in_tensor_memory: whether accumulators are in tensor memory.
        paired: tiles (m, n) of which an SM has two CTAs, so that one decodes while the other stores or waits for its
            first loads.
    """

    short: str
    heights: tuple[int, ...] = TILE_M
    widths: tuple[int, ...] = TILE_N
    clusters: tuple[tuple[int, int], ...] = CLUSTERS[:1]
    slabs: int | None = None
    warpgroups: int = 1
    swapped: bool = False
    by_warps: bool = False
    in_tensor_memory: bool = False
    paired: tuple[tuple[int, int], ...] = ()


# The columns of a swapped tile's wgmma are rows of x.
_SWAPPED = Schedule(short="swap", heights=(16, 32, 64, 128, 256), widths=(128, 256), slabs=2, swapped=True)
SCHEDULES = {
    "cooperative": Schedule(short="coop", clusters=CLUSTERS, slabs=1),
    "pingpong": Schedule(short="pp", clusters=CLUSTERS, warpgroups=PINGPONG_WARPGROUPS),
    "swapped": _SWAPPED,
    "swapped_single": dataclasses.replace(_SWAPPED, short="swap1", slabs=1, paired=((16, 128),)),
    # One slab, of which the first 16 rows are some, or two.
    "warps": Schedule(short="warps", heights=(16, 128), widths=(128,), by_warps=True),
    # An accumulator has 128 lanes; the columns of two are a power of two.
    "tensor_memory": Schedule(
        short="tm", heights=(128,), widths=(128, 256), warpgroups=PINGPONG_WARPGROUPS, in_tensor_memory=True
    ),
}


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
        require("tile m", self.m, self.rules.heights)
        require("tile n", self.n, self.rules.widths)
        require("tile k", self.k, TILE_K.values())
        require("cluster (m, n)", (self.cluster_m, self.cluster_n), self.rules.clusters)
        if self.adaptive and (self.cluster_m, self.cluster_n) != (2, 1):
            raise SpecError(f"an adaptive cluster is one of (2, 1), not ({self.cluster_m}, {self.cluster_n})")
        check_accumulators(self, MAX_TURN_ACCUMULATORS if self.takes_turns else self.max_accumulators)

    @property
    def rules(self) -> Schedule:
        return SCHEDULES[self.schedule]

    @property
    def takes_turns(self) -> bool:
        """True if each of two warpgroups has every other tile alone."""
        return self.rules.warpgroups > 1

    @property
    def by_warps(self) -> bool:
        return self.rules.by_warps

    @property
    def in_tensor_memory(self) -> bool:
        return self.rules.in_tensor_memory

    @property
    def swapped(self) -> bool:
        return self.rules.swapped

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
        return 1 if self.rules.slabs is None else self.mma_rows // (self.rules.slabs * SLAB_ROWS)

    @property
    def warpgroups(self) -> int:
        """MMA warpgroups of a CTA."""
        return self.rules.warpgroups * self.warpgroups_per_tile

    @property
    def ctas_per_sm(self) -> int:
        return 2 if (self.m, self.n) in self.rules.paired else 1

    @property
    def slabs(self) -> int:
        """Slabs of 64 rows of the MMA that a warpgroup has of its tile."""
        return math.ceil(self.mma_rows / SLAB_ROWS) // self.warpgroups_per_tile

    @property
    def slab_step(self) -> int:
        """Rows from a slab's first to the next slab's. Row r of a tile is in lane r of tensor memory, a warp has 32
        lanes, and slab s the lanes 16 s to 16 s + 15 of each warp's.
        """
        return 16 if self.in_tensor_memory else SLAB_ROWS

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
        return f"t{self.m}x{self.n}x{self.k}_{cluster}_{self.rules.short}"


def check_accumulators(tile: TileConfig, most: int) -> None:
    if tile.accumulators > most:
        mma_n, other = ("m", "n") if tile.swapped else ("n", "m")
        raise SpecError(
            f"a {tile.schedule} tile of {tile.m} x {tile.n} has {tile.accumulators} accumulators a thread, more "
            f"than {most}; choose tile {mma_n}={most * 2 // tile.slabs} or a smaller {other}"
        )
