"""How long a grouped GEMM takes on Blackwell, by a model on paper. Nothing is measured: no GPU has run the kernels.

Numbers of a B200 from its data sheet, and what an SM's shared and tensor memory deliver a cycle, which are guesses
after Hopper's. docs/blackwell.md has the model of some layers, term by term.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..arch import Gemm
from ..formats import MXFP8
from ..tiles import TileConfig


class Machine(NamedTuple):
    """A GPU.

    Attributes:
        sms: streaming multiprocessors. clock: cycles a microsecond.
        memory: bytes a microsecond.
        macs: multiply-adds of 16 bits a cycle of an SM; of 8 bits twice as many.
        shared: bytes a cycle that an SM's shared memory delivers. tensor: bytes a cycle of tensor memory to registers.
        launch_us: from launch to the first tile, and from the last tile to the end.
    """

    sms: int = 148
    clock: float = 1850.0
    memory: float = 8e6
    macs: int = 4096
    shared: int = 128
    tensor: int = 256
    launch_us: float = 5.0


B200 = Machine()
SWIZZLE_BYTES = 128


class TileCycles(NamedTuple):
    """Cycles that a tile takes of each of an SM's parts, which work beside each other.

    Attributes:
        mma: the tensor core. operands: shared memory, which it reads A and B from. accumulators: tensor memory, whose
            sums go to registers once. loads: TMA's instructions, a number and no cycles.
    """

    mma: float
    operands: float
    accumulators: float
    loads: int

    @property
    def longest(self) -> float:
        return max(self.mma, self.operands, self.accumulators)


def tile_cycles(tile: TileConfig, depth: int, parts: int = 1, machine: Machine = B200) -> TileCycles:
    """Cycles of a tile whose contraction is `depth` deep. parts: ranges of weight rows that the tile takes."""
    k_tiles = math.ceil(depth / tile.k)
    element_bytes = SWIZZLE_BYTES // tile.k
    macs = machine.macs * 2 // element_bytes
    return TileCycles(
        mma=k_tiles * tile.m * tile.n * tile.k / macs,
        operands=k_tiles * (tile.m + tile.n) * SWIZZLE_BYTES / machine.shared,
        accumulators=tile.m * tile.n * 4 / machine.tensor,
        loads=k_tiles * (tile.m // tile.box_rows + parts),
    )


def even_us(gemm: Gemm, tile: TileConfig, machine: Machine = B200) -> float:
    """Microseconds if every expert has as many rows: a launch, and bytes or rounds of tiles, whichever takes longer."""
    element_bytes = SWIZZLE_BYTES // tile.k
    weights = min(gemm.experts, gemm.rows) * gemm.columns * gemm.depth * element_bytes
    moved = weights + gemm.rows * (gemm.depth * element_bytes + 2 * gemm.stored)
    tiles = gemm.experts * math.ceil(gemm.average / tile.m) * math.ceil(gemm.columns / tile.n)
    cycles = math.ceil(tiles / machine.sms) * tile_cycles(tile, gemm.depth).longest
    return machine.launch_us + max(moved / machine.memory, cycles / machine.clock)


class Wgrad(NamedTuple):
    """Weight gradients [columns, depth] of `experts`, contracted over `average` rows each."""

    experts: int
    average: int
    columns: int
    depth: int

    @property
    def elements(self) -> int:
        """Elements of dy and x together."""
        return self.experts * self.average * (self.columns + self.depth)


class WgradTimes(NamedTuple):
    """Megabytes and microseconds of a weight gradient: of its GEMM, and of quantising its operands, 0 in 16 bits."""

    gemm_mb: float
    gemm_us: float
    quantising_mb: float
    quantising_us: float


def wgrad_times(wgrad: Wgrad, tile: TileConfig, machine: Machine = B200) -> WgradTimes:
    """Times if every expert has as many rows: operands are read once, and results of 16 bits written."""
    element_bytes = SWIZZLE_BYTES // tile.k
    moved = wgrad.elements * element_bytes + wgrad.experts * wgrad.columns * wgrad.depth * 2
    tiles = wgrad.experts * math.ceil(wgrad.columns / tile.m) * math.ceil(wgrad.depth / tile.n)
    cycles = math.ceil(tiles / machine.sms) * tile_cycles(tile, wgrad.average).longest
    gemm_us = machine.launch_us + max(moved / machine.memory, cycles / machine.clock)
    if element_bytes == 2:
        return WgradTimes(moved / 1e6, gemm_us, 0.0, 0.0)
    quantised = wgrad.elements * (2 + 1 + 1 / MXFP8.block)
    return WgradTimes(moved / 1e6, gemm_us, quantised / 1e6, 2 * machine.launch_us + quantised / machine.memory)
