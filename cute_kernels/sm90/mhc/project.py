"""p = x weight^T (24 columns for n = 4) with the rows' norms, then h = alpha p / norm + bias and its gates.

The tensor cores are idle most of the time, so the kernel is a stream of x: from global memory straight to registers,
where a lane's 16 bytes of a row are its share of an MMA operand, in whatever order the contraction takes them. Squares
are summed from the same registers. The weight lies in shared memory, a slice of its columns a CTA, as large as fits.
Each slice leaves partial sums; a second kernel adds them in their order and takes them through the gates.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...gmem import vector_at
from ...invariant import Invariant
from .gates import Gates, ProjectFinish
from .shapes import ROW_PADDING, STEP_BYTES, TOKEN_TILE, WEIGHT_BYTES, outputs, project_warps, slice_capacity
from .vectors import VECTOR_BYTES, elements, floats, form_of, load_params, run_at
from .warp_mma import WarpMma, as_operands

LANES = 32
# Four lanes share a row of a token tile, and each lane has two rows. A step is so many 16-byte reads of each.
LANES_PER_ROW = 4
READS = STEP_BYTES // (LANES_PER_ROW * VECTOR_BYTES)
WORDS = VECTOR_BYTES // 4
# Vectors of the weight that a thread reads at a time.
FILL_READS = 4


class Problem(NamedTuple):
    """tokens T; columns nC of x and weight; `slice_columns` of them a slice, for which `groups` CTAs share the tokens.

    products: float32 [slices, T, K]; squares: float32 [slices, T].
    """

    x: Int64
    products: Int64
    squares: Int64
    tokens: Int32
    columns: Int32
    slice_columns: Int32
    groups: Int32


class Project(Invariant):
    """h_pre, h_post, h_res, float32, and stats [T, K + 1]: p and the root mean square of x (0: not wanted).

    `workspace`: see `shapes.project_workspace`.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric], n: int):
        self.name = name
        self.dtype = dtype
        self.n = n
        self.outputs = outputs(n)
        capacity = slice_capacity(n, dtype.width // 8) * dtype.width // 8
        self.warps = project_warps(n)
        self.row_words = (capacity + ROW_PADDING) // 4
        self.finish = ProjectFinish(f"{name}_finish", n)

    @cute.jit
    def __call__(
        self, x: Int64, weight: Int64, alpha_pre: Int64, alpha_post: Int64, alpha_res: Int64, bias: Int64,
        h_pre: Int64, h_post: Int64, h_res: Int64, stats: Int64, workspace: Int64, forms: Int32, tokens: Int32,
        width: Int32, slices: Int32, slice_columns: Int32, groups: Int32, num_sms: Int32, eps: Float32,
        do_launch: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        gates = Gates(alpha_pre, alpha_post, alpha_res, bias, forms, eps)
        if do_launch > 0:
            self.launch(
                x, weight, gates, (h_pre, h_post, h_res, stats), workspace, tokens, width,
                (slices, slice_columns, groups), num_sms, stream,
            )  # fmt: skip

    @cute.jit
    def launch(
        self, x: Int64, weight: Int64, gates: Gates, results: tuple, workspace: Int64, tokens: Int32, width: Int32,
        cut: tuple, num_sms: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """results: h_pre, h_post, h_res and stats; cut: slices, columns of each and CTAs for each."""
        slices, slice_columns, groups = cut
        squares = workspace + Int64(slices) * tokens * (self.outputs * 4)
        problem = Problem(x, workspace, squares, tokens, width * self.n, slice_columns, groups)
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(problem, weight, form_of(gates.forms, 0)).launch(
            grid=(slices, groups, 1),
            block=(self.warps * LANES, 1, 1),
            smem=WEIGHT_BYTES,
            min_blocks_per_mp=1,
            stream=stream,
        )
        self.finish.launch((workspace, squares, slices), gates, results, tokens, width * self.n, num_sms, stream)

    @cute.kernel
    def kernel(self, problem: Problem, weight: Int64, weight_form: Int32):
        thread, _, _ = cute.arch.thread_idx()
        _, group, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // LANES)
        tiles = cute.ceil_div(problem.tokens, TOKEN_TILE)
        smem = cute.arch.get_dyn_smem(Int32, alignment=128)
        if group < tiles:
            self._fill(smem, problem, weight, weight_form)
            cute.arch.sync_threads()
            # Neighbouring tiles go to neighbouring CTAs: they are in flight at once, wherever T ends.
            first, stride = group + warp * problem.groups, problem.groups * self.warps
            if first < tiles:
                self._stream(smem, problem, first, stride, (tiles - first + stride - 1) // stride)

    @cute.jit
    def _fill(self, smem: cute.Pointer, problem: Problem, weight: Int64, form: Int32):
        """This CTA's slice of the weight in the streams' dtype; zeros behind the last column."""
        thread, _, _ = cute.arch.thread_idx()
        part, _, _ = cute.arch.block_idx()
        count, threads = elements(self.dtype), self.warps * LANES
        per_row = problem.slice_columns // count
        total = self.outputs * per_row
        for first in cutlass.range(thread, total, threads * FILL_READS):
            # Behind the end the last vector stands in, so that the reads of a turn are under way together.
            at = [cutlass.min(first + i * threads, total - 1) for i in range(FILL_READS)]
            columns = [part * problem.slice_columns + place % per_row * count for place in at]
            raw = []
            for i in cutlass.range_constexpr(FILL_READS):
                column = cutlass.min(columns[i], problem.columns - count)
                raw.append(load_params(weight, form, Int64(at[i] // per_row) * problem.columns + column, count))
            for i in cutlass.range_constexpr(FILL_READS):
                values = cute.make_rmem_tensor(count, self.dtype)
                values.store(raw[i].load().to(self.dtype))
                if columns[i] >= problem.columns:
                    values.fill(0.0)
                words = as_operands(cute.recast_tensor(values, Int32), self.dtype)
                self._words(smem, at[i] // per_row, at[i] % per_row).store(words.load())

    def _words(self, smem: cute.Pointer, row: Int32, vector: Int32) -> cute.Tensor:
        """A vector of a row of the slice, as 32-bit words."""
        return cute.make_tensor((smem + (row * self.row_words + vector * WORDS)).align(16), cute.make_layout(WORDS))

    @cute.jit
    def _stream(self, smem: cute.Pointer, problem: Problem, first: Int32, stride: Int32, my_tiles: Int32):
        """All of a warp's tiles, steps of all of them in one pipeline: while a step is computed, the next is read."""
        part, _, _ = cute.arch.block_idx()
        columns = cutlass.min(problem.slice_columns, problem.columns - part * problem.slice_columns)
        vectors = columns // elements(self.dtype)
        steps = cute.ceil_div(vectors, READS * LANES_PER_ROW)
        products = cute.make_rmem_tensor(self.outputs // 2, Float32)
        squares = cute.make_rmem_tensor(2, Float32)
        products.fill(0.0)
        squares.fill(0.0)
        tile, step = first, Int32(0)
        words = cute.make_rmem_tensor(2 * READS * WORDS, Int32)
        self._read(problem, tile, step, vectors, words)
        for _ in cutlass.range(my_tiles * steps):
            this_tile, this_step = tile, step
            step += 1
            if step == steps:
                step = Int32(0)
                tile += stride
            upcoming = cute.make_rmem_tensor(2 * READS * WORDS, Int32)
            # Behind the last step the last tile's first one is read again: harmless, and no branch.
            self._read(problem, cutlass.min(tile, first + (my_tiles - 1) * stride), step, vectors, upcoming)
            self._multiply(smem, this_step, vectors, words, products, squares)
            if this_step == steps - 1:
                self._leave(problem, part, this_tile, products, squares)
                products.fill(0.0)
                squares.fill(0.0)
            words.store(upcoming.load())

    @cute.jit
    def _read(self, problem: Problem, tile: Int32, step: Int32, vectors: Int32, words: cute.Tensor):
        """A lane's vectors of rows g and g + 8, in turns. Past the last token or vector the last one stands in."""
        part, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        for half in cutlass.range_constexpr(2):
            token = cutlass.min(tile * TOKEN_TILE + lane // LANES_PER_ROW + 8 * half, problem.tokens - 1)
            start = Int64(token) * problem.columns + part * problem.slice_columns
            row = problem.x + start * (self.dtype.width // 8)
            for i in cutlass.range_constexpr(READS):
                vector = cutlass.min((step * READS + i) * LANES_PER_ROW + lane % LANES_PER_ROW, vectors - 1)
                source = run_at(Int32, row, Int64(vector * WORDS), WORDS)
                cute.make_tensor(words.iterator + (2 * i + half) * WORDS, cute.make_layout(WORDS)).store(source.load())

    @cute.jit
    def _multiply(
        self, smem: cute.Pointer, step: Int32, vectors: Int32, words: cute.Tensor, products: cute.Tensor,
        squares: cute.Tensor,
    ):  # fmt: skip
        """Add a step's products and squares. What stood in for vectors past the last meets zeros of the weight."""
        lane = cute.arch.lane_idx()
        mma = WarpMma(self.dtype)
        for i in cutlass.range_constexpr(READS):
            vector = (step * READS + i) * LANES_PER_ROW + lane % LANES_PER_ROW
            rows = []
            for half in cutlass.range_constexpr(2):
                raw = cute.make_tensor(words.iterator + (2 * i + half) * WORDS, cute.make_layout(WORDS))
                rows.append(as_operands(raw, self.dtype))
                values = floats(cute.recast_tensor(raw, self.dtype))
                total = Float32(0.0)
                for e in cutlass.range_constexpr(elements(self.dtype)):
                    total += values[e] * values[e]
                if vector < vectors:
                    squares[half] += total
            for chunk in cutlass.range_constexpr(self.outputs // 8):
                column = cute.make_rmem_tensor(WORDS, Int32)
                column.store(self._words(smem, chunk * 8 + lane // LANES_PER_ROW, vector).load())
                sums = cute.make_tensor(products.iterator + 4 * chunk, cute.make_layout(4))
                for s in cutlass.range_constexpr(WORDS // 2):
                    a = [rows[0][2 * s], rows[1][2 * s], rows[0][2 * s + 1], rows[1][2 * s + 1]]
                    mma.add(sums, a, [column[2 * s], column[2 * s + 1]])

    @cute.jit
    def _leave(self, problem: Problem, part: Int32, tile: Int32, products: cute.Tensor, squares: cute.Tensor):
        """A finished tile's sums over this slice, to the workspace."""
        lane = cute.arch.lane_idx()
        for half in cutlass.range_constexpr(2):
            square = cute.arch.warp_reduction_sum(squares[half], threads_in_group=LANES_PER_ROW)
            token = tile * TOKEN_TILE + lane // LANES_PER_ROW + 8 * half
            if token < problem.tokens:
                row = Int64(part) * problem.tokens + token
                if lane % LANES_PER_ROW == 0:
                    vector_at(Float32, problem.squares)[row] = square
                for chunk in cutlass.range_constexpr(self.outputs // 8):
                    at = row * self.outputs + chunk * 8 + lane % LANES_PER_ROW * 2
                    pair = cute.make_tensor(products.iterator + 4 * chunk + 2 * half, cute.make_layout(2))
                    run_at(Float32, problem.products, at, 2).store(pair.load())
