"""The boundary between two sublayers: from the output y of one to the input x of the next, in one read of the residual
streams.

    update      streams'_j = post_j y + sum over i of comb_ij streams_i
    mix         u = sum over j of pre_j streams'_j;  x = RMS norm of u
    project     p = streams' weight^T, K = n^2 + 2n numbers a token, from which the next coefficients are made

There are T tokens of n residual streams of D columns; y and x are [T, D]. post [n], comb [n, n] and pre [n] are a
token's coefficients, which the boundary gets as inputs.

A CTA has a slice of the columns, 16 (of every stream) for each warp, for a part of the tokens. Token tiles of 16 come
through a ring of stages in shared memory. Asynchronous copies fill it with whole rows of the slice (`slice_tile.py`),
which memory serves faster than the short rows of one warp. For each tile there are two steps, with a barrier before
each:

1. A warp takes its columns of all 16 tokens. It updates and mixes them in registers, and overwrites streams by streams'
   and y by u in the stage. A lane has 4 neighbouring columns of two tokens. These words of streams' are its words of an
   MMA operand, so the contraction takes columns in whatever order that gives. The weight, each element as two 16-bit
   numbers (`split.py`), stays in registers.
2. All warps store whole rows of streams' and u, and add the warps' sums over columns: p, the sum of the streams'
   squares, and the sum of u's squares.

Each slice stores its part of these sums. A second kernel (`boundary_finish.py`) adds the parts, makes the coefficients,
and scales u to x. u is stored at x's address, or in the workspace if x is wanted in MXFP8 alone (`boundary_mxfp8.py`).
All sums are made in an order that does not depend on the tokens, so a token's results have the same bits in every
batch.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ..device.gmem import bytes_if, copy_chunk, vector_at
from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.select import select
from ..device.target import let_next_begin, smem_of_cta
from ..device.vectors import VECTOR_BYTES, dtype_code, load_params, shared_at
from ..device.warp_mma import WarpMma
from ..device.warps import WARP
from ..specs import MhcSpec
from ..tracing import DTYPES, Traced, traced
from .async_copy import AsyncCopy, stage_after, stage_before
from .boundary_finish import BoundaryFinish, Finished, Partials
from .boundary_mxfp8 import FinishInMxfp8
from .boundary_shapes import (
    RESERVED_BYTES,
    coefficient_floats,
    mix_place,
    slice_cta,
    slices_of,
    smem_bytes,
    tile_sums,
    tiles_of,
)
from .shapes import TOKEN_TILE, outputs
from .slice_tile import APART, COLUMNS, PAIR_WORDS, WORDS, SliceTile
from .split import rest_scale, split

LANES_PER_ROW = 4  # of an operand


class Given(NamedTuple):
    """Addresses of the inputs of kernel `Boundary` and of its two results (`updated` and `u`), and the sizes T (tokens)
    and D (columns).

    Attributes:
        y: [T, D]; 0: the streams are not updated.
        streams: [T, n, D].
        pre, post, comb: float32 coefficients [T, n], [T, n], [T, n, n].
        updated: result, the updated streams [T, n, D].
        u: result, the mix [T, D] of the updated streams.
        tokens, width: T and D.
    """

    y: Int64
    streams: Int64
    pre: Int64
    post: Int64
    comb: Int64
    updated: Int64
    u: Int64
    tokens: Int32
    width: Int32


class Boundary(Invariant):
    """Host function and first kernel of `boundary`, forward: the step from the output y of one sublayer to the input x
    of the next (formulas at the top of this file). T tokens have n residual streams of D columns each.

    Results: the updated streams, x, and the coefficients new_pre, new_post and new_comb for the next boundary.

    Args:
        y: the address of the previous sublayer's output [T, D]; 0: the streams are not updated.
        streams: the address of the streams [T, n, D].
        pre, post, comb: the addresses of this boundary's float32 coefficients [T, n], [T, n] and [T, n, n].
        weight: the address of the projection's weight [n^2 + 2n, n D].
        scale, base: the addresses of the gates' parameters [3] and [n^2 + 2n] (`boundary_finish.gate_argument`).
        norm_weight: the address of the weight [D] of the RMS norm that makes x.
        new_streams: the address of the updated streams [T, n, D].
        x: the address of the next sublayer's input [T, D] in 16 bits; 0: not wanted.
        new_pre, new_post, new_comb: the addresses of the new coefficients, float32.
        stats: the address of float32 [T, K + 2], K = n^2 + 2n, the numbers of each token that backward needs
            (`Finished.stats`); 0: not wanted.
        x_data, x_scale: the addresses of x in MXFP8, E4M3 [T, D] and E8M0 [T, D / 32]; 0: not wanted.
        workspace: the address of `boundary_shapes.workspace` float32 elements.
        forms: dtypes of weight, scale, base and norm_weight, two bits each.
        parts: number of parts of the tokens. There is a CTA for each pair of a part and a slice of the columns.
        iters: number of Sinkhorn iterations that make new_comb.
        x_block: number of columns that share a scale, 32 or 128; with 128, each scale is stored four times.
        rms_eps, norm_eps: added to the mean square before the root: of the streams, for the projection; of u, for x.
        eps: added in the Sinkhorn iterations, and to new_pre.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric], n: int):
        self.name = name
        self.dtype = dtype
        self.n = n
        self.outputs = outputs(n)
        self.steps = self.outputs // 8
        self.pitch = coefficient_floats(n)
        self.cta = slice_cta(n, smem_of_cta() - RESERVED_BYTES)
        self.threads = self.cta.warps * WARP
        self.tile = SliceTile(dtype, n, self.cta, n + 1, TOKEN_TILE * self.pitch)
        self.sums = tile_sums(n)
        self.finish = BoundaryFinish(f"{name}_finish", dtype, n)
        self.finish_in_mxfp8 = FinishInMxfp8(f"{name}_finish_mxfp8", dtype, n)

    @cute.jit
    def __call__(
        self, y: Int64, streams: Int64, pre: Int64, post: Int64, comb: Int64, weight: Int64, scale: Int64, base: Int64,
        norm_weight: Int64, new_streams: Int64, x: Int64, new_pre: Int64, new_post: Int64, new_comb: Int64,
        stats: Int64, x_data: Int64, x_scale: Int64, workspace: Int64, forms: Int32, tokens: Int32, width: Int32,
        parts: Int32, iters: Int32, x_block: Int32, rms_eps: Float32, eps: Float32, norm_eps: Float32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        if tokens > 0:
            slices = slices_of(self.cta, width)
            u = x
            if x == 0:
                u = workspace + mix_place(self.n, Int64(slices), tokens) * 4
            given = Given(y, streams, pre, post, comb, new_streams, u, tokens, width)
            name_kernel(self.kernel, self.name)
            self.kernel(given, weight, dtype_code(forms, 0), workspace).launch(
                grid=(slices, parts, 1),
                block=(self.threads, 1, 1),
                smem=smem_bytes(self.n, self.cta),
                min_blocks_per_mp=1,
                stream=stream,
            )
            scale_code = dtype_code(forms, 1)
            norm_code = dtype_code(forms, 3)
            finished = Finished(
                u, x, x_data, x_scale, x_block, norm_weight, norm_code, new_pre, new_post, new_comb, stats
            )  # fmt: skip
            arguments = (
                Partials(workspace, slices), (scale, scale_code, base, dtype_code(forms, 2)), finished, tokens, width,
                iters, (rms_eps, eps, norm_eps), stream,
            )  # fmt: skip
            if x_data != 0:
                self.finish_in_mxfp8.launch(*arguments)
            else:
                self.finish.launch(*arguments)

    @cute.kernel
    def kernel(self, given: Given, weight: Int64, weight_code: Int32, partials: Int64):
        index, _, _ = cute.arch.block_idx()
        ring = cute.arch.get_dyn_smem(Int32, alignment=128)
        stages, words = self.tile.stages, self.tile.stage_words
        start, tiles = index * self.cta.columns, tiles_of(given.tokens)
        first, last = self.tile.span(given.tokens)
        for stage in cutlass.range_constexpr(stages - 1):
            if first + stage < last:
                self._copy(ring + stage * words, given, start, first + stage)
            AsyncCopy.commit()
        operands = self._operands(weight, weight_code, start, given.width)
        let_next_begin()
        sums = cute.recast_ptr(ring + stages * words, dtype=Float32)
        stage = Int32(0)
        for number in cutlass.range(first, last):
            AsyncCopy.wait(stages - 2)
            cute.arch.sync_threads()  # all have the oldest stage, and are done with the one that is filled next
            free = stage_before(stage, stages)
            upcoming = number + (stages - 1)
            if upcoming < last:
                self._copy(ring + free * words, given, start, upcoming)
            AsyncCopy.commit()
            here = ring + stage * words
            self._compute(here, given.y != 0, operands, sums)
            cute.arch.sync_threads()
            self._store(here, given, start, number)
            self._leave_sums(sums, partials + Int64(index * tiles + number) * (self.sums * 4))
            stage = stage_after(stage, stages)

    def _operands(self, weight: Int64, code: Int32, start: Int32, width: Int32) -> list:
        """Return the projection's weight at a lane's columns as MMA operands; zeros after the last column.

        The result is operands[i][part][step], each two words: stream i; part 0 for the weight's nearest 16-bit numbers,
        1 for their rests (`split.py`); step of 8 outputs.

        Args:
            weight, code: the address of the weight [n^2 + 2n, n D], and its dtype.
            start: the first column of the CTA's slice.
            width: D.
        """
        first = start + self.tile.first_column()
        column = cutlass.min(first, width - COLUMNS)
        made: list = [[[], []] for _ in range(self.n)]
        for j in range(self.n):
            for step in range(self.steps):
                row = Int64(8 * step + cute.arch.lane_idx() // LANES_PER_ROW) * (width * self.n)
                values = load_params(weight, code, row + j * width + column, COLUMNS)
                for place in range(COLUMNS):
                    values[place] = select(first < width, values[place], Float32(0.0))
                for part, words in enumerate(split(values, self.dtype)):
                    made[j][part].append([words[0], words[1]])
        return made

    @cute.jit
    def _copy(self, stage: cute.Pointer, given: Given, start: Int32, number: Int32):
        """Start to copy token tile `number`, at the slice that begins at column `start`, to a stage.

        Past the last token, the last token is copied again. Columns past the last, and tensors that are not given,
        become zeros, since the sums over columns include them.
        """
        tile, place = self.tile, self.tile.place(start, number, given.tokens, given.width)
        tile.copy_streams(stage, given.streams, place, place.is_column)
        tile.copy_rows(tile.array(stage, self.n), given.y, place, place.is_column & (given.y != 0))
        thread, _, _ = cute.arch.thread_idx()
        of_token = self.n + 2  # vectors of comb, post and pre
        if thread < TOKEN_TILE * of_token:
            row, vector = thread // of_token, thread % of_token
            token = Int64(cutlass.min(number * TOKEN_TILE + row, given.tokens - 1))
            source = given.comb + (token * self.n + vector) * VECTOR_BYTES
            if vector == self.n:
                source = given.post + token * VECTOR_BYTES
            elif vector == self.n + 1:
                source = given.pre + token * VECTOR_BYTES
            target = stage + (tile.arrays * tile.array_words + row * self.pitch + vector * WORDS)
            copy_chunk(target.toint(), source, bytes_if((given.y != 0) | (vector == self.n + 1)))

    @cute.jit
    def _compute(self, stage: cute.Pointer, has_update: Boolean, operands: list, sums: cute.Pointer):
        """Update and mix the warp's columns of a token tile in its stage.

        Sums over these columns are stored in the warp's range of `sums`: the projection p, the squares of the updated
        streams, and the squares of the mix u.

        Args:
            stage: the tile's arrays in shared memory.
            has_update: True: y is given, so the streams are updated.
            operands: the projection's weight (`_operands`).
        """
        streams = cute.make_rmem_tensor((PAIR_WORDS, self.n, 2), Int32)
        squares = cute.make_rmem_tensor(4, Float32)
        squares.fill(0.0)
        for half in cutlass.range_constexpr(2):
            self._half(stage, has_update, streams, squares, half)
        products = self._products(streams, operands)
        lane = cute.arch.lane_idx()
        mine = sums + self.tile.warp() * self.sums
        for half in cutlass.range_constexpr(2):
            row = lane // LANES_PER_ROW + 8 * half
            pair = cute.make_rmem_tensor(2, Float32)
            for step in cutlass.range_constexpr(self.steps):
                pair[0], pair[1] = products[2 * half, step], products[2 * half + 1, step]
                place = row * self.outputs + (8 * step + lane % LANES_PER_ROW * 2)
                shared_at(Float32, mine + place, 2).store(pair.load())
            for of in cutlass.range_constexpr(2):
                pair[of] = cute.arch.warp_reduction_sum(squares[2 * half + of], threads_in_group=LANES_PER_ROW)
            if lane % LANES_PER_ROW == 0:
                shared_at(Float32, mine + (TOKEN_TILE * self.outputs + row * 2), 2).store(pair.load())

    @cute.jit
    def _half(
        self, stage: cute.Pointer, has_update: Boolean, streams: cute.Tensor, squares: cute.Tensor,
        half: cutlass.Constexpr[int],
    ):  # fmt: skip
        """Update the streams and mix them into u, for a lane's columns of one of its two tokens, number `half`.

        u, from which the norm makes x, is kept in the tile's last array.

        Args:
            stage: the tile's arrays in shared memory.
            has_update: True: y is given, so the streams are updated.
            streams: elements [., j, half] become the words of updated stream j.
            squares: the sum of the updated streams' squares is added to element 2 half, the sum of u's squares to
                element 2 half + 1.
        """
        n, tile = self.n, self.tile
        row = cute.arch.lane_idx() // LANES_PER_ROW + 8 * half
        mine = tile.mine() + half * tile.half_words
        places = [mine ^ (APART[j] * WORDS) for j in range(n)]
        for j in cutlass.range_constexpr(n):
            words = shared_at(Int32, tile.array(stage, j) + places[j], PAIR_WORDS)
            streams[None, j, half].store(words.load())
        *comb, post, pre = tile.vectors_at(stage + (tile.arrays * tile.array_words + row * self.pitch), n + 2)
        if has_update:
            self._update(stage, mine, places, comb, post, streams, half)
        u = cute.make_rmem_tensor(COLUMNS, Float32)
        u.fill(0.0)
        for j in cutlass.range_constexpr(n):
            values = tile.widened(self._words(streams, j, half))
            u.store(u.load() + values.load() * pre[j])
            for column in cutlass.range_constexpr(COLUMNS):
                squares[2 * half] += values[column] * values[column]
        words = tile.rounded(u)
        tile.keep(tile.array(stage, n), mine, words)
        values = tile.widened(words)
        for column in cutlass.range_constexpr(COLUMNS):
            squares[2 * half + 1] += values[column] * values[column]

    def _update(
        self, stage: cute.Pointer, mine: Int32, places: list, comb: list, post: list, streams: cute.Tensor, half: int
    ) -> None:  # fmt: skip
        """Update the streams at a lane's columns: replace the words of the streams by words of the updated streams, in
        `streams` (registers) and in the stage.

        Args:
            stage: the tile's arrays in shared memory.
            mine: the offset, in words, of the lane's columns in an array (`SliceTile.mine`).
            places: this offset for the array of each stream.
            comb, post: the token's coefficients.
            streams: the lane's words [., j, half] of stream j.
            half: the token's number among the lane's two tokens.
        """
        n, tile = self.n, self.tile
        given = [tile.widened(self._words(streams, j, half)) for j in range(n)]
        y = tile.numbers(tile.array(stage, n), mine)
        for j, words in enumerate(tile.updated(given, y, comb, post)):
            streams[None, j, half].store(words.load())
            tile.keep(tile.array(stage, j), places[j], words)

    def _words(self, streams: cute.Tensor, j: int, half: int) -> cute.Tensor:
        words = cute.make_rmem_tensor(PAIR_WORDS, Int32)
        words.store(streams[None, j, half].load())
        return words

    def _products(self, streams: cute.Tensor, operands: list) -> cute.Tensor:
        """Return p summed over the warp's columns: the product of the updated streams and weight^T, as 4 registers of
        an MMA for each step of 8 outputs.

        Products with the weight's rests (`split`) are added first, since their sum may need scaling. Tensor cores
        truncate their sums; a sum here has only 64 columns.

        operands: the projection's weight (`_operands`).
        """
        mma, products = WarpMma(self.dtype), cute.make_rmem_tensor((4, self.steps), Float32)
        products.fill(0.0)
        for part in (1, 0):
            for j in range(self.n):
                left = [streams[word, j, half] for word in range(PAIR_WORDS) for half in range(2)]
                for step in range(self.steps):
                    mma.add(products[None, step], left, operands[j][part][step])
            if part == 1 and rest_scale(self.dtype) != 1.0:
                products.store(products.load() * (1.0 / rest_scale(self.dtype)))
        return products

    @cute.jit
    def _store(self, stage: cute.Pointer, given: Given, start: Int32, number: Int32):
        """Store the updated streams and the mix u of token tile `number` from a stage to global memory, in whole rows
        of the slice that begins at column `start`."""
        tile, place = self.tile, self.tile.place(start, number, given.tokens, given.width)
        if place.is_token & place.is_column:
            if given.y != 0:
                tile.store_streams(stage, given.updated, place)
            tile.store_rows(tile.array(stage, self.n), given.u, place)

    @cute.jit
    def _leave_sums(self, sums: cute.Pointer, partials: Int64):
        """Add the sums of all warps, and store the results at `partials`: a token tile's sums over the CTA's slice of
        the columns."""
        thread, _, _ = cute.arch.thread_idx()
        of_warps = cute.make_tensor(sums, cute.make_layout((self.sums, self.cta.warps)))
        for place in cutlass.range(thread, self.sums, self.threads):
            total = Float32(0.0)
            for warp in cutlass.range_constexpr(self.cta.warps):
                total += of_warps[place, warp]
            vector_at(Float32, partials)[place] = total


def trace(spec: MhcSpec) -> Traced:
    return traced(spec, Boundary(spec.name, DTYPES[spec.dtype], spec.n))
