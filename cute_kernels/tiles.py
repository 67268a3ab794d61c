"""Tiles, clusters and warpgroups of a GEMM, and checks that a tile's accumulators fit into a thread's registers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

# Float32 accumulators that a thread can hold in addition to an epilogue's registers. More fit if warpgroups take turns,
# since a forward's epilogue then takes accumulators chunk by chunk.
MAX_ACCUMULATORS, MAX_TURN_ACCUMULATORS, MAX_CROWDED_ACCUMULATORS = 128, 192, 48
PINGPONG_WARPGROUPS = 2
SLAB_ROWS = 64
"""Rows of a slab, the rows that one MMA instruction of a warpgroup multiplies."""
TILE_M = (64, 128)
TILE_N = (64, 128, 192, 256)
# One 128-byte row of an operand's shared memory, by the width of an element.
TILE_K = {16: 64, 8: 128}
CLUSTERS = ((1, 1), (2, 1), (1, 2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A way in which the warps of a CTA share its tiles, and the sizes that tiles can have.

    Attributes:
        short: the schedule's name within names of specs.
        heights: possible numbers of rows of a tile (m).
        widths: possible numbers of weight rows of a tile (n).
        clusters: possible clusters, as CTAs (along m, along n).
        slabs: number of slabs (64 MMA rows) of a tile that one MMA warpgroup multiplies. None: all of them.
        warpgroups: number of MMA warpgroups that have a tile each and take turns; 1: all MMA warpgroups share a tile.
        splits: number of MMA warpgroups that share the depth of their slabs. Each multiplies every `splits`-th k-tile,
            and one of them adds the sums.
        swapped: weights are the rows of the MMA, and rows of x its columns.
        in_order: swapped, and sums have wgmma's order whatever the format of the weights. Otherwise 4-bit weights of
            few rows have another mainloop, and another order (sm90/by_words.py).
        reads_decoded: swapped, and the MMA reads weights that other warpgroups have decoded to FP8 in shared memory;
            otherwise warpgroups of a swapped tile decode the weights that they multiply, in registers.
        by_warps: each warp multiplies by itself (mma.sync), without TMA or wgmma.
        in_tensor_memory: accumulators are in tensor memory.
        paired: tiles (m, n) for which an SM has two CTAs, so that one decodes while the other stores or waits for its
            first loads.
    """

    short: str
    heights: tuple[int, ...] = TILE_M
    widths: tuple[int, ...] = TILE_N
    clusters: tuple[tuple[int, int], ...] = CLUSTERS[:1]
    slabs: int | None = None
    warpgroups: int = 1
    splits: int = 1
    swapped: bool = False
    in_order: bool = False
    reads_decoded: bool = False
    by_warps: bool = False
    in_tensor_memory: bool = False
    paired: tuple[tuple[int, int], ...] = ()


# The columns of a swapped tile's wgmma are rows of x.
_SWAPPED = Schedule(short="swap", heights=(16, 32, 64, 96, 128, 256), widths=(128, 256), slabs=2, swapped=True)
_SINGLE = dataclasses.replace(_SWAPPED, short="swap1", slabs=1, paired=((16, 128), (32, 128)))
_SPLIT = dataclasses.replace(_SWAPPED, heights=(16,), widths=(64,), slabs=1)
SCHEDULES = {
    "cooperative": Schedule(short="coop", clusters=CLUSTERS, slabs=1),
    "pingpong": Schedule(short="pp", clusters=CLUSTERS, warpgroups=PINGPONG_WARPGROUPS),
    "swapped": _SWAPPED,
    "swapped_single": _SINGLE,
    "swapped_in_order": dataclasses.replace(_SINGLE, short="swapo", heights=(32,), widths=(128,), in_order=True),
    "swapped_halves": dataclasses.replace(_SPLIT, short="swap2", splits=2, paired=((16, 64),)),
    "swapped_quarters": dataclasses.replace(_SPLIT, short="swap4", splits=4),
    "swapped_whole": Schedule(short="swapw", heights=(16, 32), widths=(128, 256), swapped=True, reads_decoded=True),
    # A tile is the first 16 rows of a slab, or two slabs.
    "warps": Schedule(short="warps", heights=(16, 128), widths=(128,), by_warps=True),
    # An accumulator has 128 lanes; the columns of both accumulators together are a power of two.
    "tensor_memory": Schedule(
        short="tm", heights=(128,), widths=(128, 256), warpgroups=PINGPONG_WARPGROUPS, in_tensor_memory=True
    ),
}


class SpecError(ValueError):
    """Raised for a spec from which no kernel can be built; the message names the field and the valid choices."""


def require(field: str, value: Any, valid: Any) -> None:
    """Raise SpecError, which names the field and the valid choices, unless `value` is in `valid`."""
    if value not in valid:
        choices = ", ".join(str(v) for v in valid)
        raise SpecError(f"{field}={value!r} is not supported; choose one of: {choices}")


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """A kernel's CTA tile (rows, weight rows, depth), cluster and warpgroup schedule.

    Attributes:
        m: rows of x in a tile, a multiple of the slab of 64 unless swapped or by warps.
        n: weight rows in a tile, the columns of its MMAs unless swapped; the epilogue stores them in chunks.
        k: depth of a tile, the elements of one 128-byte swizzle row of an operand.
        cluster_m, cluster_n: CTAs of a cluster, which share weight tiles (cluster_m) or row tiles (cluster_n) by
            multicast.
        schedule: a key of SCHEDULES: how the CTA's warps share its tiles.
        adaptive: the two CTAs of a (2, 1) cluster share a weight tile and take neighbouring row tiles. At a group's odd
            row tile they share the row tile and take neighbouring weight tiles, so that neither is idle.

    Schedules:
        cooperative: MMA warpgroups share a tile, a slab each.
        pingpong: two warpgroups have a tile each and take turns, so that the epilogue of one runs during the MMAs of
            the other.
        swapped: weights are the rows of the MMA and rows of x its columns, y^T = w x^T. MMA warpgroups share a tile,
            128 of its n weight rows each. swapped_single, swapped_in_order: 64 weight rows each. swapped_halves,
            swapped_quarters: two or four MMA warpgroups have the same 64 weight rows, and every second or fourth k-tile
            each. swapped_whole: one MMA warpgroup has all weight rows, which other warpgroups decode to FP8.
        warps: four warps share a tile, without TMA or wgmma, 16 rows of each slab to a warp. In a tile of 16 rows each
            warp multiplies a quarter of the depth.
        tensor_memory: one warp multiplies every tile into one of two accumulators in tensor memory (Blackwell's
            tcgen05). Two warpgroups have an accumulator each, and finish alternate tiles while the next tile is
            multiplied.
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
        """The tile's entry of SCHEDULES."""
        return SCHEDULES[self.schedule]

    @property
    def takes_turns(self) -> bool:
        """True if two warpgroups have a tile each and take alternate tiles."""
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
    def splits(self) -> int:
        """Number of MMA warpgroups that share the depth of the same slabs."""
        return self.rules.splits

    @property
    def stage_readers(self) -> int:
        """Number of MMA warpgroups of a CTA that read each stage of operands."""
        return self.warpgroups_per_tile // self.splits

    @property
    def mma_rows(self) -> int:
        """Rows of the tile in the MMA: n weight rows if the schedule is swapped, else m rows of x."""
        return self.n if self.swapped else self.m

    @property
    def mma_n(self) -> int:
        """Columns of the tile in the MMA: m rows of x if the schedule is swapped, else n weight rows."""
        return self.m if self.swapped else self.n

    @property
    def warpgroups_per_tile(self) -> int:
        """Number of MMA warpgroups that share a tile."""
        return 1 if self.rules.slabs is None else self.mma_rows // (self.rules.slabs * SLAB_ROWS) * self.splits

    @property
    def warpgroups(self) -> int:
        """Number of MMA warpgroups of a CTA."""
        return self.rules.warpgroups * self.warpgroups_per_tile

    @property
    def ctas_per_sm(self) -> int:
        return 2 if (self.m, self.n) in self.rules.paired else 1

    @property
    def slabs(self) -> int:
        """Number of slabs (64 MMA rows) of a tile that one warpgroup multiplies."""
        return math.ceil(self.mma_rows / SLAB_ROWS) // self.stage_readers

    @property
    def slab_step(self) -> int:
        """Distance in rows between the first rows of consecutive slabs. In tensor memory, row r of a tile is in lane r,
        and slab s has lanes 16 s to 16 s + 15 of each warp's 32 lanes.
        """
        return 16 if self.in_tensor_memory else SLAB_ROWS

    @property
    def accumulators(self) -> int:
        """Float32 accumulators that a thread holds at once: of all its slabs or, with tensor memory, of one slab."""
        return (1 if self.in_tensor_memory else self.slabs) * self.mma_n // 2

    @property
    def max_accumulators(self) -> int:
        """The most accumulators that a thread can hold with the longest epilogues. With four MMA warpgroups a thread
        has less than half the registers that it has with two, and 64 accumulators spill.
        """
        return MAX_ACCUMULATORS if self.warpgroups <= 2 else MAX_CROWDED_ACCUMULATORS

    @property
    def box_rows(self) -> int:
        """Rows of x that one TMA load brings (a box): 8 for a tile of 16 rows, 16 for a tile of 32 or 64 rows, 32 for a
        tile of 96 rows, 64 for a larger tile.

        Any multiple of the 8 rows of a swizzle atom would work. In a tile of 64, boxes of 8 rows are as fast as boxes
        of 16 if a group has few rows, and 0.5 % slower if it has 64.
        """
        return 8 if self.m <= 16 else 16 if self.m <= 64 else math.gcd(self.m, 64)

    @property
    def chunk_columns(self) -> int:
        """Columns that an epilogue stores at a time; each half (gate, up) of a gated tile is a multiple of them."""
        return 64 if self.n % 128 == 0 else 32

    @property
    def cluster_size(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def row_sharers(self) -> int:
        """Number of CTAs of a cluster that share a row tile; in an adaptive cluster they share it only sometimes."""
        return self.cluster_size if self.adaptive else self.cluster_n

    def padded(self, m: int, n: int) -> int:
        """Return the number of elements of all cluster tiles that cover an m x n result, padding included."""
        height, width = self.m * self.cluster_m, self.n * self.cluster_n
        return math.ceil(m / height) * height * math.ceil(n / width) * width

    @property
    def name(self) -> str:
        cluster = f"c{self.cluster_m}x{self.cluster_n}{'a' if self.adaptive else ''}"
        return f"t{self.m}x{self.n}x{self.k}_{cluster}_{self.rules.short}"


def check_accumulators(tile: TileConfig, most: int) -> None:
    """Raise SpecError if a thread of the tile holds more than `most` accumulators."""
    if tile.accumulators > most:
        mma_n, other = ("m", "n") if tile.swapped else ("n", "m")
        raise SpecError(
            f"a {tile.schedule} tile of {tile.m} x {tile.n} has {tile.accumulators} accumulators a thread, more "
            f"than {most}; choose tile {mma_n}={most * 2 // tile.slabs} or a smaller {other}"
        )
