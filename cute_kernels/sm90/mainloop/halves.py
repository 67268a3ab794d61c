"""The mainloop of the data gradient through a w1 that is two tensors (`GateUp`): y = x[:, :K/2] w + x[:, K/2:] w_up."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from ...device.select import select
from ...memory.weights import ExpertAddress
from ...schedule.work import WorkTile
from .base import Operands
from .gemm import GemmMainloop, Weights


class WeightsInHalves(Weights):
    """Loads of weights for a contraction of two halves. The first `half` k-tiles come from addresses[0] (w), then as
    many from addresses[1] (w_up).
    """

    half: Int32
    num_parts = 1

    def k_tile_at(self, part: int, k_tile: Int32) -> tuple[Int32, Int32, Int32]:
        is_second = k_tile >= self.half
        (first_lo, first_hi), (lo, hi) = self.addresses
        k_tile -= select(is_second, self.half, Int32(0))
        return k_tile, select(is_second, lo, first_lo), select(is_second, hi, first_hi)


class HalvesMainloop(GemmMainloop):
    """GEMM mainloop that multiplies the left and the right half of x's columns by different weights, and adds.

    The second half is contracted after the first, into the same accumulators. x is viewed as (row, k, half), so that
    TMA clips both operands where a half ends and fills the half's last k-tile with zeros.
    """

    gathers = False
    num_addresses = 2

    def operands(
        self, x: cute.Tensor, w: cute.Tensor, address: ExpertAddress, rows: Int64, scales: Int64
    ) -> Operands:  # fmt: skip
        rows_of_x, columns = x.shape
        half = Int64(columns) // 2
        layout = cute.make_layout((rows_of_x, columns // 2, 2), stride=(x.stride[0], 1, half))
        return super().operands(cute.make_tensor(x.iterator, layout), w, address, rows, scales)

    def half(self, x: cute.Tensor) -> Int32:
        """Return the number of k-tiles of one half."""
        return cute.ceil_div(cute.size(x, mode=[1]), self.tile.k)

    def num_k_tiles(self, operands: Operands, work: WorkTile) -> Int32:
        return 2 * self.half(operands.a)

    def weights(self, x: cute.Tensor, *of: Any) -> Weights:
        weights = WeightsInHalves(*of)
        weights.half = self.half(x)
        return weights

    def row_tiles(self, x: cute.Tensor, row: Int32, box: tuple[int, int]) -> cute.Tensor:
        return cute.local_tile(cute.domain_offset((row, 0, 0), x), box, (None, None, None))

    def row_tile(self, x: cute.Tensor, tiles: cute.Tensor, box: Int32, k_tile: Int32) -> cute.Tensor:
        half = self.half(x)
        is_second = k_tile >= half
        return tiles[
            None, box, k_tile - select(is_second, half, Int32(0)), select(is_second, Int32(1), Int32(0))
        ]  # fmt: skip
