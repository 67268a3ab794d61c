"""Tokens to the ranks of their experts and sums back, by torch.distributed's all-to-all: any back end, any number of
nodes. The host learns how many rows each rank sends; that is the one synchronisation.

To a rank go the tokens that have an expert there, each once, in their order: a destination is an expert of a `Routing`
of its own, which says who is sent where, and by whose rows what comes back is added, in float32 and in the order of
ranks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..layer.routing import Routing
from ..layer.rows import combine_rows

DISPATCH, COMBINE = "dispatch", "combine"
"""Phases, as errors call them."""
REFUSED = -1
"""In place of a number of rows: of a rank whose tokens do not fit."""


class PeerError(RuntimeError):
    """Another rank could not do its part; the message names it and what it was asked for."""


def all_to_all(
    group: Any, phase: str, out: Tensor, rows: Tensor, num_out: list[int] | None = None, num_in: list[int] | None = None
) -> None:
    """torch.distributed's, of as many rows from and to each rank. What it raises becomes a PeerError that says in which
    phase.
    """
    try:
        dist.all_to_all_single(out, rows, num_out, num_in, group=group)
    except RuntimeError as error:
        raise PeerError(f"{phase}: a rank has ended, or did not come within the group's time-out: {error}") from error


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One dispatch, and the way back.

    Attributes:
        group: of torch.distributed. sent: a Routing of own tokens, whose experts are ranks.
        num_sent, num_received: rows to and from each rank. here: the Routing of received rows to own experts.
    """

    group: Any
    sent: Routing
    num_sent: list[int]
    num_received: list[int]
    here: Routing | None = None

    @property
    def tokens(self) -> Tensor:
        """Of each row that is sent."""
        return self.sent.token_of_row[: sum(self.num_sent)]

    def forth(self, phase: str, rows: Tensor) -> Tensor:
        """Rows for others, [rows sent, ...], to those of others for this rank."""
        out = rows.new_empty(sum(self.num_received), *rows.shape[1:])
        return self._swap(phase, out, rows, self.num_received, self.num_sent)

    def back(self, phase: str, rows: Tensor, out: Tensor) -> Tensor:
        """The other way, into the first rows of `out`."""
        self._swap(phase, out[: sum(self.num_sent)], rows, self.num_sent, self.num_received)
        return out

    def _swap(self, phase: str, out: Tensor, rows: Tensor, num_out: list[int], num_in: list[int]) -> Tensor:
        """gloo's by way of the host, since it moves no memory of GPUs."""
        by_host = out.is_cuda and dist.get_backend(self.group) == "gloo"
        received = torch.empty(out.shape, dtype=out.dtype) if by_host else out
        sent = rows.cpu() if by_host else rows
        all_to_all(self.group, phase, received, sent.contiguous(), num_out, num_in)
        return out.copy_(received) if by_host else out

    def sums(self, phase: str, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """Of own tokens, of what all ranks send back for them, [N, H]."""
        row_of = self.sent.row_of
        buffer = self.back(phase, rows, rows.new_empty(row_of.numel(), rows.shape[1]))
        made: Tensor = combine_rows(buffer.view(*row_of.shape, rows.shape[1]), row_of, residual)
        return made


def exchange_counts(group: Any, counts: list[int]) -> list[int]:
    """How many rows each rank will send, given how many are for each."""
    mine = torch.tensor(counts, device="cuda" if dist.get_backend(group) == "nccl" else "cpu")
    theirs = torch.empty_like(mine)
    all_to_all(group, DISPATCH, theirs, mine)
    received: list[int] = theirs.tolist()
    return received


class Dispatch(torch.autograd.Function):
    """x [N, H], weights [N, K] and ids to those of the tokens that have an expert here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, ids: Tensor, exchange: Exchange) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        tokens = exchange.tokens
        parts = (exchange.forth(DISPATCH, rows.index_select(0, tokens)) for rows in (x, weights, ids))
        x_here, weights_here, ids_here = parts
        ctx.mark_non_differentiable(ids_here)
        return x_here, weights_here, ids_here

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor, d_weights: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        exchange: Exchange = ctx.exchange
        of_x, of_weights, *_ = ctx.needs_input_grad
        sums = exchange.sums(f"backward of {DISPATCH}", d_x) if of_x else None
        return sums, _of_weights(exchange, d_weights) if of_weights else None, None, None


def _of_weights(exchange: Exchange, d_weights: Tensor) -> Tensor:
    """Of own weights [N, K]: each has a gradient on the rank of its expert, and exactly 0 on others."""
    row_of = exchange.sent.row_of
    zeros = d_weights.new_zeros(row_of.numel() + 1, d_weights.shape[1])
    rows = exchange.back(f"backward of {DISPATCH}", d_weights, zeros)
    return rows[row_of.where(row_of >= 0, row_of.numel()).long()].sum(1)


class Collect(torch.autograd.Function):
    """Sums over a rank's own experts, [rows received, H], to those over all of them, [N, H], + residual."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, residual: Tensor | None, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.sums(COMBINE, sums, residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        exchange: Exchange = ctx.exchange
        of_sums, of_residual, _ = ctx.needs_input_grad
        phase = f"backward of {COMBINE}"
        d_sums = exchange.forth(phase, d_out.index_select(0, exchange.tokens)) if of_sums else None
        return d_sums, d_out if of_residual else None, None
