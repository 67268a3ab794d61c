"""A token tile's columns of streams and gradients in shared memory, as the boundary's backward reads and writes them.

A stage holds 16 tokens of 2n + 2 arrays: the n streams, the n gradients of the updated streams, y and d_x. After these
lies the tile's block (`boundary_backward_shapes.block_bytes`). The kernel overwrites the gradients of the updated
streams with their totals, and d_x with the gradient of the mix.

A row's vectors of 16 bytes lie in an order that depends on the row and on the stream. With it copies of whole rows,
accesses of 8 bytes (four rows, two neighbouring vectors each), and 8 x 8 matrices of one vector of 8 tokens, or of two
tokens' four streams, all use all banks.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..device.invariant import Invariant
from ..device.vectors import floats, shared_at
from .boundary_backward_shapes import SliceCta, block_bytes, coefficient_floats, dp_bytes
from .shapes import TOKEN_TILE

LANES = 32
WORDS = 4  # of a vector
PAIR_WORDS = 2
COLUMNS = 4  # of a lane, 8 bytes
APART = (0, 1, 4, 5)
"""A number for each stream, by which the order of its vectors differs from the other streams' orders."""


class BoundaryTile(Invariant):
    """Places in shared memory for n = 4 streams of a 16-bit dtype.

    Attributes:
        streams, gradients: numbers of the first stream and of the first gradient among a stage's arrays.
        y, d_x: numbers of y's and d_x's arrays.
    """

    def __init__(self, dtype: type[cutlass.Numeric], n: int, cta: SliceCta):
        if n > len(APART):
            raise ValueError(f"{n} streams: places are known for {len(APART)}")
        self.dtype = dtype
        self.ptx_type = "bf16" if dtype is cutlass.BFloat16 else "f16"
        self.n = n
        self.warps, self.stages = cta.warps, cta.stages
        self.columns = cta.columns
        self.vectors = cta.columns * dtype.width // (8 * 16)
        self.array_words = cta.array_bytes // 4
        self.streams, self.gradients, self.y, self.d_x = 0, n, 2 * n, 2 * n + 1
        self.arrays = 2 * n + 2
        self.block_words = block_bytes(n) // 4
        self.pitch = coefficient_floats(n)
        self.records = 2 * dp_bytes(n) // 4  # where a block's records begin
        self.stage_words = self.arrays * self.array_words + self.block_words

    def word(self, row: Int32, vector: Int32, stream: Int32 | int = 0) -> Int32:
        """Return the offset, in words, of a vector of a row within its array. stream: the stream's number, if the array
        is that of a stream or of its gradient."""
        apart = APART[stream] if isinstance(stream, int) else stream % 2 + stream // 2 * 4
        return (row * self.vectors + (vector ^ (row % 4 * 2 + row // 4 % 2 ^ apart))) * WORDS

    def mine(self) -> Int32:
        """Return the offset, in words, of a lane's first 8 bytes within an array: COLUMNS columns of token lane / 4.
        Those of token lane / 4 + 8 lie `half_words` further; of stream j at this offset ^ (APART[j] * WORDS)."""
        lane, warp = cute.arch.lane_idx(), self.warp()
        return self.word(lane // 4, warp * 2 + lane % 4 // 2) + lane % 2 * PAIR_WORDS

    @property
    def half_words(self) -> int:
        return TOKEN_TILE // 2 * self.vectors * WORDS

    def warp(self) -> Int32:
        thread, _, _ = cute.arch.thread_idx()
        return cute.arch.make_warp_uniform(thread // LANES)

    def numbers(self, array: cute.Pointer, offset: Int32) -> cute.Tensor:
        """Return the COLUMNS numbers at an offset of an array as float32."""
        words = cute.make_rmem_tensor(PAIR_WORDS, Int32)
        words.store(shared_at(Int32, array + offset, PAIR_WORDS).load())
        return self.widened(words)

    def widened(self, words: cute.Tensor) -> cute.Tensor:
        """Return COLUMNS numbers of the streams' dtype, in words, as float32."""
        if const_expr(self.dtype is not cutlass.BFloat16):
            return floats(cute.recast_tensor(words, self.dtype))
        # A word's upper half takes one instruction; the compiler's conversion takes two.
        values = cute.make_rmem_tensor(COLUMNS, Float32)
        bits = cute.recast_tensor(values, Int32)
        for i in range(PAIR_WORDS):
            bits[2 * i], bits[2 * i + 1] = words[i] << 16, words[i] & -(1 << 16)
        return values

    def rounded(self, values: cute.Tensor) -> cute.Tensor:
        """Round COLUMNS float32 registers to the streams' dtype, and return them as words.

        Two numbers take one instruction. The compiler's conversion, of numbers that are widened again, takes two from a
        slower pipe and one to join them.
        """
        words = cute.make_rmem_tensor(PAIR_WORDS, Int32)
        for i in range(PAIR_WORDS):
            words[i] = cute.arch.inline_ptx(
                f"cvt.rn.{self.ptx_type}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};",
                write_only_types=[Int32],
                read_only_args=[values[2 * i], values[2 * i + 1]],
            )
        return words

    def keep(self, array: cute.Pointer, offset: Int32, words: cute.Tensor) -> None:
        """Store COLUMNS numbers of the streams' dtype at an offset of an array."""
        shared_at(Int32, array + offset, PAIR_WORDS).store(words.load())

    def record(self, stage: cute.Pointer, row: Int32) -> list:
        """Return a token's record as lists of float32 numbers: comb by made stream (n lists), post, pre, and r, factor
        and f (`boundary_tokens.py`)."""
        start = stage + (self.arrays * self.array_words + self.records) + row * self.pitch
        found = []
        for place in range(self.pitch // 4):
            values = cute.make_rmem_tensor(4, Float32)
            values.store(shared_at(Float32, start + 4 * place, 4).load())
            found.append([values[i] for i in range(4)])
        return found
