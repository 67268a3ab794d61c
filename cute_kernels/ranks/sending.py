"""Dispatch and combine over NVLink. A rank stores rows to other ranks' memory, then writes a word: a 64-bit message
(words.py) that says that the rows are there.

    send_tokens.py   dispatch. Sends token n to every rank that has one of its experts, to row [this rank, n] of that
                     rank's region `rows` (an MXFP8 token's scales to `scales`), and all choices (expert ids) and
                     weights to all ranks. Then waits for the tokens of all ranks.
    send_sums.py     combine. For every token n that another rank sent, sends the sum of the token's rows on this rank
                     back to row [this rank, n] of that rank's region `sums`. Then waits for the sums of all ranks.

windows.py describes the regions. A token's row in a region is given by its own index, so nothing is counted before the
first store, and rows lie in the same order in every run. A warp loads 2 KB of a row once and stores them to one rank
after the other. It begins with the next rank, so that no two ranks begin with the same one. Bytes over the link bound
the time: an H100 stores 349 GB/s.

The CTA that finishes last, found by an atomic counter (tickets), writes the words and waits for the other ranks' words.
All other CTAs end. A spinning grid would hold SMs that a kernel of another stream may need, and a peer may depend on
that kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.vectors import VECTOR_BYTES, run_at
from ..device.warps import WARP
from ..specs import LayerSpec
from ..tracing import DTYPES

THREADS = 256
WARPS = THREADS // WARP
UNROLL = 4  # vectors of a row that a thread loads at once
VECTOR_WORDS = VECTOR_BYTES // 4
CTAS_OF_SM = 2  # half of an SM's threads and registers, so that kernels of other streams find room while a CTA waits


class Sizes(NamedTuple):
    """Sizes of tokens and rows.

    Attributes:
        k: choices of a token.
        vectors: vectors of 16 bytes in a row.
        most: the most tokens of a rank.
    """

    k: Int32
    vectors: Int32
    most: Int32


class RowVectors(NamedTuple):
    """The vectors of a row that a lane handles at once. Their indices are first, first + WARP, ...: UNROLL vectors,
    fewer at the row's end.

    A vector may have any size.

    Attributes:
        first: the index of the lane's first vector.
        vectors: the row's number of vectors.
    """

    first: Int32
    vectors: Int32

    def vector(self, place: int) -> Int32:
        return self.first + place * WARP


def parts_of(vectors: Int32) -> Int32:
    """Return the number of parts of a row. A part is the UNROLL vectors of each lane that a warp sends at once."""
    return cute.ceil_div(vectors, UNROLL * WARP)


def part_of(number: Int32, vectors: Int32) -> RowVectors:
    """Return this lane's vectors of part number `number` of a row of `vectors` vectors."""
    return RowVectors(number * (UNROLL * WARP) + cute.arch.lane_idx(), vectors)


def _raw(address: Int64, vector: Int64, words: int) -> cute.Tensor:
    """Return a view of a vector in global memory: vector number `vector` after an address. A vector has `words` 32-bit
    words, whatever its dtype."""
    return run_at(Int32, address, vector * words, words)


@cute.jit
def load_part(address: Int64, part: RowVectors, words: cutlass.Constexpr[int]) -> cute.Tensor:
    """Load a lane's vectors of a row into registers [words, UNROLL].

    Args:
        address: the address of the row.
        part: the lane's vectors.
        words: 32-bit words of a vector.
    """
    raw = cute.make_rmem_tensor((words, UNROLL), Int32)
    for i in cutlass.range_constexpr(UNROLL):
        if part.vector(i) < part.vectors:
            raw[None, i].store(_raw(address, Int64(part.vector(i)), words).load())
    return raw


@cute.jit
def store_part(address: Int64, part: RowVectors, raw: cute.Tensor, words: cutlass.Constexpr[int]):
    """Store the registers `raw` [words, UNROLL] to a lane's vectors (`part`) of the row at an address."""
    for i in cutlass.range_constexpr(UNROLL):
        if part.vector(i) < part.vectors:
            _raw(address, Int64(part.vector(i)), words).store(raw[None, i].load())


class Send(Invariant):
    """Base of kernels that send rows.

    A warp sends one part of a row at a time: UNROLL vectors a lane (`RowVectors`). The grid has at most as many CTAs as
    can run at the same time. A rank without tokens also launches, since the other ranks wait for its word (a 64-bit
    message, words.py).

        who                       waits for                            then
        warp 0 of each CTA        `enter` words of all ranks, only     lets its CTA begin
                                  if operations do not alternate
        all warps                 barrier (CTA)                        store rows to peers
        warp 0 of each CTA        barrier (CTA)                        fence, draw a ticket
        warp 0 of the last CTA    tickets of all other CTAs            write this rank's word to all ranks
                                  words of all ranks, or a time-out    end the operation
    """

    def __init__(self, spec: LayerSpec):
        self.name = spec.name
        self.dtype = DTYPES[spec.dtype]

    kernel: Any

    def _launch(self, arguments: tuple, parts: Int32, num_sms: Int32, stream: cuda.CUstream) -> None:
        wanted = cute.ceil_div(parts, WARPS)
        grid = cutlass.max(Int32(1), cutlass.min(wanted, num_sms * CTAS_OF_SM))
        name_kernel(self.kernel, self.name)
        self.kernel(*arguments).launch(grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @staticmethod
    def _warps() -> tuple[Int32, Int32]:
        """Return this warp's index in the grid, and the number of warps in the grid."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        return block * WARPS + cute.arch.make_warp_uniform(thread // WARP), blocks * WARPS
