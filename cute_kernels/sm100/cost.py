"""A model of a grouped GEMM's time on Blackwell. Nothing is measured: no GPU has run the kernels.

The numbers of a B200 are from its data sheet, with two exceptions: the bytes that an SM's shared memory and tensor
memory deliver in a cycle are guesses from Hopper's numbers. docs/blackwell.md computes some layers by this model, term
by term.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..arch import Gemm
from ..formats import MXFP8
from ..tiles import TileConfig


class Machine(NamedTuple):
    """Rates and sizes of a GPU.

    Attributes:
        sms: number of SMs.
        clock: cycles in a microsecond.
        memory: bytes in a microsecond from device memory.
        macs: 16-bit multiply-adds of an SM in a cycle; twice as many in 8 bits.
        shared: bytes in a cycle that an SM's shared memory delivers.
        tensor: bytes in a cycle from an SM's tensor memory to registers.
        launch_us: microseconds from the launch to the first tile, plus microseconds from the last tile to the end.
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
    """Cycles of a tile on each of an SM's units, which work at the same time.

    Attributes:
        mma: cycles of the tensor core.
        operands: cycles of shared memory, from which the tensor core reads A and B.
        accumulators: cycles of tensor memory, from which the epilogue reads each sum once.
        loads: number of TMA instructions; not cycles.
    """

    mma: float
    operands: float
    accumulators: float
    loads: int

    @property
    def longest(self) -> float:
        """Cycles of the unit that takes longest."""
        return max(self.mma, self.operands, self.accumulators)


def tile_cycles(tile: TileConfig, depth: int, parts: int = 1, machine: Machine = B200) -> TileCycles:
    """Return the modelled cycles of a tile on each unit of an SM.

    Args:
        depth: elements of the contraction.
        parts: ranges of weight rows in the tile, 2 with a gate.
        machine: rates of the GPU.
    """
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
    """Return the modelled microseconds of a GEMM whose experts all have the same number of rows.

    The time is a launch, plus memory traffic or the rounds of tiles, whichever takes longer.
    """
    element_bytes = SWIZZLE_BYTES // tile.k
    weights = min(gemm.experts, gemm.rows) * gemm.columns * gemm.depth * element_bytes
    moved = weights + gemm.rows * (gemm.depth * element_bytes + 2 * gemm.stored)
    tiles = gemm.experts * math.ceil(gemm.average / tile.m) * math.ceil(gemm.columns / tile.n)
    cycles = math.ceil(tiles / machine.sms) * tile_cycles(tile, gemm.depth).longest
    return machine.launch_us + max(moved / machine.memory, cycles / machine.clock)


class Wgrad(NamedTuple):
    """The sizes of a weight gradient dw [experts, columns, depth], contracted over `average` rows of each expert."""

    experts: int
    average: int
    columns: int
    depth: int

    @property
    def elements(self) -> int:
        """Elements of dy and x together."""
        return self.experts * self.average * (self.columns + self.depth)


class WgradTimes(NamedTuple):
    """Modelled traffic in megabytes and time in microseconds of a weight gradient: of its GEMM, and of quantising its
    operands (0 for 16-bit operands).
    """

    gemm_mb: float
    gemm_us: float
    quantising_mb: float
    quantising_us: float


def wgrad_times(wgrad: Wgrad, tile: TileConfig, machine: Machine = B200) -> WgradTimes:
    """Return the modelled times of a weight gradient whose experts all have the same number of rows.

    The model assumes that operands are read once and that results have 16 bits.
    """
    element_bytes = SWIZZLE_BYTES // tile.k
    moved = wgrad.elements * element_bytes + wgrad.experts * wgrad.columns * wgrad.depth * 2
    tiles = wgrad.experts * math.ceil(wgrad.columns / tile.m) * math.ceil(wgrad.depth / tile.n)
    cycles = math.ceil(tiles / machine.sms) * tile_cycles(tile, wgrad.average).longest
    gemm_us = machine.launch_us + max(moved / machine.memory, cycles / machine.clock)
    if element_bytes == 2:
        return WgradTimes(moved / 1e6, gemm_us, 0.0, 0.0)
    quantised = wgrad.elements * (2 + 1 + 1 / MXFP8.block)
    return WgradTimes(moved / 1e6, gemm_us, quantised / 1e6, 2 * machine.launch_us + quantised / machine.memory)
