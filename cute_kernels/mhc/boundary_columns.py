"""The first step of a token tile in the boundary's backward: everything that is computed for each column alone.

`boundary_backward.py` has the formulas. Of n residual streams with D columns, a warp has WARP_COLUMNS columns of each.
The names:

    d_updated                       the gradient of the updated streams that is given
    d'                              the whole gradient of the updated streams
    d_mix                           the gradient of the mix u of the updated streams
    dp                              the gradient of the projection, which has K = n^2 + 2n outputs
    pre [n], post [n], comb [n, n]  a token's coefficients
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.invariant import Invariant
from ..device.vectors import load_params
from ..device.warp_mma import WarpMma
from .boundary_shapes import WARP_COLUMNS
from .boundary_tile import BoundaryTile
from .dp_blocks import dp_words
from .shapes import outputs
from .slice_tile import APART, COLUMNS, WORDS
from .split import add_split, append_pairs

PARTS = 2


class ColumnWeights(NamedTuple):
    """Parameters at a lane's columns.

    Attributes:
        operands: the projection's weight as MMA operands (`BoundaryColumns.operands`).
        norm: the weight of the mix's RMS norm.
    """

    operands: list
    norm: cute.Tensor


class BoundaryColumns(Invariant):
    """Device code by which a warp computes d_streams and d_y at its WARP_COLUMNS columns of a tile's 16 tokens.

    With g = lane / 4 and t = lane % 4, a lane has columns 4t .. 4t + 3 of tokens g and g + 8. In the MMA of pair j (0
    or 1), column q is the warp's column 4 (q / 2) + 2j + q % 2, so that a lane gets its own columns 2j and 2j + 1.
    """

    def __init__(self, tile: BoundaryTile):
        self.tile = tile
        self.dtype = tile.dtype
        self.n = tile.n
        self.steps = outputs(tile.n) // 8

    def operands(self, weight: Int64, code: Int32, start: Int32, width: Int32) -> list:
        """Return the projection's weight at a warp's columns as right operands of MMAs, in registers.

        Args:
            weight, code: the address of the weight [K, n D], and its dtype.
            start: the first column of the CTA's slice.
            width: D.

        Returns:
            Words words[i][j][part][step]: stream i; pair j (0 or 1) of a lane's columns, see the class; part 0 for the
            weight's nearest 16-bit numbers, 1 for their rests (`split.py`); outputs 8 step to 8 step + 7.
        """
        lane = cute.arch.lane_idx()
        first = start + self.tile.warp() * WARP_COLUMNS + lane // 8 * COLUMNS
        column = cutlass.min(first, width - COLUMNS)
        made: list = [[[[] for _ in range(PARTS)] for _ in range(2)] for _ in range(self.n)]
        for i in range(self.n):
            for step in range(self.steps):
                rows = [Int64(8 * step + lane % 4 * 2 + one) * (width * self.n) for one in range(2)]
                values = [load_params(weight, code, row + i * width + column, COLUMNS) for row in rows]
                append_pairs(made[i], values[0], values[1], self.dtype)
        return made

    @cute.jit
    def compute(
        self, stage: cute.Pointer, made: cute.Pointer, out: cute.Pointer, weights: ColumnWeights, of_norm: cute.Tensor
    ):  # fmt: skip
        """Compute the updated streams, d_streams and d_y at the warp's columns of a token tile.

        The call also overwrites arrays in the stage, from which the next step makes sums. d_updated (the given gradient
        of the updated streams) becomes d' (their whole gradient), and d_x becomes d_mix (the gradient of the mix u).

        Args:
            stage: the tile's arrays in shared memory (`BoundaryTile`).
            made: arrays in shared memory to which the updated streams are written.
            out: arrays in shared memory to which d_streams and d_y are written.
            weights: the lane's parameters.
            of_norm: the lane's sums over tokens for the gradient of the norm's weight; the tile's contribution is
                added.
        """
        products = self._products(stage, weights.operands)
        for half in cutlass.range_constexpr(2):
            self._half(stage, made, out, weights, of_norm, products, half)

    def _products(self, stage: cute.Pointer, operands: list) -> list:
        """Return dp weight at the warp's columns, which is a term of d': the 4 registers of an MMA for each stream and
        pair of columns. dp is the projection's gradient.

        Args:
            stage: the tile's arrays and block in shared memory; dp is in the block.
            operands: the weight (`operands`).
        """
        tile = self.tile
        blocks = stage + tile.arrays * tile.array_words
        left = [dp_words(blocks, self.dtype, self.steps, False, part) for part in range(PARTS)]
        mma, half_mma = WarpMma(self.dtype), WarpMma(self.dtype, half=True)
        made: list = []
        for of_stream in operands:
            made.append([])
            for right in of_stream:
                sums = cute.make_rmem_tensor(4, Float32)
                sums.fill(0.0)
                for step in range(0, self.steps, 2):
                    count = min(2, self.steps - step)
                    a = [part[2 * step : 2 * (step + count)] for part in left]
                    b = [part[step : step + count] for part in right]
                    add_split(mma if count == 2 else half_mma, sums, (a[0], b[0]), [(a[0], b[1]), (a[1], b[0])])
                made[-1].append(sums)
        return made

    @cute.jit
    def _half(
        self, stage: cute.Pointer, made: cute.Pointer, out: cute.Pointer, weights: ColumnWeights,
        of_norm: cute.Tensor, products: list, half: cutlass.Constexpr[int],
    ):  # fmt: skip
        """Do the work of `compute` at a lane's columns for one of the lane's two tokens: token lane / 4 + 8 `half` of
        the tile.

        Args:
            stage: the tile's arrays in shared memory (`BoundaryTile`).
            made, out: arrays in shared memory for the updated streams, and for d_streams and d_y.
            weights: the lane's parameters.
            of_norm: the lane's sums for the gradient of the norm's weight; the token's contribution is added.
            products: dp weight, a term of d', at the warp's columns (`_products`).
        """
        n, tile = self.n, self.tile
        row = cute.arch.lane_idx() // 4 + 8 * half
        *comb, post, pre, (r, factor, f, _) = tile.record(stage, row)
        mine = tile.mine() + half * tile.half_words
        places = [mine ^ (APART[j] * WORDS) for j in range(n)]
        updated = self._updated(stage, made, places, comb, post, tile.numbers(tile.array(stage, tile.y), mine))
        u, d_mix = (cute.make_rmem_tensor(COLUMNS, Float32) for _ in range(2))
        u.fill(0.0)
        for j in cutlass.range_constexpr(n):
            u.store(u.load() + updated[j].load() * pre[j])
        rounded = tile.widened(tile.rounded(u)).load()
        d_x = tile.numbers(tile.array(stage, tile.d_x), mine).load()
        d_mix.store(d_x * weights.norm.load() * r - rounded * factor)
        of_norm.store(of_norm.load() + d_x * rounded * r)
        tile.keep(tile.array(stage, tile.d_x), mine, tile.rounded(d_mix))
        totals = []
        for j in cutlass.range_constexpr(n):
            place, total = tile.array(stage, tile.gradients + j), cute.make_rmem_tensor(COLUMNS, Float32)
            for column in cutlass.range_constexpr(COLUMNS):
                total[column] = products[j][column // 2][2 * half + column % 2]
            given = tile.numbers(place, places[j]).load()
            total.store(total.load() + given + d_mix.load() * pre[j] + updated[j].load() * f)
            tile.keep(place, places[j], tile.rounded(total))
            totals.append(total.load())
        for i in cutlass.range_constexpr(n):
            self._keep_sum(out + i * tile.array_words, places[i], totals, [comb[j][i] for j in range(n)])
        self._keep_sum(out + n * tile.array_words, mine, totals, post)

    def _updated(
        self, stage: cute.Pointer, made: cute.Pointer, places: list, comb: list, post: list, y: cute.Tensor
    ) -> list:  # fmt: skip
        """Compute a lane's columns of the updated streams, rounded as in forward. Write them to the arrays at `made`,
        and return them.

        Args:
            stage: the tile's arrays, from which the streams are read.
            made: arrays in shared memory to which the updated streams are written.
            places: the offset, in words, of the lane's columns in the array of each stream.
            comb, post: the token's coefficients.
            y: the lane's columns of y.
        """
        tile, found = self.tile, []
        streams = [tile.numbers(tile.array(stage, tile.streams + i), places[i]) for i in range(self.n)]
        by_source = [[comb[j][i] for j in range(self.n)] for i in range(self.n)]
        for j, words in enumerate(tile.updated(streams, y, by_source, post)):
            tile.keep(tile.array(made, j), places[j], words)
            found.append(tile.widened(words))
        return found

    def _keep_sum(self, array: cute.Pointer, offset: Int32, totals: list, factors: list[Any]) -> None:
        """Write a lane's columns of d_streams_i or d_y, rounded, to an array of results, `offset` words in.

        Each column is the sum over j of totals[j], the gradient of updated stream j, times factors[j]: comb_ij for
        d_streams_i, post_j for d_y.
        """
        values = cute.make_rmem_tensor(COLUMNS, Float32)
        values.store(totals[0] * factors[0])
        for total, factor in zip(totals[1:], factors[1:], strict=True):
            values.store(values.load() + total * factor)
        self.tile.keep(array, offset, self.tile.rounded(values))
