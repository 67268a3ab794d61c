"""Mainloops for Blackwell: the loads of Hopper's mainloops, with tcgen05 MMAs.

Loads fill the ring of stages. One thread issues the MMAs, which read the stages and add into tensor memory.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as sm100_utils
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from ..device.chunks import CHUNK_WORDS
from ..device.select import select
from ..device.vectors import shared_at
from ..device.warps import WARP
from ..schedule.work import WorkTile
from ..sm90.mainloop import gemm, halves, wgrad
from ..sm90.mainloop.base import Mainloop
from ..sm90.mainloop.gathered_rows import LANES_A_LINE, LINES_AT_ONCE, WARPS, Gather
from .tensor_memory import TensorMemory

STEP_BITS = 256


class TensorCoreMainloop(Mainloop):
    """Mixin that multiplies by tcgen05 MMAs; a class of sm90/mainloop loads the operands.

    Pipeline "stages": a stage is full as on Hopper. It is empty after 1 arrival, by a commit of the MMA warp, once the
    MMAs have read the stage. In methods, `state` is the pipeline's state, and `work` the tile.
    """

    # Number of warps that bring scales: in the gathering warpgroup, or the warp of epilogue loads if there is none.
    scale_warps = 0

    @property
    def scale_arrivals(self) -> int:
        """Number of threads that bring scales; each arrives at a stage's full barrier."""
        return WARP * self.scale_warps

    @property
    def scale_columns(self) -> int:
        """Columns of tensor memory that a stage's scales take; 0 without scales."""
        return 0

    def num_producers(self, gathers: Boolean) -> Int32:
        """Return how many threads arrive at a stage's full barrier: one for TMA, the threads that gather rows, and the
        threads that bring scales.

        gathers: True: rows come by index.
        """
        return select(gathers, Int32(WARP * WARPS), Int32(0)) + (1 + self.scale_arrivals)

    def smem_fields(self) -> dict[str, Any]:
        """Return the mainloop's fields of shared memory besides the stages of A and B, by name."""
        return {}

    def make_pipeline(self, barriers: cute.Pointer, gathers: Boolean) -> pipeline.PipelineTmaUmma:
        """Make the pipeline of stages.

        Args:
            barriers: shared memory for the mbarriers.
            gathers: True: rows come by index.
        """
        return pipeline.PipelineTmaUmma.create(
            barrier_storage=barriers,
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.num_producers(gathers)),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
            tx_count=self.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )

    def tiled_mma(self) -> cute.TiledMma:
        """Make the MMA of one CTA, 128 x tile.n."""
        return sm100_utils.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            self.a_major,
            self.b_major,
            Float32,
            tcgen05.CtaGroup.ONE,
            (self.tile.m, self.tile.n),
        )

    def operand_layouts(self) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
        """Return the shared-memory layouts of operand A and of operand B, each with all stages, as MMAs read them."""
        shape, mma = (self.tile.m, self.tile.n, self.tile.k), self.tiled_mma()
        return (
            sm100_utils.make_smem_layout_a(mma, shape, self.dtype, self.stages),
            sm100_utils.make_smem_layout_b(mma, shape, self.dtype, self.stages),
        )

    def operands_of(self, storage: Any, memory: TensorMemory) -> tuple:
        """Return the operands of MMAs: descriptors of A and of B, each (MMA, 1, step, stage).

        A step is the part of a k-tile's depth that one MMA multiplies (`step_k`). storage: the kernel's shared memory.
        """
        mma, (a, b) = self.tiled_mma(), self.operand_layouts()
        return (
            mma.make_fragment_A(storage.a.get_tensor(a.outer, swizzle=a.inner)),
            mma.make_fragment_B(storage.b.get_tensor(b.outer, swizzle=b.inner)),
        )

    def accumulator_layout(self) -> cute.Layout:
        """Return the layout of a tile's accumulator in tensor memory."""
        mma = self.tiled_mma()
        return mma.make_fragment_C(mma.partition_shape_C((self.tile.m, self.tile.n))).layout

    def depth_of(self, work: WorkTile, k_tile: Int32) -> Int32 | int:
        """Return how many elements of a k-tile's depth (tile.k) must be multiplied; tile.k or more: all."""
        return self.tile.k

    @cute.jit
    def multiply(
        self, acc: cute.Tensor, operands: tuple, work: WorkTile, num_k_tiles: Int32, stages: Any,
        state: pipeline.PipelineState,
    ):  # fmt: skip
        """Compute acc = A B^T over all k-tiles of a tile; called by the MMA warp. Return the pipeline's advanced state.

        Args:
            acc: the accumulator in tensor memory.
            operands: descriptors of A and of B, and of their scales if they have any (`operands_of`).
            work: the output tile.
            num_k_tiles: number of k-tiles; with 0, acc is not written.
            stages, state: the pipeline of the stages, and the warp's state in it.
        """
        tiled_mma = self.tiled_mma()
        for k_tile in cutlass.range(num_k_tiles, unroll=1):
            stages.consumer_wait(state)
            self.after_wait()
            depth = self.depth_of(work, k_tile)
            self.before_steps(operands, state.index, depth)
            for step in cutlass.range_constexpr(self.tile.k // self.step_k):
                tiled_mma.set(tcgen05.Field.ACCUMULATE, Boolean(k_tile > 0) if step == 0 else True)
                self._step(tiled_mma, acc, self.step_of(operands, step, state.index), step * self.step_k, depth)
            stages.consumer_release(state)
            state.advance()
        return state

    @cute.jit
    def _step(
        self, tiled_mma: cute.TiledMma, acc: cute.Tensor, operands: tuple, first: cutlass.Constexpr[int],
        depth: Int32 | cutlass.Constexpr[int],
    ):  # fmt: skip
        """Issue one MMA of a k-tile, unless all of its elements are past `depth`.

        Args:
            tiled_mma: the MMA.
            acc: the accumulator in tensor memory.
            operands: A and B of this MMA.
            first: index, in the k-tile's depth, of the first element that the MMA multiplies.
            depth: how many elements of the k-tile must be multiplied (`depth_of`).
        """
        if first < depth:
            cute.gemm(tiled_mma, acc, *operands, acc)

    @property
    def step_k(self) -> int:
        """Elements of the contraction that one MMA (a step of a k-tile) multiplies: 32 bytes."""
        return STEP_BITS // self.dtype.width

    def before_steps(self, operands: tuple, stage: Int32, depth: Int32 | int) -> None:
        """Prepare a stage (a k-tile in shared memory) for its MMAs: here do nothing. Called by the MMA warp.

        Args:
            operands: descriptors of A and of B, and of their scales if they have any (`operands_of`).
            stage: the stage's index.
            depth: how many elements of the k-tile must be multiplied (`depth_of`).
        """

    def step_of(self, operands: tuple, step: int, stage: Int32) -> tuple:
        """Return the operands A and B of MMA number `step` of a stage.

        operands: descriptors of A and of B for all steps and stages (`operands_of`).
        """
        a, b, *_ = operands
        at = (None, None, step, stage)
        return a[at], b[at]


class GemmMainloop(TensorCoreMainloop, gemm.GemmMainloop):
    """The mainloop of GEMMs that multiply rows of x by their experts' weights."""


class HalvesMainloop(TensorCoreMainloop, halves.HalvesMainloop):
    """The mainloop of GEMMs that multiply the left and the right half of x's columns by different weights, and add."""


class WgradMainloop(TensorCoreMainloop, wgrad.WgradMainloop):
    """The mainloop of weight gradients, dw = dy^T x, which contract over the rows of a group.

    In a group's last k-tile, MMAs that contain no row of the group are skipped.
    """

    def depth_of(self, work: WorkTile, k_tile: Int32) -> Int32:
        return work.group_end - work.row - k_tile * self.tile.k


class ClearingWgradMainloop(WgradMainloop):
    """The mainloop of weight gradients without TMA addresses that wrap around 2^64 (memory/ragged.py).

    Without such addresses TMA cannot clip at a group's end, so it also loads rows past the end. If the group's last MMA
    would multiply some of these rows, the MMA warp first overwrites them with zeros. They are fewer rows than an MMA is
    deep. In shared memory a row takes a line of 128 bytes for each 64 columns in 16 bits, or for each 128 columns in 8
    bits.
    """

    def _columns(self, tensor: cute.Tensor) -> cute.Tensor:
        """Return the view (columns, rows) of a matrix."""
        return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 0]))

    def _rows(self, columns: cute.Tensor, work: WorkTile) -> cute.Tensor:
        """Return the columns from the first row of the tile's group on; not clipped at the group's end.

        Args:
            columns: the view (columns, rows) of a matrix.
            work: the tile.
        """
        return cute.domain_offset((0, work.row), columns)

    def operands_of(self, storage: Any, memory: TensorMemory) -> tuple:
        self.places = [cute.recast_ptr(each.data_ptr(), dtype=Int32) for each in (storage.a, storage.b)]
        return super().operands_of(storage, memory)

    def before_steps(self, operands: tuple, stage: Int32, depth: Int32 | int) -> None:
        self._clear_tail(stage, depth)
        super().before_steps(operands, stage, depth)

    @cute.jit
    def _clear_tail(self, stage: Int32, depth: Int32):
        """Overwrite rows of both operands in a stage with zeros, from row `depth` to the last row that an MMA
        multiplies.

        Do nothing if `depth` is a multiple of an MMA's depth.
        """
        if (depth < self.tile.k) & (depth % self.step_k != 0):
            for rows, first in zip((self.rows_of_a, self.rows_of_b), self.places, strict=True):
                self._clear(rows, first, stage, depth)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()

    @cute.jit
    def _clear(self, rows: Gather, first: cute.Pointer, stage: Int32, depth: Int32):
        """Overwrite rows of one operand in a stage with zeros, from row `depth` to the last row that an MMA multiplies.

        Args:
            rows: the operand's lines of 128 bytes; only their number is used.
            first: shared memory of the operand's first stage.
            stage: index of the stage.
            depth: how many rows of the k-tile belong to the group.
        """
        line, chunk = cute.arch.lane_idx() // LANES_A_LINE, cute.arch.lane_idx() % LANES_A_LINE
        zeros = cute.make_rmem_tensor(CHUNK_WORDS, Int32)
        zeros.fill(0)
        for i in cutlass.range_constexpr(self.step_k // LINES_AT_ONCE):
            row = depth + line + i * LINES_AT_ONCE
            if row < cute.round_up(depth, self.step_k):
                for before in cutlass.range_constexpr(0, rows.lines, self.tile.k):
                    at = (stage * rows.lines + before + row) * LANES_A_LINE + chunk
                    cute.autovec_copy(zeros, shared_at(Int32, first + at * CHUNK_WORDS, CHUNK_WORDS))
