"""A token tile's columns of several arrays in shared memory, as the boundary's kernels copy, read and write them.

An array holds 16 tokens of a matrix [T, D], of one of n residual streams (D columns each), or of a stream's gradient.
It has a slice of the D columns: 16 columns for each warp of the CTA. Arrays of streams come first.

Vectors of 16 bytes are permuted within a row, by a function of the row and of the stream. With this order, each of the
following uses all banks:

- copies of whole rows;
- accesses of 8 bytes (four rows, two neighbouring vectors each);
- 8 x 8 matrices of one vector of 8 tokens, or of two tokens' four streams.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from ..device.gmem import bytes_if, copy_chunk
from ..device.invariant import Invariant
from ..device.vectors import elements, floats, run_at, shared_at
from ..device.warps import WARP
from .boundary_shapes import ITEMSIZE, WARP_COLUMNS, SliceCta, tiles_of
from .shapes import TOKEN_TILE

WORDS = 4  # of a vector
PAIR_WORDS = 2
COLUMNS = 4  # of a lane, 8 bytes
APART = (0, 1, 4, 5)
"""For each stream, the number that is XORed into the index of its vectors, so that the order of vectors differs from
stream to stream."""


class Place(NamedTuple):
    """The place of the 16 bytes that a thread copies for a tile, in each array.

    Attributes:
        row, vector: the token's number in the tile, and the number of the vector in the slice.
        at_token, at_streams: bytes before the vector in an array [T, D], and in stream 0 of an array [T, n, D].
        row_bytes: bytes from stream to stream.
        is_token, is_column: True if the token, and the column, exist.
    """

    row: Int32
    vector: Int32
    at_token: Int64
    at_streams: Int64
    row_bytes: Int32
    is_token: Boolean
    is_column: Boolean


class SliceTile(Invariant):
    """Arrays of one stage, for n = 4 streams of a 16-bit dtype. The CTA has one thread for each vector of an array;
    this thread copies the same vector of all arrays.

    Attributes:
        arrays: number of arrays.
        array_words: 32-bit words of an array.
        stage_words: 32-bit words of a stage, which has `extra_words` words after its arrays.
    """

    def __init__(self, dtype: type[cutlass.Numeric], n: int, cta: SliceCta, arrays: int, extra_words: int):
        if n > len(APART):
            raise ValueError(f"{n} streams: places are known for {len(APART)}")
        self.dtype = dtype
        self.ptx_type = "bf16" if dtype is cutlass.BFloat16 else "f16"
        self.n = n
        self.warps, self.stages = cta.warps, cta.stages
        self.columns = cta.columns
        self.vectors = cta.columns * dtype.width // (8 * 16)
        self.arrays = arrays
        self.array_words = cta.array_bytes // 4
        self.stage_words = arrays * self.array_words + extra_words

    def word(self, row: Int32, vector: Int32, stream: Int32 | int = 0) -> Int32:
        """Return the offset, in words, of a vector (16 bytes) from the start of its array.

        Args:
            row: the vector's row (token) in the tile.
            vector: the number of the vector in its row.
            stream: the stream's number, if the array holds a stream or a stream's gradient; otherwise 0.
        """
        apart = APART[stream] if isinstance(stream, int) else stream % 2 + stream // 2 * 4
        return (row * self.vectors + (vector ^ (row % 4 * 2 + row // 4 % 2 ^ apart))) * WORDS

    def mine(self) -> Int32:
        """Return where this lane's 8 bytes (COLUMNS columns) of token lane / 4 lie in an array, as an offset in words.

        The lane's 8 bytes of token lane / 4 + 8 lie `half_words` further. In the array of stream j, both offsets are
        XORed with APART[j] * WORDS.
        """
        lane, warp = cute.arch.lane_idx(), self.warp()
        return self.word(lane // 4, warp * 2 + lane % 4 // 2) + lane % 2 * PAIR_WORDS

    @property
    def half_words(self) -> int:
        return TOKEN_TILE // 2 * self.vectors * WORDS

    def warp(self) -> Int32:
        thread, _, _ = cute.arch.thread_idx()
        return cute.arch.make_warp_uniform(thread // WARP)

    def first_column(self) -> Int32:
        """Return the index of this lane's first column in the CTA's slice."""
        return self.warp() * WARP_COLUMNS + cute.arch.lane_idx() % 4 * COLUMNS

    def array(self, stage: cute.Pointer, number: int) -> cute.Pointer:
        return stage + number * self.array_words

    def numbers(self, array: cute.Pointer, offset: Int32) -> cute.Tensor:
        """Return the COLUMNS numbers at an offset of an array, as float32."""
        words = cute.make_rmem_tensor(PAIR_WORDS, Int32)
        words.store(shared_at(Int32, array + offset, PAIR_WORDS).load())
        return self.widened(words)

    def widened(self, words: cute.Tensor) -> cute.Tensor:
        """Convert COLUMNS numbers of the streams' dtype, held in words, to float32."""
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

        One instruction converts two numbers. The compiler's own conversion is slower if the numbers are widened again:
        it takes two instructions of a slower pipe, and one to join the numbers.
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

    def updated(self, streams: list, y: cute.Tensor, comb: list, post: list) -> list:
        """Compute the updated streams: stream j becomes post_j y + the sum over i of comb_ij streams_i.

        Args:
            streams: for each stream, the lane's COLUMNS numbers of it, float32.
            y: COLUMNS float32 numbers of y, the sublayer's output, at the same columns.
            comb, post: the token's coefficients (boundary.py). comb[i][j] is comb_ij; post has one number for each
                stream.

        Returns:
            For each stream, its COLUMNS numbers in the streams' 16-bit dtype, as PAIR_WORDS words of two (`rounded`).
        """
        made = [cute.make_rmem_tensor(COLUMNS, Float32) for _ in range(self.n)]
        for j in range(self.n):
            made[j].store(y.load() * post[j])
        for i in range(self.n):
            for j in range(self.n):
                made[j].store(made[j].load() + streams[i].load() * comb[i][j])
        return [self.rounded(one) for one in made]

    def span(self, tokens: Int32) -> tuple[Int32, Int32]:
        """Return the range of token tiles of this CTA's part of the tokens: the first tile, and the tile after the
        last. The grid has slices along x, parts along y."""
        _, part, _ = cute.arch.block_idx()
        _, parts, _ = cute.arch.grid_dim()
        tiles = tiles_of(tokens)
        per_part = cute.ceil_div(tiles, parts)
        return part * per_part, cutlass.min(part * per_part + per_part, tiles)

    def place(self, start: Int32, number: Int32, tokens: Int32, width: Int32) -> Place:
        """Return the place of the 16 bytes that this thread copies into each array for token tile `number`. Past the
        last token, it is the place of the last token's bytes.

        Args:
            start: the first column of the CTA's slice.
            width: D.
        """
        thread, _, _ = cute.arch.thread_idx()
        row, vector = thread // self.vectors, thread % self.vectors
        token, column = number * TOKEN_TILE + row, start + vector * elements(self.dtype)
        is_token, is_column = token < tokens, column < width
        token, bytes_ = Int64(cutlass.min(token, tokens - 1)), Int64(column * ITEMSIZE)
        row_bytes = width * ITEMSIZE
        at_streams = token * (row_bytes * self.n) + bytes_
        return Place(row, vector, token * row_bytes + bytes_, at_streams, row_bytes, is_token, is_column)

    def copy_streams(self, arrays: cute.Pointer, streams: Int64, place: Place, wanted: Boolean) -> None:
        """Start to copy a tile of `streams` (the address of [T, n, D]) to n arrays. Copy zeros instead if `wanted` is
        False."""
        count = bytes_if(wanted)
        for j in range(self.n):
            target = self.array(arrays, j) + self.word(place.row, place.vector, j)
            copy_chunk(target.toint(), (streams + Int64(j * place.row_bytes)) + place.at_streams, count)

    def copy_rows(self, array: cute.Pointer, rows: Int64, place: Place, wanted: Boolean) -> None:
        """Start to copy a tile of `rows` (the address of [T, D]) to an array. Copy zeros instead if `wanted` is
        False."""
        target = array + self.word(place.row, place.vector)
        copy_chunk(target.toint(), rows + place.at_token, bytes_if(wanted))

    def store_streams(self, arrays: cute.Pointer, streams: Int64, place: Place) -> None:
        """Store a tile of n arrays to `streams`, the address of [T, n, D]."""
        for j in range(self.n):
            source = self.array(arrays, j) + self.word(place.row, place.vector, j)
            address = (streams + Int64(j * place.row_bytes)) + place.at_streams
            run_at(Int32, address, Int64(0), WORDS).store(shared_at(Int32, source, WORDS).load())

    def store_rows(self, array: cute.Pointer, rows: Int64, place: Place) -> None:
        """Store a tile of an array to `rows`, the address of [T, D]."""
        source = array + self.word(place.row, place.vector)
        run_at(Int32, rows + place.at_token, Int64(0), WORDS).store(shared_at(Int32, source, WORDS).load())

    def vectors_at(self, place: cute.Pointer, count: int) -> list:
        """Return 4 * `count` float32 numbers in shared memory as `count` lists of 4."""
        found = []
        for number in range(count):
            values = cute.make_rmem_tensor(4, Float32)
            values.store(shared_at(Float32, place + 4 * number, 4).load())
            found.append([values[i] for i in range(4)])
        return found
