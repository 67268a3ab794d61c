"""The projection's backward for 16-bit streams, in one read of x: d_x = dp weight + f x (+ addends), d_weight = dp^T x.

T tokens have n residual streams of C columns each: x is [T, n C]. dp is the gradient of p = x weight^T, which has K =
n^2 + 2n outputs a token. f is a factor of each token that comes from the norm of x. gates_backward.py makes dp and f.
The addends are further terms of d_x (`Streams`).

A warp has the same 8 vectors of columns (4 for n = 8) for all of its tokens. The weight at these columns stays in
registers as an MMA operand, and so do the sums for d_weight. Tiles of 16 tokens come through the warp's own ring in
shared memory, so no warp waits for another. With g = lane / 4 and t = lane % 4:

    d_x         [16 tokens, 8 columns]   dp [tokens, K]            times  weight [K, columns]   added to f x
    d_weight^T  [16 columns, 8 outputs]  x^T [columns, tokens]     times  dp [tokens, K]        summed over tokens

A lane reads x twice from shared memory:

- For d_x it reads 16-byte vectors, numbers t and t + 4 of rows g and g + 8. The j-th pairs of elements of 4 lanes are
  the columns of one product. So the lane gets 16 bytes of d_x at the same columns as its 16 bytes of x.
- For d_weight it reads 8 x 8 matrices, which `ldmatrix` transposes.

dp is stored in blocks of 8 x 8, which are read both as they are and transposed. If the warps of a CTA begin each tile
together (`TileGradients.IN_STEP`), they share these blocks.

A row's vectors lie in permuted order, at vector ^ (a function of the row). With this order, copies (whole rows), reads
of vectors (two rows, four vectors each) and reads of matrices (8 rows, one vector each) all use all banks.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.target import early, let_next_begin, wait_for_earlier
from ..device.vectors import floats, load_params, run_at, shared_at
from ..device.warp_mma import WarpMma, read_matrices
from ..device.warps import WARP
from .async_copy import AsyncCopy, stage_after, stage_before
from .dp_blocks import BLOCK_WORDS, dp_words
from .gates_backward import GateRows, GateSums
from .shapes import SPREAD_CTAS_PER_SM, SPREAD_WARPS, TOKEN_TILE, block_bytes, outputs, spread_blocks
from .split import add_split, append_pairs
from .tile_sums import TileSums
from .warp_columns import VECTOR, Place

WORDS = 4
WORD_BYTES = 4
SM_BYTES, RESERVED_BYTES = 228 * 1024, 1024  # shared memory of an SM at most, and what each CTA takes besides its own


class Streams(NamedTuple):
    """Addresses and sizes of the residual streams x and of their gradient.

    Attributes:
        x: [T, n, C].
        d_x: [T, n, C]; 0: not wanted.
        d_aggregate, h_pre: [T, C] and [T, n]. If the kernel has addends, the product of the two is added to d_x.
        d_residual: [T, n, C], also added to d_x; 0: not given.
        tokens, width: T and C.
    """

    x: Int64
    d_x: Int64
    d_aggregate: Int64
    h_pre: Int64
    d_residual: Int64
    tokens: Int32
    width: Int32


class Products(NamedTuple):
    """Addresses of the kernel's inputs dp and f, and of its partial sums of d_weight.

    Attributes:
        blocks: a block for each token tile, which `GatesBackward` stored (`shapes.block_bytes`). It has dp, the
            gradient of p = x weight^T, and for each token a float32 factor f, where f x is a term of d_x.
        weights: sums for d_weight, one for each part of the tokens (`tile_sums.py`); 0: not wanted.
    """

    blocks: Int64
    weights: Int64


class TileGradients(Invariant):
    """Kernel of the projection's backward for 16-bit streams.

    Args:
        addends: True: d_x also gets the addends of `Streams`.
        is_exact: True: the weight is float32; then each element of the weight and of dp is split into two 16-bit
            numbers (`split.py`).
    """

    # True: a CTA's warps begin each tile together. Then their lines of x and d_x, which are neighbours, reach DRAM
    # together (a page is some KB), and dp is found in the L1 cache. Indexed by `addends`: with addends, the warps share
    # lines of d_aggregate instead.
    IN_STEP = (True, False)
    # Stages of the ring, indexed by `addends`: with addends a stage is larger.
    STAGES = (3, 2)

    def __init__(
        self, name: str, dtype: type[cutlass.Numeric], n: int, addends: bool, is_exact: bool, tile_sums: TileSums
    ):  # fmt: skip
        self.name = name
        self.tile_sums = tile_sums
        self.dtype = dtype
        self.n = n
        self.addends = addends
        self.parts = 2 if is_exact else 1
        self.stages = self.STAGES[addends]
        self.columns = tile_sums.columns
        self.in_step = self.IN_STEP[addends]
        # With 8 streams, sums need more registers than an SM has for three CTAs.
        self.ctas_per_sm = SPREAD_CTAS_PER_SM if n < 8 else 2
        self.steps = outputs(n) // 8
        self.vectors = self.columns.vectors
        self.copy_rows = WARP // self.vectors
        self.tile_words = TOKEN_TILE * self.vectors * WORDS
        self.block_words = block_bytes(n, self.parts) // WORD_BYTES
        self.padded_words = -(-self.block_words // WARP) * WARP
        # Each warp has its own stages of the streams. Stages of dp follow all rings: one set for all warps if these are
        # in step, otherwise one set for each warp.
        self.stage_words = self.tile_words * (3 if addends else 1)
        self.dp_warps = 1 if self.in_step else SPREAD_WARPS
        self.groups = self.vectors // 4
        self.gate_sums = GateSums(n, SPREAD_WARPS)

    @property
    def smem_bytes(self) -> int:
        return self.stages * (SPREAD_WARPS * self.stage_words + self.dp_warps * self.padded_words) * WORD_BYTES

    @property
    def carveout(self) -> int:
        """Percentage of an SM's L1 and shared memory that its CTAs need as shared memory; the rest becomes L1 cache."""
        return min(100, -(-self.ctas_per_sm * (self.smem_bytes + RESERVED_BYTES) * 100 // SM_BYTES))

    @cute.jit
    def launch(
        self, streams: Streams, products: Products, rows: GateRows, weight: Int64, weight_code: Int32, parts: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch the kernel.

        Args:
            streams, products: addresses of inputs and results.
            rows: the gates' sums, which one more CTA adds (`GateSums`).
            weight, weight_code: the address of the weight [K, n C], and its dtype.
            parts: number of parts into which the tokens are divided.
        """
        name_kernel(self.kernel, self.name)
        self.kernel(streams, products, rows, weight, weight_code).launch(
            # One more CTA, after the last column's, adds the gates' sums.
            grid=(spread_blocks(self.n, 2, streams.width) + 1, parts, 1),
            block=(SPREAD_WARPS * WARP, 1, 1),
            smem=self.smem_bytes,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=self.carveout,
            stream=stream,
            use_pdl=early(True),
        )

    @cute.kernel
    def kernel(self, streams: Streams, products: Products, rows: GateRows, weight: Int64, weight_code: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, part, _ = cute.arch.block_idx()
        blocks, parts, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        smem = cute.arch.get_dyn_smem(Int32, alignment=128)
        ring = smem + warp * (self.stages * self.stage_words)
        dp = smem + self.stages * (SPREAD_WARPS * self.stage_words + warp % self.dp_warps * self.padded_words)
        index = block * SPREAD_WARPS + warp
        warps = self.columns.warps(streams.width)
        if block == blocks - 1:
            if part == 0:
                wait_for_earlier()
                self.gate_sums.add(rows)
        elif index < warps:
            place = self.columns.place(index, streams.width)
            # This thread's index among the threads that copy a stage of dp (all warps with columns, or this warp), and
            # their count.
            threads = cutlass.min(Int32(SPREAD_WARPS), warps - block * SPREAD_WARPS) * WARP
            copiers = (thread, threads)
            if const_expr(not self.in_step):
                copiers = (thread % WARP, Int32(WARP))
            tiles = cute.ceil_div(streams.tokens, TOKEN_TILE)
            per_part = cute.ceil_div(tiles, parts)
            first, last = part * per_part, cutlass.min(part * per_part + per_part, tiles)
            sums = cute.make_rmem_tensor((4, self.steps, self.vectors // 2), Float32)
            sums.fill(0.0)
            # The streams may be read before the wait: the gates' kernel began only after all kernels before it had
            # ended.
            for stage in cutlass.range_constexpr(self.stages - 1):
                if first + stage < last:
                    self._copy_streams(ring + stage * self.stage_words, streams, place, first + stage)
            fixed = self._fixed_operand(weight, weight_code, streams.width * self.n, place)
            # Everything above overlaps the gates' kernel; everything below reads its results.
            wait_for_earlier()
            let_next_begin()
            for stage in cutlass.range_constexpr(self.stages - 1):
                if first + stage < last:
                    self._copy_products(dp + stage * self.padded_words, products, copiers, first + stage)
                AsyncCopy.commit()
            self._stream((ring, dp), copiers, streams, products, place, fixed, first, last, sums)
            if products.weights != 0:
                self.tile_sums.leave(products.weights, part, block, blocks - 1, sums)

    @cute.jit
    def _stream(
        self, rings: tuple, copiers: tuple, streams: Streams, products: Products, place: Place, fixed: list,
        first: Int32, last: Int32, sums: cute.Tensor,
    ):  # fmt: skip
        """Process tiles `first` .. `last` - 1, which are one part of the tokens, in one copy pipeline.

        Args:
            rings: this warp's stages of the streams, and the stages of dp.
            copiers: this thread's index among the threads that copy dp, and their count.
            streams, products: addresses and sizes.
            place: the warp's columns.
            fixed: the weight at these columns as MMA operands (`_fixed_operand`).
            first, last: the range of tiles.
            sums: the sums for d_weight.
        """
        stage = Int32(0)
        for tile in cutlass.range(first, last):
            # After this wait, all lanes see the oldest stage and have finished with the stage before it, which is
            # filled next.
            AsyncCopy.wait(self.stages - 2)
            if const_expr(self.in_step):
                cute.arch.barrier(barrier_id=1, number_of_threads=copiers[1])
            else:
                cute.arch.sync_warp()
            free = stage_before(stage, self.stages)
            upcoming = tile + (self.stages - 1)
            if upcoming < last:
                self._copy_streams(rings[0] + free * self.stage_words, streams, place, upcoming)
                self._copy_products(rings[1] + free * self.padded_words, products, copiers, upcoming)
            AsyncCopy.commit()
            blocks = rings[1] + stage * self.padded_words
            self._tile(rings[0] + stage * self.stage_words, blocks, streams, products, place, fixed, tile, sums)
            stage = stage_after(stage, self.stages)

    def _word(self, row: Int32, vector: Int32) -> Int32:
        """Return the offset, in words, of a vector in a stage: vector number `vector` of row number `row` of the tile.
        Vectors are permuted (see the top of this file)."""
        turned = row % 8 // 2
        if self.vectors == 8:
            turned += row % 2 * 4
        return (row * self.vectors + (vector ^ turned)) * WORDS

    @cute.jit
    def _copy_streams(self, stage: cute.Pointer, streams: Streams, place: Place, tile: Int32):
        """Start to copy a tile of x and of the addends to a stage. Past the last token or vector, the last one is
        copied again."""
        lane = cute.arch.lane_idx()
        once, often = AsyncCopy(WORDS), AsyncCopy(WORDS, is_shared=True)
        vector = lane % self.vectors
        column = place.at + cutlass.min(vector, place.inside - 1) * VECTOR
        for i in cutlass.range_constexpr(TOKEN_TILE // self.copy_rows):
            row = lane // self.vectors + i * self.copy_rows
            token = Int64(cutlass.min(tile * TOKEN_TILE + row, streams.tokens - 1))
            first = token * (streams.width * self.n) + column
            target = stage + self._word(row, vector)
            once.start(self._vector(streams.x, first), target)
            if const_expr(self.addends):
                of_token = token * streams.width + column - place.stream * streams.width
                often.start(self._vector(streams.d_aggregate, of_token), target + self.tile_words)
                if streams.d_residual != 0:
                    once.start(self._vector(streams.d_residual, first), target + 2 * self.tile_words)

    @cute.jit
    def _copy_products(self, blocks: cute.Pointer, products: Products, copiers: tuple, tile: Int32):
        """Start to copy a token tile's block to a stage: dp (the gradient of p), and each token's factor f, where f x
        is the norm's term in d_x.

        Args:
            blocks: the stage, in shared memory.
            copiers: this thread's index among the threads that copy dp, and their count.
        """
        often = AsyncCopy(WORDS, is_shared=True)
        source = products.blocks + Int64(tile) * (self.block_words * WORD_BYTES)
        for at in cutlass.range(copiers[0], self.block_words // WORDS, copiers[1]):
            often.start(run_at(Int32, source, Int64(at) * WORDS, WORDS), blocks + at * WORDS)

    def _vector(self, address: Int64, first: Int64) -> cute.Tensor:
        return run_at(Int32, address + first * (self.dtype.width // 8), Int64(0), WORDS)

    def _fixed_operand(self, weight: Int64, code: Int32, row_length: Int32, place: Place) -> list:
        """Return the weight at a warp's columns as MMA operands, which stay in registers.

        Args:
            weight, code: the address of the weight [K, n C], and its dtype.
            row_length: n C.
            place: the warp's columns.

        Returns:
            Words[group][j][part][step]: group of 4 vectors; pair j of a vector's elements; part 0 for the weight's
                nearest 16-bit numbers, 1 for their rests (`split.py`); step of 8 outputs. In the product for pair j,
                column g = lane / 4 is element 2 j + g % 2 of the group's vector g / 2.
        """
        lane = cute.arch.lane_idx()
        made: list = [[[[] for _ in range(self.parts)] for _ in range(4)] for _ in range(self.groups)]
        for group in range(self.groups):
            vector = cutlass.min(group * 4 + lane // 8, place.inside - 1)
            for step in range(self.steps):
                rows = [Int64(8 * step + lane % 4 * 2 + one) for one in range(2)]
                values = [
                    load_params(weight, code, row * row_length + (place.at + vector * VECTOR), VECTOR) for row in rows
                ]
                append_pairs(made[group], values[0], values[1], self.dtype)
        return made

    @cute.jit
    def _tile(
        self, stage: cute.Pointer, blocks: cute.Pointer, streams: Streams, products: Products, place: Place,
        fixed: list, tile: Int32, sums: cute.Tensor,
    ):  # fmt: skip
        """Process a token tile: add its contribution to the sums for d_weight, and store its d_x.

        Args:
            stage: x and the addends of the tile, in shared memory.
            blocks: dp and the factors f of the tile, in shared memory.
            place: the warp's columns.
            fixed: the weight at these columns as MMA operands (`_fixed_operand`).
            tile: number of the token tile.
            sums: the warp's sums for d_weight, registers.
        """
        if products.weights != 0:
            self._grow(stage, blocks, sums)
        if streams.d_x != 0:
            self._spread(stage, blocks, streams, place, fixed, tile)

    @cute.jit
    def _grow(self, stage: cute.Pointer, blocks: cute.Pointer, sums: cute.Tensor):
        """Add x^T dp, summed over a tile's tokens, to `sums`. dp is the gradient of p = x weight^T.

        Args:
            stage: x of the tile, in shared memory.
            blocks: dp of the tile, in shared memory.
            sums: the warp's sums for d_weight, registers.
        """
        lane, mma = cute.arch.lane_idx(), WarpMma(self.dtype)
        right = [self._dp(blocks, True, part) for part in range(self.parts)]
        row = lane % 8 + lane // 16 * 8
        mine = self._word(row, lane // 8 % 2)
        for i in cutlass.range_constexpr(self.vectors // 2):
            left = read_matrices(stage + (mine ^ (2 * i * WORDS)), self.dtype, 4, True)
            words = [left[k] for k in range(4)]
            for step in cutlass.range_constexpr(self.steps):
                products = [(words, part[2 * step : 2 * step + 2]) for part in right]
                add_split(mma, sums[None, step, i], products[0], products[1:])

    def _dp(self, blocks: cute.Pointer, transpose: bool, part: int) -> list:
        return dp_words(blocks, self.dtype, self.steps, transpose, part)

    @cute.jit
    def _spread(
        self, stage: cute.Pointer, blocks: cute.Pointer, streams: Streams, place: Place, fixed: list, tile: Int32
    ):  # fmt: skip
        """Store d_x of a tile. d_x passes through shared memory, so that 8 lanes store 128 bytes of one row; from
        registers they would store 64 bytes of each of two rows.

        Args:
            stage: x and the addends of the tile, in shared memory; d_x overwrites x.
            blocks: dp and the factors f of the tile, in shared memory.
            place: the warp's columns.
            fixed: the weight at these columns as MMA operands (`_fixed_operand`).
            tile: number of the token tile.
        """
        lane = cute.arch.lane_idx()
        left = [self._dp(blocks, False, part) for part in range(self.parts)]
        norms_at = blocks + self.parts * (2 * self.steps * BLOCK_WORDS)
        norms = [self._float(norms_at + (lane // 4 + 8 * half)) for half in range(2)]
        mine = self._word(lane // 4, lane % 4)
        places = [
            [stage + ((mine ^ (group * 4 * WORDS)) + half * (8 * self.vectors * WORDS)) for half in range(2)]
            for group in range(self.groups)
        ]
        weights = self._addend_weights(streams, place, tile)
        cute.arch.sync_warp()  # after this barrier all lanes have read x as matrices, so that d_x may take its place
        for group in cutlass.range_constexpr(self.groups):
            made = self._group(places[group], left, norms, fixed[group], weights, streams.d_residual)
            for half in cutlass.range_constexpr(2):
                shared_at(Int32, places[group][half], WORDS).store(made[half].load())
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(TOKEN_TILE // self.copy_rows):
            row, vector = lane // self.vectors + i * self.copy_rows, lane % self.vectors
            words = cute.make_rmem_tensor(WORDS, Int32)
            words.store(shared_at(Int32, stage + self._word(row, vector), WORDS).load())
            self._store(streams, place, tile * TOKEN_TILE + row, vector, words)

    def _float(self, place: cute.Pointer) -> Float32:
        return shared_at(Float32, place, 1)[0]

    @cute.jit
    def _addend_weights(self, streams: Streams, place: Place, tile: Int32) -> list:
        """Return h_pre of a lane's two tokens for the warp's stream; empty without addends."""
        made: list = []
        if const_expr(self.addends):
            for half in cutlass.range_constexpr(2):
                token = cutlass.min(tile * TOKEN_TILE + cute.arch.lane_idx() // 4 + 8 * half, streams.tokens - 1)
                made.append(vector_at(Float32, streams.h_pre)[Int64(token) * self.n + place.stream])
        return made

    @cute.jit
    def _group(
        self, places: list, left: list, norms: list, fixed: list, weights: list, d_residual: Int64
    ) -> list:  # fmt: skip
        """Return the words of d_x at a lane's vectors of two rows.

        Args:
            places: the addresses of x's vectors in these rows. The vectors of the addends are at a fixed distance after
                them.
            left: dp as MMA operands, nearest numbers and rests.
            norms: the factor f of each row.
            fixed: the weight at these vectors (`_fixed_operand`).
            weights: h_pre of each row (`_addend_weights`).
            d_residual: 0: there is no such addend.
        """
        mma, half_mma = WarpMma(self.dtype), WarpMma(self.dtype, half=True)
        sums = cute.make_rmem_tensor((4, 4), Float32)
        for half in cutlass.range_constexpr(2):
            values = cute.make_rmem_tensor(VECTOR, Float32)
            values.store(self._floats_at(places[half]).load() * norms[half])
            if const_expr(self.addends):
                of_sum = self._floats_at(places[half] + self.tile_words)
                values.store(values.load() + of_sum.load() * weights[half])
                if d_residual != 0:
                    of_residual = self._floats_at(places[half] + 2 * self.tile_words)
                    values.store(values.load() + of_residual.load())
            for j in cutlass.range_constexpr(4):
                sums[2 * half, j], sums[2 * half + 1, j] = values[2 * j], values[2 * j + 1]
        for j in cutlass.range_constexpr(4):
            for step in cutlass.range_constexpr(0, self.steps, 2):
                count = min(2, self.steps - step)
                a = [part[2 * step : 2 * (step + count)] for part in left]
                b = [part[step : step + count] for part in fixed[j]]
                with_rests = [(a[i], b[1 - i]) for i in range(self.parts) if self.parts == 2]
                add_split(mma if count == 2 else half_mma, sums[None, j], (a[0], b[0]), with_rests)
        made = []
        for half in cutlass.range_constexpr(2):
            narrow = cute.make_rmem_tensor(VECTOR, self.dtype)
            values = cute.make_rmem_tensor(VECTOR, Float32)
            for j in cutlass.range_constexpr(4):
                values[2 * j], values[2 * j + 1] = sums[2 * half, j], sums[2 * half + 1, j]
            narrow.store(values.load().to(self.dtype))
            made.append(cute.recast_tensor(narrow, Int32))
        return made

    def _floats_at(self, place: cute.Pointer) -> cute.Tensor:
        raw = cute.make_rmem_tensor(WORDS, Int32)
        raw.store(shared_at(Int32, place, WORDS).load())
        return floats(cute.recast_tensor(raw, self.dtype))

    @cute.jit
    def _store(self, streams: Streams, place: Place, token: Int32, vector: Int32, words: cute.Tensor):
        if (token < streams.tokens) & (vector < place.inside):
            first = Int64(token) * (streams.width * self.n) + (place.at + vector * VECTOR)
            self._vector(streams.d_x, first).store(words.load())
