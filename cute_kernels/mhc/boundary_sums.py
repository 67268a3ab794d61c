"""The second step of a token tile in the boundary's backward: the sums over columns and over tokens, on tensor cores.

`boundary_backward.py` has the formulas. streams' are the n updated streams and d' their gradients. d_mix is the
gradient of their mix. dp is the gradient of their projection, which has K = n^2 + 2n outputs a token. A CTA has a slice
(a range) of the columns, for a part of the tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.invariant import Invariant
from ..device.select import select
from ..device.vectors import run_at
from ..device.warp_mma import WarpMma, read_matrices
from ..device.warps import WARP
from .boundary_shapes import WARP_COLUMNS
from .boundary_tile import BoundaryTile
from .dp_blocks import dp_words
from .shapes import TOKEN_TILE, outputs
from .slice_tile import APART, COLUMNS, WORDS
from .split import add_split

FRAGMENT = 4  # registers of an MMA's result
PAIR = 2  # tokens whose sums over columns are made by one MMA


class Leaves(NamedTuple):
    """Addresses of the workspace's arrays in which the kernel leaves (stores) its partial sums, all float32.

    Attributes:
        dots: sums over a slice's columns, for the gradients of comb, post and pre.
        weights: sums over a part's tokens, for the weight's gradient; 0: not wanted.
        norms: sums over a part's tokens, for the gradient of the norm's weight; 0: not wanted.
    """

    dots: Int64
    weights: Int64
    norms: Int64


class BoundarySums(Invariant):
    """Device code that makes the sums of the boundary's backward by MMAs, for all warps of a CTA.

    The weight's gradient is made transposed: for each stream, 16 columns times 8 outputs, summed over tokens in
    registers.

    Sums over columns are dot products of rows; two tokens share an MMA. One MMA multiplies the two tokens' streams (8
    rows) and y (8 rows: each token's y four times) by their d' (8 rows). Another multiplies their streams' by their
    d_mix. Both MMAs also multiply one token's rows by the other token's rows; these elements of the results are not
    used.
    """

    def __init__(self, tile: BoundaryTile):
        self.tile = tile
        self.dtype = tile.dtype
        self.n = tile.n
        self.outputs = outputs(tile.n)
        self.steps = self.outputs // 8

    def zeros(self) -> cute.Tensor:
        """Return zeroed float32 registers in which a lane sums its elements of the weight's gradient, over all tokens
        of the CTA's part.

        Their shape is [FRAGMENT, K / 8, n]: for each of the n streams and each group of 8 of the K = n^2 + 2n outputs,
        the lane's 4 elements of 16 columns x 8 outputs.
        """
        sums = cute.make_rmem_tensor((FRAGMENT, self.steps, self.n), Float32)
        sums.fill(0.0)
        return sums

    @cute.jit
    def add(self, stage: cute.Pointer, made: cute.Pointer, sums: cute.Tensor):
        """Add a token tile's contribution to the weight's gradient, at the warp's columns, to `sums`. The contribution
        is dp^T times the updated streams, summed over the tile's tokens; dp is the projection's gradient.

        Args:
            stage: the tile's arrays and block in shared memory; dp is in the block.
            made: the updated streams in shared memory.
            sums: the lane's elements of the weight's gradient, registers [FRAGMENT, K / 8, n] (`zeros`).
        """
        tile, lane, mma = self.tile, cute.arch.lane_idx(), WarpMma(self.dtype)
        blocks = stage + tile.arrays * tile.array_words
        right = [dp_words(blocks, self.dtype, self.steps, True, part) for part in range(2)]
        mine = tile.word(lane % 8 + lane // 16 * 8, tile.warp() * 2 + lane // 8 % 2)
        for j in cutlass.range_constexpr(self.n):
            row = made + j * tile.array_words + (mine ^ (APART[j] * WORDS))
            left = read_matrices(row, self.dtype, 4, True)
            words = [left[k] for k in range(4)]
            for step in cutlass.range_constexpr(self.steps):
                pairs = [(words, part[2 * step : 2 * step + 2]) for part in right]
                add_split(mma, sums[None, step, j], pairs[0], pairs[1:])

    @cute.jit
    def leave_dots(
        self, stage: cute.Pointer, made: cute.Pointer, leaves: Leaves, index: Int32, number: Int32, tokens: Int32
    ):  # fmt: skip
        """Store each token's sums over a slice's columns, for the gradients of comb, post and pre. The tokens are those
        of tile `number`.

        Args:
            stage: the tile's arrays in shared memory: streams, d', y and d_mix.
            made: the updated streams in shared memory.
            leaves: addresses in the workspace; only `dots` is used.
            index: the slice's number.
            number: the token tile's number.
            tokens: T; tokens past the last are not stored.
        """
        for turn in cutlass.range_constexpr(TOKEN_TILE // (PAIR * self.tile.warps)):
            row = (self.tile.warp() + turn * self.tile.warps) * PAIR
            of_update, of_mix = self._dots(stage, made, row)
            first = number * TOKEN_TILE + row
            self._store(leaves.dots, index, first, tokens, of_update, of_mix)

    @cute.jit
    def _dots(self, stage: cute.Pointer, made: cute.Pointer, first: Int32) -> tuple:
        """Return the dot products over a slice's columns for two tokens of a tile, `first` and `first` + 1, as two MMA
        results [16 rows, 8 columns].

        With n = 4 streams, numbers i = 0 .. 7 stand for stream i % 4 of token `first` + i / 4. An element of a result
        is the dot product of its row and its column:

                      row i < 8            row i + 8               column i
            first     stream i             y of stream i's token   d' of stream i
            second    updated stream i     as row i                d_mix of token `first` + i % 2

        d' is the gradient of the updated streams, d_mix the gradient of the mix. A lane has 4 elements of each result:
        columns 2 (lane % 4) and 2 (lane % 4) + 1 of row lane / 4, then of row lane / 4 + 8. Elements that combine
        different tokens are not used.

        Args:
            stage: the tile's arrays in shared memory: streams, d', y and d_mix.
            made: the updated streams in shared memory.
            first: the first token's number in the tile.
        """
        tile, lane, mma = self.tile, cute.arch.lane_idx(), WarpMma(self.dtype)
        row, matrix = lane % 8, lane // 8
        token, stream = first + row // self.n, row % self.n
        by_stream = stream * tile.array_words + tile.word(token, Int32(0), stream)
        of_y = tile.word(token, Int32(0)) + tile.y * tile.array_words
        of_mixes = tile.word(first + row % PAIR, Int32(0)) + tile.d_x * tile.array_words
        updated = by_stream + Int32(made.toint() - stage.toint()) // 4
        # Matrices 0 and 2 are of streams, at two neighbouring vectors; 1 and 3 of y.
        left = select(matrix % 2 == 0, by_stream + tile.streams * tile.array_words, of_y) ^ (matrix // 2 * WORDS)
        # Two matrices, of d'.
        right = (by_stream + tile.gradients * tile.array_words) ^ (matrix % 2 * WORDS)
        # Matrices 0 and 1 are of streams', 2 and 3 of d_mix.
        other = select(matrix < 2, updated, of_mixes) ^ (matrix % 2 * WORDS)
        of_update, of_mix = (cute.make_rmem_tensor(FRAGMENT, Float32) for _ in range(2))
        of_update.fill(0.0)
        of_mix.fill(0.0)
        for step in cutlass.range_constexpr(tile.columns // WARP_COLUMNS):
            moved = 2 * step * WORDS
            a = read_matrices(stage + (left ^ moved), self.dtype, 4, False)
            b = read_matrices(stage + (right ^ moved), self.dtype, 2, False)
            c = read_matrices(stage + (other ^ moved), self.dtype, 4, False)
            mma.add(of_update, [a[k] for k in range(4)], [b[0], b[1]])
            mma.add(of_mix, [c[0], c[0], c[1], c[1]], [c[2], c[3]])
        return of_update, of_mix

    @cute.jit
    def _store(
        self, dots: Int64, index: Int32, first: Int32, tokens: Int32, of_update: cute.Tensor, of_mix: cute.Tensor
    ):  # fmt: skip
        """Store n^2 + 2n dot products of each of two tokens, for the gradients of comb, post and pre. They are the
        elements of `_dots`' results in which a token's rows are multiplied by its own rows.

        Args:
            dots: the address of the workspace's array `Leaves.dots`.
            index: the slice's number.
            first: the first of the two tokens.
            of_update, of_mix: the two results of `_dots`.
        """
        lane, n = cute.arch.lane_idx(), self.n
        row, column = lane // 4, lane % 4 * 2
        token = first + row // n
        if token < tokens:
            start = (Int64(index) * tokens + token) * self.outputs
            if row // n == column // n:
                self._store_pair(dots, start + row % n * n + column % n, of_update[0], of_update[1])
                if row % n == 0:
                    self._store_pair(dots, start + n * n + column % n, of_update[2], of_update[3])
            if column == 0:
                value = select(row < n, of_mix[0], of_mix[1])
                run_at(Float32, dots, start + n * n + n + row % n, 1)[0] = value

    def _store_pair(self, address: Int64, element: Int64, first: Float32, second: Float32) -> None:
        pair = cute.make_rmem_tensor(2, Float32)
        pair[0], pair[1] = first, second
        run_at(Float32, address, element, 2).store(pair.load())

    @cute.jit
    def leave(self, leaves: Leaves, number: Int32, sums: cute.Tensor, of_norm: cute.Tensor):
        """Store this CTA's partial sums over its part of the tokens in the workspace, for the last kernel of the
        backward to add: `sums` for the gradient of the projection's weight, `of_norm` for the gradient of the norm's
        weight.

        Args:
            leaves: addresses of the workspace's arrays; 0: this gradient is not wanted, and nothing is stored for it.
            number: the CTA's index in these arrays, part * slices + slice.
            sums: this lane's sums for the projection's weight, registers [FRAGMENT, K / 8, n] (`zeros`).
            of_norm: this lane's sums for the norm's weight.
        """
        thread, _, _ = cute.arch.thread_idx()
        if leaves.weights != 0:
            for i in cutlass.range_constexpr(self.steps * self.n):
                mine = sums[None, i % self.steps, i // self.steps]
                fragment(leaves.weights, self.tile.warps, number * (self.steps * self.n) + i).store(mine.load())
        if leaves.norms != 0:
            for i in cutlass.range_constexpr(COLUMNS):
                total = of_norm[i]
                for bit in cutlass.range_constexpr(2, 5):
                    total = total + cute.arch.shuffle_sync_bfly(total, 1 << bit)
                of_norm[i] = total
            if thread % WARP < WARP // 8:
                column = self.tile.warp() * WARP_COLUMNS + thread % WARP * COLUMNS
                first = Int64(number) * self.tile.columns + column
                run_at(Float32, leaves.norms, first, COLUMNS).store(of_norm.load())


def fragment(sums: Int64, warps: int, number: Int32) -> cute.Tensor:
    """Return a view of this thread's FRAGMENT elements of fragment `number` in the workspace.

    A fragment is a CTA's sums for the gradient of the projection's weight at 8 outputs of one stream, over the CTA's
    columns: FRAGMENT registers of each thread, as an MMA leaves them.

    Args:
        sums: the address of all CTAs' fragments.
        warps: number of warps of a CTA.
        number: the CTA's index times (fragments of a CTA), plus the fragment's index in the CTA.
    """
    thread, _, _ = cute.arch.thread_idx()
    return run_at(Float32, sums, (Int64(number) * (warps * WARP) + thread) * FRAGMENT, FRAGMENT)
