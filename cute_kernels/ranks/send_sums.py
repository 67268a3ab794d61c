"""Combine: sends sums of rows back to the ranks that sent the tokens (sending.py)."""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.gmem import vector_at
from ..device.select import select
from ..device.target import wait_for_earlier
from ..device.vectors import VECTOR_BYTES, elements, load_vector, store_vector
from ..device.warps import WARP
from ..specs import LayerSpec
from ..tracing import Traced, traced
from ..windows import LAST, WORDS
from .sending import UNROLL, VECTOR_WORDS, RowVectors, Send, Sizes, load_part, part_of, parts_of, store_part
from .words import Link, Operation, first_of

ROWS = 2  # rows to be added that a warp loads at once


class Rows(NamedTuple):
    """The results of this rank's experts for the tokens that the ranks sent.

    Attributes:
        y: the address of the rows of results.
        row_of: the address of int32 [world, most, k], the row of y for each choice of each token that a rank sent; -1:
            this rank does not have the choice's expert.
        d_weights: the address of float32 [world, most, k], gradients of the choices' weights. They are sent with the
            sums. 0: there are none.
        is_summed: 1: y is [world, most, H], in which each token's rows are already added; 0: y has a row for each
            choice of this rank's experts.
    """

    y: Int64
    row_of: Int64
    d_weights: Int64
    is_summed: Int32


class Back(NamedTuple):
    """Addresses of the tables of this rank's own tokens, which say where the tokens' sums arrive
    (`send_tokens.Table`).

    After a failure, all entries of the tables point to the NaN at the end of their regions.

    Attributes:
        sum_rows: int32 [N, world], the row of the region `sums` that each rank fills for a token; -1: none.
        weight_places: int32 [N, k], the index of a choice's gradient in the region `weight_gradients`; -1: none.
        tokens: N.
    """

    sum_rows: Int64
    weight_places: Int64
    tokens: Int32


class SendSums(Send):
    """Kernel of combine: sends, for each token that another rank sent, the sum of this rank's results back to that rank
    (sending.py). `layer/kernels.py` describes the arguments."""

    @cute.jit
    def __call__(
        self, y: Int64, row_of: Int64, d_weights: Int64, sum_rows: Int64, weight_places: Int64, handle: Int64,
        regions: Int64, state: Int64, tokens: Int32, k: Int32, width: Int32, most: Int32, is_summed: Int32,
        rank: Int32, world: Int32, num_sms: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if world > 0:
            sizes = Sizes(k, width // elements(self.dtype), most)
            rows, back = Rows(y, row_of, d_weights, is_summed), Back(sum_rows, weight_places, tokens)
            arguments = (rows, back, sizes, Link(regions, state, rank, world), handle)
            self._launch(arguments, most * world * parts_of(sizes.vectors), num_sms, stream)

    @cute.kernel
    def kernel(self, rows: Rows, back: Back, sizes: Sizes, link: Link, handle: Int64):
        wait_for_earlier()
        operation = Operation(link, "combine")
        if not operation.has_failed():
            operation.begin()
        if not operation.has_failed():
            self._send_rows(operation, rows, sizes, handle)
        cute.arch.sync_threads()
        thread, _, _ = cute.arch.thread_idx()
        if thread < WARP:
            if operation.is_last():
                if not operation.has_failed():
                    operation.publish(WORDS.index("sums"), Int64(0))
                    operation.wait(WORDS.index("sums"))
                if operation.has_failed():
                    self._invalidate(back, sizes, link)
                latest = operation.state("latest")
                is_latest = vector_at(Int64, handle)[0] == latest
                combine, older = LAST.index("combine"), LAST.index("combine of an older dispatch")
                operation.end(select(is_latest, Int64(combine), Int64(older)), latest)

    @cute.jit
    def _invalidate(self, back: Back, sizes: Sizes, link: Link):
        """Let all entries of the tables point to the NaN at the end of their regions, so that sums that follow these
        tables are NaN. A region is a range of a rank's window.

        back: the tables.
        """
        lane = cute.arch.lane_idx()
        for i in cutlass.range(lane, back.tokens * link.world, WARP, unroll=1):
            vector_at(Int32, back.sum_rows)[i] = link.world * sizes.most
        for i in cutlass.range(lane, back.tokens * sizes.k, WARP, unroll=1):
            vector_at(Int32, back.weight_places)[i] = link.world * sizes.most * sizes.k

    @cute.jit
    def _send_rows(self, operation: Operation, rows: Rows, sizes: Sizes, handle: Int64):
        """Send each token's sum back to the rank that sent the token. The order is by token number, then by rank, so
        that all links are busy at the same time.

        Args:
            rows: the results of this rank's experts.
            handle: the dispatch's handle, which says how many tokens each rank sent.
        """
        warp, warps = self._warps()
        link = operation.link
        parts, pitch = parts_of(sizes.vectors), Int64(sizes.vectors) * VECTOR_BYTES
        counts = vector_at(Int64, handle)
        most = Int32(0)
        for peer in cutlass.range(link.world, unroll=1):
            most = cutlass.max(most, Int32(counts[1 + peer]))
        for item in cutlass.range(warp, most * link.world * parts, warps, unroll=1):
            place, number = item // parts, item % parts
            token, hop = place // link.world, place % link.world
            peer = (link.rank + 1 + hop) % link.world
            if token < Int32(counts[1 + peer]):
                came = Int64(peer) * sizes.most + token
                found = Int32(-1)
                if operation.lane < sizes.k:
                    found = vector_at(Int32, rows.row_of)[came * sizes.k + operation.lane]
                choices = Int32(cute.arch.vote_ballot_sync(found >= 0))
                if choices != 0:
                    row = Int64(link.rank) * sizes.most + token
                    target = operation.region("sums", peer) + row * pitch
                    part = part_of(number, sizes.vectors)
                    if rows.is_summed != 0:
                        store_part(target, part, load_part(rows.y + came * pitch, part, VECTOR_WORDS), VECTOR_WORDS)
                    else:
                        self._send_sum(target, part, rows.y, found, choices)
                    if (rows.d_weights != 0) & (number == 0) & (operation.lane < sizes.k):
                        gradient = vector_at(Float32, rows.d_weights)[came * sizes.k + operation.lane]
                        there = vector_at(Float32, operation.region("weight_gradients", peer))
                        there[row * sizes.k + operation.lane] = gradient

    @cute.jit
    def _send_sum(self, target: Int64, part: RowVectors, y: Int64, found: Int32, choices: Int32):
        """Add the rows of y that belong to a token, and store this lane's vectors of the sum. Sums are float32, in the
        order of choices, and rounded once.

        Args:
            target: the address of the row to which the sum is stored.
            part: this lane's vectors.
            found: in lane j, the row of y of the token's j-th choice.
            choices: a mask of the lanes that have a row.
        """
        count = elements(self.dtype)
        sums = cute.make_rmem_tensor((count, UNROLL), Float32)
        sums.fill(0.0)
        left = choices
        while left != 0:
            # All loads are issued before the first sum.
            raw = cute.make_rmem_tensor((count, UNROLL, ROWS), self.dtype)
            raw.fill(0.0)
            rows = cute.make_rmem_tensor(ROWS, Int32)
            for j in cutlass.range_constexpr(ROWS):
                row = cute.arch.shuffle_sync(found, first_of(left) % WARP)
                rows[j] = select(left != 0, row, Int32(-1))
                left = left & (left - 1)
            for j in cutlass.range_constexpr(ROWS):
                for i in cutlass.range_constexpr(UNROLL):
                    if (rows[j] >= 0) & (part.vector(i) < part.vectors):
                        at = Int64(rows[j]) * part.vectors + part.vector(i)
                        raw[None, i, j].store(load_vector(self.dtype, y, at).load())
            for j in cutlass.range_constexpr(ROWS):
                if rows[j] >= 0:
                    sums.store(sums.load() + raw[None, None, j].load().to(Float32))
        for i in cutlass.range_constexpr(UNROLL):
            if part.vector(i) < part.vectors:
                store_vector(self.dtype, target, Int64(part.vector(i)), sums[None, i])


def trace(spec: LayerSpec) -> Traced:
    return traced(spec, SendSums(spec))
