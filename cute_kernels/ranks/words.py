"""Words: the 64-bit messages by which a rank tells the others that it has sent, that it is ready, or that it gave up.

windows.py has the layout of words and state. An operation (a dispatch or a combine) stores its rows, then writes one
word to every rank including its own. It ends when the words of all ranks have arrived. The words that a rank reads are
in its own memory. Each word has one writer, so no atomics or locks are needed.

    tokens, sums, enter   written by `publish`, a release after the fence that orders the stores of all CTAs; read by
                          `wait`, an acquire
    abort                 written by `fail` to all ranks except the missing one; a waiting rank looks for it

A chain of late ranks blames the first: if rank A is late because it waits for rank B, A began to wait before this rank
did. So A's time is up first. A's abort word, which names B, arrives before this rank's own time is up, and this rank
also reports B.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.select import select
from ..device.warps import WARP
from ..windows import (
    EPOCH_SHIFT,
    LAST,
    PHASE_SHIFT,
    PHASES,
    REASON_SHIFT,
    REASONS,
    REGIONS,
    STATE,
    STATUS_SHIFT,
    STATUSES,
    SUSPECT_MASK,
    WORD_BYTES,
    WORDS,
)

SPIN_NS, SLEEP_NS = 20_000, 200  # spin at first, then sleep between looks, to spare the GPU's memory bandwidth
LAUNCH_TICKETS = 1 << 20  # each launch adds this much in all, whatever its grid, so the counter is never reset
ENTER = WORDS.index("enter")
LATE, ELSEWHERE, REFUSED, OTHER_FORM = (
    REASONS.index(reason) for reason in ("late", "elsewhere", "refused", "other form")
)


class Link(NamedTuple):
    """A rank's connection to the other ranks.

    Attributes:
        regions: the address of int64 [REGIONS, world], the address of each region of each rank's window.
        state: the address of int64 [STATE], this rank's own state.
        rank, world: this rank's index, and the number of ranks.
    """

    regions: Int64
    state: Int64
    rank: Int32
    world: Int32


def word_at(address: Int64) -> cute.Pointer:
    """Return a pointer to the 64-bit word at an address."""
    return vector_at(Int64, address).iterator


def load_word(word: cute.Pointer) -> Int64:
    """Load a word with acquire semantics. All stores that the word's writer made before it wrote the word are then
    visible."""
    return Int64(cute.arch.load(word, Int64, sem="acquire", scope="sys"))


def first_of(lanes: Int32) -> Int32:
    """Return the index of the lowest lane in a bit mask of lanes."""
    return Int32(cute.arch.popc((lanes & -lanes) - 1))


class Operation(Invariant):
    """An operation of this rank, which is a dispatch or a combine, as one CTA of its kernel sees it.

    Attributes:
        link: the connection to the other ranks.
        phase: the kind of this operation, an index of windows.PHASES (dispatch, combine).
        word: the kind of word that this operation's ranks wait for, an index of WORDS.
        epoch: this operation's number.
        has_credit: True if this operation alternates with the last one: a combine after its dispatch, or a dispatch
            after a combine or as the first operation. Then the words of the last operation say that all ranks have read
            what was sent before.
        peer: the rank whose word this lane reads: the lane's index, at most world - 1.
    """

    def __init__(self, link: Link, phase: str):
        self.link = link
        self.phase = PHASES.index(phase)
        self.word = WORDS.index({"dispatch": "tokens", "combine": "sums"}[phase])
        self.epoch = self.state("epoch") + 1
        last = self.state("last")
        if phase == "dispatch":
            self.has_credit = (last == LAST.index("nothing")) | (last == LAST.index("combine"))
        else:
            self.has_credit = last == LAST.index("dispatch")
        self.lane = cute.arch.lane_idx()
        self.peer = cutlass.min(self.lane, link.world - 1)

    def state(self, name: str) -> Int64:
        return vector_at(Int64, self.link.state)[STATE.index(name)]

    def _state_at(self, name: str) -> cute.Pointer:
        return word_at(self.link.state + 8 * STATE.index(name))

    def region(self, name: str, rank: Int32) -> Int64:
        return vector_at(Int64, self.link.regions)[REGIONS.index(name) * self.link.world + rank]

    def _word(self, rank: Int32, kind: int, writer: Int32) -> cute.Pointer:
        place = Int64(kind) * self.link.world + writer
        return word_at(self.region("words", rank) + place * WORD_BYTES)

    def has_failed(self) -> Boolean:
        """Return True if this operation (a dispatch or a combine) or an earlier one has failed. After a failure nothing
        is sent."""
        return cute.arch.load(self._state_at("error"), Int64, sem="acquire", scope="gpu") != 0

    @cute.jit
    def begin(self):
        """Wait until this CTA may store to peers. The whole CTA calls this.

        Peers must have read what was sent to them before. If dispatches and combines alternate, the words of the
        previous operation say so. Otherwise each rank says so by an `enter` word, for which this method waits.
        """
        if not self.has_credit:
            thread, _, _ = cute.arch.thread_idx()
            if thread < WARP:
                # Every CTA writes the same word, so no CTA waits for another.
                self.publish(ENTER, Int64(0))
                self.wait(ENTER)
            cute.arch.sync_threads()

    @cute.jit
    def is_last(self) -> Boolean:
        """Return True in the CTA that finishes last, after all other CTAs have finished their stores. One warp of each
        CTA calls this, after its CTA's stores."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        ticket = Int32(0)
        if self.lane == 0:
            cute.arch.fence_acq_rel_sys()
            mine = select(block == 0, Int64(LAUNCH_TICKETS + 1) - blocks, Int64(1))
            before = cute.arch.atomic_add(self._state_at("tickets"), mine, sem="acq_rel", scope="gpu")
            ticket = Int32((before + mine) & (LAUNCH_TICKETS - 1))
        return Boolean(cute.arch.shuffle_sync(ticket, 0) == 0)

    @cute.jit
    def publish(self, kind: cutlass.Constexpr[int], content: Int64):
        """Write this rank's word (a 64-bit message) to every rank. One warp calls this.

        kind: an index of WORDS. content: the word's low 24 bits.
        """
        cute.arch.fence_acq_rel_sys()
        if self.lane < self.link.world:
            word = self._word(self.lane, kind, self.link.rank)
            cute.arch.store(word, self._stamp(kind) | content, sem="release", scope="sys")

    @cute.jit
    def wait(self, kind: cutlass.Constexpr[int]) -> Int64:
        """Wait for the words (64-bit messages) of a kind from all ranks, and return in lane r the word of rank r. One
        warp calls this.

        Call `fail` if a word does not arrive in time, or if a rank gave up or is in another operation.

        kind: an index of WORDS.
        """
        mine = self._word(self.link.rank, kind, self.peer)
        begin = cute.arch.globaltimer()
        word, error, missing = Int64(0), Int64(0), Int32(-1)
        while (missing != 0) & (error == 0):
            word = load_word(mine)
            missing = Int32(cute.arch.vote_ballot_sync(self._ahead(kind, word) < 0))
            if missing != 0:
                waited = cute.arch.globaltimer() - begin
                error = self._error_of_peers()
                elsewhere = self._elsewhere(kind)
                if (error == 0) & (elsewhere != 0):
                    error = self._error(first_of(elsewhere), ELSEWHERE)
                if (error == 0) & (waited > self.state("timeout")):
                    error = self._error(first_of(missing), LATE)
                if waited > SPIN_NS:
                    cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(SLEEP_NS)])
        later = Int32(cute.arch.vote_ballot_sync(self._ahead(kind, word) > 0))
        if (error == 0) & (later != 0):
            error = self._error(first_of(later), ELSEWHERE)
        if error != 0:
            self.fail(error)
        return word

    def _stamp(self, kind: int) -> Int64:
        """Return this operation's number as words (messages) of a kind hold it: shifted to the upper 40 bits; in
        `enter` words, which may be arbitrarily old, as all 64 bits.

        kind: the kind of the words, an index of windows.WORDS.
        """
        return self.epoch if kind == ENTER else self.epoch << EPOCH_SHIFT

    def _ahead(self, kind: int, word: Int64) -> Int64:
        """Compare the operation that wrote a word with this one. Return a number > 0 if the writer is a later
        operation, 0 if it is this one, < 0 if it is an earlier one. The word's status and count are ignored.

        Args:
            kind: the kind of the word, an index of WORDS.
            word: a word of this kind.
        """
        number = word if kind == ENTER else word >> EPOCH_SHIFT << EPOCH_SHIFT
        return number - self._stamp(kind)

    @cute.jit
    def _elsewhere(self, kind: cutlass.Constexpr[int]) -> Int32:
        """Return a bit mask of the ranks that are in another operation. A rank shows this in one of two ways: it wrote
        a word of the other phase (`tokens` or `sums`) with this operation's number, or it wrote an `enter` word with
        this number although this rank needs none (has_credit).

        kind: the kind of word that this rank waits for, an index of WORDS.
        """
        other, rank = 1 - self.word, self.link.rank
        is_elsewhere = self._ahead(other, load_word(self._word(rank, other, self.peer))) == 0
        if const_expr(kind != ENTER):
            enters = self._ahead(ENTER, load_word(self._word(rank, ENTER, self.peer))) == 0
            is_elsewhere = is_elsewhere | (enters & self.has_credit)
        return Int32(cute.arch.vote_ballot_sync(is_elsewhere))

    @cute.jit
    def _error_of_peers(self) -> Int64:
        """Return the abort word of a rank that gave up, the lowest if several did; 0: no rank did."""
        abort = WORDS.index("abort")
        error = load_word(self._word(self.link.rank, abort, self.peer))
        telling = Int32(cute.arch.vote_ballot_sync(error != 0))
        if telling != 0:
            error = load_word(self._word(self.link.rank, abort, first_of(telling)))
        return error

    def _error(self, suspect: Int32, reason: int) -> Int64:
        what = reason << REASON_SHIFT | self.phase << PHASE_SHIFT
        return (self.epoch << EPOCH_SHIFT) | what | Int64(suspect)

    @cute.jit
    def compare(self, word: Int64, status: Int32):
        """Call `fail` if a rank's `tokens` word shows a problem: the rank refused its own tokens, or their format
        differs from this rank's.

        Args:
            word: in lane r, the word of rank r.
            status: this rank's status, an index of STATUSES.
        """
        theirs = Int32(word >> STATUS_SHIFT & 0xF)
        refused = Int32(cute.arch.vote_ballot_sync(theirs == STATUSES.index("refused")))
        other = Int32(cute.arch.vote_ballot_sync(theirs != status))
        if refused != 0:
            self.fail(self._error(first_of(refused), REFUSED))
        elif other != 0:
            self.fail(self._error(first_of(other), OTHER_FORM))

    @cute.jit
    def fail(self, error: Int64):
        """Record an error (`windows.failure`) for the host and for later kernels. Write it as abort word to all ranks
        except the suspect, which is the rank that the error names. One warp calls this.

        Only a rank's first error is recorded.
        """
        first = Int64(0)
        if self.lane == 0:
            first = cute.arch.atomic_cas(self._state_at("error"), cmp=Int64(0), val=error, sem="acq_rel", scope="gpu")
            if first == 0:
                cute.arch.store(word_at(self.state("mirror")), error, sem="release", scope="sys")
        suspect = Int32(error & SUSPECT_MASK)
        if (self.lane < self.link.world) & (self.lane != suspect):
            word = self._word(self.lane, WORDS.index("abort"), self.link.rank)
            cute.arch.store(word, error, sem="release", scope="sys")

    @cute.jit
    def end(self, last: Int64, latest: Int64):
        """Record the end of the operation in the state. One warp calls this.

        Operations are counted even after a failure.

        Args:
            last: the operation's kind, an index of LAST.
            latest: the number of the latest dispatch.
        """
        if self.lane == 0:
            state = vector_at(Int64, self.link.state)
            state[STATE.index("last")] = last
            state[STATE.index("latest")] = latest
            state[STATE.index("epoch")] = self.epoch
