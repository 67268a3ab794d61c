"""Dispatch: sends tokens' rows and choices to the ranks that have the chosen experts (sending.py)."""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ..device.gmem import vector_at
from ..device.select import select
from ..device.target import wait_for_earlier
from ..device.vectors import VECTOR_BYTES, elements
from ..device.warps import WARP
from ..formats import MXFP8_WIDE
from ..specs import LayerSpec
from ..tracing import Traced, traced
from ..windows import COUNT_MASK, LAST, STATUS_SHIFT, STATUSES, WORDS
from .sending import VECTOR_WORDS, Send, Sizes, load_part, part_of, parts_of, store_part
from .words import Link, Operation


class SentTokens(NamedTuple):
    """The tokens to send.

    Attributes:
        x: the address of the tokens' rows.
        scales: the address of the rows' scales, if the rows are in MXFP8.
        words: size of a row's scales in 32-bit words; 0: there are no scales.
        status: the format of the rows, 16 bits or MXFP8: an index of windows.STATUSES.
    """

    x: Int64
    scales: Int64
    words: Int32
    status: Int32


class Table(NamedTuple):
    """Addresses of the choices of N tokens, and of two tables that say where the other ranks' results for these tokens
    will arrive in this rank's window.

    `SendTokens` writes the tables when it sends choices. The kernels that add a token's results read the results at
    these places. When gradients of the same tokens are sent later, `sum_rows` also says to which ranks to send them.

    Attributes:
        ids: int32 [N, k], the experts of the choices.
        weights: float32 [N, k]; address 0: the choices were sent before, so the tables are complete.
        sum_rows: int32 [N, world], the row of the region `sums` that each rank fills for a token; -1: none.
        weight_places: int32 [N, k], the index of a choice's gradient in the region `weight_gradients`; -1: none.
        experts: number of experts on all ranks.
        tokens: N.
    """

    ids: Int64
    weights: Int64
    sum_rows: Int64
    weight_places: Int64
    experts: Int32
    tokens: Int32


class SendTokens(Send):
    """Kernel of dispatch: sends tokens' rows and choices to the ranks that have the chosen experts (sending.py).
    `layer/kernels.py` describes the arguments."""

    @cute.jit
    def __call__(
        self, x: Int64, x_scale: Int64, ids: Int64, weights: Int64, sum_rows: Int64, weight_places: Int64,
        handle: Int64, regions: Int64, state: Int64, tokens: Int32, k: Int32, width: Int32, experts: Int32, most: Int32,
        rank: Int32, world: Int32, status: Int32, num_sms: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if world > 0:
            table = Table(ids, weights, sum_rows, weight_places, experts, tokens)
            in_mxfp8 = status == STATUSES.index("MXFP8 rows")
            vectors = select(in_mxfp8, width // VECTOR_BYTES, width // elements(self.dtype))
            words = select(in_mxfp8, width // MXFP8_WIDE.block, Int32(0))
            sizes, link = Sizes(k, vectors, most), Link(regions, state, rank, world)
            arguments = (SentTokens(x, x_scale, words, status), table, sizes, link, handle)
            self._launch(arguments, tokens * (parts_of(vectors) + parts_of(words)), num_sms, stream)

    @cute.kernel
    def kernel(self, tokens: SentTokens, table: Table, sizes: Sizes, link: Link, handle: Int64):
        wait_for_earlier()
        operation = Operation(link, "dispatch")
        if not operation.has_failed():
            operation.begin()
        if not operation.has_failed():
            if (table.weights != 0) | (table.tokens == 0):
                self._send_table(operation, table, sizes)
            self._send_rows(operation, tokens, table, sizes)
        cute.arch.sync_threads()
        thread, _, _ = cute.arch.thread_idx()
        if thread < WARP:
            if operation.is_last():
                if not operation.has_failed():
                    content = Int64(tokens.status << STATUS_SHIFT | table.tokens)
                    operation.publish(WORDS.index("tokens"), content)
                    word = operation.wait(WORDS.index("tokens"))
                    operation.compare(word, tokens.status)
                    self._keep(operation, word, handle)
                operation.end(Int64(LAST.index("dispatch")), operation.epoch)

    @cute.jit
    def _keep(self, operation: Operation, word: Int64, handle: Int64):
        """Write this dispatch's number, and how many tokens each rank sent, to the handle. `SendSums` reads the handle.

        Args:
            operation: this dispatch.
            word: in lane r, the word of rank r.
            handle: the address of int64 [1 + world]; 0: not wanted.
        """
        kept = vector_at(Int64, handle)
        if handle != 0:
            if operation.lane == 0:
                kept[0] = operation.epoch
            if operation.lane < operation.link.world:
                kept[1 + operation.lane] = word & COUNT_MASK

    @cute.jit
    def _send_table(self, operation: Operation, table: Table, sizes: Sizes):
        """Send all choices (ids and weights) to all ranks. Ids after the last token are -1, so that a receiver can sort
        the choices without the number of tokens.

        Args:
            operation: this dispatch.
            table: the choices.
        """
        warp, warps = self._warps()
        link = operation.link
        first, step = warp * WARP + operation.lane, warps * WARP
        for index in cutlass.range(first, sizes.most * sizes.k, step, unroll=1):
            expert, weight = Int32(-1), Float32(0.0)
            is_choice = index < table.tokens * sizes.k
            if is_choice:
                expert = vector_at(Int32, table.ids)[index]
                weight = vector_at(Float32, table.weights)[index]
            place = Int64(link.rank) * sizes.most * sizes.k + index
            for hop in cutlass.range(link.world, unroll=1):
                peer = (link.rank + 1 + hop) % link.world
                vector_at(Int32, operation.region("ids", peer))[place] = expert
                if is_choice:
                    vector_at(Float32, operation.region("weights", peer))[place] = weight

    @cute.jit
    def _send_rows(self, operation: Operation, tokens: SentTokens, table: Table, sizes: Sizes):
        """Send the rows of tokens, then their scales.

        Warps take parts (pieces of rows or of scales, `Send`) one after the other: with W warps in the grid, warp i
        takes parts i, i + W, ... After the last part of the rows, the next warp takes the first part of the scales. So
        with few tokens, no warp has two parts.
        """
        warp, warps = self._warps()
        self._send(operation, "rows", VECTOR_WORDS, tokens.x, sizes.vectors, warp, table, sizes)
        if tokens.words != 0:
            first = (warp + warps - table.tokens * parts_of(sizes.vectors) % warps) % warps
            self._send(operation, "scales", 1, tokens.scales, tokens.words, first, table, sizes)

    @cute.jit
    def _send(
        self, operation: Operation, region: cutlass.Constexpr[str], words: cutlass.Constexpr[int], rows: Int64,
        vectors: Int32, first: Int32, table: Table, sizes: Sizes,
    ):  # fmt: skip
        """Send each token's row, or the scales of the row, to the ranks that have one of the token's experts.

        Args:
            region: the name of the windows' region that receives the rows.
            words, vectors: a row has `vectors` vectors of `words` 32-bit words.
            rows: the address of the rows, or of the scales.
            first: the index of this warp's first part among all parts of all tokens' rows.
        """
        _, warps = self._warps()
        link = operation.link
        parts, pitch = parts_of(vectors), Int64(vectors) * (4 * words)
        for item in cutlass.range(first, table.tokens * parts, warps, unroll=1):
            token, number = item // parts, item % parts
            part = part_of(number, vectors)
            raw = load_part(rows + token * pitch, part, words)
            ranks = self._destinations(link, token, table, sizes, number == 0)
            row = Int64(link.rank) * sizes.most + token
            for hop in cutlass.range(link.world, unroll=1):
                peer = (link.rank + 1 + hop) % link.world
                if (ranks >> peer) & 1 != 0:
                    store_part(operation.region(region, peer) + row * pitch, part, raw, words)

    @cute.jit
    def _destinations(self, link: Link, token: Int32, table: Table, sizes: Sizes, is_first: Boolean) -> Int32:
        """Return a bit mask of the ranks to which a token is sent, because they have one of its experts.

        The mask follows from the token's choices. If these were sent before, it follows from the table `sum_rows`. If
        choices are sent now and `is_first`, also write the token's entries of both tables. Each lane handles one
        choice, then one rank.

        Args:
            table: the choices and the two tables.
            is_first: True in the warp that sends the first part of the token's row.
        """
        lane = cute.arch.lane_idx()
        ranks = Int32(0)
        if table.weights != 0:
            owner = Int32(-1)
            if lane < sizes.k:
                expert = vector_at(Int32, table.ids)[token * sizes.k + lane]
                if (expert >= 0) & (expert < table.experts):
                    owner = ((expert + 1) * link.world - 1) // table.experts
            bit = select(owner >= 0, Int32(1) << cutlass.max(owner, Int32(0)), Int32(0))
            ranks = Int32(cute.arch.warp_redux_sync(bit, "or"))
            if is_first:
                if lane < sizes.k:
                    place = (owner * sizes.most + token) * sizes.k + lane
                    vector_at(Int32, table.weight_places)[token * sizes.k + lane] = select(owner >= 0, place, Int32(-1))
                if lane < link.world:
                    is_there = (ranks >> lane) & 1 != 0
                    row = select(is_there, lane * sizes.most + token, Int32(-1))
                    vector_at(Int32, table.sum_rows)[token * link.world + lane] = row
        else:
            row = Int32(-1)
            if lane < link.world:
                row = vector_at(Int32, table.sum_rows)[token * link.world + lane]
            ranks = Int32(cute.arch.vote_ballot_sync(row >= 0))
        return ranks


def trace(spec: LayerSpec) -> Traced:
    return traced(spec, SendTokens(spec))
