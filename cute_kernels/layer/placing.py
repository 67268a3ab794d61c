"""Placing: a stable counting sort by expert that finds the row of each choice. A choice is a pair (token n, j-th of its
k experts).

Rows are sorted by expert, then by choice. A CTA has a chunk of consecutive choices; each of its warps has a run of the
chunk. The sort has three steps:

1. Each warp counts its run's choices of each expert.
2. One thread for each expert computes the expert's first row in each warp: the sum of all counts of lower experts, and
   of this expert's counts in earlier chunks and earlier warps.
3. Each warp goes through its run again, 32 choices at a time. Lanes with the same expert take this expert's next rows
   in order.

The previous kernel ("count" or "choose" in route.py) makes the counts of all chunks, [chunks, E]. A single chunk needs
only its own counts.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.select import select
from ..device.target import smem_of_cta
from ..device.vectors import load_params
from ..device.warps import WARP, inclusive_scan, lanes_before, lanes_like

THREADS = 1024
WARPS = THREADS // WARP
TOTALS_BYTES = WARPS * 4
UNROLL = 8


class Choices(NamedTuple):
    """The experts that tokens chose.

    An expert's index is id - first or, with an expert_map, entry id - first of the map. A choice has no row in three
    cases: its expert's index is not in 0 .. experts - 1; id - first is outside of the map; or its token's number is
    `limit` or more.

    Attributes:
        ids: the address of the ids [N, k].
        wide: 1: ids are int64; 0: int32.
        first: the id of the map's (or of this rank's) first expert.
        expert_map: the address of int32 [num_mapped]; 0: no map.
        experts: number of experts that have rows.
        k: choices of a token.
        limit: number of tokens that are not padding.
    """

    ids: Int64
    wide: Int32
    first: Int32
    expert_map: Int64
    num_mapped: Int32
    experts: Int32
    k: Int32
    limit: Int32

    def expert(self, index: Int32) -> Int32:
        """Return the index of the expert of choice number `index`; -1 if the choice has no row."""
        return _expert(self, index)


def unmapped(ids: Int64, experts: Int32, k: Int32, limit: Int32) -> Choices:
    """Make the Choices of ids that are int32 expert indices already, without a map.

    Args:
        ids: the address of int32 [N, k].
        experts: number of experts that have rows.
        k: choices of a token.
        limit: number of tokens that are not padding.
    """
    return Choices(ids, Int32(0), Int32(0), Int64(0), Int32(0), experts, k, limit)


@cute.jit
def _expert(choices: Choices, index: Int32) -> Int32:
    """Return the index of the expert of choice number `index`; -1 if the choice has no row (`Choices`)."""
    wide = Int64(0)
    if choices.wide != 0:
        wide = vector_at(Int64, choices.ids)[index]
    else:
        wide = Int64(vector_at(Int32, choices.ids)[index])
    wide -= choices.first
    if choices.expert_map != 0:
        place = Int32(-1)
        if (wide >= 0) & (wide < choices.num_mapped):
            place = vector_at(Int32, choices.expert_map)[Int32(wide)]
        wide = Int64(place)
    has_row = (wide >= 0) & (wide < choices.experts) & (index // choices.k < choices.limit)
    return select(has_row, Int32(wide), Int32(-1))


@cute.jit
def token_limit(address: Int64, tokens: Int32) -> Int32:
    """Return how many tokens are not padding: the int32 at `address`, clamped to 0 .. tokens. address 0: all tokens."""
    limit = tokens
    if address != 0:
        limit = cutlass.max(Int32(0), cutlass.min(vector_at(Int32, address)[0], tokens))
    return limit


class Results(NamedTuple):
    """Addresses of the tensors that placing writes, and of the choices' weights, which it copies to `weight_of_row`.

    Attributes:
        weights: the weights [N, k] of choices, an input.
        weight_form: the dtype of the weights (`dtypes.PARAM_FORMS`).
        offs: int32 [E], the end of each expert's rows.
        token_of_row: int32 [T], the token of each row.
        row_of: int32 [N, k], the row of each choice; -1: none.
        weight_of_row: float32 [T], the weight of each row.
    """

    weights: Int64
    weight_form: Int32
    offs: Int64
    token_of_row: Int64
    row_of: Int64
    weight_of_row: Int64


def counters_of(capacity: int) -> int:
    """Return how many warps of a CTA handle choices: at most WARPS, and at most as many as have room in shared memory
    for counts of `capacity` experts each."""
    return min(WARPS, (smem_of_cta() - TOTALS_BYTES) // (capacity * 4))


class Placer(Invariant):
    """Counting sort, by expert, of a CTA's chunk of choices, `begin` .. `end` - 1. Call `count` first, then
    `leave_counts` or `place`.

    Attributes:
        capacity: the most experts.
        run: number of consecutive choices of a warp.
        warps: number of warps that have choices, at most `counters_of(capacity)`; other warps have no counts.
        counts: [capacity, counters_of(capacity)] in shared memory. After `count`: choices of each expert in each warp's
            run. In `place`: the next row of each expert for each warp.
        totals: [WARPS] in shared memory, for `_scan`.
    """

    def __init__(self, choices: Choices, begin: Int32, end: Int32, capacity: int):
        self.choices = choices
        self.begin = begin
        self.end = end
        thread, _, _ = cute.arch.thread_idx()
        self.thread = thread
        counters = counters_of(capacity)
        self.run = cute.ceil_div(end - begin, counters * WARP) * WARP
        self.warps = cute.ceil_div(end - begin, cutlass.max(self.run, Int32(1)))
        self.warp = cute.arch.make_warp_uniform(thread // WARP)
        smem = cute.arch.get_dyn_smem(Int32)
        self.counts = cute.make_tensor(smem, cute.make_layout((capacity, counters)))
        self.totals = cute.make_tensor(smem + capacity * counters, cute.make_layout(WARPS))
        self.capacity = capacity

    @staticmethod
    def num_bytes(capacity: int) -> int:
        return capacity * counters_of(capacity) * 4 + TOTALS_BYTES

    def _run(self) -> tuple[Int32, Int32]:
        """Return the range of this warp's run, which is consecutive choices of the CTA's chunk: the first choice, and
        the choice after the last."""
        begin = cutlass.min(self.begin + self.warp * self.run, self.end)
        return begin, cutlass.min(begin + self.run, self.end)

    @cute.jit
    def count(self):
        """Count the choices of each expert in each warp's run (its consecutive choices), and write them to `counts` in
        shared memory."""
        for i in cutlass.range(self.thread, self.capacity * self.warps, THREADS):
            self.counts[i % self.capacity, i // self.capacity] = Int32(0)
        cute.arch.sync_threads()
        begin, end = self._run()
        for index in cutlass.range(begin + cute.arch.lane_idx(), end, WARP):
            expert = self.choices.expert(index)
            if expert >= 0:
                at = self.counts.iterator + expert + self.capacity * self.warp
                cute.arch.atomic_add(at, Int32(1), sem="relaxed", scope="cta")
        cute.arch.sync_threads()

    @cute.jit
    def leave_counts(self, counts: Int64, chunk: Int32):
        """Write how often the chunk chose each expert to row `chunk` of `counts`, an address. The kernel that places
        reads these counts."""
        if self.thread < self.choices.experts:
            total = Int32(0)
            for warp in cutlass.range(self.warps, unroll=UNROLL):
                total += self.counts[self.thread, warp]
            vector_at(Int32, counts)[chunk * self.choices.experts + self.thread] = total

    @cute.jit
    def place(self, results: Results, counts: Int64, chunk: Int32, chunks: Int32):
        """Write the CTA's chunk of choices to all tensors of `results`. Call `count` before.

        Args:
            counts: the address of all chunks' counts, int32 [chunks, E]; not read if there is one chunk.
            chunk, chunks: this CTA's chunk, and the number of chunks.
        """
        before, total = self._elsewhere(counts, chunk, chunks)
        ends = self._scan(total)
        if (chunk == 0) & (self.thread < self.choices.experts):
            vector_at(Int32, results.offs)[self.thread] = ends
        if self.thread < self.capacity:
            row = ends - total + before
            for warp in cutlass.range(self.warps, unroll=UNROLL):
                mine = self.counts[self.thread, warp]
                self.counts[self.thread, warp] = row
                row += mine
        cute.arch.sync_threads()
        self._place(results)

    @cute.jit
    def _elsewhere(self, counts: Int64, chunk: Int32, chunks: Int32) -> tuple[Int32, Int32]:
        """Return how often this thread's expert was chosen: in all chunks before this one, and in all chunks.

        Args:
            counts: the address of all chunks' counts, int32 [chunks, E]; not read if there is one chunk.
            chunk, chunks: this CTA's chunk, and the number of chunks.
        """
        before = Int32(0)
        total = Int32(0)
        if chunks > 1:
            if self.thread < self.choices.experts:
                for other in cutlass.range(chunks, unroll=8):
                    there = vector_at(Int32, counts)[other * self.choices.experts + self.thread]
                    total += there
                    before += select(other < chunk, there, Int32(0))
        elif self.thread < self.capacity:
            for warp in cutlass.range(self.warps, unroll=UNROLL):
                total += self.counts[self.thread, warp]
        return before, total

    @cute.jit
    def _scan(self, value: Int32) -> Int32:
        """Return the sum of `value` over this thread and all threads of the CTA before it."""
        lane = cute.arch.lane_idx()
        within = inclusive_scan(value, lane)
        if lane == WARP - 1:
            self.totals[self.warp] = within
        cute.arch.sync_threads()
        others = select(lane < self.warp, self.totals[lane], Int32(0))
        return within + Int32(cute.arch.warp_redux_sync(others, "add"))

    @cute.jit
    def _place(self, results: Results):
        begin, end = self._run()
        lane = cute.arch.lane_idx()
        for base in cutlass.range(begin, end, WARP, unroll=1):
            index = base + lane
            expert = Int32(-1)
            weight = Float32(0.0)
            if index < end:
                expert = self.choices.expert(index)
                weight = load_params(results.weights, results.weight_form, Int64(index), 1)[0]
            alike = lanes_like(expert)
            rank = cute.arch.popc(alike & lanes_before())
            row = Int32(-1)
            if expert >= 0:
                row = self.counts[expert, self.warp] + rank
            cute.arch.sync_warp()
            if (expert >= 0) & (rank == 0):
                self.counts[expert, self.warp] = row + cute.arch.popc(alike)
            cute.arch.sync_warp()
            if index < end:
                vector_at(Int32, results.row_of)[index] = row
            if expert >= 0:
                vector_at(Int32, results.token_of_row)[row] = index // self.choices.k
                vector_at(Float32, results.weight_of_row)[row] = weight
