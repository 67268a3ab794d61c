"""Transport of tokens between ranks by torch.distributed's all-to-all: any back end, any number of nodes.

Each operation (dispatch, combine, and their backwards) begins with a header from each rank to each other rank
(`headers`), for which the host waits. The header of a dispatch says how many rows each rank sends. A rank receives the
tokens that have an expert there, each token once, in their order.

To find out which token goes to which ranks, and to sum the returned rows by token, a second `Routing` is used, with
ranks in place of experts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..formats.mxfp8 import MXFP8Tensor
from ..layer.routing import Routing
from ..layer.rows import combine_rows
from .exchange import COMBINE, DISPATCH, Exchange, PeerError
from .headers import Headers
from .owners import Owners
from .tokens import SENT_AS, Tokens, status_of
from .turn import Turn


class AllToAll:
    """The all-to-all transport between the ranks of a torch.distributed group.

    Args:
        group: the process group.
        owners: which rank owns which experts.
        identity: a number that identifies this ExpertParallel, the same on all ranks.
    """

    name = "all_to_all"

    def __init__(self, group: Any, owners: Owners, identity: int) -> None:
        self.group, self.owners, self.turn = group, owners, Turn()
        self.back_end, self.host_group = dist.get_backend(group), host_group(group)
        self.headers = Headers(self._swap_headers, owners.world, identity, self.turn)

    def begin(self, ids: Tensor, x: Tokens) -> _Rows:
        """Begin an exchange (a dispatch and its combine) of tokens x with choices ids [N, K].

        The host waits for all ranks' headers. No rows are sent yet.
        """
        to = self.owners.destinations(ids)
        sent = Routing.from_topk(to, torch.ones(to.shape, device=to.device), self.owners.world)
        num_sent = sent.counts.tolist()
        like = x if isinstance(x, Tensor) else x.data
        num_received = self.headers.agree(DISPATCH, like, num_sent, status=status_of(x))
        return _Rows(self, sent, num_sent, num_received, self.headers.number)

    def refuse(self) -> None:
        """Tell the other ranks that this rank refused its tokens; this takes the place of an exchange."""
        self.headers.tell(DISPATCH, "refused")

    def check(self) -> None:
        """Raise the PeerError of an earlier operation again, if it left the ranks in different operations."""
        self.headers.check()

    @contextlib.contextmanager
    def sending(self, phase: str) -> Iterator[None]:
        """Context in which rows are sent after a header. `phase`: the operation's name in errors.

        If this rank raises inside, the object refuses all later calls: the other ranks still wait for the remaining
        rows, until their time-out.
        """
        try:
            yield
        except Exception as error:
            self.headers.end(f"{phase}: this rank failed while rows were on their way ({type(error).__name__})")
            raise

    def swap(
        self, phase: str, out: Tensor, rows: Tensor, num_out: list[int] | None = None, num_in: list[int] | None = None,
        group: Any = None,
    ) -> None:  # fmt: skip
        """Run torch.distributed's all-to-all.

        Args:
            phase: the operation's name in errors.
            out: buffer for the received rows.
            rows: the rows to send.
            num_out: number of rows that come from each rank; None: equal numbers.
            num_in: number of rows that go to each rank; None: equal numbers.
            group: the process group; None: the transport's own.

        Raises:
            PeerError: the all-to-all failed.
        """
        try:
            dist.all_to_all_single(out, rows, num_out, num_in, group=group or self.group)
        except (RuntimeError, ValueError) as error:
            raise PeerError(
                f"{phase}: a rank has ended, or did not come within the group's time-out: {error}"
            ) from error

    def _swap_headers(self, phase: str, mine: Tensor) -> Tensor:
        theirs = torch.empty_like(mine)
        self.swap(phase, theirs, mine, group=self.host_group)
        return theirs


_host_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def host_group(group: Any) -> Any:
    """Return a group of the same ranks that can exchange host memory, so that headers do not wait for kernels.

    NCCL exchanges only GPU memory, so for an NCCL group this is a gloo group, made once. Every rank must call this.
    """
    if dist.get_backend(group) != "nccl":
        return group
    if group not in _host_groups:
        ranks = dist.get_process_group_ranks(group)
        _host_groups[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _host_groups[group]


@dataclasses.dataclass
class _Rows(Exchange):
    """An exchange by all-to-all, in which received rows are compact: no gaps between the rows of different ranks.

    Attributes:
        sent: a Routing of this rank's tokens to ranks, with ranks in place of experts.
        num_sent, num_received: number of rows sent to each rank, and received from each rank.
        number: the dispatch's number among the operations of the ExpertParallel.
    """

    transport: AllToAll
    sent: Routing
    num_sent: list[int]
    num_received: list[int]
    number: int

    @property
    def tokens(self) -> int:
        return len(self.sent.row_of)

    def fail(self) -> None:
        self.transport.headers.tell(COMBINE, "failed", self.number)

    def dispatch(self, x: Tokens, weights: Tensor, ids: Tensor) -> tuple[Tokens, Tensor, Tensor]:
        with self.transport.sending(DISPATCH):
            return self._tokens_forth(x), self._forth(DISPATCH, weights), self._forth(DISPATCH, ids)

    def _tokens_forth(self, x: Tokens) -> Tokens:
        """Send tokens to their experts' ranks; return the received tokens.

        MXFP8 is sent as bytes, since neither torch nor the back ends send every 8-bit float dtype.
        """
        if isinstance(x, Tensor):
            return self._forth(DISPATCH, x)
        data, scale = (self._forth(DISPATCH, one.view(torch.uint8)).view(one.dtype) for one in (x.data, x.scale))
        return MXFP8Tensor.unchecked(data, scale, *SENT_AS)

    def forth(self, d_out: Tensor) -> Tensor:
        phase = f"backward of {COMBINE}"
        self._agree(phase, d_out, self.num_sent, self.num_received)
        with self.transport.sending(phase):
            return self._forth(phase, d_out)

    def back(self, sums: Tensor, residual: Tensor | None) -> Tensor:
        self._agree(COMBINE, sums, self.num_received, self.num_sent)
        with self.transport.sending(COMBINE):
            return self._sums(COMBINE, sums, residual)

    def gradients_back(self, d_x: Tensor, d_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        phase = f"backward of {DISPATCH}"
        self._agree(phase, d_x, self.num_received, self.num_sent, has_weights=d_weights is not None)
        with self.transport.sending(phase):
            return self._sums(phase, d_x, None), None if d_weights is None else self._of_weights(phase, d_weights)

    def _agree(
        self, phase: str, rows: Tensor, sent: list[int], received: list[int], has_weights: bool = False
    ) -> None:  # fmt: skip
        self.transport.headers.agree(phase, rows, sent, received, answers=self.number, has_weights=has_weights)

    def _forth(self, phase: str, of_tokens: Tensor) -> Tensor:
        rows = of_tokens.index_select(0, self.sent.token_of_row[: sum(self.num_sent)])
        out = rows.new_empty(sum(self.num_received), *rows.shape[1:])
        return self._swap(phase, out, rows, self.num_received, self.num_sent)

    def _back(self, phase: str, rows: Tensor, out: Tensor) -> Tensor:
        """Send rows back to their tokens' ranks; return `out`, whose first rows are the rows that came back here.

        phase: the operation's name in errors.
        """
        self._swap(phase, out[: sum(self.num_sent)], rows, self.num_sent, self.num_received)
        return out

    def _swap(self, phase: str, out: Tensor, rows: Tensor, num_out: list[int], num_in: list[int]) -> Tensor:
        """Send each rank its part of `rows`; write the rows that come from all ranks to `out`, and return `out`.

        num_out, num_in: numbers of rows that come from each rank, and that go to each rank.

        With gloo, which does not send GPU memory, GPU tensors go through the host.
        """
        by_host = out.is_cuda and self.transport.back_end == "gloo"
        received = torch.empty(out.shape, dtype=out.dtype, device="cpu") if by_host else out
        sent = rows.cpu() if by_host else rows
        self.transport.swap(phase, received, sent.contiguous(), num_out, num_in)
        return out.copy_(received) if by_host else out

    def _sums(self, phase: str, rows: Tensor, residual: Tensor | None) -> Tensor:
        """Send rows back; add the rows that return to this rank by token, plus the residual unless None: [N, H]."""
        row_of = self.sent.row_of
        buffer = self._back(phase, rows, rows.new_empty(row_of.numel(), rows.shape[1]))
        made: Tensor = combine_rows(buffer.view(*row_of.shape, rows.shape[1]), row_of, residual)
        return made

    def _of_weights(self, phase: str, d_weights: Tensor) -> Tensor:
        """Send gradients of received weights back; return the gradients of this rank's weights [N, K].

        Each is the sum over the ranks that got the token. A rank that does not own the choice's expert adds exactly 0.

        Args:
            phase: the operation's name in errors.
            d_weights: the gradients of the received weights.
        """
        row_of = self.sent.row_of
        zeros = d_weights.new_zeros(row_of.numel() + 1, d_weights.shape[1])
        rows = self._back(phase, d_weights, zeros)
        return rows[row_of.where(row_of >= 0, row_of.numel()).long()].sum(1)
