"""The mainloop of grouped GEMMs: rows of x times the weights of their experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode

from ...device.invariant import Invariant
from ...device.select import select
from ...epilogue.sizes import ROWS
from ...memory.row_boxes import acquire, num_boxes
from ...memory.weights import ExpertAddress, expert_offset, lo_hi, part_offset
from ...schedule.work import WorkTile
from ...tiles import TileConfig
from ..gemm_policy import GemmPolicy
from .base import Loop, Operands, Source
from .gathered_rows import LINES_AT_ONCE, SWIZZLE_PERIOD, GatherAlongRows, RowIndices, Share, arrive, row_indices
from .weights_first import WeightsFirst


class Weights(Invariant):
    """TMA loads of the weights of an output tile, k-tile by k-tile.

    Args:
        source: the TMA load.
        tiles: shared memory and global memory, partitioned for the load.
        ahead: number of k-tiles whose loads have begun before.
        num_bytes: bytes that TMA brings into a stage.
        n_tile: the output tile's index along columns.
        addresses: the TMA coordinates (lo, hi) of each part of the expert's weights (memory/weights.py).
        policy: L2 policy; None: the default one.
    """

    def __init__(
        self, source: Source, tiles: tuple[cute.Tensor, cute.Tensor], ahead: Int32, num_bytes: Int32, n_tile: Int32,
        addresses: list[tuple[Int32, Int32]], policy: Int64 | None,
    ):  # fmt: skip
        self.source = source
        self.smem, self.gmem = tiles
        self.ahead = ahead
        self.num_bytes = num_bytes
        self.n_tile = n_tile
        self.addresses = addresses
        self.policy = policy

    @cute.jit
    def load(self, stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, k_tile: Int32):
        """Wait for an empty stage and start the load of k-tile number `k_tile`; do nothing if `k_tile` < `ahead`."""
        if k_tile >= self.ahead:
            acquire(stages, state, self.num_bytes)
            barrier = stages.producer_get_barrier(state)
            for part in cutlass.range_constexpr(self.num_parts):
                k, lo, hi = self.k_tile_at(part, k_tile)
                source = self.gmem[None, self.n_tile, k, lo, hi]
                self.source.copy(source, self.smem[None, part, 0, state.index], barrier, self.policy)

    @property
    def num_parts(self) -> int:
        return len(self.addresses)

    def k_tile_at(self, part: int, k_tile: Int32) -> tuple[Int32, Int32, Int32]:
        """Return the TMA coordinates (k, lo, hi) of a part's weights in k-tile number `k_tile` of the contraction.

        k counts k-tiles in memory; (lo, hi) is the weights' address.
        """
        lo, hi = self.addresses[part]
        return k_tile, lo, hi


class Product(NamedTuple):
    """A product x w^T of a tile, by the loads of its operands.

    Attributes:
        a: the load of rows of x.
        b: the load of weights.
        address: the offsets of the experts' weights.
        rows: indices of x's rows.
    """

    a: Source
    b: Source
    address: ExpertAddress
    rows: RowIndices


class RowBoxes(NamedTuple):
    """TMA boxes of a tile's rows of x.

    Attributes:
        source: their load.
        smem: the boxes in shared memory, partitioned for TMA: (box's elements, box, _, stage).
        memory: x in global memory, divided into boxes (`GemmMainloop.row_tiles`) and partitioned for TMA.
    """

    source: Source
    smem: cute.Tensor
    memory: cute.Tensor


class GemmMainloop(WeightsFirst):
    """Mainloop that multiplies tile.m rows of x (operand A) by tile.n weight rows of an expert (B).

    Rows of x are neighbours or come by index (gathered_rows.py). A group may begin at any row. Rows past a group's end
    are computed but not stored. They are loaded only if their TMA box (memory/row_boxes.py) also holds rows of the
    group. If `policy.skips_half_tiles`, a warpgroup that has a tile alone skips the second slab (64 rows) if the group
    has no rows there.

    Args:
        parts: number of ranges of weight rows in a tile: 2 for a gated layer (rows of a, rows of u), else 1.
        transposed: True: w is stored transposed, so that the contraction runs over its rows.
        load_warp_gathers: True: the TMA warp is the first gathering warp, because warp 2 loads for the epilogue.
    """

    def __init__(
        self, dtype: type[cutlass.Numeric], tile: TileConfig, parts: int, transposed: bool, stages: int,
        policy: GemmPolicy, load_warp_gathers: bool,
    ):  # fmt: skip
        self.policy = policy
        self.parts = parts
        self.part_n = tile.n // parts
        self.w_box = self.part_n, tile.k
        b_major = OperandMajorMode.MN if transposed else OperandMajorMode.K
        super().__init__(dtype, tile, OperandMajorMode.K, b_major, stages)
        self.load_warp_gathers = load_warp_gathers
        # The TMA warp gathers fewer rows than the other warp, since its TMA loads take registers, too.
        self.tma_warp_rows = tile.m * 5 // 16 // SWIZZLE_PERIOD * SWIZZLE_PERIOD
        self.rows = GatherAlongRows(tile.m, dtype)

    def operands(
        self, x: cute.Tensor, w: cute.Tensor, address: ExpertAddress, rows: Int64, scales: Int64
    ) -> Operands:  # fmt: skip
        """Host side: make the TMA descriptors of x (rows, k) and of the weights (n, k, lo, hi).

        Args:
            x: the tensor that has the rows of x.
            w: the view (n, k, lo, hi) of all experts' weights (memory/weights.py).
            address: offsets of the weights' experts.
            rows: address of the indices of x's rows; 0: rows lie in order.
            scales: address of the scales of x, or a tuple that locates scales, for a mainloop that multiplies by
                scales.
        """
        atom_a, a = self._tma(x, self.a_major, self.tile.box_rows, self.tile.row_sharers)
        atom_b, b = self._tma(w, self.b_major, self.part_n, self.tile.cluster_m)
        extra: tuple = (address,)
        if self.tile.adaptive:
            extra += self._tma(w, self.b_major, self.part_n, 1), self._tma(x, self.a_major, self.tile.box_rows, 1)
        return Operands(atom_a, a, atom_b, b, extra, row_indices(rows, x), scales)

    def gather(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, rank: Int32,
    ) -> pipeline.PipelineState:  # fmt: skip
        return self._gather(operands, sA, stages, state, work, rank, self.num_k_tiles(operands, work))

    def _gather(
        self, operands: Operands, sA: cute.Tensor, stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState,
        work: WorkTile, rank: Int32, num_k_tiles: Int32,
    ) -> pipeline.PipelineState:  # fmt: skip
        share = Share(self.tma_warp_rows, (self.tile.m - self.tma_warp_rows) // LINES_AT_ONCE)
        share = share if self.load_warp_gathers else self.rows.half(rank)
        return self.rows.fill(operands.rows, sA, share, stages, state, work, num_k_tiles)

    def _row_sources(self, operands: Operands) -> tuple[Source, Any]:
        """Return two TMA loads of rows of x: one that multicasts if the CTAs of a cluster share rows, and one without
        multicast.

        The second load is None unless the tile is adaptive.
        """
        shared = Source(operands.atom_a, operands.a, self.tile.row_sharers)
        if not self.tile.adaptive:
            return shared, None
        atom, tensor = operands.extra[2]
        return shared, Source(atom, tensor, 1)

    def weight_row_bytes(self, operands: Operands) -> Int32:
        along = 1 if self.b_major == OperandMajorMode.K else 0
        return cute.size(operands.b, mode=[along]) * (self.dtype.width // 8)

    def num_k_tiles(self, operands: Operands, work: WorkTile) -> Int32:
        return cute.ceil_div(cute.size(operands.a, mode=[1]), self.tile.k)

    def loops(self, work: WorkTile, num_k_tiles: Int32) -> list[Loop]:
        if not self.policy.skips_half_tiles:
            return super().loops(work, num_k_tiles)
        is_short = work.group_end - work.row <= ROWS
        of_one = select(is_short, num_k_tiles, Int32(0))
        return [Loop(num_k_tiles - of_one, self.tile.slabs, self.tile.k), Loop(of_one, 1, self.tile.k)]

    @cute.jit
    def _fill(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, ahead: Int32, count: Int32,
        with_rows: cutlass.Constexpr[bool], policy: Int64 | None,
    ):  # fmt: skip
        address, *alone = operands.extra
        a_shared, a_alone = self._row_sources(operands)
        b_shared = Source(operands.atom_b, operands.b, self.tile.cluster_m)
        rest = (sA, sB, stages, state, work, ahead, count, with_rows, policy)
        if const_expr(self.tile.adaptive):
            # If columns are paired, the CTAs share rows of A; else they share columns of B.
            atom, tensor = alone[0]
            b_alone = Source(atom, tensor, 1)
            if work.pairs_columns > 0:
                state = self._load_from(Product(a_shared, b_alone, address, operands.rows), *rest)
            else:
                state = self._load_from(Product(a_alone, b_shared, address, operands.rows), *rest)
        else:
            state = self._load_from(Product(a_shared, b_shared, address, operands.rows), *rest)
        return state

    @cute.jit
    def _load_from(
        self, of: Product, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, ahead: Int32, count: Int32,
        with_rows: cutlass.Constexpr[bool], policy: Int64 | None,
    ):  # fmt: skip
        """Fill `count` stages with weights and rows of x. Returns the advanced state.

        If rows come by index and `load_warp_gathers`, this warp gathers rows, too.

        Args:
            of: the product whose operands are loaded.
            sA, sB: shared memory of all stages.
            ahead: number of stages that already have their weights.
            with_rows: True: load rows of x, too; False: load weights alone.
            policy: L2 policy of the weights' loads; None: the default.
        """
        boxes = self._boxes(of, work)
        weights, x = self._loads(of, sA, sB, work, ahead, boxes, policy)
        in_order = count
        if const_expr(with_rows and self.load_warp_gathers):
            if of.rows.address != 0:
                share = Share(0, self.tma_warp_rows // LINES_AT_ONCE)
                state = self.rows.fill(of.rows, sA, share, stages, state, work, count, weights)
                in_order = Int32(0)
        return self._load_in_order(weights, x, boxes if with_rows else None, stages, state, in_order)

    def _boxes(self, of: Product, work: WorkTile) -> Int32:
        """Return the number of TMA boxes of rows of x that a tile loads; 0 if rows come by index."""
        return select(of.rows.address == 0, num_boxes(self.tile, work), Int32(0))

    def _loads(
        self, of: Product, sA: cute.Tensor, sB: cute.Tensor, work: WorkTile, ahead: Int32, boxes: Int32,
        policy: Int64 | None,
    ) -> tuple[Weights, RowBoxes]:  # fmt: skip
        """Return the TMA loads of a tile's weights and of its rows of x. See `_load_from` for the arguments."""
        x_box, w_box = (self.tile.box_rows, self.tile.k), self.w_box
        gB = cute.local_tile(of.b.tensor, w_box, (None, None, None, None))
        tBsB, tBgB = of.b.partition(cute.flat_divide(sB, w_box), gB)
        first = expert_offset(of.address, work.expert)
        gA = self.row_tiles(of.a.tensor, work.row, x_box)
        tAsA, tAgA = of.a.partition(cute.flat_divide(sA, x_box), gA)
        num_bytes = self.num_bytes(boxes)
        addresses = [lo_hi(first + part_offset(of.address, part)) for part in range(self.num_addresses)]
        weights = self.weights(of.a.tensor, of.b, (tBsB, tBgB), ahead, num_bytes, work.n_tile, addresses, policy)
        return weights, RowBoxes(of.a, tAsA, tAgA)

    @cute.jit
    def _load_in_order(
        self, weights: Weights, x: RowBoxes, boxes: Int32 | None, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, count: Int32, arrives: Boolean | None = None,
    ):  # fmt: skip
        """Fill `count` stages by TMA alone. Returns the advanced state.

        Args:
            weights, x: the loads, from `_loads`.
            boxes: number of boxes of rows of x in a stage; None: load weights alone.
            arrives: True: this warp's lanes arrive at each stage, since the stage's barrier counts them as gathering
                lanes. None: no stage's barrier ever does.
        """
        for k_tile in cutlass.range(count, unroll=1):
            weights.load(stages, state, k_tile)
            if const_expr(boxes is not None):
                for box in cutlass.range(boxes, unroll=1):
                    barrier = stages.producer_get_barrier(state)
                    box_of_x = self.row_tile(x.source.tensor, x.memory, box, k_tile)
                    x.source.copy(box_of_x, x.smem[None, box, 0, state.index], barrier)
            if const_expr(arrives is not None):
                if arrives:
                    arrive(stages, state)
            state.advance()
        return state

    def num_bytes(self, boxes: Int32) -> Int32:
        """Return the bytes that TMA brings into a stage with `boxes` boxes of rows of x."""
        return (boxes * self.tile.box_rows + self.tile.n) * (self.tile.k * self.dtype.width // 8)

    @property
    def num_addresses(self) -> int:
        """Number of addresses of an expert's weights that a tile reads from: one for each part."""
        return self.parts

    def weights(self, x: cute.Tensor, *of: Any) -> Weights:
        """Make the loads of a tile's weights. x: the operand x, which only subclasses look at. of: the arguments with
        which `Weights` is constructed."""
        return Weights(*of)

    def row_tiles(self, x: cute.Tensor, row: Int32, box: tuple[int, int]) -> cute.Tensor:
        """Return x from row number `row` on, divided into TMA boxes: (row, k, box along rows, k-tile).

        box: the size of a box, (rows, k).
        """
        return cute.local_tile(cute.domain_offset((row, 0), x), box, (None, None))

    def row_tile(self, x: cute.Tensor, tiles: cute.Tensor, box: Int32, k_tile: Int32) -> cute.Tensor:
        """Return TMA box number `box` (some rows of x) of k-tile number `k_tile`.

        tiles: x divided into TMA boxes (`row_tiles`), partitioned for TMA.
        """
        return tiles[None, box, k_tile]
