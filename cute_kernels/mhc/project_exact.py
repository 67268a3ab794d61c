"""The projection p = x weight^T, with the squares of x for its norms, for a float32 weight ("exact"). Each element of
the weight is split into two numbers of the MMA's dtype (split.py), so that its precision is kept.

A split slice of the weight takes twice the shared memory that it takes in `project.py`. Built like `project.py`, this
kernel would have twice as many slices, and each slice has sums for every token to write and to add. So this kernel
works the other way:

- A CTA keeps the sums of 512 tokens in registers and steps through the columns of x and of the weight.
- Each warp has 64 of these tokens, in two units of 32. It copies them to its own ring in shared memory.
- All threads of the CTA load the weight, one step ahead, split it, and write it to shared memory, where every warp
  reads it.

So the weight is read once for every 512 tokens, mostly from the L2 cache. For 4 streams these reads are a tenth of x's
bytes.

Columns are divided into slices only if there are too few tokens to fill the SMs; `gates.py` adds the slices' sums.
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
from ..device.target import is_for_hopper_alone
from ..device.vectors import VECTOR_BYTES, elements, run_at, shared_at
from ..device.warp_mma import WarpMma, as_operands
from ..device.warps import WARP
from .async_copy import AsyncCopy, stage_after, stage_before
from .shapes import TOKEN_TILE, UNIT_TOKENS, ProjectCta, exact_ring, outputs
from .split import rest_scale, split

LANES_PER_ROW = 4  # lanes that share a row of an MMA operand
WORDS = VECTOR_BYTES // 4
UNIT_TILES = UNIT_TOKENS // TOKEN_TILE


class ExactProjection(NamedTuple):
    """Addresses and sizes of a projection p = x weight^T of T tokens with a float32 weight.

    A token has n residual streams of C columns; p has K = n^2 + 2n columns. Columns of x are divided into slices.

    Attributes:
        x: the residual streams [T, n C].
        weight: float32 [K, n C].
        products: float32 [slices, T, K], partial sums of p.
        squares: float32 [slices, T], partial sums of x's squares.
        tokens, columns: T, and n C.
        slice_columns: columns of a slice.
    """

    x: Int64
    weight: Int64
    products: Int64
    squares: Int64
    tokens: Int32
    columns: Int32
    slice_columns: Int32


class Slice(NamedTuple):
    """A warp's work: the CTA's slice of the columns, for the tokens of the warp's units.

    Attributes:
        first: the first column of the slice.
        vectors: number of 16-byte vectors that a row has in the slice.
        steps: steps in the slice; a step is `ProjectCta.step_bytes` of each row.
        token: the first token of the warp's first unit.
    """

    first: Int32
    vectors: Int32
    steps: Int32
    token: Int32


class ExactProducts(Invariant):
    """Kernel that stores the partial sums of p and of x's squares over each slice of the columns. `gates.ProjectFinish`
    adds these sums."""

    def __init__(self, name: str, dtype: type[cutlass.Numeric], n: int, cta: ProjectCta):
        self.name = name
        self.dtype = dtype
        self.outputs = outputs(n)
        self.warps, self.threads = cta.warps, cta.warps * WARP
        self.step_words, self.step_vectors = cta.step_bytes // 4, cta.step_bytes // VECTOR_BYTES
        self.reads = self.step_vectors // LANES_PER_ROW
        self.copy_rows = WARP // self.step_vectors
        self.copies = UNIT_TOKENS // self.copy_rows  # copies of a lane for a unit
        self.unit_words = UNIT_TOKENS * self.step_words
        self.units, self.stages = exact_ring(n)
        self.tokens = self.warps * UNIT_TOKENS * self.units
        self.ring_words = self.warps * self.stages * self.unit_words
        self.slot_words = 2 * self.outputs * self.step_words
        # Number of a lane's 16 copies that are unrolled. All 16 take 10 % longer than 8 (510 us instead of 465 for 4
        # streams), 4 take 1 % longer. With 8 copies of 4 bfloat16 streams, sm_80 lacks one register. With 8 streams,
        # registers are spilled unless all copies are unrolled and each computes its address anew.
        at_once = 8 if is_for_hopper_alone() else 4
        self.copies_at_once, self.keeps_offsets = (at_once, True) if n < 8 else (self.copies, False)
        # Reads of a lane whose products the tensor cores add together: with one, the kernel takes 3 % longer. With 8
        # streams two do not fit into registers; with float32 streams the tensor cores would truncate too much.
        self.reads_at_once = 2 if n < 8 and dtype is not Float32 else 1
        # Vectors of a step of the weight that each thread loads.
        self.rounds = -(-self.outputs * self.step_vectors // self.threads)

    @cute.jit
    def launch(self, problem: ExactProjection, slices: Int32, groups: Int32, stream: cuda.CUstream):
        """Launch slices * groups CTAs: one for each pair of a slice of x's columns and a group of tokens."""
        name_kernel(self.kernel, self.name)
        self.kernel(problem).launch(
            grid=(slices, groups, 1),
            block=(self.threads, 1, 1),
            smem=(self.ring_words + 2 * self.slot_words) * 4,
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, problem: ExactProjection):
        thread, _, _ = cute.arch.thread_idx()
        index, group, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        smem = cute.arch.get_dyn_smem(Int32, alignment=128)
        ring, slots = smem + warp * (self.stages * self.unit_words), smem + self.ring_words
        first = index * problem.slice_columns
        vectors = cutlass.min(problem.slice_columns, problem.columns - first) // elements(self.dtype)
        mine = Slice(
            first, vectors, cute.ceil_div(vectors, self.step_vectors), group * self.tokens + warp * UNIT_TOKENS
        )
        for unit in cutlass.range_constexpr(self.stages - 1):
            self._advance(ring + unit * self.unit_words, problem, mine, Int32(unit // self.units), unit % self.units)
        self._stream(ring, slots, problem, mine)

    @cute.jit
    def _stream(self, ring: cute.Pointer, slots: cute.Pointer, problem: ExactProjection, mine: Slice):
        products = cute.make_rmem_tensor(self.units * UNIT_TILES * self.outputs // 2, Float32)
        squares = cute.make_rmem_tensor((4, self.units * UNIT_TILES), Float32)
        products.fill(0.0)
        squares.fill(0.0)
        upcoming = cute.make_rmem_tensor((elements(self.dtype), self.rounds), Float32)
        self._read(problem, mine, Int32(0), upcoming)
        self._keep(slots, mine, Int32(0), upcoming)
        self._read(problem, mine, Int32(1), upcoming)
        stage, slot = Int32(0), Int32(0)
        for step in cutlass.range(mine.steps):
            # After this barrier, all warps see this step of the weight and have finished with the step before it, whose
            # slot is written next.
            cute.arch.sync_threads()
            self._keep(slots + (1 - slot) * self.slot_words, mine, step + 1, upcoming)
            self._read(problem, mine, step + 2, upcoming)
            for unit in cutlass.range_constexpr(self.units):
                # After this wait, all lanes see the oldest stage and have finished with the stage before it, which is
                # filled next.
                AsyncCopy.wait(self.stages - 2)
                cute.arch.sync_warp()
                free = stage_before(stage, self.stages)
                ahead = unit + self.stages - 1
                self._advance(
                    ring + free * self.unit_words, problem, mine, step + ahead // self.units, ahead % self.units
                )
                weights = slots + slot * self.slot_words
                self._multiply(ring + stage * self.unit_words, weights, mine, step, unit, products, squares)
                stage = stage_after(stage, self.stages)
            slot = 1 - slot
        self._leave(problem, mine, products, squares)

    @cute.jit
    def _read(self, problem: ExactProjection, mine: Slice, step: Int32, values: cute.Tensor):
        """Load this thread's vectors of a step of the weight. Past the last column or row, the last one is read
        again.

        Args:
            mine: the warp's work.
            values: registers for the vectors.
        """
        for i in cutlass.range_constexpr(self.rounds):
            row, vector = self._place(i)
            vector += step * self.step_vectors
            column = mine.first + cutlass.min(vector, mine.vectors - 1) * elements(self.dtype)
            at = Int64(cutlass.min(row, self.outputs - 1)) * problem.columns + column
            values[None, i].store(run_at(Float32, problem.weight, at, elements(self.dtype)).load())

    def _place(self, i: int) -> tuple[Int32, Int32]:
        """Return where a thread's i-th vector of the weight lies: its weight row, and its index within the row's
        step."""
        thread, _, _ = cute.arch.thread_idx()
        at = thread + i * self.threads
        return at // self.step_vectors, at % self.step_vectors

    @cute.jit
    def _keep(self, slot: cute.Pointer, mine: Slice, step: Int32, values: cute.Tensor):
        """Split a step's vectors of the weight, which `_read` loaded to `values`, and write them to shared memory for
        all warps.

        Vectors past the last column become zeros. (If `_read` set these zeros, it would have to wait for its loads.)

        Args:
            slot: the shared memory for one step of the weight.
            mine: the warp's work.
        """
        for i in cutlass.range_constexpr(self.rounds):
            cute.arch.sync_warp()  # or the compiler splits all vectors of 8 streams at once, and spills
            row, vector = self._place(i)
            if step * self.step_vectors + vector >= mine.vectors:
                values[None, i].fill(0.0)
            if row < self.outputs:
                parts = split(values[None, i], self.dtype)
                for part in cutlass.range_constexpr(2):
                    self._words(slot, part * self.outputs + row, vector).store(parts[part].load())

    def _words(self, start: cute.Pointer, row: Int32, vector: Int32) -> cute.Tensor:
        return shared_at(Int32, start + self._at(row, vector), WORDS)

    def _at(self, row: Int32, vector: Int32) -> Int32:
        """Return the offset, in words, of a vector (16 bytes) in a step's columns: vector number `vector` of row number
        `row`.

        In odd rows, the two halves of each 128 bytes are exchanged. Then the 16-byte reads of 8 lanes for an MMA
        operand (2 rows, 4 vectors each) use all banks.
        """
        return row * self.step_words + (vector ^ (row % 2 * LANES_PER_ROW)) * WORDS

    @cute.jit
    def _advance(
        self, stage: cute.Pointer, problem: ExactProjection, mine: Slice, step: Int32, unit: cutlass.Constexpr[int]
    ):  # fmt: skip
        """Start to copy one step of a unit's tokens to a stage, if the step exists.

        Past the last token or vector, the last one is copied again. A unit without any token is not copied, and its
        sums are not stored.

        Args:
            mine: the warp's work.
            unit: number of the unit (32 tokens) among the warp's units.
        """
        copy, itemsize = AsyncCopy(WORDS), self.dtype.width // 8
        first = mine.token + unit * (self.warps * UNIT_TOKENS)
        if (step < mine.steps) & (first < problem.tokens):
            row, vector = cute.arch.lane_idx() // self.step_vectors, cute.arch.lane_idx() % self.step_vectors
            column = mine.first + cutlass.min(step * self.step_vectors + vector, mine.vectors - 1) * elements(
                self.dtype
            )
            start = problem.x + (Int64(first + row) * problem.columns + column) * itemsize
            target, row_bytes = self._words(stage, row, vector).iterator, problem.columns * itemsize
            last = problem.tokens - 1 - (first + row)
            for i in cutlass.range(self.copies, unroll=self.copies_at_once):
                at = start + Int64(cutlass.min(i * self.copy_rows, last)) * row_bytes
                if const_expr(not self.keeps_offsets):
                    token = cutlass.min(first + row + i * self.copy_rows, problem.tokens - 1)
                    at = problem.x + (Int64(token) * problem.columns + column) * itemsize
                copy.start(run_at(Int32, at, Int64(0), WORDS), target + i * (self.copy_rows * self.step_words))
        copy.commit()

    @cute.jit
    def _multiply(
        self, stage: cute.Pointer, weights: cute.Pointer, mine: Slice, step: Int32, unit: cutlass.Constexpr[int],
        products: cute.Tensor, squares: cute.Tensor,
    ):  # fmt: skip
        """Multiply one step of a unit (UNIT_TOKENS tokens) by the weight.

        The results are added to `products`. The squares of the step's elements of x are added to `squares`.

        Args:
            stage: x of the unit at this step, in shared memory.
            weights: the weight at this step, split, in shared memory.
            mine: the warp's work.
            step: the number of the step, which is some columns of the slice (`Slice.steps`).
            unit: the number of the unit among the warp's units.
        """
        lane = cute.arch.lane_idx()
        if (step + 1) * self.step_vectors > mine.vectors:
            self._clear(stage, mine.vectors - step * self.step_vectors)
        for i in cutlass.range(self.reads // self.reads_at_once, unroll=1):
            # A lane reads only even or only odd rows: one address is computed, other rows are at constant distances.
            places = [
                self._at(lane // LANES_PER_ROW, (i * self.reads_at_once + j) * LANES_PER_ROW + lane % LANES_PER_ROW)
                for j in range(self.reads_at_once)
            ]
            tiles = []
            for tile in cutlass.range_constexpr(UNIT_TILES):
                rows = [[self._row(stage + at, tile * TOKEN_TILE + 8 * half) for half in range(2)] for at in places]
                tiles.append([self._left(pair) for pair in rows])
                self._square(rows, tiles[tile], squares[None, unit * UNIT_TILES + tile])
            for chunk in cutlass.range_constexpr(self.outputs // 8):
                right = [
                    [self._row(weights + at, part * self.outputs + chunk * 8) for part in range(2)] for at in places
                ]
                for tile in cutlass.range_constexpr(UNIT_TILES):
                    self._add(tiles[tile], right, self._sums(products, unit * UNIT_TILES + tile, chunk))

    @cute.jit
    def _clear(self, stage: cute.Pointer, vectors: Int32):
        """Write zeros over a stage's vectors from number `vectors` on, which `_advance` filled with copies of the last
        vector."""
        zeros = cute.make_rmem_tensor(WORDS, Int32)
        zeros.fill(0)
        vector = cute.arch.lane_idx() % self.step_vectors
        for i in cutlass.range(self.copies, unroll=1):
            if vector >= vectors:
                row = cute.arch.lane_idx() // self.step_vectors + i * self.copy_rows
                self._words(stage, row, vector).store(zeros.load())
        cute.arch.sync_warp()

    def _row(self, place: cute.Pointer, rows: int) -> cute.Tensor:
        """Return 16 bytes of shared memory, `rows` rows after the lane's address `place`, as 4 words."""
        words = cute.make_rmem_tensor(WORDS, Int32)
        words.store(shared_at(Int32, place + rows * self.step_words, WORDS).load())
        return words

    def _square(self, rows: list, left: list, sums: cute.Tensor) -> None:
        """Add x's squares to `sums`.

        For 16-bit elements, the tensor cores multiply rows by themselves, which takes a quarter of the instructions.
        The squares are then the diagonal of the product: row g's squares are in sums[g % 2] and sums[2 + g % 2] of one
        lane, from which `_leave` picks them.
        """
        for half in range(2):
            if self.dtype is Float32:
                total = Float32(0.0)
                for pair in rows:
                    values = cute.recast_tensor(pair[half], Float32)
                    for e in range(WORDS):
                        total += values[e] * values[e]
                sums[2 * half] = sums[2 * half] + total
            else:
                few = cute.make_rmem_tensor(4, Float32)
                few.fill(0.0)
                for pair, parts in zip(rows, left, strict=True):
                    self._multiply_vectors(WarpMma(self.dtype), few, parts[0], pair[half])
                for i in range(2):
                    sums[2 * half + i] = sums[2 * half + i] + few[2 * half + i]

    def _left(self, rows: list) -> list:
        """Return x's MMA operands, each as the words of two rows. 16-bit x: one operand, the numbers themselves.
        float32 x: two operands, the nearest TF32 numbers and their rests (`split`)."""
        if self.dtype is Float32:
            parts = [split(cute.recast_tensor(words, Float32), Float32) for words in rows]
            return [[part[i] for part in parts] for i in range(2)]
        return [[as_operands(words, self.dtype) for words in rows]]

    def _add(self, left: list, right: list, sums: cute.Tensor) -> None:
        """Add left times right to `sums`; the product of rest and rest is left out.

        Products with one rest come first, since their sum may need scaling. The tensor cores sum the 4 products of each
        read, and these sums are added in float32. Longer sums on tensor cores would be less exact: tensor cores
        truncate their sums, so the error would grow with the number of steps.
        """
        mma, few = WarpMma(self.dtype), cute.make_rmem_tensor(4, Float32)
        few.fill(0.0)
        reads = list(zip(left, right, strict=True))
        with_rests = [(a[0], b[1]) for a, b in reads] + [(rests, b[0]) for a, b in reads for rests in a[1:]]
        for a, b in with_rests:
            self._multiply_vectors(mma, few, a, b)
        if rest_scale(self.dtype) != 1.0:
            few.store(few.load() * (1.0 / rest_scale(self.dtype)))
        for a, b in reads:
            self._multiply_vectors(mma, few, a[0], b[0])
        sums.store(sums.load() + few.load())

    def _multiply_vectors(self, mma: WarpMma, sums: cute.Tensor, rows: list, column: cute.Tensor) -> None:
        for s in range(WORDS // 2):
            a = [rows[0][2 * s], rows[1][2 * s], rows[0][2 * s + 1], rows[1][2 * s + 1]]
            mma.add(sums, a, [column[2 * s], column[2 * s + 1]])

    def _sums(self, products: cute.Tensor, tile: int, chunk: int) -> cute.Tensor:
        at = (tile * (self.outputs // 8) + chunk) * 4
        return cute.make_tensor(products.iterator + at, cute.make_layout(4))

    @cute.jit
    def _leave(self, problem: ExactProjection, mine: Slice, products: cute.Tensor, squares: cute.Tensor):
        """Store the warp's sums over this CTA's slice of columns in the workspace.

        Args:
            mine: the warp's work.
            products, squares: the lane's sums, of p and of x's squares (`_square`), for the tokens of all units.
        """
        index, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        for tile in cutlass.range_constexpr(self.units * UNIT_TILES):
            place = tile // UNIT_TILES * (self.warps * UNIT_TOKENS) + tile % UNIT_TILES * TOKEN_TILE
            for half in cutlass.range_constexpr(2):
                square = squares[2 * half, tile]
                if const_expr(self.dtype is not Float32):
                    if lane // LANES_PER_ROW % 2 == 1:
                        square = squares[2 * half + 1, tile]
                    if lane // 8 != lane % LANES_PER_ROW:
                        square = Float32(0.0)
                square = cute.arch.warp_reduction_sum(square, threads_in_group=LANES_PER_ROW)
                token = mine.token + (place + lane // LANES_PER_ROW + 8 * half)
                if token < problem.tokens:
                    row = Int64(index) * problem.tokens + token
                    if lane % LANES_PER_ROW == 0:
                        vector_at(Float32, problem.squares)[row] = square
                    for chunk in cutlass.range_constexpr(self.outputs // 8):
                        at = row * self.outputs + chunk * 8 + lane % LANES_PER_ROW * 2
                        sums = self._sums(products, tile, chunk)
                        pair = cute.make_rmem_tensor(2, Float32)
                        pair[0], pair[1] = sums[2 * half], sums[2 * half + 1]
                        run_at(Float32, problem.products, at, 2).store(pair.load())
