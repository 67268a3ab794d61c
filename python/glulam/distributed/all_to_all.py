"""Transport by torch.distributed's all-to-all: any back end, any number of nodes. The host learns how many rows each
rank sends; that is the one synchronisation.

A rank is sent the tokens that have an expert there, each once, in their order: ranks are the experts of a `Routing` of
their own, which says who is sent where, and by whose rows what comes back is added.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cute_kernels.windows import STATUSES

from ..layer.routing import Routing
from ..layer.rows import combine_rows
from ..mxfp8 import MXFP8Tensor
from .exchange import COMBINE, DISPATCH, WHY, Exchange, PeerError
from .owners import Owners
from .tokens import FORM, Tokens


class AllToAll:
    """Between the ranks of a group of torch.distributed."""

    name = "all_to_all"

    def __init__(self, group: Any, owners: Owners) -> None:
        self.group, self.owners = group, owners

    def begin(self, ids: Tensor, status: str) -> _Rows:
        """An exchange of the tokens whose choices are ids [N, K]; `status`, of STATUSES: what they are."""
        to = self.owners.destinations(ids)
        sent = Routing.from_topk(to, torch.ones(to.shape, device=to.device), self.owners.world)
        num_sent = sent.counts.tolist()
        num_received, theirs = self._exchange_counts(num_sent, status)
        refused = [rank for rank, one in enumerate(theirs) if one == "refused"]
        other = [rank for rank, one in enumerate(theirs) if one != status]
        if refused or other:
            why, (rank, *_) = ("refused", refused) if refused else ("other form", other)
            raise PeerError(f"{DISPATCH}: {WHY[why].format(rank)}")
        return _Rows(self, sent, num_sent, num_received)

    def refuse(self) -> None:
        """In place of an exchange: the other ranks' tokens get no answer."""
        self._exchange_counts([0] * self.owners.world, "refused")

    def check(self) -> None:
        """A call raises what went wrong in it."""

    def _exchange_counts(self, counts: list[int], status: str) -> tuple[list[int], list[str]]:
        """How many rows each rank will send, and its status, given how many are for each and the own one."""
        pairs = [(count, STATUSES.index(status)) for count in counts]
        mine = torch.tensor(pairs, device="cuda" if dist.get_backend(self.group) == "nccl" else "cpu")
        theirs = torch.empty_like(mine)
        self.swap(DISPATCH, theirs, mine)
        received, statuses = theirs.mT.tolist()
        return received, [STATUSES[one] for one in statuses]

    def swap(
        self, phase: str, out: Tensor, rows: Tensor, num_out: list[int] | None = None, num_in: list[int] | None = None
    ) -> None:
        """torch.distributed's all-to-all, of as many rows from and to each rank. What it raises becomes a PeerError."""
        try:
            dist.all_to_all_single(out, rows, num_out, num_in, group=self.group)
        except RuntimeError as error:
            raise PeerError(
                f"{phase}: a rank has ended, or did not come within the group's time-out: {error}"
            ) from error


@dataclasses.dataclass
class _Rows(Exchange):
    """Compact rows.

    Attributes:
        sent: a Routing of own tokens, whose experts are ranks. num_sent, num_received: rows to and from each rank.
    """

    transport: AllToAll
    sent: Routing
    num_sent: list[int]
    num_received: list[int]

    def dispatch(self, x: Tokens, weights: Tensor, ids: Tensor) -> tuple[Tokens, Tensor, Tensor]:
        return self._tokens_forth(x), self._forth(DISPATCH, weights), self._forth(DISPATCH, ids)

    def _tokens_forth(self, x: Tokens) -> Tokens:
        """Those in MXFP8 as bytes, since neither torch nor back ends move all 8-bit floats."""
        if isinstance(x, Tensor):
            return self._forth(DISPATCH, x)
        data, scale = (self._forth(DISPATCH, one.view(torch.uint8)).view(one.dtype) for one in (x.data, x.scale))
        return MXFP8Tensor.unchecked(data, scale, *FORM)

    def forth(self, d_out: Tensor) -> Tensor:
        return self._forth(f"backward of {COMBINE}", d_out)

    def back(self, sums: Tensor, residual: Tensor | None) -> Tensor:
        return self._sums(COMBINE, sums, residual)

    def gradients_back(self, d_x: Tensor, d_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        phase = f"backward of {DISPATCH}"
        return self._sums(phase, d_x, None), None if d_weights is None else self._of_weights(phase, d_weights)

    def _forth(self, phase: str, of_tokens: Tensor) -> Tensor:
        rows = of_tokens.index_select(0, self.sent.token_of_row[: sum(self.num_sent)])
        out = rows.new_empty(sum(self.num_received), *rows.shape[1:])
        return self._swap(phase, out, rows, self.num_received, self.num_sent)

    def _back(self, phase: str, rows: Tensor, out: Tensor) -> Tensor:
        """Into the first rows of `out`."""
        self._swap(phase, out[: sum(self.num_sent)], rows, self.num_sent, self.num_received)
        return out

    def _swap(self, phase: str, out: Tensor, rows: Tensor, num_out: list[int], num_in: list[int]) -> Tensor:
        """gloo's by way of the host, since it moves no memory of GPUs."""
        by_host = out.is_cuda and dist.get_backend(self.transport.group) == "gloo"
        received = torch.empty(out.shape, dtype=out.dtype, device="cpu") if by_host else out
        sent = rows.cpu() if by_host else rows
        self.transport.swap(phase, received, sent.contiguous(), num_out, num_in)
        return out.copy_(received) if by_host else out

    def _sums(self, phase: str, rows: Tensor, residual: Tensor | None) -> Tensor:
        """Of own tokens, of what all ranks send back for them, [N, H]."""
        row_of = self.sent.row_of
        buffer = self._back(phase, rows, rows.new_empty(row_of.numel(), rows.shape[1]))
        made: Tensor = combine_rows(buffer.view(*row_of.shape, rows.shape[1]), row_of, residual)
        return made

    def _of_weights(self, phase: str, d_weights: Tensor) -> Tensor:
        """Each weight has a gradient on the rank of its expert, and exactly 0 on others."""
        row_of = self.sent.row_of
        zeros = d_weights.new_zeros(row_of.numel() + 1, d_weights.shape[1])
        rows = self._back(phase, d_weights, zeros)
        return rows[row_of.where(row_of >= 0, row_of.numel()).long()].sum(1)
