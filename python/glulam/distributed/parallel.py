"""ExpertParallel: the distribution of experts over ranks, and the transport of tokens to their experts and back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from .. import recipes
from ..calls.addressed import WIDTH_MULTIPLE
from ..calls.checks import KERNEL_DTYPES, any_requires_grad, check_tensor
from ..formats.mxfp8 import MXFP8Tensor
from ..layer.checks import INT32_MAX
from ..layer.routing import Routing
from ..layer.rows import combine
from ..names import Transport
from ..recipes import Recipe
from .all_to_all import AllToAll
from .checks import NAME, check_back, check_options
from .exchange import DISPATCH, Collect, Dispatch, Handle, PeerError
from .neighbours import agree
from .owners import Owners
from .side_stream import SideStreamWork
from .symmetric import MAX_TOKENS, Symmetric
from .tokens import SENT_AS, Tokens, as_read, check_tokens, in_mxfp8, quantizes, refuse_gradients
from .window import Sizes, shared_window

__all__ = ["ExpertParallel", "PeerError"]
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Allowed dtypes of the weights of choices."""
MOST_TRIED = 64


class ExpertParallel:
    """The experts of a layer, spread over the ranks of a torch.distributed group.

    Rank r owns the experts floor(r E / world) to floor((r + 1) E / world) - 1.

        ep = ExpertParallel(group, num_experts, top_k, hidden_size, max_tokens, dtype=torch.bfloat16)
        y = glulam.moe(x, glulam.route(logits, top_k), w1, w2, parallel=ep)      # w1, w2: of own experts

    The same in three steps; instead of `moe`, any function that returns a result for each token here can be used:

        routing = glulam.route(logits, top_k)
        x_here, routing_here, handle = ep.dispatch(x, routing.ids, routing.weights)
        y_here = glulam.moe(x_here, routing_here, w1, w2)
        y = ep.combine(y_here, handle)

    A token is sent once to each rank that owns one of its experts. There, the results of this rank's experts are added
    in the order of the choices; then, on the token's own rank, the sums from all ranks are added in the order of ranks.
    Each sum is computed in float32 and rounded once, so every run of a group gives the same bits. Ranks may have
    different numbers of tokens, or none.

    Every rank of the group must make the same calls in the same order, backward passes included.

    Args:
        group: a torch.distributed process group; None: the default group of all processes.
        num_experts, top_k, hidden_size: E, K and H. E is at most 1024 and at least the number of ranks.
        max_tokens: the most tokens of a rank in one call.
        dtype: dtype of tokens.
        transport: how rows are sent.
            "symmetric": kernels store to the memory of the host's other GPUs, without host synchronisation, and CUDA
                graphs can capture them. Received data lies in buffers, twice world x max_tokens rows, that the next
                dispatch overwrites; if gradients are recorded, the data is copied.
            "all_to_all": torch.distributed's all-to-all, which any back end has. The host waits once in each dispatch
                for the numbers of rows, so no CUDA graph can capture it.
            "auto": symmetric if all ranks have GPUs of one host that can access each other, else all_to_all.

    Attributes:
        rank, world: this rank, and the number of ranks.
        first, num_local: the first expert here, and the number of experts here.
        transport: the chosen transport.

    Only one thread at a time may use an object. If two threads use it at once, the second gets a RuntimeError, and the
    object becomes unusable, since the threads of other ranks may have come in another order.

    Raises:
        ValueError, TypeError: options are invalid, or differ between ranks.
        PeerError: another rank's options are invalid, or another rank makes no ExpertParallel within the group's
            time-out.
        RuntimeError: torch.distributed was not initialised.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, num_experts: int, top_k: int, hidden_size: int, max_tokens: int, *,
        dtype: torch.dtype, transport: Transport = "auto",
    ) -> None:  # fmt: skip
        if not dist.is_initialized():
            raise RuntimeError(f"{NAME}: torch.distributed has no process group; call init_process_group first")
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError(f"{NAME}: this process is not in the group; give one that it is in")
        options = {"num_experts": num_experts, "top_k": top_k, "hidden_size": hidden_size, "max_tokens": max_tokens}
        window, error = Sizes(self.world, max_tokens, top_k, hidden_size, dtype), None
        try:
            check_options(options, self.world, transport, dtype)
        except (ValueError, TypeError) as refused:
            error = refused
        unfit = "" if error else self._unfit(window)
        self.transport, identity = agree(self.group, transport, (num_experts, *window), unfit, error)
        self.num_experts, self.top_k, self.hidden_size = num_experts, top_k, hidden_size
        self.max_tokens, self.dtype = max_tokens, dtype
        self.owners = Owners(num_experts, self.world)
        self.first, self.num_local = self.owners.first(self.rank), self.owners.count(self.rank)
        self._way: AllToAll | Symmetric = AllToAll(self.group, self.owners, identity)
        if self.transport == Symmetric.name:
            device = torch.device("cuda", torch.cuda.current_device())
            shared = shared_window(self.group, window, device)
            self._way = Symmetric(*shared, self.rank, num_experts, window)
            self._warm_up(device)

    @staticmethod
    def _unfit(window: Sizes) -> str:
        """Return text that says why the symmetric transport's kernels do not support these sizes; "": they do."""
        if window.dtype not in KERNEL_DTYPES:
            return f"dtype is {window.dtype}; kernels take {', '.join(map(str, KERNEL_DTYPES))}"
        if window.hidden_size % WIDTH_MULTIPLE:
            return f"hidden_size is {window.hidden_size}; kernels take multiples of {WIDTH_MULTIPLE}"
        if window.max_tokens > MAX_TOKENS or window.rows * window.top_k > INT32_MAX:
            most = INT32_MAX // window.top_k
            return f"max_tokens is {window.max_tokens}; {window.world} ranks may have {most} in all"
        return ""

    @torch.no_grad()
    def _warm_up(self, device: torch.device) -> None:
        """Run dispatch and combine without valid tokens, to load all kernels: no rank then waits for a first call."""
        x = torch.zeros(1, self.hidden_size, dtype=self.dtype, device=device)
        ids = torch.full((1, self.top_k), -1, dtype=torch.int32, device=device)
        for _ in range(2):
            x_here, _, handle = self.dispatch(x, ids, torch.zeros(ids.shape, device=device))
            self.collect(x_here, handle)
            torch.cuda.synchronize(device)
            dist.barrier(self.group)
        self.check()

    def check(self) -> None:
        """Raise the PeerError of a failure in an earlier call, or in a replay of a CUDA graph.

        It does not wait for the device: synchronise first if the latest calls must be included.
        """
        self._way.check()

    @property
    def timeout(self) -> float | None:
        """Seconds that a rank waits for other ranks with the symmetric transport, 600 unless set.

        None: the transport is all_to_all, whose time-out is torch.distributed's, of the group.
        """
        return self._way.timeout if isinstance(self._way, Symmetric) else None

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        if not isinstance(self._way, Symmetric):
            raise ValueError(f"{NAME}: the time-out of all_to_all is torch.distributed's; give it to the group")
        self._way.timeout = seconds

    def dispatch(self, x: Tokens, ids: Tensor, weights: Tensor) -> tuple[Any, Routing, Handle]:
        """Send tokens to the ranks that own their experts. Differentiable in x and weights.

        Args:
            x: [N, H] in the object's dtype, N at most max_tokens. Or, on all ranks, an MXFP8Tensor quantised by rows
                with block "1x128" and plain scales, H a multiple of 128; it is not differentiable.
            ids: int32 or int64 [N, K], the chosen experts; an id that is no expert (-1, E and more) is ignored.
            weights: [N, K], floating point.

        Returns:
            x_here: [R, H], the tokens that have an expert on this rank, in x's format, ordered by their rank, then by
                their number. With the symmetric transport it is a buffer with room for all ranks' tokens, R = world x
                max_tokens, with gaps that routing_here does not read; unless gradients are recorded, the next dispatch
                overwrites it.
            routing_here: a Routing of these tokens to the experts of this rank.
            handle: an argument of `combine`.

        Raises:
            ValueError, TypeError: an argument is invalid; other ranks get a PeerError.
            GradientNotSupported: x is in MXFP8, and weights requires a gradient; other ranks get a PeerError.
            PeerError: another rank's arguments are invalid, or have another format than this rank's, or another rank
                does not dispatch in time. With the symmetric transport, an earlier call's error may be raised here.
        """
        return self._dispatch(lambda: self._checked(x, ids, weights), ids, weights)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Context for work before a dispatch. If the work raises, the other ranks' dispatch raises a PeerError."""
        with self._way.turn, _telling(self._way.refuse):
            yield

    def _dispatch(self, tokens: Callable[[], Any], ids: Tensor, weights: Tensor) -> tuple[Any, Routing, Handle]:
        """Do the work of `dispatch`.

        Args:
            tokens: function that checks the arguments and returns the tokens. If it raises, other ranks are told.
            ids, weights: [N, K], the chosen experts and their weights.
        """
        with self._way.turn:
            with self.refusing():
                x = tokens()
                ours = ids.contiguous()
                if ours.dtype is not torch.int32:
                    ours = ours.where((ours >= 0) & (ours < self.num_experts), -1).int()
                weights = weights.to(torch.promote_types(self.dtype, torch.float32))  # one dtype on all ranks
            exchange = self._way.begin(ours, x)
            if isinstance(x, MXFP8Tensor):
                x_here, weights_here, ids_here = exchange.dispatch(x, weights, ours)
            else:
                x_here, weights_here, ids_here = Dispatch.apply(x, weights, ours, exchange)  # type: ignore[no-untyped-call]
            with _telling(exchange.fail):
                here = Routing.from_topk(
                    ids_here, weights_here, self.num_local, self.first, world_experts=self._spread(len(ours))
                )
        exchange.row_of = here.row_of
        return x_here, here, Handle(exchange, here)

    def _spread(self, tokens: int) -> int:
        """Return `Routing.world_experts`, by which kernels are chosen, for the tokens that arrive on this rank.

        Args:
            tokens: the number of tokens of this rank, by which the other ranks' numbers are estimated.
        """
        if self.transport == Symmetric.name:
            return self.owners.spread_in_room(tokens, self.max_tokens)
        return self._spread_of_arrived

    @functools.cached_property
    def _spread_of_arrived(self) -> int:
        return self.owners.spread_of_arrived(self.rank, self.top_k)

    def _checked(self, x: Any, ids: Any, weights: Any) -> Any:
        """Check the arguments of `dispatch`, and return x. Raises the errors that `dispatch` documents."""
        self._check_tokens(x)
        op, shape = DISPATCH, (x.shape[0], self.top_k)
        integers = torch.int32, torch.int64
        why = "x has N tokens, which choose top_k experts each"
        check_tensor(op, "ids", ids, "a tensor [N, K]", x, dtypes=integers, shape=shape, why=why)
        check_tensor(op, "weights", weights, "a tensor [N, K]", x, dtypes=FLOATING, shape=shape, why=why)
        refuse_gradients(op, x, weights)
        return x

    def _check_tokens(self, x: Any) -> None:
        check_tokens(DISPATCH, x, self.hidden_size, self.max_tokens, self.dtype)

    def combine(
        self, y_here: Tensor, handle: Handle, residual: Tensor | None = None, *, summed: bool | None = None
    ) -> Tensor:
        """Send the results of this rank's experts back to the tokens' ranks, and add them there. Differentiable.

        Args:
            y_here: results of the experts, contiguous, multiplied by the weights of choices, in one of two forms:
                Sums: [R, H], one for each row of x_here, as `glulam.moe(x_here, routing_here, ...)` returns.
                Rows: [T, H], T = R top_k, one for each row of routing_here, as `grouped_mlp` returns when called with
                    `offs=routing_here.offs, row_scale=routing_here.weight_of_row`. The rows of each token are added
                    on this rank first.
                With the symmetric transport, y_here must have the object's dtype, and the gradient of sums has the same
                gaps as x_here.
            handle: the handle that the dispatch returned.
            residual: [N, H], added to the sums; None: nothing is added.
            summed: True: y_here holds sums. False: y_here holds rows. None: its shape decides. With top_k = 1 both
                shapes are equal, but sums are ordered by token and rows by expert. None then means sums, so pass False
                for rows.

        Returns:
            [N, H]: residual[n] + the sum over ranks of token n's sums.

        Raises:
            ValueError, TypeError: an argument is invalid. Nothing was sent, so the call can be repeated.
            PeerError: since the dispatch, another rank failed; or it is in another operation, sends another dtype or
                width, or does not combine in time.
        """
        is_summed = check_back(y_here, handle, summed, residual)
        return self._combine(y_here, handle, residual, is_summed)

    def _combine(self, y_here: Tensor, handle: Handle, residual: Tensor | None, is_summed: bool) -> Tensor:
        with self._way.turn:
            if is_summed:
                return self.collect(y_here, handle, residual)
            if torch.is_grad_enabled() and any_requires_grad(y_here, residual):
                return self.collect(combine(y_here, handle.here), handle, residual)
            return handle.exchange.back_rows(y_here, handle.here, residual)

    def collect(self, sums: Tensor, handle: Handle, residual: Tensor | None = None) -> Tensor:
        """Do the work of `combine` for sums [R, H], without checking their shape."""
        with self._way.turn:
            out: Tensor = Collect.apply(sums, residual, handle.exchange)  # type: ignore[no-untyped-call]
        return out

    def layer(
        self, op: str, recipe: str | Recipe, experts: Callable[[Any, Routing, bool], Tensor], given: Mapping[str, Any],
        x: Tokens, routing: Routing, residual: Tensor | None = None, shared: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Run a whole layer: dispatch tokens, run the experts on the tokens that arrive, and combine the results.

        If this rank raises, the other ranks' call raises a PeerError. If an argument is the cause, that happens in
        dispatch, before anything is sent; else in combine.

        Args:
            op: the public operator's name in errors.
            recipe: the experts' recipe, which decides whether tokens are sent in MXFP8.
            experts: function (x_here, routing_here, is_summed) that returns the experts' results. is_summed is True if
                gradients are recorded: return a sum for each token. False: return rows, which combine adds on their way
                back.
            given: the other arguments of the experts, by name. They are checked before dispatch, by a call of `experts`
                without tokens, if an earlier call had no arguments of the same kind (shape, dtype, ...).
            x, routing: the tokens [N, H], and their Routing to all experts.
            residual: [N, H], added to the result; None: nothing is added.
            shared: function that computes the residual from x while rows are on their way; None: `residual` is used.

        Returns:
            [N, H], the result for this rank's own tokens.
        """
        with self._way.turn:
            beside = None if shared is None else SideStreamWork(shared, x)  # type: ignore[arg-type]  # of modules, whose x is one
            tokens = functools.partial(self._tokens_of_layer, op, recipe, experts, given, x, routing)
            x_here, here, handle = self._dispatch(tokens, routing.ids, routing.weights)
            with _telling(handle.exchange.fail):
                if beside:
                    residual = beside.run()
                is_summed = _by_sums(x_here)
                made = experts(x_here, here, is_summed)
                if beside:
                    beside.join()
                check_back(made, handle, is_summed, residual)
            return self._combine(made, handle, residual, is_summed)

    def _tokens_of_layer(
        self, op: str, recipe: str | Recipe, experts: Callable[[Any, Routing, bool], Tensor], given: Mapping[str, Any],
        x: Tokens, routing: Routing,
    ) -> Tokens:  # fmt: skip
        """Check the tokens, the routing and the experts' arguments of a layer; return the tokens as they are sent.

        Raises:
            ValueError, TypeError: an argument is invalid.
            GradientNotSupported: see `dispatch`.
        """
        if (routing.first, routing.num_experts) != (0, self.num_experts):
            raise ValueError(
                f"{op}: routing is to {routing.num_experts} experts from {routing.first} on; with parallel give one to "
                f"all {self.num_experts}"
            )
        if routing.expert_map is not None:
            raise ValueError(
                f"{op}: routing has an expert_map, and with parallel ids are those of all ranks' experts; leave out "
                "expert_map"
            )
        sent: Tokens = self._checked(self._as_sent(op, recipe, x), routing.ids, routing.weights)
        self._try_experts(experts, given, sent, routing)
        return sent

    def _try_experts(
        self, experts: Callable[[Any, Routing, bool], Tensor], given: Mapping[str, Any], x: Tokens, routing: Routing
    ) -> None:
        """Let the experts check their arguments, by a call with zero tokens: once for each kind of arguments (`_kind`).

        An error is raised here, before anything is sent, and not while other ranks wait.
        """
        key = isinstance(x, Tensor), torch.is_grad_enabled(), *map(_kind, given.values())
        if key in self._tried:
            return
        nobody = x[:0] if isinstance(x, Tensor) else MXFP8Tensor.unchecked(x.data[:0], x.scale[:0], *SENT_AS)
        ids = routing.ids.new_empty(0, self.top_k, dtype=torch.int32)
        weights = routing.weights.new_empty(0, self.top_k, dtype=torch.float32)
        here = Routing.from_topk(ids, weights, self.num_local, self.first)
        with torch.no_grad():
            experts(nobody, here, _by_sums(x))
        if len(self._tried) > MOST_TRIED:
            self._tried.clear()
        self._tried.add(key)

    @functools.cached_property
    def _tried(self) -> set[Any]:
        """Keys of calls that `_try_experts` need not try again, since the experts accepted such arguments before.

        A key has: True if tokens are in 16 bits, not MXFP8; the grad mode; type, shape and dtype of each argument
        (`_kind`).
        """
        return set()

    def _as_sent(self, op: str, recipe: str | Recipe, x: Tokens) -> Tokens:
        """Convert a layer's tokens to the format in which they are sent: 16 bits or MXFP8.

        The format depends only on recipe, sizes, grad mode and x's own format, so it is the same on all ranks.
        """
        if isinstance(x, MXFP8Tensor):
            return as_read(op, recipe, x, self.dtype)
        if not quantizes(recipes.find(op, recipe), self.hidden_size, self.dtype):
            return x
        self._check_tokens(x)
        return in_mxfp8(x)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        """Return the object itself, since a process group cannot be copied."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{NAME} has a process group, which no file holds; save the module's state_dict() instead")

    def __repr__(self) -> str:
        last = self.first + self.num_local - 1
        return f"{NAME}(rank {self.rank} of {self.world}, experts {self.first} to {last} of {self.num_experts})"


@contextlib.contextmanager
def _telling(tell: Callable[[], None]) -> Iterator[None]:
    """Context for work on which other ranks depend. If the work raises, call `tell`, so that other ranks raise too."""
    try:
        yield
    except Exception:
        tell()
        raise


def _by_sums(x: Tokens) -> bool:
    """Return True if a layer's experts must return a sum for each token; False: a row for each choice.

    Sums are needed if gradients are recorded. Tokens x in MXFP8 have no gradients.
    """
    return torch.is_grad_enabled() and isinstance(x, Tensor)


def _kind(value: Any) -> Any:
    """Return the properties of an argument that experts check, such as type, shape and dtype, as part of a key.

    For a list, the key has the length and the first tensor's properties.
    """
    if isinstance(value, (list, tuple)):
        return type(value), len(value), *map(_kind, value[:1])
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else (type(value), shape, getattr(value, "dtype", None), value.device)
