"""The backward of a boundary (boundary.py), in one pass over the streams and their gradient.

T tokens have n residual streams of D columns; y and d_x are [T, D]. pre [n], post [n] and comb [n, n] are a token's
coefficients that forward used. streams' are the updated streams, and streams'_flat are a token's n updated streams as
one row of n D. u is their mix. p = streams'_flat weight^T is their projection, K = n^2 + 2n numbers a token. d_ marks
gradients.

    streams'_j = post_j y + sum over i of comb_ij streams_i          as forward rounds them
    u = sum over j of pre_j streams'_j                               as forward rounds it
    d_mix = r d_x w - factor u                                       the gradient of u; w is the norm's weight
    d'_j = d_updated_j + pre_j d_mix + (dp weight)_j + f streams'_j  the gradient of streams'
    d_streams_i = sum over j of comb_ij d'_j;  d_y = sum over j of post_j d'_j

    d_comb_ij = d'_j . streams_i;  d_post_j = d'_j . y;  d_pre_j = d_mix . streams'_j          sums over D
    d_weight = dp^T streams'_flat;  d_w = sum of d_x u r                                       sums over tokens

Backward has three kernels. The first (`boundary_tokens.py`) makes each token's r, factor, f and dp. The main kernel is
here. The last (`boundary_backward_finish.py`) adds the partial sums that the main kernel stores: for sums over D, one
for each slice of the columns; for sums over tokens, one for each part of the tokens
(`boundary_backward_shapes.BackwardCut`).

A CTA has a slice of the columns, 16 (of every stream) for each warp, for a part of the tokens. Token tiles come through
a ring of stages in shared memory, filled by asynchronous copies (`boundary_tile.py`). For each tile there are two
steps, with a barrier before each:

1. A warp takes its columns of all 16 tokens (`boundary_columns.py`). dp weight is a product on tensor cores, whose
   operand, the weight, stays in registers. A lane gets four neighbouring columns of two tokens of the result, and
   computes everything for them except sums. d'_j and d_mix are rounded to 16 bits, since step 2 multiplies them on
   tensor cores.
2. The sums are made on tensor cores (`boundary_sums.py`). A warp multiplies streams' of its columns by dp; these
   products are summed over tokens in registers. It also multiplies rows of two tokens by each other, over all columns.
   Results go to memory in whole rows.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.gmem import copy_chunk, offset_by
from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.target import early, let_next_begin, smem_of_cta, wait_for_earlier
from ..device.vectors import VECTOR_BYTES, dtype_code, load_params
from ..device.warps import WARP
from ..specs import MhcSpec
from ..tracing import DTYPES, Traced, traced
from .async_copy import AsyncCopy, stage_after, stage_before
from .boundary_backward_finish import BoundaryBackwardFinish, Finished
from .boundary_backward_shapes import backward_workspace, slice_cta, smem_bytes
from .boundary_columns import BoundaryColumns, ColumnWeights
from .boundary_shapes import RESERVED_BYTES, slices_of
from .boundary_sums import BoundarySums, Leaves
from .boundary_tile import BoundaryTile
from .boundary_tokens import BoundaryTokens, TokenInputs
from .gates_backward import GateRows
from .slice_tile import WORDS


class Given(NamedTuple):
    """Addresses of the inputs of kernel `BoundaryBackward`, and their sizes: T tokens, D columns. Address 0 of
    d_updated, y or d_x stands for zeros.

    Attributes:
        streams: [T, n, D], the streams before the update.
        d_updated: [T, n, D], the gradient of the updated streams.
        y, d_x: [T, D].
        blocks: a block for each token tile, which the first kernel stores (`boundary_backward_shapes.block_bytes`).
        tokens, width: T and D.
    """

    streams: Int64
    d_updated: Int64
    y: Int64
    d_x: Int64
    blocks: Int64
    tokens: Int32
    width: Int32


class Results(NamedTuple):
    """Addresses of d_streams [T, n, D] and d_y [T, D]; 0: not wanted."""

    d_streams: Int64
    d_y: Int64


class Parameters(NamedTuple):
    """Addresses and dtypes of two parameters: the projection's weight [K, n D], K = n^2 + 2n, and the weight [D] of the
    mix's RMS norm."""

    weight: Int64
    weight_code: Int32
    norm: Int64
    norm_code: Int32


class BoundaryBackward(Invariant):
    """Host function and main kernel of the backward of `boundary` (boundary.py: the step from the output y of one
    sublayer to the input x of the next). The formulas are at the top of this file.

    Argument d_NAME is the gradient of NAME. Address 0 of a gradient means: an input that is not given, or a result that
    is not wanted.

    Args:
        d_new_streams, d_x, d_new_pre, d_new_post, d_new_comb: the gradients of forward's results, inputs here.
        y, streams, pre, post, comb, weight, scale, base, norm_weight: forward's inputs.
        x, stats: two results of forward.
        d_sums: result, float32 [K + 3], the gradients of base and scale.
        workspace: its address; its size is `boundary_backward_shapes.backward_workspace(...).end`.
        forms: dtypes of weight, scale, base and norm_weight, two bits each.
        token_ctas: number of CTAs of the first kernel.
        parts: number of parts into which the main kernel divides the tokens.
        iters, eps: number of Sinkhorn iterations that made new_comb, and the number that forward added in them.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric], n: int):
        self.name = name
        self.dtype = dtype
        self.n = n
        self.cta = slice_cta(n, smem_of_cta() - RESERVED_BYTES)
        self.threads = self.cta.warps * WARP
        self.tile = BoundaryTile(dtype, n, self.cta)
        self.columns = BoundaryColumns(self.tile)
        self.sums = BoundarySums(self.tile)
        self.first = BoundaryTokens(f"{name}_tokens", dtype, n)
        self.finish = BoundaryBackwardFinish(f"{name}_finish", n, self.cta)

    @cute.jit
    def __call__(
        self, d_new_streams: Int64, d_x: Int64, d_new_pre: Int64, d_new_post: Int64, d_new_comb: Int64, y: Int64,
        streams: Int64, pre: Int64, post: Int64, comb: Int64, weight: Int64, scale: Int64, base: Int64,
        norm_weight: Int64, x: Int64, stats: Int64, d_y: Int64, d_streams: Int64, d_pre: Int64, d_post: Int64,
        d_comb: Int64, d_weight: Int64, d_norm_weight: Int64, d_sums: Int64, workspace: Int64, forms: Int32,
        tokens: Int32, width: Int32, token_ctas: Int32, parts: Int32, iters: Int32, eps: Float32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        if tokens > 0:
            sizes = (Int64(width), Int64(tokens), Int64(token_ctas), Int64(parts))
            at = [workspace + place for place in backward_workspace(self.n, self.cta, *sizes)]
            of_tokens = TokenInputs(
                d_x, x, d_new_pre, d_new_post, d_new_comb, pre, post, comb, stats, scale, base, forms
            )
            self.first.launch(of_tokens, at[0], at[1], tokens, width, token_ctas, iters, eps, stream)
            given = Given(streams, d_new_streams, y, d_x, at[0], tokens, width)
            parameters = Parameters(weight, dtype_code(forms, 0), norm_weight, dtype_code(forms, 3))
            name_kernel(self.kernel, self.name)
            self.kernel(given, Results(d_streams, d_y), parameters, Leaves(at[2], at[3], at[4])).launch(
                grid=(slices_of(self.cta, width), parts, 1),
                block=(self.threads, 1, 1),
                smem=smem_bytes(self.n, self.cta),
                min_blocks_per_mp=1,
                stream=stream,
                use_pdl=early(True),
            )
            codes = (dtype_code(forms, 0), dtype_code(forms, 3))
            finished = Finished(d_pre, d_post, d_comb, d_weight, d_norm_weight, *codes)
            rows = GateRows(at[1], token_ctas, d_sums)
            self.finish.launch((at[2], at[3], at[4]), rows, finished, tokens, width, parts, stream)

    @cute.kernel
    def kernel(self, given: Given, results: Results, parameters: Parameters, leaves: Leaves):
        index, _, _ = cute.arch.block_idx()
        ring = cute.arch.get_dyn_smem(Int32, alignment=128)
        stages, words = self.tile.stages, self.tile.stage_words
        start = index * self.cta.columns
        first, last = self.tile.span(given.tokens)
        # The kernel of the tokens does not write these inputs, and began only when all kernels before it had ended.
        for stage in cutlass.range_constexpr(stages - 1):
            if first + stage < last:
                self._copy(ring + stage * words, given, start, first + stage)
        weights = self._weights(parameters, start, given.width)
        # Everything above overlaps the kernel of the tokens; everything below reads its results.
        wait_for_earlier()
        let_next_begin()
        for stage in cutlass.range_constexpr(stages - 1):
            if first + stage < last:
                self._copy_block(ring + stage * words, given, first + stage)
            AsyncCopy.commit()
        self._tiles(ring, given, results, weights, leaves, (first, last))

    @cute.jit
    def _tiles(
        self, ring: cute.Pointer, given: Given, results: Results, weights: ColumnWeights, leaves: Leaves, span: tuple
    ):  # fmt: skip
        """Process token tiles span[0] .. span[1] - 1 of this CTA's slice in one copy pipeline. Then store the sums over
        all these tiles' tokens in the workspace.

        Args:
            ring: the stages in shared memory.
            weights: the parameters at the lane's columns.
            leaves: addresses in the workspace for the sums.
        """
        index, part, _ = cute.arch.block_idx()
        slices, _, _ = cute.arch.grid_dim()
        tile, stages, (first, last) = self.tile, self.tile.stages, span
        start = index * self.cta.columns
        # The tile's arrays of streams', and of results on their way to memory.
        made = ring + stages * tile.stage_words
        out = made + self.n * tile.array_words
        sums, of_norm = self.sums.zeros(), cute.make_rmem_tensor(WORDS, Float32)
        of_norm.fill(0.0)
        stage = Int32(0)
        for number in cutlass.range(first, last):
            AsyncCopy.wait(stages - 2)
            cute.arch.sync_threads()  # all have the oldest stage, and are done with the one that is filled next
            free = stage_before(stage, stages)
            upcoming = number + (stages - 1)
            if upcoming < last:
                self._copy(ring + free * tile.stage_words, given, start, upcoming)
                self._copy_block(ring + free * tile.stage_words, given, upcoming)
            AsyncCopy.commit()
            here = ring + stage * tile.stage_words
            self.columns.compute(here, made, out, weights, of_norm)
            cute.arch.sync_threads()
            self.sums.add(here, made, sums)
            self.sums.leave_dots(here, made, leaves, index, number, given.tokens)
            self._store(out, given, results, start, number)
            stage = stage_after(stage, stages)
        self.sums.leave(leaves, part * slices + index, sums, of_norm)

    @cute.jit
    def _copy(self, stage: cute.Pointer, given: Given, start: Int32, number: Int32):
        """Start to copy token tile `number`, at the slice that begins at column `start`, to a stage.

        Past the last token, the last token is copied again. Columns past the last, and tensors that are not given,
        become zeros, since the sums over columns include them.
        """
        tile, place = self.tile, self.tile.place(start, number, given.tokens, given.width)
        tile.copy_streams(tile.array(stage, tile.streams), given.streams, place, place.is_column)
        of_updated = place.is_column & (given.d_updated != 0)
        tile.copy_streams(tile.array(stage, tile.gradients), given.d_updated, place, of_updated)
        for array, source in ((tile.y, given.y), (tile.d_x, given.d_x)):
            tile.copy_rows(tile.array(stage, array), source, place, place.is_column & (source != 0))

    @cute.jit
    def _copy_block(self, stage: cute.Pointer, given: Given, number: Int32):
        """Start to copy the block of token tile `number` to a stage. The first kernel stored this block: dp (the
        projection's gradient), and a record of float32 numbers for each token."""
        thread, _, _ = cute.arch.thread_idx()
        tile = self.tile
        block, target = given.blocks + Int64(number) * (tile.block_words * 4), stage + tile.arrays * tile.array_words
        for at in cutlass.range(thread, tile.block_words // WORDS, self.threads):
            copy_chunk((target + at * WORDS).toint(), offset_by(block, at), Int32(VECTOR_BYTES))

    @cute.jit
    def _weights(self, parameters: Parameters, start: Int32, width: Int32) -> ColumnWeights:
        """Return the projection's weight and the norm's weight at the lane's columns of the slice that begins at column
        `start`. width: D."""
        column = cutlass.min(start + self.tile.first_column(), width - WORDS)
        norm = load_params(parameters.norm, parameters.norm_code, Int64(column), WORDS)
        return ColumnWeights(self.columns.operands(parameters.weight, parameters.weight_code, start, width), norm)

    @cute.jit
    def _store(self, out: cute.Pointer, given: Given, results: Results, start: Int32, number: Int32):
        """Store d_streams and d_y of token tile `number` from the arrays at `out` (shared memory) to global memory, in
        whole rows of the slice that begins at column `start`."""
        tile, place = self.tile, self.tile.place(start, number, given.tokens, given.width)
        if place.is_token & place.is_column:
            if results.d_streams != 0:
                tile.store_streams(out, results.d_streams, place)
            if results.d_y != 0:
                tile.store_rows(tile.array(out, self.n), results.d_y, place)


def trace(spec: MhcSpec) -> Traced:
    return traced(spec, BoundaryBackward(spec.name, DTYPES[spec.dtype], spec.n))
