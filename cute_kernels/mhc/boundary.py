"""The boundary between two sublayers, from the output y of one to the input x of the next, in one read of the streams.

    update      streams'_j = post_j y + sum over i of comb_ij streams_i
    mix         u = sum over j of pre_j streams'_j;  x = RMS norm of u
    project     p = streams' weight^T, K = n^2 + 2n numbers a token, from which the next coefficients are made

There are T tokens of n streams of D columns.

A token's streams are 57 KB at D = 7168, so a CTA could hold three tokens; but then each CTA would read the whole
weight, 2.75 MB of float32, for three tokens: from the L2 cache 16 times the bytes of the streams. So a CTA holds a
slice of the weight's columns in shared memory for all of its tokens, each element as two 16-bit numbers (`split.py`).

A warp takes 16 tokens at a time (a tile), in steps of 32 columns of each stream. A lane reads 16 bytes of each stream
and of y, of two tokens, and updates them in registers. These 16 bytes are its part of an MMA operand; the contraction
takes columns in whatever order that gives. So no part of the streams passes through shared memory, and no warp waits
for another.

p, the sum of the streams' squares and the sum of u's squares run over all columns. Each slice stores partial sums of
them; a second kernel (`boundary_finish.py`) adds these, makes the coefficients, and scales u, which is stored at x's
address, or in the workspace if x is wanted in MXFP8 alone (`boundary_mxfp8.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.target import let_next_begin
from ..device.vectors import VECTOR_BYTES, dtype_code, elements, floats, load_params, run_at, shared_at
from ..device.warp_mma import WarpMma
from ..specs import MhcSpec
from ..tracing import DTYPES, Traced, traced
from .boundary_finish import BoundaryFinish, Finished, Partials
from .boundary_mxfp8 import FinishInMxfp8
from .boundary_shapes import BLOCK, WARPS, coefficient_floats, mix_place
from .shapes import ROW_PADDING, TOKEN_TILE, outputs
from .split import rest_scale, split

LANES = 32
LANES_PER_ROW = 4  # of an operand
WORDS = VECTOR_BYTES // 4
STEP_VECTORS = LANES_PER_ROW
FILL_READS = 4


class Given(NamedTuple):
    """Addresses of the first kernel's inputs and results.

    Attributes:
        y: [T, D]; 0: the streams are not updated.
        streams: [T, n, D].
        pre, post, comb: float32 coefficients [T, n], [T, n], [T, n, n].
        updated: the updated streams, a result.
        u: the mix [T, D], a result.
    """

    y: Int64
    streams: Int64
    pre: Int64
    post: Int64
    comb: Int64
    updated: Int64
    u: Int64


class Sizes(NamedTuple):
    """Sizes. tokens: T. width: D. blocks: blocks of BLOCK columns (of each stream) in a slice. groups: number of groups
    into which tokens are divided; a CTA handles one slice for one group."""

    tokens: Int32
    width: Int32
    blocks: Int32
    groups: Int32


class Mine(NamedTuple):
    """A warp's current work. tile: number of its tile of 16 tokens. first, blocks: the slice's first column (of each
    stream) and its number of blocks. params: where the warp keeps its tokens' coefficients in shared memory."""

    tile: Int32
    first: Int32
    blocks: Int32
    params: cute.Pointer


class Boundary(Invariant):
    """Host function and first kernel of the boundary's forward. Results: the updated streams, x, and the coefficients
    new_pre, new_post and new_comb.

    x: 0: not wanted in 16 bits.
    x_data, x_scale: x in MXFP8, E4M3 [T, D] and E8M0 [T, D / 32]; 0: not wanted. x_block: the columns that share a
        scale, 32 or 128; 128: each scale is stored four times.
    stats: float32 [T, K + 2], what backward needs of each token (`Finished.stats`); 0: not wanted.
    workspace: float32, of `boundary_shapes.workspace` elements. slices, blocks, merge, groups: `boundary_shapes.Cut`.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric], n: int):
        self.name = name
        self.dtype = dtype
        self.n = n
        self.outputs = outputs(n)
        self.count = elements(dtype)
        self.chunks = self.outputs // 8
        self.pitch = coefficient_floats(n)
        self.params_words = TOKEN_TILE * self.pitch
        self.finish = BoundaryFinish(f"{name}_finish", dtype, n)
        self.finish_in_mxfp8 = FinishInMxfp8(f"{name}_finish_mxfp8", dtype, n)

    @cute.jit
    def __call__(
        self, y: Int64, streams: Int64, pre: Int64, post: Int64, comb: Int64, weight: Int64, scale: Int64, base: Int64,
        norm_weight: Int64, new_streams: Int64, x: Int64, new_pre: Int64, new_post: Int64, new_comb: Int64,
        stats: Int64, x_data: Int64, x_scale: Int64, workspace: Int64, forms: Int32, tokens: Int32, width: Int32,
        slices: Int32, blocks: Int32, merge: Int32, groups: Int32, iters: Int32, x_block: Int32, rms_eps: Float32,
        eps: Float32, norm_eps: Float32, stream: cuda.CUstream,
    ):  # fmt: skip
        if tokens > 0:
            u = x
            if x == 0:
                u = workspace + mix_place(self.n, Int64(slices), tokens) * 4
            given, sizes = Given(y, streams, pre, post, comb, new_streams, u), Sizes(tokens, width, blocks, groups)
            row_words = blocks * (BLOCK * self.n // 2) + ROW_PADDING // 4
            self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
            self.kernel(given, sizes, weight, dtype_code(forms, 0), workspace).launch(
                grid=(slices, groups, 1),
                block=(WARPS * LANES, 1, 1),
                smem=(WARPS * self.params_words + 2 * self.outputs * row_words) * 4,
                min_blocks_per_mp=1,
                stream=stream,
            )
            scale_code = dtype_code(forms, 1)
            partials = Partials(workspace, slices, merge)
            norm_code = dtype_code(forms, 3)
            finished = Finished(
                u, x, x_data, x_scale, x_block, norm_weight, norm_code, new_pre, new_post, new_comb, stats
            )  # fmt: skip
            arguments = (
                partials, (scale, scale_code, base, dtype_code(forms, 2)), finished, tokens, width, iters,
                (rms_eps, eps, norm_eps), stream,
            )  # fmt: skip
            if x_data != 0:
                self.finish_in_mxfp8.launch(*arguments)
            else:
                self.finish.launch(*arguments)

    @cute.kernel
    def kernel(self, given: Given, sizes: Sizes, weight: Int64, weight_code: Int32, partials: Int64):
        thread, _, _ = cute.arch.thread_idx()
        index, group, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // LANES)
        smem = cute.arch.get_dyn_smem(Float32, alignment=128)
        weights = cute.recast_ptr(smem + WARPS * self.params_words, dtype=Int32)
        first = index * (sizes.blocks * BLOCK)
        blocks = cutlass.min(sizes.blocks, cute.ceil_div(sizes.width - first, BLOCK))
        self._fill(weights, sizes, weight, weight_code, first)
        cute.arch.sync_threads()
        let_next_begin()
        tiles = cute.ceil_div(sizes.tokens, TOKEN_TILE)
        # Neighbouring tiles go to neighbouring CTAs.
        for tile in cutlass.range(group + warp * sizes.groups, tiles, sizes.groups * WARPS):
            mine = Mine(tile, first, blocks, smem + warp * self.params_words)
            self._tile(given, sizes, mine, weights, partials)

    @cute.jit
    def _fill(self, weights: cute.Pointer, sizes: Sizes, weight: Int64, code: Int32, first: Int32):
        """Write this CTA's slice of the weight to shared memory, split in two parts (`split`); zeros after the last
        column.

        weights: where the slice lies in shared memory. weight, code: address and dtype of the whole weight. first: the
        slice's first column.
        """
        thread, _, _ = cute.arch.thread_idx()
        per_stream = sizes.blocks * (BLOCK // self.count)
        per_row = per_stream * self.n
        total = self.outputs * per_row
        for start in cutlass.range(thread, total, WARPS * LANES * FILL_READS):
            # Past the end, read the last vector again, so that all reads of a turn are issued together.
            at = [cutlass.min(start + i * (WARPS * LANES), total - 1) for i in range(FILL_READS)]
            columns = [first + place % per_stream * self.count for place in at]
            raw = []
            for i in cutlass.range_constexpr(FILL_READS):
                row, j = Int64(at[i] // per_row), at[i] % per_row // per_stream
                column = j * sizes.width + cutlass.min(columns[i], sizes.width - self.count)
                raw.append(load_params(weight, code, row * (sizes.width * self.n) + column, self.count))
            for i in cutlass.range_constexpr(FILL_READS):
                if columns[i] >= sizes.width:
                    raw[i].fill(0.0)
                parts = split(raw[i], self.dtype)
                if start + i * (WARPS * LANES) < total:
                    for part in cutlass.range_constexpr(2):
                        kept = at[i] // per_row + part * self.outputs
                        self._weights(weights, sizes, kept, at[i] % per_row).store(parts[part].load())

    def _weights(self, weights: cute.Pointer, sizes: Sizes, row: Int32, vector: Int32) -> cute.Tensor:
        """Return vector number `vector` of a row of the slice in shared memory. A row has the slice's columns of stream
        0, then of stream 1, and so on."""
        row_words = sizes.blocks * (BLOCK * self.n // 2) + ROW_PADDING // 4
        return shared_at(Int32, weights + (row * row_words + vector * WORDS), WORDS)

    @cute.jit
    def _tile(self, given: Given, sizes: Sizes, mine: Mine, weights: cute.Pointer, partials: Int64):
        """Process the slice's columns of a tile of 16 tokens."""
        self._load_coefficients(given, sizes, mine)
        products, total = (cute.make_rmem_tensor(self.chunks * 4, Float32) for _ in range(2))
        squares, all_squares = (cute.make_rmem_tensor(4, Float32) for _ in range(2))
        total.fill(0.0)
        all_squares.fill(0.0)
        raw = cute.make_rmem_tensor((WORDS, self.n + 1, 2), Int32)
        raw.fill(0)
        steps = mine.blocks * (BLOCK // (STEP_VECTORS * self.count))
        self._read(given, sizes, mine, Int32(0), raw)
        for block in cutlass.range(mine.blocks):
            products.fill(0.0)
            squares.fill(0.0)
            first = block * (BLOCK // (STEP_VECTORS * self.count))
            for step in cutlass.range(first, first + BLOCK // (STEP_VECTORS * self.count), unroll=1):
                upcoming = cute.make_rmem_tensor((WORDS, self.n + 1, 2), Int32)
                upcoming.fill(0)
                self._read(given, sizes, mine, cutlass.min(step + 1, steps - 1), upcoming)
                self._step(given, sizes, mine, weights, step, raw, products, squares)
                raw.store(upcoming.load())
            total.store(total.load() + products.load())
            for i in cutlass.range_constexpr(4):
                all_squares[i] += cute.arch.warp_reduction_sum(squares[i], threads_in_group=LANES_PER_ROW)
        self._leave(sizes, mine, partials, total, all_squares)

    @cute.jit
    def _load_coefficients(self, given: Given, sizes: Sizes, mine: Mine):
        """Copy the coefficients of the tile's tokens to shared memory: comb_ij ordered by j, the stream that is made,
        then post and pre. After the last token, that token is copied again."""
        n, lane = self.n, cute.arch.lane_idx()
        count = n * n + 2 * n
        params = cute.make_tensor(mine.params, cute.make_layout(self.params_words))
        cute.arch.sync_warp()  # all lanes are done with the tile before
        for i in cutlass.range_constexpr(TOKEN_TILE * count // LANES):
            place = lane + i * LANES
            row, k = place // count, place % count
            token = Int64(cutlass.min(mine.tile * TOKEN_TILE + row, sizes.tokens - 1))
            value = Float32(0.0)
            if k >= n * n + n:
                value = vector_at(Float32, given.pre)[token * n + k - (n * n + n)]
            elif given.y != 0:
                if k < n * n:
                    value = vector_at(Float32, given.comb)[token * (n * n) + k % n * n + k // n]
                else:
                    value = vector_at(Float32, given.post)[token * n + k - n * n]
            params[row * self.pitch + k] = value
        cute.arch.sync_warp()

    def _coefficients(self, mine: Mine, half: int, first: int) -> cute.Tensor:
        """Return n coefficients, from number `first` on, of a lane's token (`half` 0 or 1)."""
        row = cute.arch.lane_idx() // LANES_PER_ROW + 8 * half
        values = cute.make_rmem_tensor(self.n, Float32)
        values.store(shared_at(Float32, mine.params + (row * self.pitch + first), self.n).load())
        return values

    def _column(self, mine: Mine, step: Int32) -> Int32:
        """Return the first of the columns that a lane has in a step."""
        return mine.first + (step * STEP_VECTORS + cute.arch.lane_idx() % LANES_PER_ROW) * self.count

    def _token(self, mine: Mine, half: int) -> Int32:
        return mine.tile * TOKEN_TILE + cute.arch.lane_idx() // LANES_PER_ROW + 8 * half

    @cute.jit
    def _read(self, given: Given, sizes: Sizes, mine: Mine, step: Int32, raw: cute.Tensor):
        """Read a lane's vectors of a step to `raw` [WORDS, n + 1, 2]: of each stream, then of y, of both tokens. After
        the last token or column, that one is read again."""
        column = cutlass.min(self._column(mine, step), sizes.width - self.count)
        for half in cutlass.range_constexpr(2):
            token = Int64(cutlass.min(self._token(mine, half), sizes.tokens - 1))
            for j in cutlass.range_constexpr(self.n):
                at = token * (self.n * sizes.width) + (j * sizes.width + column)
                raw[None, j, half].store(self._words(given.streams, at).load())
            if given.y != 0:
                raw[None, self.n, half].store(self._words(given.y, token * sizes.width + column).load())

    def _words(self, address: Int64, element: Int64) -> cute.Tensor:
        return run_at(Int32, address + element * (self.dtype.width // 8), Int64(0), WORDS)

    @cute.jit
    def _step(
        self, given: Given, sizes: Sizes, mine: Mine, weights: cute.Pointer, step: Int32, raw: cute.Tensor,
        products: cute.Tensor, squares: cute.Tensor,
    ):  # fmt: skip
        """Update a lane's columns in `raw`, store them and u, and add to the products with the weight and to the
        squares."""
        column = self._column(mine, step)
        for half in cutlass.range_constexpr(2):
            token = self._token(mine, half)
            is_inside = (token < sizes.tokens) & (column < sizes.width)
            if given.y != 0:
                self._update(mine, half, raw)
                if is_inside:
                    for j in cutlass.range_constexpr(self.n):
                        at = Int64(token) * (self.n * sizes.width) + (j * sizes.width + column)
                        self._words(given.updated, at).store(raw[None, j, half].load())
            self._mix(given, sizes, mine, half, column, is_inside, raw, squares)
        lane = cute.arch.lane_idx()
        per_stream = sizes.blocks * (BLOCK // self.count)
        vector = step * STEP_VECTORS + lane % LANES_PER_ROW
        for j in cutlass.range_constexpr(0, self.n, 2):
            # Tensor cores truncate their sums, so they add no more than the products of two streams.
            left = [[raw[None, j + one, half] for half in range(2)] for one in range(2)]
            for chunk in cutlass.range_constexpr(self.chunks):
                row = chunk * 8 + lane // LANES_PER_ROW
                right = [
                    [self._weights(weights, sizes, row + part * self.outputs, (j + one) * per_stream + vector)
                     for part in range(2)] for one in range(2)
                ]  # fmt: skip
                self._add(left, right, cute.make_tensor(products.iterator + 4 * chunk, cute.make_layout(4)))

    @cute.jit
    def _update(self, mine: Mine, half: cutlass.Constexpr[int], raw: cute.Tensor):
        n = self.n
        streams = [floats(cute.recast_tensor(self._copied(raw, j, half), self.dtype)).load() for j in range(n + 1)]
        posts = self._coefficients(mine, half, n * n)
        for j in cutlass.range_constexpr(n):
            mixed_by = self._coefficients(mine, half, j * n)
            made = cute.make_rmem_tensor(self.count, Float32)
            made.store(streams[n] * posts[j])
            for i in cutlass.range_constexpr(n):
                made.store(made.load() + streams[i] * mixed_by[i])
            raw[None, j, half].store(self._narrow(made).load())

    def _copied(self, raw: cute.Tensor, j: int, half: int) -> cute.Tensor:
        words = cute.make_rmem_tensor(WORDS, Int32)
        words.store(raw[None, j, half].load())
        return words

    def _narrow(self, values: cute.Tensor) -> cute.Tensor:
        """Round float32 registers to the streams' dtype and return them as 32-bit words."""
        narrow = cute.make_rmem_tensor(self.count, self.dtype)
        narrow.store(values.load().to(self.dtype))
        return cute.recast_tensor(narrow, Int32)

    @cute.jit
    def _mix(
        self, given: Given, sizes: Sizes, mine: Mine, half: cutlass.Constexpr[int], column: Int32, is_inside,
        raw: cute.Tensor, squares: cute.Tensor,
    ):  # fmt: skip
        """Store u at a lane's columns. Add the streams' squares to squares[half], and u's squares to
        squares[2 + half]."""
        weights = self._coefficients(mine, half, self.n * self.n + self.n)
        u = cute.make_rmem_tensor(self.count, Float32)
        u.fill(0.0)
        square, of_u = Float32(0.0), Float32(0.0)
        for j in cutlass.range_constexpr(self.n):
            values = floats(cute.recast_tensor(self._copied(raw, j, half), self.dtype))
            u.store(u.load() + values.load() * weights[j])
            for e in cutlass.range_constexpr(self.count):
                square += values[e] * values[e]
        words = self._narrow(u)
        rounded = floats(cute.recast_tensor(words, self.dtype))
        for e in cutlass.range_constexpr(self.count):
            of_u += rounded[e] * rounded[e]
        if is_inside:
            self._words(given.u, Int64(self._token(mine, half)) * sizes.width + column).store(words.load())
            squares[half] += square
            squares[2 + half] += of_u

    def _add(self, left: list, right: list, sums: cute.Tensor) -> None:
        """Add the product left right to `sums`. Products with the weight's rests (`split`) are added first, since they
        may need scaling.

        left: streams' words, by stream and token. right: the weight's words, by stream and part.
        """
        mma, few = WarpMma(self.dtype), cute.make_rmem_tensor(4, Float32)
        few.fill(0.0)
        columns = [[self._loaded(part) for part in parts] for parts in right]
        for part in (1, 0):
            for rows, parts in zip(left, columns, strict=True):
                for s in range(WORDS // 2):
                    a = [rows[0][2 * s], rows[1][2 * s], rows[0][2 * s + 1], rows[1][2 * s + 1]]
                    mma.add(few, a, [parts[part][2 * s], parts[part][2 * s + 1]])
            if part == 1 and rest_scale(self.dtype) != 1.0:
                few.store(few.load() * (1.0 / rest_scale(self.dtype)))
        sums.store(sums.load() + few.load())

    def _loaded(self, words: cute.Tensor) -> cute.Tensor:
        registers = cute.make_rmem_tensor(WORDS, Int32)
        registers.store(words.load())
        return registers

    @cute.jit
    def _leave(self, sizes: Sizes, mine: Mine, partials: Int64, total: cute.Tensor, squares: cute.Tensor):
        """Store a tile's sums over this slice as rows of `partials`: K products, the sum of the streams' squares, the
        sum of u's squares."""
        index, _, _ = cute.arch.block_idx()
        lane, row_length = cute.arch.lane_idx(), self.outputs + 2
        for half in cutlass.range_constexpr(2):
            token = self._token(mine, half)
            if token < sizes.tokens:
                row = (Int64(index) * sizes.tokens + token) * row_length
                if lane % LANES_PER_ROW == 0:
                    pair = cute.make_rmem_tensor(2, Float32)
                    pair[0], pair[1] = squares[half], squares[2 + half]
                    run_at(Float32, partials, row + self.outputs, 2).store(pair.load())
                for chunk in cutlass.range_constexpr(self.chunks):
                    pair = cute.make_rmem_tensor(2, Float32)
                    pair[0], pair[1] = total[4 * chunk + 2 * half], total[4 * chunk + 2 * half + 1]
                    run_at(Float32, partials, row + (chunk * 8 + lane % LANES_PER_ROW * 2), 2).store(pair.load())


def trace(spec: MhcSpec) -> Traced:
    return traced(spec, Boundary(spec.name, DTYPES[spec.dtype], spec.n))
