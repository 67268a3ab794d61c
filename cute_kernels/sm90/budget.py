"""Resources that a tile takes from an SM: shared memory, pipeline stages for operands, registers, accumulators.

Plain Python: whether a tile fits can be checked without a compiler.
"""

from __future__ import annotations

from typing import NamedTuple

from ..epilogue.sizes import ROWS, SLOT_BYTES, SLOTS
from ..specs import GroupedDgluSpec, GroupedGluSpec, GroupedMlpSpec, GroupedMmSpec, GroupedWgradSpec, Spec
from ..tiles import SpecError, TileConfig

# Shared memory of a CTA that has an SM to itself. Every CTA takes another 1 KB, which is reserved.
SMEM_BYTES, RESERVED_BYTES = 227 * 1024, 1024
# Barriers, ring slots and biases (SMALL_BYTES) and column scales (SCALE_BYTES) come before the first buffer that is
# aligned to 1024 bytes.
SMALL_BYTES, SCALE_BYTES = 2048, 1024
# One stage is multiplied while the next is loaded.
MIN_STAGES = 2

# Pairs of preactivation slots of a CTA that loads preactivations by TMA: one pair in use, one being loaded. act has as
# many slots. Must be a power of two, since `preact.py` masks with PAIRS - 1.
PAIRS = 2

# Registers a thread at launch, by (MMA warpgroups of a CTA, CTAs of an SM). `registers` redistributes them among the
# warpgroups; a single MMA warpgroup needs no redistribution.
LAUNCH_REGISTERS = {(2, 1): 168, (4, 1): 96, (2, 2): 80}
REGISTERS_UNIT = 8
# Registers of a thread of the load warpgroup:
#   LOAD_REGISTERS      TMA loads, and a scheduler that walks the groups once.
#   ACROSS_REGISTERS    a scheduler with two walks (light_groups.py), and 8 gathered rows a lane.
#   ALONG_REGISTERS     16 gathered rows a lane.
#   LOADING_REGISTERS   22 gathered rows a lane, or 10 beside TMA loads.
LOAD_REGISTERS, ACROSS_REGISTERS, ALONG_REGISTERS, LOADING_REGISTERS = 24, 56, 64, 80


class BesideDecoding(NamedTuple):
    """Registers of a thread in a kernel that has decoding warpgroups, by kind of warpgroup.

    Attributes:
        load: the load warpgroup.
        mma: MMA warpgroups.
        decoding: warpgroups that decode weights.
    """

    load: int
    mma: int
    decoding: int


BESIDE_DECODING = BesideDecoding(LOAD_REGISTERS, 160, 64)
"""Registers of a thread in each of one load, two MMA and two decoding warpgroups. Their sum is 472; a CTA of 640
threads can have 480, which is 96 a thread at launch."""


class DecodingToFp8(NamedTuple):
    """Resources of a kernel that decodes weights to FP8 (mainloop/decoded_fp8.py).

    Attributes:
        warpgroups: number of decoding warpgroups, at most `slots`.
        slots: number of shared-memory slots for decoded k-tiles, at most the number of stages.
        ahead: number of 16-byte chunks of packed weights that a decoding thread reads before it decodes the first.
        registers: registers of a thread in each kind of warpgroup.
    """

    warpgroups: int
    slots: int
    ahead: int
    registers: BesideDecoding


DECODING_TO_FP8 = {
    16: DecodingToFp8(3, 4, 4, BesideDecoding(56, 136, 96)),
    32: DecodingToFp8(2, 4, 4, BesideDecoding(72, 224, 104)),
    64: DecodingToFp8(2, 2, 4, BesideDecoding(72, 216, 112)),
    128: DecodingToFp8(1, 2, 3, BesideDecoding(40, 208, 56)),
}
"""Resources of kernels that decode weights to FP8, by the tile's number of rows of x (tile.m).

All threads together have at most the registers that a CTA gets at launch: 96 for each of 640 threads (tiles of 16
rows), or 128 for each of 512 threads (all other tiles).
"""


def packed_bytes(tile: TileConfig) -> int:
    """Return the bytes of a k-tile of 4-bit weights: tile.n rows of tile.k elements, two elements a byte."""
    return tile.n * tile.k // 2


def registers(tile: TileConfig, load: int) -> tuple[int, int]:
    """Return the registers of a thread for setmaxnreg: `load` for the load warpgroup, the rest for each MMA warpgroup.

    setmaxnreg hangs if the sum exceeds the registers that the launch reserved.
    """
    rest = LAUNCH_REGISTERS[tile.warpgroups, tile.ctas_per_sm] * (tile.warpgroups + 1) - load
    return load, rest // tile.warpgroups // REGISTERS_UNIT * REGISTERS_UNIT


def smem_bytes(tile: TileConfig) -> int:
    """Return the bytes of shared memory that one CTA may use if `tile.ctas_per_sm` CTAs share an SM."""
    return (SMEM_BYTES + RESERVED_BYTES) // tile.ctas_per_sm - RESERVED_BYTES


def stage_k(tile: TileConfig) -> int:
    """Return the depth of a stage in elements of k: tile.k, or tile.k / 2 for swapped tiles with m > 128.

    Of such large tiles, too few whole k-tiles would fit into shared memory.
    """
    return tile.k // 2 if tile.swapped and tile.m > 128 else tile.k


def stages(tile: TileConfig, staging_bytes: int, element_bytes: int, scales_columns: bool = False) -> int:
    """Return how many pipeline stages, each with a k-tile of both operands, fit into shared memory.

    Args:
        staging_bytes: bytes of the epilogue's staging slots.
        element_bytes: bytes of an operand's element.
        scales_columns: True: shared memory also holds a scale for each weight row of the tile.
    """
    stage = (tile.m + tile.n) * tile.k * element_bytes
    small = SMALL_BYTES + (SCALE_BYTES if scales_columns else 0)
    return (SMEM_BYTES - small - staging_bytes) // stage


def stages_to_decode(tile: TileConfig, staging_bytes: int) -> int:
    """Return how many pipeline stages fit into shared memory in a kernel that decodes 4-bit weights to FP8.

    A stage has FP8 rows of x and packed 4-bit weights. Shared memory also holds slots for decoded weights.

    staging_bytes: bytes of the epilogue's staging slots.
    """
    taken = SMALL_BYTES + SCALE_BYTES + staging_bytes + DECODING_TO_FP8[tile.m].slots * tile.n * tile.k
    return (SMEM_BYTES - taken) // (tile.m * tile.k + packed_bytes(tile))


def dglu_slots(gated: bool) -> int:
    """Return the number of staging slots of a grouped_dglu CTA: for each of PAIRS chunks, one slot for act and one for
    preactivations (two if gated: activated half and linear half).
    """
    return PAIRS * (1 + (2 if gated else 1))


class Budget(NamedTuple):
    """Resources of one GEMM kernel with 16-bit operands.

    Attributes:
        tile: the kernel's tile.
        stages: number of pipeline stages that fit into shared memory.
        stage_bytes: bytes of a stage: a k-tile of both operands.
        staging_bytes: bytes of the epilogue's staging slots.
        accumulators: float32 accumulators of a thread.
        threads: threads of a CTA.
    """

    tile: TileConfig
    stages: int
    stage_bytes: int
    staging_bytes: int
    accumulators: int
    threads: int

    @property
    def smem_bytes(self) -> int:
        """Bytes of all stages and staging slots. The small arrays before the first aligned buffer are not counted."""
        return self.stages * self.stage_bytes + self.staging_bytes


def _budget(tile: TileConfig, staging_bytes: int) -> Budget:
    """Return the budget of a GEMM of 16-bit operands. staging_bytes: bytes of the epilogue's staging slots."""
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
    """Return the budget of a GEMM whose epilogue stages rows of the result: SLOTS slots of 64 rows by `chunk_columns`
    16-bit columns for each warpgroup."""
    return _budget(tile, tile.warpgroups * SLOTS * ROWS * tile.chunk_columns * 2)


def _of_weights(tile: TileConfig) -> Budget:
    """Return the budget of a GEMM whose epilogue stages SLOTS slots of SLOT_BYTES for each warpgroup, such as a weight
    gradient."""
    return _budget(tile, tile.warpgroups * SLOTS * SLOT_BYTES)


def budgets(spec: Spec) -> tuple[Budget, ...]:
    """Return a Budget for each GEMM of a spec, in launch order; () if operands are not 16-bit or there is no GEMM."""
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
    """Raise SpecError if fewer than MIN_STAGES stages of one of the spec's GEMMs fit into shared memory."""
    for budget in budgets(spec):
        if budget.stages < MIN_STAGES:
            raise SpecError(
                f"{spec.op} on {budget.tile.name}: {budget.stages} stages of {budget.stage_bytes} bytes fit into shared"
                f" memory ({SMEM_BYTES} bytes, of which stores take {budget.staging_bytes}), a ring needs {MIN_STAGES}"
            )
