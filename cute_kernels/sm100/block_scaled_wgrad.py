"""The mainloop of weight gradients in MXFP8: columns of dy times columns of x, with a scale for each 32 rows of a
column.

Both operands come from `quantize.quantize_groups`, which begins blocks at the first row of a group. It writes scales in
the order that tensor memory takes: an atom of 512 bytes for 128 columns and a band of 128 rows (memory/scale_bands.py).
A k-tile is the rows of one band. So one thread copies a k-tile's atoms to its stage, and scales never pass through
registers. The thread belongs to the epilogue load warp (warp 2), which has nothing to load for a weight gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Uint8
from cutlass.cute.nvgpu import cpasync

from ..memory.row_boxes import acquire
from ..memory.scale_bands import ATOM_BYTES, ScaleBands
from ..schedule.work import WorkTile
from ..sm90.mainloop.base import Operands
from .block_scaled import BlockScaled
from .mainloop import ClearingWgradMainloop, WgradMainloop


class OperandScales(NamedTuple):
    """The scales of dy and of x."""

    dy: ScaleBands
    x: ScaleBands


class BlockScaledWgradMainloop(BlockScaled, WgradMainloop):
    """The mainloop of columns of dy times columns of x, both in MXFP8.

    Rows never come by index, since the quantiser has gathered them. Pipeline "stages": a stage is full after 1 arrival
    of the load warp, 1 of the warp that brings scales, and the bytes of operands and scales, by transaction.
    """

    gathers = False
    scale_warps = 1
    scale_arrivals = 1

    @cute.jit
    def bring_scales(
        self, operands: Operands, storage: Any, stages: Any, state: pipeline.PipelineState, work: WorkTile, rank: Int32
    ):  # fmt: skip
        """Copy the scales of dy and of x, for all k-tiles of one output tile, to their stages.

        Return the pipeline's advanced state.

        Args:
            operands: the mainloop's inputs, with the addresses of the scales.
            storage: the kernel's shared memory.
            stages, state: the pipeline of the stages, and the warp's state in it.
            work: the output tile.
            rank: always 0, since one warp brings the scales of both operands.
        """
        counts = self._atoms
        places = storage.a_scales.data_ptr(), storage.b_scales.data_ptr()
        tiles = work.m_tile, work.n_tile
        copy = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Uint8, num_bits_per_copy=8 * ATOM_BYTES)
        for k_tile in cutlass.range(self.num_k_tiles(operands, work), unroll=1):
            acquire(stages, state, Int32(sum(counts) * ATOM_BYTES))
            barrier = stages.producer_get_barrier(state)
            with cute.arch.elect_one():
                for scales, place, tile, count in zip(operands.scales, places, tiles, counts, strict=True):
                    for atom in cutlass.range_constexpr(count):
                        source = scales.atom(tile * count + atom, work.row, work.expert, k_tile)
                        target = _vector(place + (state.index * count + atom) * ATOM_BYTES)
                        cute.copy(copy, source, target, mbar_ptr=barrier)
            state.advance()
        return state


class ClearingBlockScaledWgradMainloop(ClearingWgradMainloop, BlockScaledWgradMainloop):
    """The mainloop of weight gradients in MXFP8 for builds without TMA addresses that wrap around 2^64.

    TMA then cannot clip at a group's end, so the MMA warp zeroes rows past it (mainloop.ClearingWgradMainloop).
    """


def _vector(pointer: cute.Pointer) -> cute.Tensor:
    """Return an atom (the scales of 128 columns in a k-tile, 512 bytes) in shared memory as a vector of bytes."""
    return cute.make_tensor(pointer, cute.make_layout(ATOM_BYTES))
