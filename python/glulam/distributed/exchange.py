"""What every transport has: the two ends of a layer whose experts are on several ranks, and their gradients."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..layer.routing import Routing
from ..layer.rows import combine
from .tokens import Tokens
from .turn import Turn

DISPATCH, COMBINE = "dispatch", "combine"
"""Phases, as errors call them."""
WHY = {
    "refused": "the tokens of rank {} were refused, as its own error says",
    "failed": "rank {} failed between dispatch and combine, as its own error says",
    "other form": "rank {} has tokens in another form; give 16-bit ones on all ranks or MXFP8 on all, and record "
    "gradients on all or none",
}
"""Why what a rank sent does not count, by `windows.REASONS` and `headers.SAID`."""


class PeerError(RuntimeError):
    """Another rank could not do its part; the message names it and what it was asked for."""


class Exchange(abc.ABC):
    """One dispatch, and the way back. What it sends forth is by token; what comes here lies by rank and then by token.

    Callers of the methods hold the transport's turn.

    Attributes:
        transport: an AllToAll or a Symmetric. row_of: of the Routing here, once there is one.
    """

    transport: Any
    row_of: Tensor | None = None

    @property
    def turn(self) -> Turn:
        """The ExpertParallel's, which backward passes take themselves."""
        turn: Turn = self.transport.turn
        return turn

    @property
    @abc.abstractmethod
    def tokens(self) -> int:
        """N, the number of this rank's tokens that were dispatched."""

    @abc.abstractmethod
    def dispatch(self, x: Tokens, weights: Tensor, ids: Tensor) -> tuple[Tokens, Tensor, Tensor]:
        """The same of the tokens of all ranks that have an expert here."""

    @abc.abstractmethod
    def forth(self, d_out: Tensor) -> Tensor:
        """Gradients of results [N, H], to where their tokens went."""

    @abc.abstractmethod
    def back(self, sums: Tensor, residual: Tensor | None) -> Tensor:
        """Of own tokens [N, H], the sums over ranks of those that come back for them, + residual."""

    @abc.abstractmethod
    def fail(self) -> None:
        """In place of `back`: tell the other ranks that this one failed."""

    def back_rows(self, y: Tensor, here: Routing, residual: Tensor | None) -> Tensor:
        """`back` of rows of experts [T, H]."""
        return self.back(combine(y, here), residual)

    @abc.abstractmethod
    def gradients_back(self, d_x: Tensor, d_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Of own tokens [N, H] as `back`, and of their weights [N, K], each from the rank of its expert; 0 without."""


@dataclasses.dataclass(frozen=True)
class Handle:
    """What `combine` answers: an exchange, and the Routing of the tokens that came to own experts."""

    exchange: Exchange
    here: Routing


class Dispatch(torch.autograd.Function):
    """x [N, H], weights [N, K] and ids to those of the tokens that have an expert here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, ids: Tensor, exchange: Exchange) -> tuple[Any, ...]:
        ctx.exchange = exchange
        x_here, weights_here, ids_here = exchange.dispatch(x, weights, ids)
        ctx.mark_non_differentiable(ids_here)
        return x_here, weights_here, ids_here

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor, d_weights: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        of_x, of_weights, *_ = ctx.needs_input_grad
        with ctx.exchange.turn:
            sums, of_choices = ctx.exchange.gradients_back(d_x, d_weights if of_weights else None)
        return sums if of_x else None, of_choices, None, None


class Collect(torch.autograd.Function):
    """Sums over a rank's own experts, by token that came, to those over all of them, [N, H], + residual."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, residual: Tensor | None, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.back(sums, residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        of_sums, of_residual, _ = ctx.needs_input_grad
        d_sums = None
        if of_sums:
            with ctx.exchange.turn:
                d_sums = ctx.exchange.forth(d_out)
        return d_sums, d_out if of_residual else None, None
