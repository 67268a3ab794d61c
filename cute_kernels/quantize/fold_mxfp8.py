"""Folding of weights to MXFP8: a weight is quantised in blocks of 32 along the contraction, then rescaled so that each
whole row of the result has one scale, a power of two.

An element is rounded twice. First it is rounded to E4M3 with its block's scale, as the quantiser does. Then it is
rounded again, when it is rescaled from its block's power of two to its row's. The row's scale is the least power of two
with which the row's largest quantised element is at most 448. Quantising keeps the order of numbers, so the row's
largest magnitude alone determines this scale. So a first pass over a row takes maxima, and a second pass quantises and
rescales each block.

    row    w [R, C] to data [R, C]. 1 to 8 warps share a row, as few as can hold it in registers, 8 vectors of 16 bytes
           a thread. The part of a longer row that does not fit is read again, from L1 or L2.
    col    w [E, N, K] to data [E, K, N], along N. A CTA takes 128 bytes of an expert's columns and walks down N twice,
           the second time from the end, which L2 may still hold. A warp takes 32 rows, a block of each column. A thread
           reads 8 rows by 16 bytes and writes 8 bytes of each column; four threads write a sector, 32 bytes.

Let `width` be the bytes of an element of w, 2 or 4. By rows, a call moves R C (width + 1) bytes. By columns it moves R
C (2 width + 1) bytes (R C elements of w), less what L2 still holds.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils
from cutlass import Boolean, Float8E4M3FN, Float16, Float32, Int32, Int64, Uint8

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.select import select
from ..device.warps import WARP
from ..formats import MXFP8
from ..specs import FoldMxfp8Spec
from ..tracing import DTYPES, Traced, traced
from .scales import E8M0_INF, Magnitudes, exponent_of, multiplier_of
from .tile import VECTOR_BYTES, WORDS

BLOCK = MXFP8.block
WARPS = 8
THREADS = WARPS * WARP
MIN_BLOCKS = 3  # CTAs of an SM: 24 warps, up to 4 KB of loads each; 80 registers a thread
HELD = 8  # vectors of a row in a thread's registers
SMEM_PERCENT = 7  # 16 of 228 KB, of which CTAs use 6; the rest is L1, from which a row or strip is read again
UNIT_EXPONENT = 127
FOUR = 4  # E4M3 numbers in a word
STRIP_LANES = 8  # threads side by side: 128 bytes of a row
SLOTS = WARP // STRIP_LANES
RUN = BLOCK // SLOTS  # rows of a block that a thread has


def quantised_max(amax: Float32) -> Float32:
    """Return the E4M3 element to which a block's greatest magnitude, amax, is quantised. The element is returned as
    float32, without the block's scale."""
    pair = cute.make_rmem_tensor(FOUR, Float32)
    pair.fill(amax * multiplier_of(exponent_of(amax)))
    quantised = cute.make_rmem_tensor(FOUR, Float8E4M3FN)
    quantised.store(pair.load().to(Float8E4M3FN))
    return Float32(quantised.load().to(Float32)[0])


def row_exponent(amax: Float32) -> Int32:
    """Return the biased exponent, 0 .. 0xFE, of the scale of a row whose greatest magnitude is amax."""
    excess = exponent_of(quantised_max(amax)) - UNIT_EXPONENT
    return cutlass.min(cutlass.max(exponent_of(amax) + excess, Int32(0)), Int32(E8M0_INF))


def shift_of(exponent: Int32, target: Int32) -> Int32:
    """Return the factor 2^(exponent - target), which rescales a block's elements to its row's scale, as two equal
    float16 numbers in a word.

    exponent, target: biased exponents of the block's scale and of the row's scale.

    Two cases need no exact factor. A factor below 2^-24 becomes 0, since its products would be below half of E4M3's
    least number anyway. If the block's scale is NaN, the factor does not matter, since all elements of the block are
    NaN.
    """
    power = (cutlass.max(exponent - target + UNIT_EXPONENT, Int32(0)) << 23).bitcast(Float32)
    pair = cute.make_rmem_tensor(2, Float16)
    pair.fill(power.to(Float16))
    return Int32(cute.recast_tensor(pair, Int32)[0])


def fold_four(numbers: cute.Tensor, factor: Int32) -> Int32:
    """Round four float32 numbers to E4M3, multiply them by `factor`, and round to E4M3 again. Return the four bytes.

    The product is exact, except where it becomes 0. Rounding is to nearest even, saturating; NaN becomes E4M3's NaN.

    factor: the power of two that rescales a block to its row's scale, as two equal float16 numbers (`shift_of`).
    """
    ptx = """{
    .reg .b16 low, high; .reg .b32 first, second;
    cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};
    cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2};
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    mul.rn.f16x2 first, first, {$r4};
    mul.rn.f16x2 second, second, {$r4};
    cvt.rn.satfinite.e4m3x2.f16x2 low, first;
    cvt.rn.satfinite.e4m3x2.f16x2 high, second;
    mov.b32 {$w0}, {low, high};
    }"""
    four = [numbers[i] for i in range(FOUR)]
    return Int32(cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[*four, factor]))


class FoldMxfp8(Invariant):
    """Base of the kernels that fold a weight w to MXFP8, with one scale for each row or each column.

    w is bfloat16, float16 or float32, and is read in vectors of 16 bytes.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric]):
        self.name = name
        self.dtype = dtype
        self.magnitudes = Magnitudes(dtype)
        self.vector = VECTOR_BYTES * 8 // dtype.width

    def _load(self, address: Int64, values: cute.Tensor) -> None:
        pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=VECTOR_BYTES)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(self.vector)), values)

    def _max_into(self, maxima: cute.Tensor, words: cute.Tensor) -> None:
        for j in range(WORDS):
            maxima[j] = self.magnitudes.max(maxima[j], self.magnitudes.absolute(words[j]))

    def _store_words(self, words: cute.Tensor, address: Int64) -> None:
        count = cute.size(words)
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4 * count)
        cute.autovec_copy(words, cute.make_tensor(pointer, cute.make_layout(count)))


class Span(NamedTuple):
    """Vectors of a row that one thread handles. They begin at columns `column`, `column` + `step`, ..., all below
    `columns`.

    w, data: addresses of the row in the weight w [R, C] and in the result data [R, C].
    """

    w: Int64
    data: Int64
    column: Int32
    step: Int32
    columns: Int32


class FoldRows(FoldMxfp8):
    """Kernel that folds w [R, C] to data [R, C] and scale bytes [R]."""

    @cute.jit
    def launch(self, w: cute.Tensor, data: cute.Tensor, scale: Int64, stream: cuda.CUstream):
        """Launch the kernel. The number of warps for each row is a power of two: the least with which registers can
        hold the row, but at most 8."""
        name_kernel(self.kernel, self.name)
        held = WARP * HELD * self.vector
        warps_a_row = Int32(1)
        for power in cutlass.range_constexpr(3):
            if w.shape[1] > held << power:
                warps_a_row = Int32(2 << power)
        self.kernel(w, data, scale, warps_a_row).launch(
            grid=(cute.ceil_div(w.shape[0], WARPS // warps_a_row), 1, 1), block=(THREADS, 1, 1),
            min_blocks_per_mp=MIN_BLOCKS, preferred_smem_carveout=SMEM_PERCENT, stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, w: cute.Tensor, data: cute.Tensor, scale: Int64, warps_a_row: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = thread // WARP
        row = block * (WARPS // warps_a_row) + warp // warps_a_row
        lane = warp % warps_a_row * WARP + thread % WARP
        columns = select(row < w.shape[0], Int32(w.shape[1]), Int32(0))
        span = Span(
            w.iterator.toint() + Int64(row) * w.stride[0] * (self.dtype.width // 8),
            data.iterator.toint() + Int64(row) * w.shape[1],
            lane * self.vector, warps_a_row * WARP * self.vector, columns,
        )  # fmt: skip
        chunk = span.step * HELD
        chunks = cute.ceil_div(columns, chunk)

        maxima = cute.make_rmem_tensor(WORDS, Int32)
        maxima.fill(0)
        held = self._load_chunk(span, Int32(0))
        self._max_of(held, maxima)
        for n in cutlass.range(1, chunks, unroll=1):
            self._max_of(self._load_chunk(span, n * chunk), maxima)
        target = row_exponent(self._row_max(maxima, warps_a_row))
        if (lane == 0) & (row < w.shape[0]):
            vector_at(Uint8, scale + row)[0] = Uint8(target)

        self._fold_chunk(span, Int32(0), held, target)
        for n in cutlass.range(1, chunks, unroll=1):
            self._fold_chunk(span, n * chunk, self._load_chunk(span, n * chunk), target)

    @cute.jit
    def _load_chunk(self, span: Span, first: Int32) -> cute.Tensor:
        """Load this thread's HELD vectors of a chunk of the row; zeros past the row's end. A chunk is the columns that
        the threads of a row load at once.

        Args:
            span: the thread's vectors of the row.
            first: the column at which the chunk begins.
        """
        values = cute.make_rmem_tensor((self.vector, HELD), self.dtype)
        values.fill(0.0)
        for i in cutlass.range_constexpr(HELD):
            column = first + span.column + i * span.step
            if column < span.columns:
                self._load(span.w + Int64(column) * (self.dtype.width // 8), values[None, i])
        return values

    def _max_of(self, values: cute.Tensor, maxima: cute.Tensor) -> None:
        words = cute.recast_tensor(values, Int32)
        for i in range(HELD):
            self._max_into(maxima, words[None, i])

    @cute.jit
    def _row_max(self, maxima: cute.Tensor, warps_a_row: Int32) -> Float32:
        """Return the row's greatest magnitude, in all threads that share the row.

        Args:
            maxima: this thread's maxima, as words (`Magnitudes`).
            warps_a_row: number of warps that share the row.
        """
        thread, _, _ = cute.arch.thread_idx()
        warp = thread // WARP
        shared = cutlass.utils.SmemAllocator().allocate_tensor(Int32, cute.make_layout(WARPS), 16)
        mine = self._greatest(maxima).bitcast(Int32)
        shared[warp] = Int32(cute.arch.warp_redux_sync(mine, "max"))
        cute.arch.sync_threads()
        first = warp // warps_a_row * warps_a_row
        result = Int32(0)
        for other in cutlass.range_constexpr(WARPS):
            if (other >= first) & (other < first + warps_a_row):
                result = cutlass.max(result, shared[other])
        return result.bitcast(Float32)

    def _greatest(self, maxima: cute.Tensor) -> Float32:
        """Return the greatest magnitude of a thread's WORDS words, as float32. The words are compared as integers,
        which have the same order as the numbers."""
        word = maxima[0]
        for j in range(1, WORDS):
            word = self.magnitudes.max(word, maxima[j])
        return self.magnitudes.greatest(word)

    @cute.jit
    def _fold_chunk(self, span: Span, first: Int32, values: cute.Tensor, target: Int32):
        for i in cutlass.range_constexpr(HELD):
            column = first + span.column + i * span.step
            if first + i * span.step < span.columns:  # all lanes of a warp take part in the shuffles
                exponent = exponent_of(self._block_max(values[None, i]))
                numbers = cute.make_rmem_tensor(self.vector, Float32)
                numbers.store(values[None, i].load().to(Float32) * multiplier_of(exponent))
                fours = cute.logical_divide(numbers, cute.make_layout(FOUR))
                folded = cute.make_rmem_tensor(self.vector // FOUR, Int32)
                factor = shift_of(exponent, target)
                for j in cutlass.range_constexpr(self.vector // FOUR):
                    folded[j] = fold_four(fours[None, j], factor)
                if column < span.columns:
                    self._store_words(folded, span.data + column)

    def _block_max(self, values: cute.Tensor) -> Float32:
        """Return the greatest magnitude of the block that holds this thread's 16 bytes."""
        words = cute.recast_tensor(values, Int32)
        kind = self.magnitudes
        word = kind.absolute(words[0])
        for j in range(1, WORDS):
            word = kind.max(word, kind.absolute(words[j]))
        distance = 1
        while distance < BLOCK // self.vector:
            word = kind.max(word, cute.arch.shuffle_sync_bfly(word, distance))
            distance *= 2
        return kind.greatest(word)


class Strip(NamedTuple):
    """A thread's columns of a weight.

    Attributes:
        w: the address of the thread's vector in its first row of block 0.
        row_bytes: bytes from row to row.
        inside: False if the columns are past the weight's last.
    """

    w: Int64
    row_bytes: Int64
    inside: Boolean


class FoldColumns(FoldMxfp8):
    """Kernel that folds w [E, N, K] along N. The result is transposed: data [E, K, N] and scale bytes [E, K]."""

    @cute.jit
    def launch(self, w: cute.Tensor, data: cute.Tensor, scale: Int64, stream: cuda.CUstream):
        """Launch one CTA for each strip of 128 bytes of columns. CTAs of an expert have neighbouring indices, since
        they read the same pages of memory."""
        name_kernel(self.kernel, self.name)
        strips = cute.ceil_div(w.shape[2], STRIP_LANES * self.vector) * w.shape[0]
        self.kernel(w, data, scale).launch(
            grid=(strips, 1, 1), block=(THREADS, 1, 1),
            min_blocks_per_mp=MIN_BLOCKS, preferred_smem_carveout=SMEM_PERCENT, stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, w: cute.Tensor, data: cute.Tensor, scale: Int64):
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        warp, lane = thread // WARP, thread % STRIP_LANES
        strips = cute.ceil_div(w.shape[2], STRIP_LANES * self.vector)
        expert = index // strips
        column = (index % strips * STRIP_LANES + lane) * self.vector
        row = thread % WARP // STRIP_LANES * RUN
        row_bytes = Int64(w.shape[2]) * (self.dtype.width // 8)
        first = w.iterator.toint() + Int64(expert) * w.stride[0] * (self.dtype.width // 8)
        strip = Strip(
            first + row * row_bytes + column * (self.dtype.width // 8), row_bytes, column < w.shape[2]
        )  # fmt: skip
        blocks = Int32(w.shape[1] // BLOCK)

        maxima = cute.make_rmem_tensor(WORDS, Int32)
        maxima.fill(0)
        for block in cutlass.range(warp, blocks, WARPS, unroll=1):
            self._max_of(self._load_block(strip, block), maxima)
        targets = self._column_targets(maxima)
        if (thread < STRIP_LANES) & strip.inside:
            at = scale + Int64(expert) * w.shape[2] + column
            for c in cutlass.range_constexpr(self.vector):
                vector_at(Uint8, at + c)[0] = Uint8(targets[c])

        out = data.iterator.toint() + Int64(expert) * data.stride[0] + Int64(column) * w.shape[1] + row
        turns = (blocks - warp + WARPS - 1) // WARPS
        for turn in cutlass.range(turns, unroll=1):
            block = (turns - 1 - turn) * WARPS + warp
            values = self._load_block(strip, block)
            self._fold_block(values, targets, out + block * BLOCK, w.shape[1], strip.inside)

    @cute.jit
    def _load_block(self, strip: Strip, block: Int32) -> cute.Tensor:
        """Load this thread's RUN rows of block number `block` (32 rows), in the thread's vector of columns; zeros past
        the last column."""
        values = cute.make_rmem_tensor((self.vector, RUN), self.dtype)
        values.fill(0.0)
        if strip.inside:
            first = strip.w + block * (strip.row_bytes * BLOCK)
            for i in cutlass.range_constexpr(RUN):
                self._load(first + i * strip.row_bytes, values[None, i])
        return values

    def _max_of(self, values: cute.Tensor, maxima: cute.Tensor) -> None:
        words = cute.recast_tensor(values, Int32)
        for i in range(RUN):
            self._max_into(maxima, words[None, i])

    def _max_over_slots(self, maxima: cute.Tensor) -> None:
        for distance in (STRIP_LANES, 2 * STRIP_LANES):
            for j in range(WORDS):
                maxima[j] = self.magnitudes.max(maxima[j], cute.arch.shuffle_sync_bfly(maxima[j], distance))

    @cute.jit
    def _column_targets(self, maxima: cute.Tensor) -> cute.Tensor:
        """Return the biased exponents of the scales of the thread's columns.

        Threads of the same columns exchange their maxima by shuffles and through shared memory.

        maxima: each column's greatest magnitude in the thread's rows, as words (`Magnitudes`).
        """
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % STRIP_LANES
        shared = cutlass.utils.SmemAllocator().allocate_tensor(
            Int32, cute.make_layout((WORDS, STRIP_LANES, WARPS)), VECTOR_BYTES
        )
        self._max_over_slots(maxima)
        if thread % WARP < STRIP_LANES:
            cute.autovec_copy(maxima, shared[None, lane, thread // WARP])
        cute.arch.sync_threads()
        columns = cute.make_rmem_tensor(self.vector, self.dtype)
        words = cute.recast_tensor(columns, Int32)
        words.fill(0)
        others = cute.make_rmem_tensor(WORDS, Int32)
        for warp in cutlass.range_constexpr(WARPS):
            cute.autovec_copy(shared[None, lane, warp], others)
            self._max_into(words, others)
        targets = cute.make_rmem_tensor(self.vector, Int32)
        for c in cutlass.range_constexpr(self.vector):
            targets[c] = row_exponent(columns[c].to(Float32))
        return targets

    @cute.jit
    def _fold_block(self, values: cute.Tensor, targets: cute.Tensor, out: Int64, pitch: Int32, inside: Boolean):
        """Quantise a block of 32 rows, rescale each column to its exponent in `targets`, and store the block.

        Args:
            values: the thread's elements of the block (`_load_block`).
            targets: the biased exponents of the scales of the thread's columns.
            out: the address, in the transposed result, of this thread's rows of its first column.
            pitch: bytes from column to column in the result.
            inside: False if the columns are past the weight's last.
        """
        columns = cute.make_rmem_tensor(self.vector, self.dtype)
        maxima = cute.recast_tensor(columns, Int32)
        maxima.fill(0)
        self._max_of(values, maxima)
        self._max_over_slots(maxima)
        for c in cutlass.range_constexpr(self.vector):
            exponent = exponent_of(columns[c].to(Float32))
            numbers = cute.make_rmem_tensor(RUN, Float32)
            multiplier = multiplier_of(exponent)
            for i in cutlass.range_constexpr(RUN):
                numbers[i] = values[c, i].to(Float32) * multiplier
            fours = cute.logical_divide(numbers, cute.make_layout(FOUR))
            folded = cute.make_rmem_tensor(RUN // FOUR, Int32)
            factor = shift_of(exponent, targets[c])
            for j in cutlass.range_constexpr(RUN // FOUR):
                folded[j] = fold_four(fours[None, j], factor)
            if inside:
                self._store_words(folded, out + Int64(c) * pitch)


class Fold:
    """Host function that folds a weight to MXFP8: launches FoldRows or, with axis "col", FoldColumns."""

    def __init__(self, spec: FoldMxfp8Spec):
        kernel = FoldRows if spec.axis == "row" else FoldColumns
        self.fold = kernel(spec.name, DTYPES[spec.dtype])

    @cute.jit
    def __call__(self, w: cute.Tensor, data: cute.Tensor, scale: Int64, stream: cuda.CUstream):
        if w.shape[0] > 0:
            self.fold.launch(w, data, scale, stream)


def trace(spec: FoldMxfp8Spec) -> Traced:
    return traced(spec, Fold(spec))
