"""The projection's backward for float32 streams, in TF32: d_x = dp weight + f x (+ addends), d_weight = dp^T x.

project_backward.py explains the names.

A warp has the same 32 columns for all of its tokens. Its lanes form 8 groups of 4 neighbours. Each group has 4 of the
columns, and every lane of the group has the same 4. The weight at these columns is an MMA operand that never changes,
and the sums for d_weight stay in registers.

For each tile of 16 tokens, a lane reads its columns of the four tokens 2t, 2t + 1, 2t + 8 and 2t + 9 (t = lane % 4).
They are its elements of the left operand of d_weight's product, whose contraction runs over tokens. d_x's product is
made transposed, so that a lane gets exactly the elements that it read. So nothing passes through shared memory.

    d_x^T        [16 columns, 8 tokens]   weight^T [columns, K]  times  dp^T [K, tokens]     dp^T read for each tile
    d_weight^T   [16 columns, 8 outputs]  x^T [columns, tokens]  times  dp [tokens, K]       summed over tokens

An MMA has 16 of the warp's columns as rows, two of each group. In MMA number i, rows g and g + 8 are columns 2i and
2i + 1 of group g (g = lane / 4).

Tokens are divided into parts (grid dimension y). Each part has its own sums for d_weight, which a last kernel adds in
order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.vectors import floats, load_params, run_at, shared_at
from ..device.warp_mma import WarpMma, as_operands
from ..device.warps import WARP
from .project_tiles import Streams
from .shapes import SPREAD_WARPS, TOKEN_TILE, outputs, spread_blocks, thread_columns
from .split import split

THREADS = SPREAD_WARPS * WARP
LANES_IN_ROW = 8
# A lane has the tokens 2t + OFFSETS of a tile.
OFFSETS = (0, 1, 8, 9)


class Products(NamedTuple):
    """Addresses of arrays of `shapes.BackwardWorkspace`: dp and f, which `GatesBackward` stored, and the partial sums
    for d_weight.

    Attributes:
        products: dp, the gradient of p = x weight^T, by token.
        pairs: dp by pairs of tokens.
        norms: for each token the factor f, where f x is the norm's term in d_x.
        weights: the sums for d_weight, one for each part of the tokens; 0: d_weight is not wanted.
    """

    products: Int64
    pairs: Int64
    norms: Int64
    weights: Int64


class VectorGradients(Invariant):
    """Kernel of the projection's backward for float32 streams.

    Args:
        addends: True: d_x also gets the addends of `Streams`.
        is_exact: True: the weight is float32; then the elements of weight, dp and x are each split into two TF32
            numbers for the products (`split.py`).
    """

    def __init__(self, name: str, n: int, addends: bool, is_exact: bool):
        self.name = name
        self.dtype = Float32
        self.n = n
        self.addends = addends
        self.is_exact = is_exact
        self.itemsize = 4
        self.outputs = outputs(n)
        self.columns = thread_columns(n, self.itemsize)
        self.words = self.columns
        # Load dp and the addends early if there are registers for them.
        self.reads_pairs_early = n < 8
        self.reads_addends_early = addends and n < 8

    @cute.jit
    def launch(
        self, streams: Streams, products: Products, weight: Int64, weight_code: Int32, parts: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch the kernel.

        Args:
            streams, products: addresses of inputs and results.
            weight, weight_code: the address of the weight [K, n C], and its dtype.
            parts: number of parts into which the tokens are divided.
        """
        name_kernel(self.kernel, self.name)
        self.kernel(streams, products, weight, weight_code).launch(
            grid=(spread_blocks(self.n, self.itemsize, streams.width), parts, 1),
            block=(THREADS, 1, 1),
            smem=self.outputs // 8 * (self.columns // 2) * THREADS * 16 if self.is_exact else 0,
            # Without a bound, the compiler spills registers (n = 2) to make room for more CTAs than are launched.
            min_blocks_per_mp=int(self.n == 2),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, streams: Streams, products: Products, weight: Int64, weight_code: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, part, _ = cute.arch.block_idx()
        _, parts, _ = cute.arch.grid_dim()
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), cute.arch.lane_idx()
        # Neighbouring warps have the same columns of different streams, so that the data they share comes from the
        # cache.
        index = block * SPREAD_WARPS + warp
        stream, column = index % self.n, index // self.n * (LANES_IN_ROW * self.columns)
        if column < streams.width:
            mine = column + lane // 4 * self.columns
            # Lanes past the last column load and multiply the last columns, and store nothing.
            is_inside = mine < streams.width
            at = stream * streams.width + cutlass.min(mine, streams.width - self.columns)
            tiles = cute.ceil_div(streams.tokens, TOKEN_TILE)
            per_part = cute.ceil_div(tiles, parts)
            first, last = part * per_part, cutlass.min(part * per_part + per_part, tiles)
            sums = cute.make_rmem_tensor((4, self.outputs // 8, self.columns // 2), Float32)
            sums.fill(0.0)
            fixed = self._fixed_operand(weight, weight_code, streams.width * self.n, at)
            raw = cute.make_rmem_tensor((self.words, 4), Int32)
            raw.fill(0)
            if first < last:
                self._read(streams, streams.x, at, first, raw)
            for tile in cutlass.range(first, last):
                upcoming = cute.make_rmem_tensor((self.words, 4), Int32)
                self._read(streams, streams.x, at, cutlass.min(tile + 1, last - 1), upcoming)
                self._tile(streams, products, fixed, raw, at, stream, tile, is_inside, sums)
                raw.store(upcoming.load())
            if (products.weights != 0) & is_inside:
                self._leave(products.weights, streams.width * self.n, at, part, sums)

    @cute.jit
    def _read(self, streams: Streams, source: Int64, at: Int32, tile: Int32, words: cute.Tensor):
        """Load a lane's columns of its four tokens of a tile. Past the last token, the last token is loaded again, with
        a dp of 0.

        Args:
            source: the address of a matrix [T, n C].
            at: the lane's first column, counted in a token's row of n C columns.
            tile: number of the token tile.
            words: registers [., 4] for the columns of the four tokens.
        """
        for j in cutlass.range_constexpr(len(OFFSETS)):
            token = cutlass.min(self._token(tile, j), streams.tokens - 1)
            row = source + (Int64(token) * (streams.width * self.n) + at) * self.itemsize
            words[None, j].store(run_at(Int32, row, Int64(0), self.words).load())

    def _token(self, tile: Int32, j: int) -> Int32:
        return tile * TOKEN_TILE + cute.arch.lane_idx() % 4 * 2 + OFFSETS[j]

    def _fixed_operand(self, weight: Int64, code: Int32, row_length: Int32, at: Int32) -> list:
        """Return the weight at a lane's columns as left MMA operands. They are nested by step of 8 outputs, then by 16
        columns.

        Args:
            weight, code: the address of the weight [K, n C], and its dtype.
            row_length: n C.
            at: the lane's first column, counted in a token's row of n C columns.
        """
        place = cute.arch.lane_idx() % 4
        steps = []
        for step in range(self.outputs // 8):
            low, high = (
                load_params(weight, code, Int64(8 * step + row) * row_length + at, self.columns)
                for row in (place, place + 4)
            )
            first = step * (self.columns // 2)
            steps.append([self._left(low, high, first + i) for i in range(self.columns // 2)])
        return steps

    def _left(self, low: cute.Tensor, high: cute.Tensor, index: int) -> list:
        """Return the left MMA operand made of columns 2i and 2i + 1 of two weight rows.

        An exact (float32) weight's operand goes to shared memory instead (`_held`), and the returned list is empty.

        Args:
            low, high: the weight at the lane's columns, for the lane's two outputs of a step.
            index: the operand's number, step * (operands per step) + i.
        """
        i = index % (self.columns // 2)
        values = [values[2 * i + e] for values in (low, high) for e in range(2)]
        if self.is_exact:
            self._held(index).store(_registers(values).load())
            return []
        return self._parts(_registers(values))

    def _held(self, index: int) -> cute.Tensor:
        """Return this thread's place in shared memory for operand `index` of an exact (float32) weight. The two parts
        of a split operand (`split.py`) would not fit into registers."""
        thread, _, _ = cute.arch.thread_idx()
        smem = cute.arch.get_dyn_smem(Float32, alignment=16)
        return shared_at(Float32, smem + (index * THREADS + thread) * 4, 4)

    def _parts(self, raw: cute.Tensor) -> list:
        """Return the words of an MMA operand, as lists. For an exact (float32) weight there are two lists, of nearest
        TF32 numbers and of their rests (`split`); for other weights there is one list, of TF32 numbers.

        raw: the operand in float32.
        """
        parts = split(raw, Float32) if self.is_exact else (as_operands(cute.recast_tensor(raw, Int32), Float32),)
        return [[words[i] for i in range(cute.size(raw))] for words in parts]

    def _add(self, mma: WarpMma, sums: cute.Tensor, left: list, right: list) -> None:
        """Add left times right to `sums`.

        left and right are lists of one MMA operand or, if `is_exact`, of two (split.py): the nearest TF32 numbers, and
        the rests (the float32 numbers less the nearest ones). With two, the products of nearest and rest are added
        first, then nearest times nearest. Rest times rest is left out.
        """
        for i, j in ((0, 1), (1, 0), (0, 0))[0 if self.is_exact else 2 :]:
            mma.add(sums, left[i], right[j])

    @cute.jit
    def _tile(
        self, streams: Streams, products: Products, fixed: list, raw: cute.Tensor, at: Int32, stream: Int32,
        tile: Int32, is_inside, sums: cute.Tensor,
    ):  # fmt: skip
        """Process a token tile at the lane's columns: add the tile's x^T dp to the sums for d_weight, and store its
        d_x. (dp is the gradient of p = x weight^T.)

        All loads come first, since the compiler cannot move a load before a store.

        Args:
            streams: addresses of x, d_x and the addends.
            products: addresses of dp and of each token's factor f; weights 0: d_weight is not wanted.
            fixed: the weight at the lane's columns as MMA operands (`_fixed_operand`).
            raw: x of the lane's four tokens at its columns, as words (`_read`).
            at: the lane's first column, counted in a token's row of n C columns.
            stream: number of the residual stream that has these columns.
            tile: number of the token tile.
            is_inside: False: the lane has no columns of its own, and stores nothing.
            sums: the lane's sums for d_weight, registers.
        """
        columns = [cute.recast_tensor(raw[None, j], self.dtype) for j in range(len(OFFSETS))]
        chunks = range(self.outputs // 8)
        pairs = [self._pairs(products, tile, chunk) for chunk in chunks if self.reads_pairs_early]
        norms = [vector_at(Float32, products.norms)[self._token(tile, j)] for j in range(len(OFFSETS))]
        addends = [self._addends(streams, tile, at, stream, j) for j in range(4) if self.reads_addends_early]
        if products.weights != 0:
            self._grow(products, tile, columns, pairs, sums)
        if streams.d_x != 0:
            for half in cutlass.range_constexpr(2):
                made = self._product(fixed, self._rows(products, tile, half))
                for one in cutlass.range_constexpr(2):
                    j = 2 * half + one
                    values = cute.make_rmem_tensor(self.columns, Float32)
                    for i in cutlass.range_constexpr(self.columns):
                        values[i] = made[2 * (i % 2) + one, i // 2]
                    values.store(values.load() + floats(columns[j]).load() * norms[j])
                    if const_expr(self.addends):
                        scale, of_sum, of_residual = _at(addends, j, self._addends, streams, tile, at, stream, j)
                        values.store(values.load() + floats(of_sum).load() * scale + floats(of_residual).load())
                    token = self._token(tile, j)
                    if (token < streams.tokens) & is_inside:
                        first = Int64(token) * (streams.width * self.n) + at
                        run_at(self.dtype, streams.d_x, first, self.columns).store(values.load().to(self.dtype))

    def _pairs(self, products: Products, tile: Int32, chunk: int) -> list:
        """Return dp (the gradient of p) as the right operand of d_weight's product, for the 8 outputs of `chunk`. It is
        the words of two pairs of tokens, which begin at 2t and 2t + 8 with t = lane % 4.

        Args:
            products: addresses of dp.
            tile: number of the token tile.
        """
        lane = cute.arch.lane_idx()
        rows = [Int64(tile) * (TOKEN_TILE // 2) + pair for pair in (lane % 4, lane % 4 + 4)]
        values = [
            run_at(Float32, products.pairs, (row * self.outputs + chunk * 8 + lane // 4) * 2, 2).load() for row in rows
        ]
        return [self._parts(_registers([pair[0], pair[1]])) for pair in values]

    def _rows(self, products: Products, tile: Int32, half: int) -> list:
        """Return dp (the gradient of p) as the right operand of d_x's product, for one half (8) of the tile's tokens:
        the words of each step of 8 outputs.

        Args:
            products: addresses of dp.
            tile: number of the token tile.
        """
        lane = cute.arch.lane_idx()
        row = (Int64(tile) * TOKEN_TILE + 8 * half + lane // 4) * self.outputs
        made = []
        for step in range(self.outputs // 8):
            places = (8 * step + lane % 4, 8 * step + lane % 4 + 4)
            values = vector_at(Float32, products.products)
            made.append(self._parts(_registers([values[row + place] for place in places])))
        return made

    @cute.jit
    def _addends(
        self, streams: Streams, tile: Int32, at: Int32, stream: Int32, j: cutlass.Constexpr[int]
    ) -> tuple:  # fmt: skip
        """Return the addends of d_x for the lane's j-th token: h_pre, and the lane's vectors of d_aggregate and
        d_residual, in the dtype of the streams.

        Args:
            at: the lane's first column, counted in a token's row of n C columns.
            stream: number of the residual stream that has these columns.
        """
        token = Int64(cutlass.min(self._token(tile, j), streams.tokens - 1))
        first = token * (streams.width * self.n) + at
        of_token = token * streams.width + at - stream * streams.width
        of_sum = cute.make_rmem_tensor(self.columns, self.dtype)
        of_sum.store(run_at(self.dtype, streams.d_aggregate, of_token, self.columns).load())
        of_residual = cute.make_rmem_tensor(self.columns, self.dtype)
        of_residual.fill(0.0)
        if streams.d_residual != 0:
            of_residual.store(run_at(self.dtype, streams.d_residual, first, self.columns).load())
        return vector_at(Float32, streams.h_pre)[token * self.n + stream], of_sum, of_residual

    def _grow(self, products: Products, tile: Int32, columns: list, pairs: list, sums: cute.Tensor) -> None:
        """Add x^T dp to `sums`, in two steps of 8 tokens. x^T dp is the tile's contribution to d_weight, dp the
        gradient of p.

        Args:
            columns: x at the lane's columns, for each of its four tokens.
            pairs: dp for each group of 8 outputs (`_pairs`); empty: dp is loaded here.
        """
        mma = WarpMma(self.dtype)
        for chunk in range(self.outputs // 8):
            near, far = _at(pairs, chunk, self._pairs, products, tile, chunk)
            for i in range(self.columns // 2):
                target = sums[None, chunk, i]
                if self.is_exact:
                    # Tensor cores truncate their sums, an error that would add up over tiles.
                    target = cute.make_rmem_tensor(4, Float32)
                    target.fill(0.0)
                for half, right in enumerate((near, far)):
                    values = [columns[2 * half + one][2 * i + e] for one in range(2) for e in range(2)]
                    left = self._parts(_registers(values))
                    self._add(mma, target, left, right)
                if self.is_exact:
                    sums[None, chunk, i].store(sums[None, chunk, i].load() + target.load())

    def _product(self, fixed: list, rows: list) -> cute.Tensor:
        """Return dp weight, a term of d_x, at a lane's columns for 8 tokens. dp is the gradient of p. The result is
        transposed: MMA results [4, columns / 2].

        Args:
            fixed: the weight (`_fixed_operand`).
            rows: dp of the 8 tokens (`_rows`).
        """
        mma = WarpMma(self.dtype, half=True)
        made = cute.make_rmem_tensor((4, self.columns // 2), Float32)
        made.fill(0.0)
        if self.is_exact:
            cute.arch.sync_warp()  # or the compiler loads all held operands ahead of the loop, and spills them
        for step, right in enumerate(rows):
            for i in range(self.columns // 2):
                left = fixed[step][i]
                if self.is_exact:
                    held = cute.make_rmem_tensor(4, Float32)
                    held.store(self._held(step * (self.columns // 2) + i).load())
                    left = self._parts(held)
                self._add(mma, made[None, i], left, right)
        return made

    @cute.jit
    def _leave(self, weights: Int64, row_length: Int32, at: Int32, part: Int32, sums: cute.Tensor):
        """Store the warp's sums for d_weight in the workspace. They are sums over the CTA's part of the tokens.

        Args:
            weights: the address of the sums [parts, K, n C].
            row_length: n C.
            at: the lane's first column, counted in a token's row of n C columns.
            part: number of the part of the tokens.
        """
        for chunk in cutlass.range_constexpr(self.outputs // 8):
            for one in cutlass.range_constexpr(2):
                row = Int64(part) * self.outputs + chunk * 8 + cute.arch.lane_idx() % 4 * 2 + one
                values = cute.make_rmem_tensor(self.columns, Float32)
                for i in cutlass.range_constexpr(self.columns):
                    values[i] = sums[2 * (i % 2) + one, chunk, i // 2]
                run_at(Float32, weights, row * row_length + at, self.columns).store(values.load())


def _registers(values: list) -> cute.Tensor:
    """Return float32 registers that hold the numbers of a list."""
    raw = cute.make_rmem_tensor(len(values), Float32)
    for i, value in enumerate(values):
        raw[i] = value
    return raw


def _at(early: list, index: int, read: Callable, *arguments):
    """Return early[index] if `early` is not empty (the values were loaded before); otherwise return read(*arguments),
    which loads the values now."""
    return early[index] if early else read(*arguments)
