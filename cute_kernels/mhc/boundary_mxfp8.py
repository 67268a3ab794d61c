"""The second kernel of a boundary's forward (boundary_finish.py) if x is wanted in MXFP8: E4M3 elements and E8M0
scales.

A boundary lies between two sublayers (boundary.py). u [T, D] is the mix of the residual streams after the first
sublayer, and x = RMS norm of u = u r norm_weight is the input of the second one. Here r is 1 / (root mean square of the
token's u).

A thread has 8 columns of u. It makes x in the streams' dtype from them, then quantises x, so the result has the same
bytes as `quantize_mxfp8` of x. Threads of the same block of 32 or 128 columns are neighbouring lanes; they exchange
magnitudes by shuffles. A row's scales are collected in shared memory before they are stored. Otherwise a warp would
store 8 bytes of scales at a time, and storing less than a sector (32 bytes) costs as much as storing two sectors.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, Uint8

from ..device.gmem import UNBOUNDED, vector_at
from ..device.select import select
from ..device.vectors import VECTOR_BYTES, elements, floats, load_params, load_vector, run_at, store_vector
from ..device.warps import WARP
from ..quantize.e4m3 import to_e4m3
from ..quantize.scales import Magnitudes, exponent_of, multiplier_of
from .boundary_finish import FINISH_WARPS, THREADS, BoundaryFinish, Finished
from .boundary_shapes import SCALE_COLUMNS, WIDE_COLUMNS

READS = 4
"""Vectors of u that a thread loads before it uses the first."""
WORDS = VECTOR_BYTES // 4
WORD_SCALES = 4


class FinishInMxfp8(BoundaryFinish):
    """Second kernel of `boundary`, forward, if x is wanted in MXFP8: the next sublayer's input as E4M3 elements and
    E8M0 scales. It makes the coefficients of the next boundary, as `BoundaryFinish` does, x in MXFP8 and, if wanted,
    also x in 16 bits."""

    def __init__(self, name: str, dtype: type[cutlass.Numeric], n: int):
        super().__init__(name, dtype, n)
        self.count = elements(dtype)
        self.magnitudes = Magnitudes(dtype)

    def smem_bytes(self, width: Int32) -> Int32:
        return super().smem_bytes(width) + cute.round_up(width // SCALE_COLUMNS, VECTOR_BYTES)

    @cute.jit
    def _norm(self, finished: Finished, token: Int32, width: Int32, r: Float32):
        """Make x = u r norm_weight; store it in MXFP8 and, if wanted, in 16 bits.

        Args:
            width: D.
            r: the factor of the norm, 1 / (root mean square of u).
        """
        thread, _, _ = cute.arch.thread_idx()
        vectors = width // self.count
        sums = cute.arch.get_dyn_smem(Float32, alignment=16)
        after_sums = cute.recast_ptr(sums + WARP * FINISH_WARPS, dtype=Uint8)
        scales = cute.make_tensor(after_sums, cute.make_layout(UNBOUNDED))
        for first in cutlass.range(0, vectors, THREADS * READS, unroll=1):
            mixes = [cute.make_rmem_tensor(self.count, self.dtype) for _ in range(READS)]
            weights = []
            for i in cutlass.range_constexpr(READS):
                vector = first + i * THREADS + thread
                mixes[i].fill(0.0)
                if vector < vectors:
                    mixes[i].store(load_vector(self.dtype, finished.u, Int64(token) * vectors + vector).load())
                column = Int64(cutlass.min(vector, vectors - 1)) * self.count
                weights.append(load_params(finished.norm_weight, finished.norm_code, column, self.count))
            for i in cutlass.range_constexpr(READS):
                made = cute.make_rmem_tensor(self.count, Float32)
                made.store(floats(mixes[i]).load() * r * weights[i].load())
                self._store(finished, token, first + i * THREADS + thread, vectors, made, scales)
        cute.arch.sync_threads()
        self._store_scales(finished, token, width // SCALE_COLUMNS, scales)

    @cute.jit
    def _store(
        self, finished: Finished, token: Int32, vector: Int32, vectors: Int32, made: cute.Tensor, scales: cute.Tensor
    ):  # fmt: skip
        """Store a thread's vector of x, and write its block's scale to shared memory.

        All lanes of a warp call this. Vectors after the last are not stored and count as zeros.

        Args:
            vector: number of the vector in the token's row.
            vectors: number of vectors of a row.
            made: the vector of x, float32.
            scales: the scales of the token's row in shared memory.
        """
        is_inside = vector < vectors
        at = Int64(token) * vectors + vector
        if (finished.x != 0) & is_inside:
            store_vector(self.dtype, finished.x, at, made)
        narrow = cute.make_rmem_tensor(self.count, self.dtype)
        narrow.store(made.load().to(self.dtype))
        exponent = self._exponent(cute.recast_tensor(narrow, Int32), is_inside, finished.x_block)
        data = to_e4m3(narrow.load().to(Float32) * multiplier_of(exponent), self.count)
        if is_inside:
            run_at(Float8E4M3FN, finished.x_data, at * self.count, self.count).store(data.load())
            if vector % (SCALE_COLUMNS // self.count) == 0:
                scales[vector // (SCALE_COLUMNS // self.count)] = Uint8(exponent)

    @cute.jit
    def _exponent(self, words: cute.Tensor, is_inside: Boolean, block: Int32) -> Int32:
        """Return the scale byte of the block to which this thread's vector of x belongs. words: the vector, as 32-bit
        words.

        Args:
            is_inside: False: the vector is after the row's last; it counts as zeros.
            block: number of columns that share a scale, 32 or 128.
        """
        kind = self.magnitudes
        most = kind.absolute(words[0])
        for j in cutlass.range_constexpr(1, WORDS):
            most = kind.max(most, kind.absolute(words[j]))
        most = self._max_over_lanes(select(is_inside, most, Int32(0)), 1, SCALE_COLUMNS // self.count)
        if block == WIDE_COLUMNS:
            most = self._max_over_lanes(most, SCALE_COLUMNS // self.count, WIDE_COLUMNS // self.count)
        return exponent_of(kind.greatest(most))

    def _max_over_lanes(self, most: Int32, first: int, beyond: int) -> Int32:
        """Return the greatest `most` (a word of magnitudes) over a group of lanes. The group is all lanes whose index
        differs from this lane's only in the bits first, 2 first, ... below `beyond`."""
        distance = first
        while distance < beyond:
            most = self.magnitudes.max(most, cute.arch.shuffle_sync_bfly(most, distance))
            distance *= 2
        return most

    @cute.jit
    def _store_scales(self, finished: Finished, token: Int32, count: Int32, scales: cute.Tensor):
        """Store a token's scales. A thread stores four scales at once if rows of scales begin at multiples of 4 bytes,
        otherwise one.

        Args:
            count: number of scales of a token.
            scales: the scales in shared memory.
        """
        thread, _, _ = cute.arch.thread_idx()
        row = finished.x_scale + Int64(token) * count
        if count % WORD_SCALES == 0:
            words = cute.recast_tensor(scales, Int32)
            for word in cutlass.range(thread, count // WORD_SCALES, THREADS):
                vector_at(Int32, row)[word] = words[word]
        else:
            for byte in cutlass.range(thread, count, THREADS):
                vector_at(Uint8, row)[byte] = scales[byte]
