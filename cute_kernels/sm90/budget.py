"""What a tile takes of an SM: shared memory, stages of its ring, accumulators. Plain Python: no compiler is needed to
say that a tile does not fit.
"""

from __future__ import annotations

from typing import NamedTuple

from ..epilogue.sizes import ROWS, SLOT_BYTES, SLOTS
from ..specs import GroupedDgluSpec, GroupedGluSpec, GroupedMlpSpec, GroupedMmSpec, GroupedWgradSpec, Spec
from ..tiles import SpecError, TileConfig

# Of a CTA that has an SM alone; each CTA takes 1 KB besides.
SMEM_BYTES, RESERVED_BYTES = 227 * 1024, 1024
# Barriers, ring slots, biases and column scales come before the first 1024-byte-aligned buffer.
SMALL_BYTES, SCALE_BYTES = 2048, 1024
# One being multiplied, one on its way.
MIN_STAGES = 2

# Where preactivations come by TMA, of a CTA: pairs of slots, one in work, one on its way, and as many slots for act. A
# power of two.
PAIRS = 2

# Registers a thread at launch, by MMA warpgroups of a CTA and CTAs of an SM: warpgroups share them. One warpgroup needs
# no redistribution.
LAUNCH_REGISTERS = {(2, 1): 168, (4, 1): 96, (2, 2): 80}
REGISTERS_UNIT = 8
# Of the load warpgroup. TMA and a scheduler that walks the groups once make do with LOAD_REGISTERS; one of two walks
# (light_groups.py) and 8 rows by index a lane take ACROSS_REGISTERS, 16 rows ALONG_REGISTERS, and LOADING_REGISTERS 22
# rows, or 10 beside TMA loads.
LOAD_REGISTERS, ACROSS_REGISTERS, ALONG_REGISTERS, LOADING_REGISTERS = 24, 56, 64, 80


class BesideDecoding(NamedTuple):
    """Registers of a thread of the load warpgroup, of an MMA warpgroup and of one that decodes weights."""

    load: int
    mma: int
    decoding: int


BESIDE_DECODING = BesideDecoding(LOAD_REGISTERS, 160, 64)
"""Registers of two MMA warpgroups and two that decode: all that 640 threads have."""
DECODED_STAGES = 2
"""K-tiles of weights that are decoded to FP8: one is multiplied while the next is written."""
DECODING_TO_FP8 = {1: (2, BesideDecoding(72, 224, 104)), 2: (1, BesideDecoding(40, 208, 56))}
"""Warpgroups that decode to FP8 and all registers, by MMA warpgroups: 512 threads have 128 each on average."""


def packed_bytes(tile: TileConfig) -> int:
    """Of a k-tile of weights in 4 bits."""
    return tile.n * tile.k // 2


def registers(tile: TileConfig, load: int) -> tuple[int, int]:
    """Of a thread of the load warpgroup and of an MMA warpgroup. Who asks for more than a launch had waits for ever."""
    rest = LAUNCH_REGISTERS[tile.warpgroups, tile.ctas_per_sm] * (tile.warpgroups + 1) - load
    return load, rest // tile.warpgroups // REGISTERS_UNIT * REGISTERS_UNIT


def smem_bytes(tile: TileConfig) -> int:
    """Of one of the CTAs that share an SM."""
    return (SMEM_BYTES + RESERVED_BYTES) // tile.ctas_per_sm - RESERVED_BYTES


def stage_k(tile: TileConfig) -> int:
    """Elements of k of a stage: of a swapped tile of many rows half a k-tile's, since few whole ones would fit."""
    return tile.k // 2 if tile.swapped and tile.m > 128 else tile.k


def stages(tile: TileConfig, staging_bytes: int, element_bytes: int, scales_columns: bool = False) -> int:
    """Stages of operand tiles that fit beside `staging_bytes` of stores and, if it `scales_columns`, their scales."""
    stage = (tile.m + tile.n) * tile.k * element_bytes
    small = SMALL_BYTES + (SCALE_BYTES if scales_columns else 0)
    return (SMEM_BYTES - small - staging_bytes) // stage


def stages_to_decode(tile: TileConfig, staging_bytes: int) -> int:
    """Stages of FP8 rows and packed weights that fit beside stores and decoded weights."""
    taken = SMALL_BYTES + SCALE_BYTES + staging_bytes + DECODED_STAGES * tile.n * tile.k
    return (SMEM_BYTES - taken) // (tile.m * tile.k + packed_bytes(tile))


def dglu_slots(gated: bool) -> int:
    """Staging slots of a CTA of grouped_dglu: act, and a preactivation's two parts or one."""
    return PAIRS * (1 + (2 if gated else 1))


class Budget(NamedTuple):
    """One GEMM's kernel: stages of its ring, bytes of each, bytes for stores, accumulators a thread, threads."""

    tile: TileConfig
    stages: int
    stage_bytes: int
    staging_bytes: int
    accumulators: int
    threads: int

    @property
    def smem_bytes(self) -> int:
        """Without what comes before the first buffer."""
        return self.stages * self.stage_bytes + self.staging_bytes


def _budget(tile: TileConfig, staging_bytes: int) -> Budget:
    element_bytes = 2
    return Budget(
        tile=tile,
        stages=stages(tile, staging_bytes, element_bytes),
        stage_bytes=(tile.m + tile.n) * tile.k * element_bytes,
        staging_bytes=staging_bytes,
        accumulators=tile.accumulators,
        threads=128 * (1 + tile.warpgroups),
    )


def _of_rows(tile: TileConfig) -> Budget:
    return _budget(tile, tile.warpgroups * SLOTS * ROWS * tile.chunk_columns * 2)


def _of_weights(tile: TileConfig) -> Budget:
    return _budget(tile, tile.warpgroups * SLOTS * SLOT_BYTES)


def budgets(spec: Spec) -> tuple[Budget, ...]:
    """Those of a spec's GEMMs with 16-bit operands, in the order of its launches; none for any other spec."""
    if getattr(spec, "operands", "16bit") != "16bit":
        return ()
    if isinstance(spec, GroupedMlpSpec):
        return *budgets(spec.fc1), *budgets(spec.fc2)
    if isinstance(spec, GroupedDgluSpec):
        dgrad = (_of_rows(spec.dgrad),) if spec.dgrad else ()
        return _budget(spec.tile, dglu_slots(spec.gated) * SLOT_BYTES), *dgrad
    if isinstance(spec, (GroupedMmSpec, GroupedGluSpec)):
        return (_of_rows(spec.tile),)
    if isinstance(spec, GroupedWgradSpec):
        return (_of_weights(spec.tile),)
    return ()


def check(spec: Spec) -> None:
    """Raises SpecError where a kernel of the spec finds no room in shared memory."""
    for budget in budgets(spec):
        if budget.stages < MIN_STAGES:
            raise SpecError(
                f"{spec.op} on {budget.tile.name}: {budget.stages} stages of {budget.stage_bytes} bytes fit into shared"
                f" memory ({SMEM_BYTES} bytes, of which stores take {budget.staging_bytes}), a ring needs {MIN_STAGES}"
            )
