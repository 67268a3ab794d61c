"""Dispatch and combine over NVLink. A rank stores rows to other ranks' memory, then writes a word: a 64-bit message
(words.py) that says that the rows are there.

    send_tokens   dispatch. Sends token n to every rank that has one of its experts, to row [this rank, n] of that
                  rank's region `rows` (an MXFP8 token's scales to `scales`), and all choices (expert ids) and weights
                  to all ranks. Then waits for the tokens of all ranks.
    send_sums     combine. For every token n that another rank sent, sends the sum of the token's rows on this rank
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
from cutlass import Boolean, Float32, Int32, Int64

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.select import select
from ..device.target import wait_for_earlier
from ..device.vectors import VECTOR_BYTES, elements, load_vector, run_at, store_vector
from ..device.warps import WARP
from ..formats import MXFP8_WIDE
from ..specs import LayerSpec
from ..tracing import DTYPES, Traced, traced
from ..windows import COUNT_MASK, LAST, STATUS_SHIFT, STATUSES, WORDS
from .words import Link, Operation, first_of

THREADS = 256
WARPS = THREADS // WARP
UNROLL = 4  # vectors of a row that a thread loads at once
ROWS = 2  # rows to be added that a warp loads at once
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


def _parts(vectors: Int32) -> Int32:
    """Return the number of parts of a row. A part is the UNROLL vectors of each lane that a warp sends at once."""
    return cute.ceil_div(vectors, UNROLL * WARP)


def _part(number: Int32, vectors: Int32) -> RowVectors:
    """Return this lane's vectors of part number `number` of a row of `vectors` vectors."""
    return RowVectors(number * (UNROLL * WARP) + cute.arch.lane_idx(), vectors)


def _raw(address: Int64, vector: Int64, words: int) -> cute.Tensor:
    """Return a view of a vector in global memory: vector number `vector` after an address. A vector has `words` 32-bit
    words, whatever its dtype."""
    return run_at(Int32, address, vector * words, words)


@cute.jit
def _load(address: Int64, part: RowVectors, words: cutlass.Constexpr[int]) -> cute.Tensor:
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
def _store(address: Int64, part: RowVectors, raw: cute.Tensor, words: cutlass.Constexpr[int]):
    """Store the registers `raw` [words, UNROLL] to a lane's vectors (`part`) of the row at an address."""
    for i in cutlass.range_constexpr(UNROLL):
        if part.vector(i) < part.vectors:
            _raw(address, Int64(part.vector(i)), words).store(raw[None, i].load())


class _Send(Invariant):
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
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(*arguments).launch(grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @staticmethod
    def _warps() -> tuple[Int32, Int32]:
        """Return this warp's index in the grid, and the number of warps in the grid."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        return block * WARPS + cute.arch.make_warp_uniform(thread // WARP), blocks * WARPS


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


class SendTokens(_Send):
    """Kernel of dispatch: sends tokens' rows and choices to the ranks that have the chosen experts (see the top of this
    file). `layer/kernels.py` describes the arguments."""

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
            self._launch(arguments, tokens * (_parts(vectors) + _parts(words)), num_sms, stream)

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

        Warps take parts (pieces of rows or of scales, `_Send`) one after the other: with W warps in the grid, warp i
        takes parts i, i + W, ... After the last part of the rows, the next warp takes the first part of the scales. So
        with few tokens, no warp has two parts.
        """
        warp, warps = self._warps()
        self._send(operation, "rows", VECTOR_WORDS, tokens.x, sizes.vectors, warp, table, sizes)
        if tokens.words != 0:
            first = (warp + warps - table.tokens * _parts(sizes.vectors) % warps) % warps
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
        parts, pitch = _parts(vectors), Int64(vectors) * (4 * words)
        for item in cutlass.range(first, table.tokens * parts, warps, unroll=1):
            token, number = item // parts, item % parts
            part = _part(number, vectors)
            raw = _load(rows + token * pitch, part, words)
            ranks = self._destinations(link, token, table, sizes, number == 0)
            row = Int64(link.rank) * sizes.most + token
            for hop in cutlass.range(link.world, unroll=1):
                peer = (link.rank + 1 + hop) % link.world
                if (ranks >> peer) & 1 != 0:
                    _store(operation.region(region, peer) + row * pitch, part, raw, words)

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
    """Addresses of the tables of this rank's own tokens, which say where the tokens' sums arrive (`Table`).

    After a failure, all entries of the tables point to the NaN at the end of their regions.

    Attributes:
        sum_rows: int32 [N, world], the row of the region `sums` that each rank fills for a token; -1: none.
        weight_places: int32 [N, k], the index of a choice's gradient in the region `weight_gradients`; -1: none.
        tokens: N.
    """

    sum_rows: Int64
    weight_places: Int64
    tokens: Int32


class SendSums(_Send):
    """Kernel of combine: sends, for each token that another rank sent, the sum of this rank's results back to that rank
    (see the top of this file). `layer/kernels.py` describes the arguments."""

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
            self._launch(arguments, most * world * _parts(sizes.vectors), num_sms, stream)

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
        parts, pitch = _parts(sizes.vectors), Int64(sizes.vectors) * VECTOR_BYTES
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
                    part = _part(number, sizes.vectors)
                    if rows.is_summed != 0:
                        _store(target, part, _load(rows.y + came * pitch, part, VECTOR_WORDS), VECTOR_WORDS)
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


KERNELS = {"send_tokens": SendTokens, "send_sums": SendSums}


def trace(spec: LayerSpec) -> Traced:
    return traced(spec, KERNELS[spec.kernel](spec))
