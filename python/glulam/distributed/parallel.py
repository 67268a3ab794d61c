"""ExpertParallel: whose experts are where, and the way of tokens to them and back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..calls.checks import check_tensor, shape_text
from ..layer.routing import MAX_EXPERTS, MAX_K, Routing
from ..layer.rows import combine
from .exchange import REFUSED, Collect, Dispatch, Exchange, PeerError, exchange_counts
from .owners import Owners

__all__ = ["ExpertParallel", "PeerError"]
NAME = "ExpertParallel"
TRANSPORTS = ("auto", "all_to_all")
MAX_RANKS = MAX_K
"""A token's rows from other ranks are added as those of its choices are."""


class ExpertParallel:
    """The experts of a layer spread over the ranks of a torch.distributed group, rank r owning floor(r E / world) to
    floor((r + 1) E / world) - 1.

        ep = ExpertParallel(group, num_experts, top_k, hidden_size, max_tokens, dtype=torch.bfloat16)
        y = glulam.moe(x, glulam.route(logits, top_k), w1, w2, parallel=ep)      # w1, w2: of own experts

    A token goes once to each rank that has an expert of its; results are added on that rank first, in the order of the
    choices, and then in the order of ranks, both in float32 and rounded once: the same bits in every run of a group.
    Ranks may have different numbers of tokens, or none.

    Every rank of the group makes the same calls in the same order, backward passes included.

    Args:
        group: of torch.distributed; None: the default one, of all processes.
        num_experts, top_k, hidden_size: E, at most 1024 and at least the number of ranks; K; H.
        max_tokens: the most tokens of a rank in one call.
        dtype: of tokens.
        transport: "all_to_all", torch.distributed's, which any back end has: the host waits for the numbers of rows
            once a dispatch, so that no CUDA graph can hold it. "auto": the best that there is.

    Attributes:
        rank, world; first, num_local: the first expert here, and how many there are.

    Raises:
        ValueError, TypeError: options that cannot work.
        RuntimeError: torch.distributed was not initialised.
    """

    def __init__(
        self, group: Any, num_experts: int, top_k: int, hidden_size: int, max_tokens: int, *, dtype: torch.dtype,
        transport: str = "auto",
    ) -> None:  # fmt: skip
        if not dist.is_initialized():
            raise RuntimeError(f"{NAME}: torch.distributed has no process group; call init_process_group first")
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError(f"{NAME}: this process is not in the group; give one that it is in")
        sizes = {"num_experts": num_experts, "top_k": top_k, "hidden_size": hidden_size, "max_tokens": max_tokens}
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{NAME}: {name} is {value!r}; give an integer")
            most = {"num_experts": MAX_EXPERTS, "top_k": min(MAX_K, num_experts)}.get(name, math.inf)
            if not 1 <= value <= most:
                raise ValueError(
                    f"{NAME}: {name} is {value}; it must be 1 {'or more' if most == math.inf else f'to {most}'}"
                )
        if self.world > min(num_experts, MAX_RANKS):
            raise ValueError(
                f"{NAME}: {self.world} ranks for {num_experts} experts; there may be at most {MAX_RANKS}, and one for "
                "each expert, so give a smaller group"
            )
        if transport not in TRANSPORTS:
            raise ValueError(f"{NAME}: transport={transport!r}; choose {' or '.join(map(repr, TRANSPORTS))}")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"{NAME}: dtype is {dtype!r}; give that of tokens, as torch.bfloat16")
        self.num_experts, self.top_k, self.hidden_size = num_experts, top_k, hidden_size
        self.max_tokens, self.dtype, self.transport = max_tokens, dtype, "all_to_all"
        self.owners = Owners(num_experts, self.world)
        self.first, self.num_local = self.owners.first(self.rank), self.owners.count(self.rank)

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Routing, Exchange]:
        """Send tokens to the ranks of the experts that they chose. Differentiable in x and weights.

        Args:
            x: [N, H], N at most max_tokens. ids: int32 or int64 [N, K]; those of no expert (-1, E and more) have no
                part. weights: [N, K], floating point.

        Returns:
            x_here: [R, H], the tokens that have an expert here, by rank and then by number.
            routing_here: a Routing of these tokens to own experts.
            handle: for `combine`.

        Raises:
            ValueError, TypeError: an argument that does not fit; other ranks get a PeerError.
            PeerError: another rank's arguments did not fit.
        """
        try:
            self._check(x, ids, weights)
        except (ValueError, TypeError):
            exchange_counts(self.group, [REFUSED] * self.world)
            raise
        to = self.owners.destinations(ids)
        sent = Routing.from_topk(to, torch.ones(to.shape, device=to.device), self.world)
        num_sent = sent.counts.tolist()
        num_received = exchange_counts(self.group, num_sent)
        if REFUSED in num_received:
            raise PeerError(
                f"dispatch: the tokens of rank {num_received.index(REFUSED)} were refused, as its own error says"
            )
        exchange = Exchange(self.group, sent, num_sent, num_received)
        ours = ids.where((ids >= 0) & (ids < self.num_experts), -1).int()
        x_here, weights_here, ids_here = Dispatch.apply(x, weights, ours, exchange)  # type: ignore[no-untyped-call]
        here = Routing.from_topk(ids_here, weights_here, self.num_local, self.first)
        return x_here, here, dataclasses.replace(exchange, here=here)

    def _check(self, x: Any, ids: Any, weights: Any) -> None:
        op = "dispatch"
        check_tensor(op, "x", x, "a tensor [N, H]", dtypes=(self.dtype,))
        if x.dim() != 2 or x.shape[1] != self.hidden_size:
            raise ValueError(f"{op}: x has shape {shape_text(x.shape)}; it must be [N, {self.hidden_size}]")
        if len(x) > self.max_tokens:
            raise ValueError(f"{op}: x has {len(x)} tokens, and max_tokens is {self.max_tokens}; make it larger")
        shape = len(x), self.top_k
        integers = torch.int32, torch.int64
        why = "x has N tokens, which choose top_k experts each"
        check_tensor(op, "ids", ids, "a tensor [N, K]", x, dtypes=integers, shape=shape, why=why)
        check_tensor(op, "weights", weights, "a tensor [N, K]", x, shape=shape, why=why)

    def combine(self, y_here: Tensor, handle: Exchange, residual: Tensor | None = None) -> Tensor:
        """Sums of experts' rows, on the ranks that their tokens came from. Differentiable.

        Args:
            y_here: [T, H], rows of `routing_here`'s experts, as of `grouped_mlp` with its weights as row_scale.
            handle: of the dispatch. residual: [N, H], added to the sums.

        Returns:
            [N, H]: residual[n] + the sum over ranks of their sums.

        Raises:
            ValueError, TypeError: as of `glulam.combine`.
        """
        assert handle.here is not None
        return self.collect(combine(y_here, handle.here), handle, residual)

    def collect(self, sums: Tensor, handle: Exchange, residual: Tensor | None = None) -> Tensor:
        """The same of sums over own experts [R, H], as `glulam.moe` of x_here and routing_here makes them."""
        out: Tensor = Collect.apply(sums, residual, handle)  # type: ignore[no-untyped-call]
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        """Itself: a group has no copy."""
        return self

    def __repr__(self) -> str:
        last = self.first + self.num_local - 1
        return f"{NAME}(rank {self.rank} of {self.world}, experts {self.first} to {last} of {self.num_experts})"
