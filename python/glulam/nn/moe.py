"""MoE: a router, its experts, and optionally a shared expert that processes every token."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..calls.checks import check_number, mismatch, runs_kernels, shape_text
from ..calls.memory import check_dense
from ..formats.mxfp8 import MXFP8Tensor
from ..host.invariance import is_on
from ..layer import Routing, combine, moe, permute, route
from ..layer.checks import LOGITS_DTYPES, check_rule
from ..layer.expert_rows import rows_of_experts
from ..layer.few_tokens import route_few, routes_few
from ..layer.moe import moe_call
from ..names import Score
from ..recipes import BF16
from . import dialects
from .children import called, is_plain, parameters_of, product
from .in_order import product_in_order, refuse_called, route_in_order
from .lora import Lora
from .mlp import ExpertOptions, GroupedMLP, arguments_of
from .options import check_options, check_placement, held, shown_options
from .state import Converts, Move
from .weight_gradients import run

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..distributed import ExpertParallel

NAME = "MoE"


class MoE(Converts):
    """A mixture-of-experts layer: for each token the weighted sum of its experts' results, plus the shared expert's.

        routing = route(router(x), top_k);  y = moe(x, routing, w1, w2, residual=sigmoid(shared_gate(x)) shared(x))

    `glulam.route` and `glulam.moe` describe the two steps.

    Args:
        hidden_size, intermediate_size, num_experts: H, I and E.
        top_k: number of experts for each token.
        score, normalize, scale, num_groups, top_groups: see `glulam.route`.
        router_bias: True: the router has a trained bias [E] (gpt-oss).
        choice_bias: True: there is a buffer `choice_bias`, float32 [E], that is added to the scores when experts are
            chosen, but not to the experts' weights in the sum (DeepSeek-V3); see `update_choice_bias`. The buffer stays
            float32 when the module is cast and when a state dict is loaded.
        router_dtype: dtype of the router's parameters and logits; None: `dtype`.
        shared_intermediate_size: width of the shared expert, which processes every token; None: no shared expert.
        shared_gate: True: the shared expert's output is multiplied by sigmoid(x g), with a trained g [H] (Qwen2-MoE).
        parallel: a `glulam.distributed.ExpertParallel` for the same sizes; the module then holds only the experts of
            its own rank. None: the module holds all experts.
        device, dtype: device and dtype of the parameters.
        experts: options of all experts, the shared expert included: bias, activation, glu_layout, the activation's
            numbers, packed, recompute, delay_wgrad and recipe; see `GroupedMLP`.

    Children: `router` is a torch Linear, `experts` a GroupedMLP, `shared` a GroupedMLP of one expert or None, and
    `shared_gate` a Linear or None. `routing` is the routing of the last forward, for `glulam.load_balancing_loss` and
    `glulam.router_z_loss`.

    The layer does not call its children, but computes them by its own operators, which needs fewer launches. Only a
    child that is hooked, wrapped, compiled, of another class or a unit of FSDP2 is called as a module: the router and
    the gate with tokens [N, H], the experts with rows [T, H], `offs` and `row_scale`.

    State dicts of Qwen2-MoE, Qwen3-MoE, Mixtral, gpt-oss and DeepSeek-V3 blocks load by name: see `nn.dialects`.
    Quantised experts that are stored one by one, the shared expert included, load too if the recipe keeps their format:
    see `glulam.load_experts`.

    Raises:
        ValueError, TypeError: at construction: an option is invalid, or options cannot work together.
    """

    choice_bias: Tensor | None
    _routing: Routing | None = None
    _recomputed: weakref.ref[Routing] | None = None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        score: Score = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
        router_bias: bool = False,
        choice_bias: bool = False,
        router_dtype: torch.dtype | None = None,
        shared_intermediate_size: int | None = None,
        shared_gate: bool = False,
        parallel: ExpertParallel | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **experts: Unpack[ExpertOptions],
    ) -> None:
        super().__init__()
        check_options(MoE, locals())
        if parallel is not None:
            _check_parallel(parallel, num_experts=num_experts, top_k=top_k, hidden_size=hidden_size)
        self.parallel = parallel
        check_rule(NAME, num_experts, top_k, score, normalize, num_groups, top_groups, scale, name_of_k="top_k")
        if shared_gate and shared_intermediate_size is None:
            raise ValueError(
                f"{NAME}: shared_gate is True but there is no shared expert; give shared_intermediate_size"
            )
        self.hidden_size, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        self.rule: dict[str, Any] = {
            "score": score, "normalize": normalize, "scale": scale, "num_groups": num_groups, "top_groups": top_groups
        }  # fmt: skip
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        probe = torch.empty(0, **where)
        check_placement(MoE, probe, hidden_size, intermediate_size)
        valid = LOGITS_DTYPES if runs_kernels(probe) else (*LOGITS_DTYPES, torch.float64)
        if router_dtype is not None and router_dtype not in valid:
            raise TypeError(f"{NAME}: router_dtype is {router_dtype}; it must be {', '.join(map(str, valid))}, or None")
        self.router_dtype = router_dtype
        self.router = nn.Linear(hidden_size, num_experts, router_bias, device=device, dtype=router_dtype or dtype)
        num_local = num_experts if parallel is None else parallel.num_local
        made = [
            GroupedMLP(count, hidden_size, width, out_features=hidden_size, **experts, **where)
            for count, width in ((num_local, intermediate_size), (1, shared_intermediate_size))
            if width is not None
        ]
        self.experts, self.shared = made[0], made[1] if len(made) > 1 else None
        self.shared_gate = nn.Linear(hidden_size, 1, False, **where) if shared_gate else None
        biases = torch.zeros(num_experts, device=device, dtype=torch.float32) if choice_bias else None
        self.register_buffer("choice_bias", biases)
        self.register_load_state_dict_pre_hook(_widen_choice_bias)  # type: ignore[no-untyped-call]

    @property
    def routing(self) -> Routing | None:
        """The routing of the last forward, with its autograd graph.

        None before the first forward, and in a copy of the module. While an activation checkpoint recomputes a forward,
        `routing` is the routing of that recomputation. The graph's nodes stay in memory until the next forward; a
        backward that does not retain the graph frees their saved tensors.
        """
        recomputed = None if self._recomputed is None else self._recomputed()
        return self._routing if recomputed is None else recomputed

    @routing.setter
    def routing(self, routing: Routing | None) -> None:
        self._routing, self._recomputed = routing, None

    def reset_parameters(self) -> None:
        """Initialise all layers like torch.nn.Linear, and set the choice bias to zero."""
        for child in self.children():
            child.reset_parameters()  # type: ignore[operator]
        if self.choice_bias is not None:
            self.choice_bias.zero_()

    def forward(self, x: Tensor, *, num_tokens: Tensor | None = None) -> Tensor:
        """Return the layer's result [..., H] for tokens [..., H].

        Args:
            x: tokens, in the parameters' dtype.
            num_tokens: number of valid tokens, which come first in x; see `glulam.route`. The tokens after them are
                padding: no routed expert processes padding, but the shared expert does, like a dense layer. So padding
                must be finite if gradients are computed.

        Raises:
            ValueError, TypeError: x has another width or dtype; also raised by `glulam.route` and `glulam.moe`.
        """
        y, routing = self._alone(x, num_tokens) if self.parallel is None else self._among_ranks(x, num_tokens)
        if x.dim() != 2:
            # FSDP2 hangs its hook of backward on this result; a later write to a view would drop the hook.
            y = torch.ops.aten._unsafe_view.default(y, x.shape) if y.requires_grad else y.view(x.shape)
        self._keep(routing, y)
        return y

    def _alone(self, x: Tensor, num_tokens: Tensor | None) -> tuple[Tensor, Routing]:
        """Return `forward`'s result [N, H] and the routing, for a module whose experts are all in this process."""
        tokens = self._tokens(x)
        routing = self.route(tokens, num_tokens)
        given = arguments_of(self._modules["experts"])
        return self._experts(given, tokens, routing, None if self.shared is None else self._shared(tokens)), routing

    def _among_ranks(self, x: Tensor, num_tokens: Tensor | None) -> tuple[Tensor, Routing]:
        """Return the result [N, H] and the routing, for a module whose experts are spread over several ranks."""
        assert self.parallel is not None
        with self.parallel.refusing():
            tokens = self._tokens(x)
            routing = self.route(tokens, num_tokens)
            given = arguments_of(self._modules["experts"])
        shared, experts = None if self.shared is None else self._shared, partial(self._of_ranks, given)
        recipe = getattr(self.experts, "recipe", BF16)
        y = self.parallel.layer(NAME, recipe, experts, given or {}, tokens, routing, shared=shared)
        return y, routing

    def _tokens(self, x: Any) -> Tensor:
        """Return x as a contiguous matrix [N, H].

        Raises:
            ValueError: x is no tensor of this width. TypeError: it is sparse or nested.
        """
        if isinstance(x, Tensor):
            check_dense(NAME, "x", x)
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[-1] != self.hidden_size:
            shape = shape_text(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{NAME}: x is {shape}; give a tensor [..., {self.hidden_size}]")
        return x if x.dim() == 2 and x.is_contiguous() else x.reshape(-1, self.hidden_size).contiguous()

    def _keep(self, routing: Routing, y: Tensor) -> None:
        """Store the routing of a forward that returned y, without keeping the graph of a recomputation alive.

        A forward that runs within a backward is an activation checkpoint's recomputation. No later backward frees the
        recomputation's graph: if the module held the routing, everything saved before the router would stay in memory.
        So y's graph node holds the routing, and the module holds only a weak reference.
        """
        if is_dynamo_compiling():
            self.routing = routing
        elif torch._C._current_graph_task_id() >= 0 and y.grad_fn is not None:
            y.grad_fn.metadata[NAME] = routing  # type: ignore[index]  # a dictionary of the node, for anyone's use
            self._recomputed = weakref.ref(routing)
        else:  # without the 4 us of `Module.__setattr__`
            self.__dict__.update(_routing=routing, _recomputed=None)

    def _experts(
        self, given: dict[str, Any] | None, tokens: Tensor, routing: Routing, residual: Tensor | None = None
    ) -> Tensor:
        """Run the routed experts; return [N, H], each token's weighted sum of its experts' results plus the residual.

        Args:
            given: the experts' weights and options as arguments of `glulam.moe`; None: the experts are called as a
                module.
            tokens, routing: [N, H], and their Routing.
            residual: [N, H], added to the sums; None: nothing is added.
        """
        if given is None:
            return combine(self._called_experts(tokens, routing), routing, residual)
        arguments = {"x": tokens, "routing": routing, "residual": residual, **given}
        y: Tensor = run(moe, moe_call, arguments, self.experts.grad_writers(tokens))
        return y

    def _called_experts(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Call the experts as a module on one row for each (token, choice); return the weighted results [T, H]."""
        rows: Tensor = self.experts(permute(tokens, routing), offs=routing.offs, row_scale=routing.weight_of_row)
        return rows

    def _of_ranks(
        self, given: dict[str, Any] | None, tokens: Tensor | MXFP8Tensor, routing: Routing, is_summed: bool
    ) -> Tensor:
        """Run this rank's experts on the tokens that this rank received from all ranks.

        Args:
            given: the experts' weights and options as arguments of `glulam.moe`; None: the experts are called as a
                module.
            is_summed: True: return one sum for each token, [N, H], as `_experts` does. False: return one result for
                each row (token and expert), [T, H].
        """
        assert self.parallel is not None
        if given is not None and not is_summed:
            return rows_of_experts(tokens, routing, dtype=self.parallel.dtype, **given)
        tokens = tokens.dequantize(self.parallel.dtype) if isinstance(tokens, MXFP8Tensor) else tokens
        return self._experts(given, tokens, routing) if is_summed else self._called_experts(tokens, routing)

    def route(self, tokens: Tensor, num_tokens: Tensor | None = None) -> Routing:
        """Compute the router's logits, choose top_k experts for each token, and return the Routing.

        Args:
            tokens: [N, H].
            num_tokens: int32 [1], number of valid tokens, which come first; None: all are valid.

        Raises:
            ValueError, TypeError: raised by `glulam.route`; or the router's weight or result has a wrong shape.
        """
        router, dtype = self._modules["router"], self.router_dtype or tokens.dtype
        bias = held(self, self._buffers, "choice_bias")
        options = {"bias": None if bias is None else bias.float(), "num_tokens": num_tokens, **self.rule}
        if not is_plain(router, nn.Linear):
            if is_on():
                refuse_called(f"{NAME}: router", router)
            logits = called(f"{NAME}: router", router, tokens, dtype, self.num_experts)
            return route(logits, self.top_k, **options)
        weight, weight_bias = parameters_of(router)
        if weight.shape != (self.num_experts, self.hidden_size):
            wanted = self.num_experts, self.hidden_size
            mismatch(NAME, "router.weight", weight.shape, wanted, "it has a row of hidden_size for each expert")
        if is_on():
            return route_in_order(f"{NAME}: router", tokens, weight, weight_bias, self.top_k, dtype, **options)
        if routes_few(tokens, weight, weight_bias, dtype):
            return route_few(tokens, weight, weight_bias, self.top_k, dtype, **options)
        return route(product(tokens, weight, weight_bias, dtype), self.top_k, **options)

    def _shared(self, tokens: Tensor) -> Tensor:
        """Return the shared expert's result [N, H]; if there is a shared gate, times sigmoid of the token's gate.

        The shared expert is a GroupedMLP of one expert, so all tokens form one group.
        """
        scale = None
        if self.shared_gate is not None:
            gate = self._gate(self.shared_gate, tokens).squeeze(-1)
            scale = gate.to(torch.promote_types(gate.dtype, torch.float32)).sigmoid()
        ends = torch.full((1,), tokens.shape[0], dtype=torch.int32, device=tokens.device)
        y: Tensor = self.shared(tokens, offs=ends, row_scale=scale)  # type: ignore[misc]
        return y

    def _gate(self, gate: nn.Linear, tokens: Tensor) -> Tensor:
        if is_plain(gate, nn.Linear):
            if is_on():
                return product_in_order(f"{NAME}: shared_gate", tokens, *parameters_of(gate))
            return product(tokens, *parameters_of(gate), tokens.dtype)
        if is_on():
            refuse_called(f"{NAME}: shared_gate", gate)
        return called(f"{NAME}: shared_gate", gate, tokens, tokens.dtype, 1)

    def backward_dw(self) -> None:
        """Compute the weight gradients that the oldest pending backward of a forward left out, of routed and shared
        experts.

        Only for a module made with delay_wgrad=True.

        Raises:
            RuntimeError: nothing is pending, or the module was made without delay_wgrad.
        """
        parts = [part for part in (self.experts, self.shared) if part is not None and part.has_delayed()]
        for part in parts or [self.experts]:
            part.backward_dw()

    def add_lora(self, r: int, **options: Any) -> Lora:
        """Add adapters of rank r to the routed experts, and return the submodule that holds the adapters.

        Use `shared.add_lora` for the shared expert. The router's `requires_grad` does not change.

        Args:
            r, options: see `GroupedMLP.add_lora`, also for the errors.
        """
        return self.experts.add_lora(r, **options)

    def remove_lora(self) -> None:
        """Remove the routed experts' adapters; merged weights stay merged, and frozen parameters stay frozen."""
        self.experts.remove_lora()

    def merge_lora(self, keep: bool = True) -> None:
        """Add the adapters to the routed experts' weights; later calls do not apply the adapters again.

        Args:
            keep: True: store copies of the weights for `unmerge_lora`; see `GroupedMLP.merge_lora`, also for errors.
        """
        self.experts.merge_lora(keep)

    def unmerge_lora(self) -> None:
        """Restore the routed experts' exact weights from before `merge_lora`; calls apply the adapters again."""
        self.experts.unmerge_lora()

    @torch.no_grad()
    def update_choice_bias(self, rate: float, counts: Tensor | None = None) -> None:
        """Add `rate` to the choice bias of experts with fewer rows than the mean; subtract it for experts with more.

        DeepSeek-V3 balances loads like this without a loss (arXiv:2412.19437, section 2.1.2). The call does not
        synchronise with the GPU.

        Args:
            rate: the amount by which each expert's bias changes.
            counts: [E], number of rows of each expert in a training step, summed over micro-batches and ranks; None:
                the counts of the last forward.

        Raises:
            RuntimeError: the module was made without choice_bias, or there are no counts.
            TypeError, ValueError: rate is no number, or counts is no tensor [E].
        """
        if self.choice_bias is None:
            raise RuntimeError("update_choice_bias: made without choice_bias=True, so there is none to update")
        if counts is None and self.routing is None:
            raise RuntimeError("update_choice_bias: there was no forward whose rows count; give counts")
        check_number("update_choice_bias", "rate", rate)
        if counts is not None and not isinstance(counts, Tensor):
            raise TypeError(f"update_choice_bias: counts is a {type(counts).__name__}; give a tensor [E]")
        if counts is not None and counts.shape != self.choice_bias.shape:
            mismatch("update_choice_bias", "counts", counts.shape, self.choice_bias.shape, "there are E experts")
        loads = (self.routing.counts if counts is None else counts).float()  # type: ignore[union-attr]
        self.choice_bias.add_((loads.mean() - loads).sign(), alpha=rate)

    def _apply(self, fn: Any, recurse: bool = True) -> MoE:
        before = self.choice_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before is not None and self.choice_bias is not None and self.choice_bias.dtype != before.dtype:
            self.choice_bias = before.to(self.choice_bias.device)
        return self

    def moves(self, keys: Collection[str], prefix: str, moments: bool = False) -> Iterator[list[Move]]:
        return iter(()) if moments else dialects.moves(keys, prefix, self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the routing, since a routing belongs to an autograd graph."""
        return {**self.__dict__, "_routing": None, "_recomputed": None}

    def extra_repr(self) -> str:
        return shown_options(
            MoE, hidden_size=self.hidden_size, num_experts=self.num_experts, top_k=self.top_k, **self.rule,
            choice_bias=self.choice_bias is not None, router_dtype=self.router_dtype, parallel=self.parallel,
        )  # fmt: skip


def _widen_choice_bias(module: MoE, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook before load_state_dict: cast the choice bias to float32.

    load_state_dict(assign=True) would keep the dtype of the state dict. In bfloat16, an update of 1e-3 is lost: it does
    not change a bias of 1.
    """
    key = f"{prefix}choice_bias"
    if module.choice_bias is not None and isinstance(state.get(key), Tensor):
        state[key] = state[key].float()


def _check_parallel(parallel: Any, **sizes: int) -> None:
    from ..distributed import ExpertParallel  # imported late: only needed with several processes

    if not isinstance(parallel, ExpertParallel):
        raise TypeError(f"{NAME}: parallel is a {type(parallel).__name__}; give a glulam.distributed.ExpertParallel")
    for name, size in sizes.items():
        if getattr(parallel, name) != size:
            raise ValueError(f"{NAME}: {name} is {size}, and that of parallel {getattr(parallel, name)}")
