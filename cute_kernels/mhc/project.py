"""The projection: p = x weight^T (K = n^2 + 2n columns, 24 for n = 4) with the norms of x's rows, then the gates
(gates.py).

x [T, n C] has n residual streams of C columns for each of T tokens. Memory bounds the kernel; the tensor cores are idle
most of the time.

A CTA holds a slice of the weight's columns in shared memory. Each of its warps has its own tiles of 16 tokens, and its
own ring of stages, which it fills by asynchronous copies, two whole rows of a stage at a time. So no warp waits for
another. A stage holds a step: step_bytes of each token of a tile.

A lane's 16 bytes of a row are its words of an MMA operand, so the contraction takes columns in whatever order that
gives. The squares are summed from the same registers. Each slice stores partial sums; a second kernel
(`gates.ProjectFinish`) adds them in order and applies the gates.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.vectors import F32, VECTOR_BYTES, dtype_code, elements, floats, load_params, run_at, shared_at
from ..device.warp_mma import WarpMma, as_operands
from ..device.warps import WARP
from ..specs import MhcSpec
from ..tracing import DTYPES, Traced, traced
from .async_copy import AsyncCopy, stage_after, stage_before
from .gates import Gates, ProjectFinish
from .project_exact import ExactProducts, ExactProjection
from .shapes import (
    ROW_PADDING,
    TOKEN_TILE,
    outputs,
    project_cta,
    ring_stages,
    slice_capacity,
)

# In an MMA operand, four lanes share a row of a token tile, and each lane has two rows.
LANES_PER_ROW = 4
WORDS = VECTOR_BYTES // 4
# Vectors of the weight that a thread reads at a time.
FILL_READS = 8


class Projection(NamedTuple):
    """Addresses and sizes of a projection p = x weight^T. The columns of x are divided into slices.

    Attributes:
        x: the residual streams [T, n C].
        products: float32 [slices, T, K], partial sums of p.
        squares: float32 [slices, T], partial sums of x's squares.
        tokens: T.
        columns: n C.
        slice_columns: columns of a slice.
        groups: number of CTAs that share the tokens of a slice.
    """

    x: Int64
    products: Int64
    squares: Int64
    tokens: Int32
    columns: Int32
    slice_columns: Int32
    groups: Int32


class Place(NamedTuple):
    """A position in a warp's work: a token tile, and a step of this tile. A step is `step_bytes` of each token.

    Attributes:
        tile: the number of the token tile.
        step: the number of the step in the tile.
    """

    tile: Int32
    step: Int32


class Path(NamedTuple):
    """The extent of a warp's work: all steps of the warp's token tiles, over the columns of the CTA's slice.

    Attributes:
        vectors: number of 16-byte vectors that a row of x has in the slice.
        steps: number of steps of one tile.
        stride: distance between consecutive tiles of the warp, in tiles.
        total: number of steps of all of the warp's tiles.
    """

    vectors: Int32
    steps: Int32
    stride: Int32
    total: Int32


class Project(Invariant):
    """Host function and first kernel of `project`. The first kernel computes p = x weight^T and the squares of x, a
    part of each for every slice of the columns. The second kernel (`gates.ProjectFinish`) adds the parts, and applies
    norm and gates. Results: h_pre, h_post and h_res, float32.

    The kernel multiplies 16-bit weights, in the streams' dtype. For float32 weights, `ExactProducts` is launched
    instead.

    Args:
        x: the address of the streams [T, n C].
        weight: the address of [K, n C], K = n^2 + 2n.
        alpha_pre, alpha_post, alpha_res, bias, eps: parameters of the gates (`Gates`).
        h_pre, h_post, h_res: the addresses of the results [T, n], [T, n] and [T, n, n].
        stats: the address of float32 [T, K + 1], each token's p, then the root mean square of its x; 0: not wanted.
        workspace: the address of float32, `shapes.project_workspace` elements.
        forms: dtypes of the weight, the alphas and the bias (mhc/kernels.py).
        width: C.
        slices, slice_columns, groups: number of slices of the columns, columns of a slice, and CTAs for each slice,
            which share the tokens (`shapes.Slices`).
    """

    def __init__(self, spec: MhcSpec):
        name, dtype, n = spec.name, DTYPES[spec.dtype], spec.n
        cta = project_cta(spec.arch)
        self.name = name
        self.dtype = dtype
        self.n = n
        self.outputs = outputs(n)
        self.smem_bytes, self.warps, self.threads = cta.smem, cta.warps, cta.warps * WARP
        # reads: vectors in a step of each of a lane's two rows. copy_lanes: neighbouring lanes that copy one row's
        # bytes of a step.
        self.reads = cta.step_bytes // (LANES_PER_ROW * VECTOR_BYTES)
        self.copy_lanes = cta.step_bytes // VECTOR_BYTES
        self.copy_rows = WARP // self.copy_lanes
        self.step_words, self.stage_words = cta.step_bytes // 4, cta.stage_bytes // 4
        capacity = slice_capacity(cta, n, dtype.width // 8) * dtype.width // 8
        self.stages = ring_stages(n)
        self.row_words = (capacity + ROW_PADDING) // 4
        self.ring_words = self.warps * self.stages * self.stage_words
        self.exact = ExactProducts(f"{name}_exact", dtype, n, cta)
        self.finish = ProjectFinish(f"{name}_finish", n)

    @cute.jit
    def __call__(
        self, x: Int64, weight: Int64, alpha_pre: Int64, alpha_post: Int64, alpha_res: Int64, bias: Int64,
        h_pre: Int64, h_post: Int64, h_res: Int64, stats: Int64, workspace: Int64, forms: Int32, tokens: Int32,
        width: Int32, slices: Int32, slice_columns: Int32, groups: Int32, num_sms: Int32, eps: Float32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        if tokens > 0:
            squares = workspace + Int64(slices) * tokens * (self.outputs * 4)
            columns, code = width * self.n, dtype_code(forms, 0)
            if code == F32:
                exact = ExactProjection(x, weight, workspace, squares, tokens, columns, slice_columns)
                self.exact.launch(exact, slices, groups, stream)
            else:
                problem = Projection(x, workspace, squares, tokens, columns, slice_columns, groups)
                name_kernel(self.kernel, self.name)
                self.kernel(problem, weight, code).launch(
                    grid=(slices, groups, 1),
                    block=(self.threads, 1, 1),
                    smem=self.smem_bytes,
                    min_blocks_per_mp=1,
                    stream=stream,
                )
            sums, results = (workspace, squares, slices), (h_pre, h_post, h_res, stats)
            gates = Gates(alpha_pre, alpha_post, alpha_res, bias, forms, eps)
            self.finish.launch(sums, gates, results, tokens, columns, num_sms, stream)

    @cute.kernel
    def kernel(self, problem: Projection, weight: Int64, weight_code: Int32):
        thread, _, _ = cute.arch.thread_idx()
        _, group, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        tiles = cute.ceil_div(problem.tokens, TOKEN_TILE)
        ring = cute.arch.get_dyn_smem(Int32, alignment=128)
        mine, weights = ring + warp * (self.stages * self.stage_words), ring + self.ring_words
        if group < tiles:
            # Neighbouring tiles go to neighbouring CTAs, so that they are in flight at the same time whatever T is.
            first, stride = Place(group + warp * problem.groups, Int32(0)), problem.groups * self.warps
            count = (tiles - first.tile + stride - 1) // stride
            path = self._path(problem, stride, count)
            ahead = self._start(mine, problem, path, first)
            self._fill(weights, problem, weight, weight_code)
            cute.arch.sync_threads()
            self._stream(mine, weights, problem, path, first, ahead)

    @cute.jit
    def _path(self, problem: Projection, stride: Int32, tiles: Int32) -> Path:
        part, _, _ = cute.arch.block_idx()
        columns = cutlass.min(problem.slice_columns, problem.columns - part * problem.slice_columns)
        vectors = columns // elements(self.dtype)
        steps = cute.ceil_div(vectors, self.copy_lanes)
        return Path(vectors, steps, stride, tiles * steps)

    @cute.jit
    def _fill(self, weights: cute.Pointer, problem: Projection, weight: Int64, code: Int32):
        """Write this CTA's slice of the weight's columns, in the streams' dtype, to shared memory. Columns past the
        last become zeros.

        Args:
            weights: the shared memory.
            weight, code: the address of the weight [K, n C], and its dtype.
        """
        thread, _, _ = cute.arch.thread_idx()
        part, _, _ = cute.arch.block_idx()
        count, threads = elements(self.dtype), self.threads
        per_row = problem.slice_columns // count
        total = self.outputs * per_row
        for first in cutlass.range(thread, total, threads * FILL_READS):
            # Past the end, read the last vector again, so that all FILL_READS reads are issued together.
            at = [cutlass.min(first + i * threads, total - 1) for i in range(FILL_READS)]
            columns = [part * problem.slice_columns + place % per_row * count for place in at]
            raw = []
            for i in cutlass.range_constexpr(FILL_READS):
                column = cutlass.min(columns[i], problem.columns - count)
                raw.append(load_params(weight, code, Int64(at[i] // per_row) * problem.columns + column, count))
            for i in cutlass.range_constexpr(FILL_READS):
                values = cute.make_rmem_tensor(count, self.dtype)
                values.store(raw[i].load().to(self.dtype))
                if columns[i] >= problem.columns:
                    values.fill(0.0)
                words = as_operands(cute.recast_tensor(values, Int32), self.dtype)
                self._weight_words(weights, at[i] // per_row, at[i] % per_row).store(words.load())

    def _weight_words(self, weights: cute.Pointer, row: Int32, vector: Int32) -> cute.Tensor:
        """Return a view, as 32-bit words, of vector number `vector` of a row of the weight's slice in shared memory."""
        return shared_at(Int32, weights + (row * self.row_words + vector * WORDS), WORDS)

    @cute.jit
    def _start(self, ring: cute.Pointer, problem: Projection, path: Path, first: Place) -> Place:
        """Start to copy the words of the warp's first steps, to all stages of its ring except one, while the weight is
        read. Return the step to copy next."""
        ahead = first
        for stage in cutlass.range_constexpr(self.stages - 1):
            ahead = self._advance(ring + stage * self.stage_words, problem, path, ahead, stage < path.total)
        return ahead

    @cute.jit
    def _advance(self, stage: cute.Pointer, problem: Projection, path: Path, place: Place, is_any) -> Place:
        """Start to copy the step at `place` to a stage, and return the step to copy after it.

        is_any: False: no step is left; nothing is copied, but a group is committed, so that waits count alike.
        """
        copy = AsyncCopy(WORDS)
        if is_any:
            self._copy(copy, stage, problem, place, path.vectors)
        copy.commit()
        return self._next(place, path)

    @cute.jit
    def _stream(
        self, ring: cute.Pointer, weights: cute.Pointer, problem: Projection, path: Path, first: Place, ahead: Place
    ):  # fmt: skip
        """Multiply all of a warp's token tiles. The steps of all tiles form one copy pipeline, which does not drain
        between tiles.

        Args:
            ring: the warp's own stages, which `_start` began to fill.
            weights: the weight's slice in shared memory.
            problem, path: sizes of the projection and of the warp's work.
            first: the step to multiply first.
            ahead: the step to copy next.
        """
        products = cute.make_rmem_tensor(self.outputs // 2, Float32)
        squares = cute.make_rmem_tensor(2, Float32)
        products.fill(0.0)
        squares.fill(0.0)
        place, stage = first, Int32(0)
        for done in cutlass.range(path.total):
            # After this wait, all lanes see the oldest stage and have finished with the stage before it, which is
            # filled next.
            AsyncCopy.wait(self.stages - 2)
            cute.arch.sync_warp()
            free = stage_before(stage, self.stages)
            is_any = done + (self.stages - 1) < path.total
            ahead = self._advance(ring + free * self.stage_words, problem, path, ahead, is_any)
            self._multiply(ring + stage * self.stage_words, weights, place.step, path.vectors, products, squares)
            if place.step == path.steps - 1:
                self._leave(problem, place.tile, products, squares)
                products.fill(0.0)
                squares.fill(0.0)
            place = self._next(place, path)
            stage = stage_after(stage, self.stages)

    @cute.jit
    def _next(self, place: Place, path: Path) -> Place:
        """Return the step that follows a step: the next step of the same tile, or the first step of the warp's next
        tile."""
        tile, step = place.tile, place.step + 1
        if step == path.steps:
            tile += path.stride
            step = Int32(0)
        return Place(tile, step)

    @cute.jit
    def _copy(self, copy: AsyncCopy, stage: cute.Pointer, problem: Projection, place: Place, vectors: Int32):
        """Start to copy a step of a token tile to a stage. Past the last token or vector, the last one is copied again.

        In odd rows, the two halves of each 128 bytes are exchanged. Then the 16-byte reads of 8 lanes for an MMA
        operand (2 rows, 4 vectors each) use all banks.
        """
        part, _, _ = cute.arch.block_idx()
        row, vector = cute.arch.lane_idx() // self.copy_lanes, cute.arch.lane_idx() % self.copy_lanes
        target = stage + (row * self.step_words + _exchanged(row, vector) * WORDS)
        source = cutlass.min(place.step * self.copy_lanes + vector, vectors - 1) * elements(self.dtype)
        for i in cutlass.range_constexpr(TOKEN_TILE // self.copy_rows):
            token = cutlass.min(place.tile * TOKEN_TILE + row + i * self.copy_rows, problem.tokens - 1)
            at = Int64(token) * problem.columns + (part * problem.slice_columns + source)
            words = run_at(Int32, problem.x + at * (self.dtype.width // 8), Int64(0), WORDS)
            copy.start(words, target + i * (self.copy_rows * self.step_words))

    @cute.jit
    def _multiply(
        self, stage: cute.Pointer, weights: cute.Pointer, step: Int32, vectors: Int32, products: cute.Tensor,
        squares: cute.Tensor,
    ):  # fmt: skip
        """Multiply a step by the weight. The results are added to `products`, and the squares of the step's elements of
        x to `squares`.

        `_copy` copied the last vector again in place of vectors past the last. These copies are multiplied by zeros of
        the weight.

        Args:
            stage: x at the step, in shared memory.
            weights: the weight's slice in shared memory.
            vectors: number of vectors that a row of x has in the slice.
        """
        lane = cute.arch.lane_idx()
        mma = WarpMma(self.dtype)
        for i in cutlass.range_constexpr(self.reads):
            vector = i * LANES_PER_ROW + lane % LANES_PER_ROW
            is_inside = step * self.copy_lanes + vector < vectors
            rows = []
            for half in cutlass.range_constexpr(2):
                row = lane // LANES_PER_ROW + 8 * half
                at = stage + (row * self.step_words + _exchanged(row, vector) * WORDS)
                raw = cute.make_rmem_tensor(WORDS, Int32)
                raw.store(shared_at(Int32, at, WORDS).load())
                rows.append(as_operands(raw, self.dtype))
                values = floats(cute.recast_tensor(raw, self.dtype))
                total = Float32(0.0)
                for e in cutlass.range_constexpr(elements(self.dtype)):
                    total += values[e] * values[e]
                if is_inside:
                    squares[half] += total
            for chunk in cutlass.range_constexpr(self.outputs // 8):
                column = cute.make_rmem_tensor(WORDS, Int32)
                at_weight = chunk * 8 + lane // LANES_PER_ROW, step * self.copy_lanes + vector
                column.store(self._weight_words(weights, *at_weight).load())
                sums = cute.make_tensor(products.iterator + 4 * chunk, cute.make_layout(4))
                for s in cutlass.range_constexpr(WORDS // 2):
                    a = [rows[0][2 * s], rows[1][2 * s], rows[0][2 * s + 1], rows[1][2 * s + 1]]
                    mma.add(sums, a, [column[2 * s], column[2 * s + 1]])

    @cute.jit
    def _leave(self, problem: Projection, tile: Int32, products: cute.Tensor, squares: cute.Tensor):
        """Store a finished token tile's sums over this CTA's slice of columns in the workspace."""
        part, _, _ = cute.arch.block_idx()
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


def _exchanged(row: Int32, vector: Int32) -> Int32:
    """Return the position of a vector in its row of a stage. In odd rows, the halves of each 128 bytes are exchanged
    (`_copy`)."""
    return vector ^ (row % 2 * LANES_PER_ROW)


def trace(spec: MhcSpec) -> Traced:
    return traced(spec, Project(spec))
