"""Interface of the transports: `Exchange` (a layer's dispatch and combine, and the backward of both), and PeerError."""

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
"""Names of the phases in error messages."""
WHY = {
    "refused": "the tokens of rank {} were refused, as its own error says",
    "failed": "rank {} failed between dispatch and combine, as its own error says",
    "other form": "rank {} has tokens in another form; give 16-bit ones on all ranks or MXFP8 on all, and record "
    "gradients on all or none",
}
"""Error texts for the reasons why an exchange with a rank failed; keys are in `windows.REASONS` and `headers.SAID`."""


class PeerError(RuntimeError):
    """Raised if another rank failed, refused its arguments, is in another operation, or does not come in time.

    The message names the rank and the operation.
    """


class Exchange(abc.ABC):
    """One dispatch with its combine, and their backward passes, as seen by one rank.

    Tensors that this rank sends are ordered by its tokens. Received tensors are ordered by sending rank, then by token.
    The caller of a method must hold the transport's `turn`, a lock that only one thread at a time may hold.

    Attributes:
        transport: an AllToAll or a Symmetric.
        row_of: int32 [received tokens, K], for each choice its row in the input of this rank's experts, -1: no row;
            `row_of` of the received tokens' Routing. None before this Routing is made.
    """

    transport: Any
    row_of: Tensor | None = None

    @property
    def turn(self) -> Turn:
        """The ExpertParallel's Turn, a lock that only one thread at a time may hold. Backward passes enter it."""
        turn: Turn = self.transport.turn
        return turn

    @property
    @abc.abstractmethod
    def tokens(self) -> int:
        """Number of tokens N that this rank dispatched."""

    @abc.abstractmethod
    def dispatch(self, x: Tokens, weights: Tensor, ids: Tensor) -> tuple[Tokens, Tensor, Tensor]:
        """Send tokens x [N, H], with weights and ids [N, K] of their choices, to the ranks of their experts.

        Returns (x, weights, ids) that this rank received.
        """

    @abc.abstractmethod
    def forth(self, d_out: Tensor) -> Tensor:
        """Backward of `back`: send the gradients of the results, d_out [N, H], to the ranks that got the tokens.

        Returns the gradients that this rank received, one row for each received token.
        """

    @abc.abstractmethod
    def back(self, sums: Tensor, residual: Tensor | None) -> Tensor:
        """Combine: send this rank's results, one sum for each received token, back to the tokens' ranks.

        Returns [N, H]: for each of this rank's own tokens the sum over all ranks, plus the residual unless None.
        """

    @abc.abstractmethod
    def fail(self) -> None:
        """Tell the other ranks that this rank failed; takes the place of `back`. Their combine raises a PeerError."""

    def back_rows(self, y: Tensor, here: Routing, residual: Tensor | None) -> Tensor:
        """Combine from rows: add the rows y [T, H] of each received token, and send the sums back to the tokens' ranks.

        Returns [N, H]: for each of this rank's own tokens the sum over all ranks, plus the residual.

        Args:
            y: the experts' results, one row for each choice of a received token: T rows.
            here: the Routing of the received tokens.
            residual: [N, H], added to the sums of this rank's own tokens; None: nothing is added.
        """
        return self.back(combine(y, here), residual)

    @abc.abstractmethod
    def gradients_back(self, d_x: Tensor, d_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Backward of `dispatch`: send the gradients of received tokens and weights back to the tokens' ranks.

        Args:
            d_x: the gradients of the received tokens.
            d_weights: the gradients of the received weights; None: weights need no gradient.

        Returns:
            (gradient of this rank's own tokens [N, H], summed over ranks; gradient of their weights [N, K], None if
                `d_weights` is None). The gradient of a weight comes from the rank of the choice's expert; 0 for a
                choice without an expert.
        """


@dataclasses.dataclass(frozen=True)
class Handle:
    """The result of a dispatch that `combine` needs.

    Attributes:
        exchange: the exchange.
        here: the Routing of the tokens that arrived on this rank to this rank's experts.
    """

    exchange: Exchange
    here: Routing


class Dispatch(torch.autograd.Function):
    """`Exchange.dispatch` as an autograd function, differentiable in x [N, H] and weights [N, K]."""

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
    """`Exchange.back` as an autograd function, from sums over this rank's experts to [N, H], sums over all experts."""

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
