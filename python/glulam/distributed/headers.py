"""Headers that ranks exchange before they exchange rows by all_to_all, so that mistakes raise errors.

torch.distributed sends any bytes without looking at them. If one rank is in dispatch while another is in combine, or
sends another dtype, rows come out wrong without an error, or the back end ends the process. So each operation begins
with a header of fixed size to every rank, and rows follow only if all headers agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.windows import STATUSES

from .exchange import COMBINE, DISPATCH, WHY, PeerError
from .turn import SHARED, Turn

PHASES = (DISPATCH, COMBINE, f"backward of {COMBINE}", f"backward of {DISPATCH}")
SAID = (*STATUSES, "failed")
"""Names of a header's status: formats of rows, or "refused" and "failed". After these two no rows follow; that rank
raises its own error."""
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


class Header(NamedTuple):
    """One rank's description of an operation, sent to one other rank.

    All fields except `rows` must be equal on all ranks.

    Attributes:
        identity: a number that identifies the ExpertParallel, the same on all its ranks.
        number: the operation's number among all operations of the ExpertParallel.
        phase: the kind of operation, as an index of PHASES.
        answers: the number of the dispatch to which this operation belongs; 0: the operation is a dispatch.
        status: an index of SAID.
        dtype: the rows' dtype, as an index of DTYPES.
        width: columns of the rows.
        has_weights: 1 if gradients of choices' weights follow, else 0.
        rows: number of rows that follow for the rank that reads this header.
    """

    identity: int
    number: int
    phase: int
    answers: int
    status: int
    dtype: int
    width: int
    has_weights: int
    rows: int

    @property
    def place(self) -> tuple[int, ...]:
        return self.identity, self.number, self.phase, self.answers

    @property
    def row_format(self) -> str:
        weights = " with gradients of weights" if self.has_weights else ""
        return f"rows of {self.width} {DTYPES[self.dtype]}{weights}"


class Headers:
    """Exchanges and compares headers for the operations of one ExpertParallel, in their order.

    Args:
        swap: function (phase, tensor [W, n]) that runs torch.distributed's all-to-all, or raises PeerError.
        world: W, the number of ranks.
        identity: see Header.
        turn: the ExpertParallel's Turn; once two threads have shared it, all operations are refused.
    """

    def __init__(self, swap: Callable[[str, Tensor], Tensor], world: int, identity: int, turn: Turn) -> None:
        self._swap, self._world, self._identity, self._turn = swap, world, identity, turn
        self.number = 0
        self._ended = ""

    def check(self) -> None:
        """Raise the PeerError of an earlier operation again, if it left the ranks in different operations."""
        if self._ended:
            raise PeerError(f"{self._ended}; make a new object on all ranks")

    def end(self, why: str) -> None:
        """Refuse all later operations with the error text `why`, since other ranks may still be in an operation."""
        self._ended = self._ended or why

    def agree(
        self, phase: str, like: Tensor, rows: list[int], expected: list[int] | None = None, *,
        status: str = STATUSES[0], answers: int = 0, has_weights: bool = False,
    ) -> list[int]:  # fmt: skip
        """Begin an operation: exchange headers with all ranks, and return how many rows come from each rank.

        Args:
            phase: the kind of operation, one of PHASES.
            like: a tensor [., width] of the dtype that will be sent.
            rows: number of rows for each rank.
            expected: number of rows that must come from each rank; None: taken from the other ranks' headers.
            status: one of SAID.
            answers: the number of the dispatch to which this operation belongs; 0: this operation is a dispatch.
            has_weights: True: gradients of choices' weights follow the rows.

        Raises:
            PeerError: a rank refused its tokens, failed, is in another operation, or sends another dtype or width.
            RuntimeError: two threads used the object.
        """
        self.check()
        if self._turn.was_shared:
            self.tell(phase, "failed", answers)
            self.end(SHARED)
            raise RuntimeError(SHARED)
        row_format = DTYPES.index(like.dtype), like.shape[1], int(has_weights)
        mine, theirs = self._exchange(phase, rows, answers, status, row_format)
        for complaint in (_silent, _elsewhere, _other_status, _other_row_format):
            for rank, header in enumerate(theirs):
                if why := complaint(rank, header, mine):
                    if complaint is _elsewhere:
                        self.end(f"{phase}: {why}")
                    raise PeerError(f"{phase}: {why}")
        received = [header.rows for header in theirs]
        if expected is not None and received != expected:
            self.end(f"{phase}: ranks sent {received} rows, and {expected} were dispatched to them")
            self.check()
        return received

    def tell(self, phase: str, status: str, answers: int = 0) -> None:
        """Send only a header with status "refused" or "failed", without rows; the other ranks raise a PeerError.

        Args:
            phase: the kind of operation, one of PHASES.
            status: "refused" or "failed".
            answers: the number of the dispatch to which this operation belongs; 0: this operation is a dispatch.
        """
        if self._ended:
            return
        try:
            mine, theirs = self._exchange(phase, [0] * self._world, answers, status, (0, 0, 0))
        except PeerError as error:  # the caller raises an error of its own
            self.end(str(error))
            return
        for rank, header in enumerate(theirs):
            if why := _elsewhere(rank, header, mine):
                self.end(f"{phase}: {why}")

    def _exchange(
        self, phase: str, rows: list[int], answers: int, status: str, row_format: tuple[int, int, int]
    ) -> tuple[Header, list[Header]]:
        """Send a header to each rank; return (this rank's header for rank 0, the headers from all ranks).

        Args:
            phase: the kind of operation, one of PHASES.
            rows: number of rows for each rank.
            answers: the number of the dispatch to which this operation belongs; 0: this operation is a dispatch.
            status: one of SAID.
            row_format: (dtype, width, has_weights) of the header.
        """
        self.number += 1
        place, said = (self._identity, self.number, PHASES.index(phase), answers), SAID.index(status)
        mine = [Header(*place, said, *row_format, count) for count in rows]
        theirs = self._swap(phase, torch.tensor(mine, dtype=torch.int64, device="cpu")).tolist()
        return mine[0], [Header(*values) for values in theirs]


def _silent(rank: int, header: Header, _: Header) -> str:
    said = SAID[header.status]
    return WHY[said].format(rank) if said in ("refused", "failed") else ""


def _elsewhere(rank: int, header: Header, mine: Header) -> str:
    if header.place == mine.place:
        return ""
    if header.identity != mine.identity:
        return f"rank {rank} is in a call of another ExpertParallel; all ranks must make the same calls in one order"
    return (
        f"rank {rank} is in {_where(header)}, this rank in {_where(mine)}; all ranks must make the same calls in one "
        "order"
    )


def _where(header: Header) -> str:
    of = f" of dispatch {header.answers}" if header.answers else ""
    return f"{PHASES[header.phase]}{of} (operation {header.number})"


def _other_status(rank: int, header: Header, mine: Header) -> str:
    return WHY["other form"].format(rank) if header.status != mine.status else ""


def _other_row_format(rank: int, header: Header, mine: Header) -> str:
    if header.row_format == mine.row_format:
        return ""
    theirs, ours = header.row_format, mine.row_format
    return f"rank {rank} sends {theirs}, this rank {ours}; give the same dtypes and widths on all ranks"
