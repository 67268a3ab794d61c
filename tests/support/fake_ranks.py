"""The fake GPU's kernels that send rows to other ranks; see `support.fake_gpu` and `cute_kernels.ranks`.

Ranks are threads of one process. A fake kernel does the same as the compiled one, in the same order, but as one CTA: it
stores to other ranks' windows by address, writes its word, and waits for the words of all ranks or until its time-out.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from cute_kernels.specs import LayerSpec
from cute_kernels.windows import (
    COUNT_MASK,
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
from glulam.layer import reference

from .memory import memory

F32, I32, I64 = torch.float32, torch.int32, torch.int64
SLEEP_S = 1e-4  # between looks at words; other ranks run meanwhile


def _signed(number: int) -> int:
    """Return an integer wrapped to 64 signed bits, as the kernels' operation counters wrap."""
    return (number + 2**63) % 2**64 - 2**63


class _Operation:
    """One rank's part in a dispatch or a combine.

    `phase`: an entry of PHASES; `at`: the kernel's arguments by name.
    """

    def __init__(self, at: Any, phase: str) -> None:
        self.at, self.phase = at, PHASES.index(phase)
        self.word = {"dispatch": "tokens", "combine": "sums"}[phase]
        self._state = memory(at.state, len(STATE), dtype=I64)
        self._addresses = memory(at.regions, len(REGIONS), at.world, dtype=I64).tolist()
        self.epoch = self.state("epoch") + 1
        before = {"dispatch": ("nothing", "combine"), "combine": ("dispatch",)}[phase]
        self.has_credit = LAST[self.state("last")] in before

    def state(self, name: str) -> int:
        return int(self._state[STATE.index(name)])

    def region(self, name: str, rank: int, *shape: int, dtype: torch.dtype) -> Tensor:
        return memory(self._addresses[REGIONS.index(name)][rank], *shape, dtype=dtype)

    def _words(self, rank: int, kind: str) -> Tensor:
        """Return the words of one kind in a rank's window, int64 [W]: word r is the one that rank r writes."""
        every = self.region("words", rank, len(WORDS), self.at.world, WORD_BYTES // 8, dtype=I64)
        return every[WORDS.index(kind), :, 0]

    def _stamp(self, kind: str) -> int:
        return self.epoch if kind == "enter" else _signed(self.epoch << EPOCH_SHIFT)

    def _ahead(self, kind: str, words: list[int]) -> list[int]:
        low = 0 if kind == "enter" else EPOCH_SHIFT
        return [_signed((word >> low << low) - self._stamp(kind)) for word in words]

    def begin(self) -> None:
        """Wait until all ranks have entered.

        There is no wait if dispatches and combines alternate, since that proves that buffers are free.
        """
        if not self.has_credit:
            self.publish("enter", 0)
            self.wait("enter")

    def publish(self, kind: str, content: int) -> None:
        for rank in range(self.at.world):
            self._words(rank, kind)[self.at.rank] = self._stamp(kind) | content

    def wait(self, kind: str) -> list[int]:
        """Wait for the words of all ranks and return them; fail the operation if one does not come in time."""
        begin, error, missing = time.monotonic_ns(), 0, True
        while missing and not error:
            words = self._words(self.at.rank, kind).tolist()
            ahead = self._ahead(kind, words)
            missing = min(ahead) < 0
            if missing:
                error = self._why_missing(ahead, time.monotonic_ns() - begin, kind)
                time.sleep(SLEEP_S)
        if not error and max(ahead) > 0:
            error = self._error(next(rank for rank, by in enumerate(ahead) if by > 0), "elsewhere")
        if error:
            self.fail(error)
        return words

    def _why_missing(self, ahead: list[int], waited: int, kind: str) -> int:
        """Return the code of an error that ends the wait; 0: continue waiting."""
        told = next((word for word in self._words(self.at.rank, "abort").tolist() if word), 0)
        if told:
            return told
        others = ["sums" if self.word == "tokens" else "tokens"]
        if kind != "enter" and self.has_credit:
            others.append("enter")
        for other in others:
            there = self._ahead(other, self._words(self.at.rank, other).tolist())
            if 0 in there:
                return self._error(there.index(0), "elsewhere")
        is_late = waited > self.state("timeout")
        return self._error(next(rank for rank, by in enumerate(ahead) if by < 0), "late") if is_late else 0

    def _error(self, suspect: int, reason: str) -> int:
        what = REASONS.index(reason) << REASON_SHIFT | self.phase << PHASE_SHIFT
        return _signed(self.epoch << EPOCH_SHIFT | what | suspect)

    def compare(self, words: list[int], status: int) -> None:
        """Fail the operation if a rank's word says "refused", or has another status than this rank's."""
        theirs = [word >> STATUS_SHIFT & 0xF for word in words]
        if STATUSES.index("refused") in theirs:
            self.fail(self._error(theirs.index(STATUSES.index("refused")), "refused"))
        elif set(theirs) != {status}:
            self.fail(self._error(next(rank for rank, one in enumerate(theirs) if one != status), "other form"))

    def fail(self, error: int) -> None:
        """Record the first error of this rank, and tell the host and the other ranks."""
        if not self.state("error"):
            self._state[STATE.index("error")] = error
            memory(self.state("mirror"), 1, dtype=I64)[0] = error
        for rank in range(self.at.world):
            if rank != error & SUSPECT_MASK:
                self._words(rank, "abort")[self.at.rank] = error

    def end(self, last: str, latest: int) -> None:
        for name, value in (("last", LAST.index(last)), ("latest", latest), ("epoch", self.epoch)):
            self._state[STATE.index(name)] = value


def _is_there(at: Any) -> Tensor:
    """Return bool [N, W]: True if the rank has an expert of the token.

    Also write the tables of the places at which sums and weight gradients will come back.
    """
    sum_rows = memory(at.sum_rows, at.tokens, at.world, dtype=I32)
    if not at.weights:
        return sum_rows >= 0
    ids = memory(at.ids, at.tokens, at.k, dtype=I32).long()
    firsts = torch.tensor([rank * at.experts // at.world for rank in range(1, at.world)])
    owner = torch.bucketize(ids, firsts, right=True).masked_fill((ids < 0) | (ids >= at.experts), -1)
    token = torch.arange(at.tokens)[:, None]
    places = (owner * at.most + token) * at.k + torch.arange(at.k)
    memory(at.weight_places, at.tokens, at.k, dtype=I32).copy_(places.masked_fill(owner < 0, -1))
    ranks = torch.arange(at.world)
    there = (owner[:, :, None] == ranks).any(1)
    sum_rows.copy_((ranks * at.most + token).masked_fill(~there, -1))
    return there


def _parts_of_rows(at: Any, dtype: torch.dtype) -> list[tuple[str, int, int, torch.dtype]]:
    """Return the parts of a token's row as (the window's region, the address for token 0, the width, the dtype)."""
    if STATUSES[at.status] != "MXFP8 rows":
        return [("rows", at.x, at.width, dtype)]
    assert at.width % 128 == 0 and at.x % 16 == 0 and at.x_scale % 4 == 0
    return [("rows", at.x, at.width, torch.uint8), ("scales", at.x_scale, at.width // 32, torch.uint8)]


def _store_tokens(operation: _Operation, at: Any, dtype: torch.dtype) -> None:
    """Store the table of choices to all ranks (-1 after the last token), and each token to the ranks of its experts."""
    if at.weights or not at.tokens:
        for rank in range(at.world):
            operation.region("ids", rank, at.world, at.most, at.k, dtype=I32)[at.rank] = -1
    if not at.tokens:
        return
    there = _is_there(at)
    for rank in range(at.world):
        for region, address, width, kind in _parts_of_rows(at, dtype):
            rows = operation.region(region, rank, at.world, at.most, width, dtype=kind)[at.rank, : at.tokens]
            rows[there[:, rank]] = memory(address, at.tokens, width, dtype=kind)[there[:, rank]]
        if at.weights:
            for name, kind in (("ids", I32), ("weights", F32)):
                table = operation.region(name, rank, at.world, at.most, at.k, dtype=kind)
                table[at.rank, : at.tokens] = memory(getattr(at, name), at.tokens, at.k, dtype=kind)


def send_tokens(spec: LayerSpec, at: Any) -> None:
    operation = _Operation(at, "dispatch")
    if not operation.state("error"):
        operation.begin()
    if not operation.state("error"):
        _store_tokens(operation, at, getattr(torch, spec.dtype))
        operation.publish("tokens", at.status << STATUS_SHIFT | at.tokens)
        words = operation.wait("tokens")
        operation.compare(words, at.status)
        if at.handle:
            counts = [word & COUNT_MASK for word in words]
            memory(at.handle, 1 + at.world, dtype=I64).copy_(torch.tensor([operation.epoch, *counts]))
    operation.end("dispatch", operation.epoch)


def _sums(at: Any, rows: slice, row_of: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums [n, H] for the tokens in the given rows of the window.

    row_of: the rows of these tokens' choices.
    """
    places = at.world * at.most
    if at.is_summed:
        return memory(at.y, places, at.width, dtype=dtype)[rows]
    y = memory(at.y, places, at.k, at.width, dtype=dtype)
    return reference.combine(y, row_of, None)[0]


def _store_sums(operation: _Operation, at: Any, dtype: torch.dtype) -> None:
    """Send back the sum of each received token's rows on this rank, if it has any.

    The sum goes into the window of the rank that the token came from; if weight gradients are given, they go there,
    too.
    """
    counts = memory(at.handle, 1 + at.world, dtype=I64)[1:].tolist()
    every = memory(at.row_of, at.world, at.most, at.k, dtype=I32)
    for rank, count in enumerate(counts):
        row_of = every[rank, :count]
        has_row = (row_of >= 0).any(1)
        made = _sums(at, slice(rank * at.most, rank * at.most + count), row_of, dtype)
        sums = operation.region("sums", rank, at.world, at.most, at.width, dtype=dtype)[at.rank, :count]
        sums[has_row] = made[has_row]
        if at.d_weights:
            shape = at.world, at.most, at.k
            there = operation.region("weight_gradients", rank, *shape, dtype=F32)[at.rank, :count]
            there[has_row] = memory(at.d_weights, *shape, dtype=F32)[rank, :count][has_row]


def _invalidate(at: Any) -> None:
    """Set all places of sums to an entry that holds NaN, as after a failed operation."""
    places = at.world * at.most
    if at.tokens:
        memory(at.sum_rows, at.tokens, at.world, dtype=I32).fill_(places)
        memory(at.weight_places, at.tokens, at.k, dtype=I32).fill_(places * at.k)


def send_sums(spec: LayerSpec, at: Any) -> None:
    operation = _Operation(at, "combine")
    if not operation.state("error"):
        operation.begin()
    if not operation.state("error"):
        _store_sums(operation, at, getattr(torch, spec.dtype))
        operation.publish("sums", 0)
        operation.wait("sums")
    if operation.state("error"):
        _invalidate(at)
    latest = operation.state("latest")
    is_latest = int(memory(at.handle, 1, dtype=I64)[0]) == latest
    operation.end("combine" if is_latest else "combine of an older dispatch", latest)
