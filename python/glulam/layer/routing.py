"""Routing: the choice of experts for each token, their weights, and the rows of the choices in the experts' input."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cute_kernels.layer.kernels import CAPACITIES
from cute_kernels.specs import PARAM_FORMS, LayerSpec, Spec

from ..calls.addressed import AddressedCall, Gradients, Like, check_dtype
from ..calls.checks import check_tensor, runs_kernels, shape_text
from ..calls.front import operator
from ..choose.problem import Problem, dtype_name
from ..host.groups import with_spare_rows
from ..host.plans import Plans
from ..names import Score
from . import reference
from .checks import (
    INT32_MAX,
    check_choices,
    check_matrix,
    check_rule,
    experts_of_world,
    forms_of_choices,
    num_mapped,
)

MOST_SORTED, MOST_CHOOSING = 2048, 64
"""Limits up to which one launch of a single CTA is faster than two launches that use more SMs.

MOST_SORTED: choices that one CTA sorts. MOST_CHOOSING: tokens for which one CTA also chooses the experts. On an H200, 8
of 128 experts a token: 64 tokens take 8.8 us in one launch; 128 tokens 15.0 us in one launch and 9.7 us in two.
"""


@dataclasses.dataclass(eq=False)  # frozen, it would take 3 us to make
class Routing:
    """N tokens' choices of K experts each, and the row of each choice in the input of the experts' grouped GEMMs.

    Rows of an expert are adjacent, in the order of tokens; experts follow each other in their order. There is room for
    T = N K rows. A choice has a row only if its expert is here, on this rank. It has none with id -1, with an id
    outside `first` .. `first` + `num_experts` - 1, or with an id without an entry in `expert_map`.

    Attributes:
        offs: int32 [num_experts], the end of each expert's rows; rows from offs[-1] on are never read.
        token_of_row: int32 [T], the token of each row.
        row_of: int32 [N, K], the row of each choice; -1: no row.
        weight_of_row: float32 [T], the weight of each row; differentiable if `weights` is.
        ids: int32 [N, K], the chosen experts; from `from_topk` the tensor that it was called with.
        weights: float32 [N, K], from `from_topk` the tensor that it was called with; differentiable.
        num_experts: number of experts here, all of them or a rank's.
        first: id of the first expert here. expert_map: see `from_topk`.
        logits, score: arguments of `route`, for losses; None in a routing from `from_topk`.
        world_experts: number of experts on all ranks that `ids` choose among. Kernels are chosen for T num_experts /
            world_experts rows, and work for any number of rows up to T.
    """

    offs: Tensor
    token_of_row: Tensor
    row_of: Tensor
    weight_of_row: Tensor
    ids: Tensor
    weights: Tensor
    num_experts: int
    first: int = 0
    logits: Tensor | None = None
    score: str | None = None
    expert_map: Tensor | None = None
    world_experts: int = 0

    def __post_init__(self) -> None:
        with_spare_rows(self.offs)
        if not self.world_experts:
            self.world_experts = self.num_experts

    @property
    def counts(self) -> Tensor:
        """Number of rows of each expert, int32 [num_experts]; computed at every access.

        Raises TypeError if `offs` was replaced by something that is no tensor.
        """
        offs: Any = self.offs
        if not isinstance(offs, Tensor):
            check_tensor("counts", "routing.offs", offs, "a tensor [E]")
        return with_spare_rows(self.offs.diff(prepend=self.offs.new_zeros(1)))

    @classmethod
    def from_topk(
        cls, ids: Tensor, weights: Tensor, num_experts: int, first: int = 0, *, expert_map: Tensor | None = None,
        world_experts: int | None = None,
    ) -> Routing:  # fmt: skip
        """Return the routing of choices that any other router made.

        Args:
            ids: int32 or int64 [N, K], contiguous, K at most 32. Ids outside `first` .. `first` + `num_experts` - 1
                (other ranks' experts, -1) have no row, and their weights' gradients are 0.
            weights: [N, K], float32 (float64 on the CPU), or 16-bit; the weights of rows are then float32 copies.
            num_experts: number of experts here, at most 1024.
            first: id of the first expert here.
            expert_map: int32 [experts of all ranks], contiguous: for each id the number of its expert among the experts
                here, 0 .. num_experts - 1. Ids with another value (-1), and ids outside the map, have no row. None: the
                experts here have consecutive ids from `first` on.
            world_experts: number of experts that `ids` choose among. Kernels are chosen for the number of rows expected
                here, N K num_experts / world_experts; results are right for any number of rows. None: the length of
                `expert_map`; without a map `num_experts`, since then all choices may be here.

        Raises:
            ValueError, TypeError: an argument is invalid; nothing was launched.
            UnsupportedDevice, BundleError (RuntimeErrors): no kernel for this GPU, or no usable bundle.
        """
        world = experts_of_world("from_topk", num_experts, expert_map, world_experts)
        offs, token_of_row, row_of, weight_of_row = sort_choices(ids, weights, None, expert_map, num_experts, first)
        return cls(
            offs, token_of_row, row_of, weight_of_row, ids, weights, num_experts, first, expert_map=expert_map,
            world_experts=world,
        )  # fmt: skip


def route(
    logits: Tensor, k: int, *, score: Score = "softmax", bias: Tensor | None = None, num_groups: int = 1,
    top_groups: int = 1, normalize: bool = True, scale: float = 1.0, num_tokens: Tensor | None = None,
) -> Routing:  # fmt: skip
    """Choose each token's k best experts; return them with their weights and rows. Differentiable.

    The call is one launch, or two for many tokens.

    Args:
        logits: [N, E], contiguous, float32 or 16-bit (float64 on the CPU), E at most 1024. NaN counts as largest; of
            equal logits the expert with the lower number is chosen.
        k: experts for each token, at most 32.
        score: "softmax": over all experts, in float32, then the k largest (Qwen3, Mixtral); "topk_softmax": softmax
            over the k largest logits (gpt-oss); "sigmoid": of each logit (DeepSeek-V3).
        bias: float32 [E], added to scores only for the choice (if the score is a softmax: to logits). None: no bias.
        num_groups, top_groups: experts are divided into num_groups equal ranges, at most 32; a token chooses only from
            its top_groups ranges, those with the largest sum of their two best scores.
        normalize: True: divide a token's weights by their sum (of sigmoids: by the sum plus 1e-20).
        scale: factor of the weights, applied last.
        num_tokens: int32 [1] on the device, the number of valid tokens; later tokens are padding of a captured batch,
            and have no row. None: all tokens are valid.

    Returns:
        A Routing. Its ids are int32, each token's in descending order of scores; -1 for padding.

    Raises:
        ValueError, TypeError: an argument is invalid; nothing was launched.
        UnsupportedDevice, BundleError (RuntimeErrors): no kernel for this GPU, or no usable bundle.
    """
    ids, weights, offs, token_of_row, row_of, weight_of_row = route_tokens(
        logits, bias, num_tokens, k, score, normalize, num_groups, top_groups, scale
    )
    experts = logits.shape[1]
    return Routing(offs, token_of_row, row_of, weight_of_row, ids, weights, experts, logits=logits, score=score)


def capacity_of(experts: int) -> int:
    """Return the capacity (most experts) of the smallest kernel that handles this number of experts."""
    return next(most for most in CAPACITIES if experts <= most)


def _chunks(is_one: bool, tokens: int, experts: int, sm_count: int) -> tuple[int, int]:
    """Return (tokens for each CTA, int32 elements of the workspace in which CTAs exchange counts).

    is_one: one CTA handles all tokens, and needs no workspace.
    """
    if is_one:
        return max(tokens, 1), 0
    chunk = -(-tokens // sm_count)
    return chunk, -(-tokens // chunk) * experts


class LayerCall(AddressedCall):
    """Base of calls of a layer's kernels other than the experts' GEMMs, such as route, permute and combine.

    The first dimension of the leading tensor (the argument `leads` names) counts tokens. `trailing` is the number of
    its other dimensions.
    """

    family = "layer"
    trailing = 1

    def find_resizable(self, key: Hashable, plans: Plans[Any]) -> tuple[Problem, Any] | None:
        """Return (problem, old plan) of a checked call with another number of tokens; see `Call.find_resizable`.

        None: there is no such call, or the leading tensor has a wrong number of dimensions, which later checks refuse.
        """
        return super().find_resizable(key, plans) if self.lead.dim() == 1 + self.trailing else None

    def spec(self, arch: str) -> Spec:
        return LayerSpec(self.kernel, arch=arch)


def _rule(call: Any) -> dict[str, int]:
    """Return kernel constants of the routing rule. "topk_softmax" is the same as softmax with normalised weights."""
    is_normalized = call.normalize or call.score == "topk_softmax"
    rule = {"score": int(call.score == "sigmoid"), "normalize": int(is_normalized)}
    return {**rule, "forms": PARAM_FORMS[dtype_name(call.logits_dtype)], "experts": call.sizes[1]}


def _chunks_of_route(call: Any) -> dict[str, int]:
    tokens, experts = call.sizes
    is_one = tokens <= MOST_CHOOSING and tokens * call.k <= MOST_SORTED
    chunk, counts = _chunks(is_one, tokens, experts, call.gpu.sm_count)
    return {"chunk": chunk, "workspace": counts}


def _sizes_of_sort(call: Any) -> dict[str, int]:
    (tokens, k), experts = call.ids.shape, call.num_experts
    chunk, counts = _chunks(tokens * k <= MOST_SORTED, tokens, experts, call.gpu.sm_count)
    wide, weight_form = forms_of_choices(call.ids, call.id_weights)
    of_ids = {"wide": wide, "weight_form": weight_form, "num_mapped": num_mapped(call.expert_map)}
    return {**of_ids, "experts": experts, "k": k, "chunk": chunk, "workspace": counts}


class _Choosing(LayerCall):
    """Base of the calls of route's forward and backward, whose leading argument is the logits [N, E].

    The class provides the numbers of tokens and experts, the logits' dtype, and the kernel constants of the routing
    rule.
    """

    op = "route"
    leads = "logits"
    definition = LayerCall.definition.extended(
        constants=(_rule,),
        # "topk_softmax" normalises whatever the option says. num_groups: of experts in the rule, not of rows.
        overrides=("normalize", "num_groups"),
    )

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of tokens and experts."""
        tokens, experts = self.logits.shape
        return tokens, experts

    @property
    def logits_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.logits.dtype
        return dtype


class RouteCall(_Choosing):
    kernel = "route"
    explains = True
    returns: ClassVar[tuple[str, ...]] = ("ids", "weights", "offs", "token_of_row", "row_of", "weight_of_row")
    shared = frozenset(("bias", "num_tokens"))
    unaligned = frozenset(("logits", "bias", "num_tokens"))
    differentiable = True
    saves = ("logits", "ids", "row_of")
    integers = ("ids", "offs", "token_of_row", "row_of")
    on_cpu: ClassVar[Callable[..., Any]] = staticmethod(reference.route)
    definition = _Choosing.definition.extended(of_rows=(_chunks_of_route,))

    def check_inputs(self) -> None:
        check_matrix(self.op, "logits", self.logits, "N, E")
        check_dtype(self.op, "logits", self.logits)
        self._check_choice()

    def _check_choice(self) -> None:
        tokens, experts = self.sizes
        options = self.score, self.normalize, self.num_groups, self.top_groups, self.scale
        check_rule(self.op, experts, self.k, *options, of="logits has ")
        if tokens * self.k > INT32_MAX:
            raise ValueError(
                f"{self.op}: {tokens} tokens of {self.k} experts are more than {INT32_MAX} rows; split the batch"
            )
        of_bias = (torch.float32,) if runs_kernels(self.lead) else (torch.float32, self.logits_dtype)
        self._check_vector("bias", (experts,), of_bias, "there are E experts")
        self._check_vector("num_tokens", (1,), (torch.int32,), "it is one number")

    def _check_vector(self, name: str, shape: tuple[int, ...], dtypes: Sequence[torch.dtype], why: str) -> None:
        value, what = getattr(self, name), f"a tensor {shape_text(shape)}"
        if value is not None:
            check_tensor(self.op, name, value, what, self.lead, dtypes=dtypes, shape=shape, why=why)

    def likes(self) -> Sequence[Like | None]:
        (tokens, experts), k = self.sizes, self.k
        ints, floats = torch.int32, torch.promote_types(self.logits_dtype, torch.float32)
        of_rows = ((tokens * k,), ints), ((tokens, k), ints), ((tokens * k,), floats)
        return [((tokens, k), ints), ((tokens, k), floats), ((experts,), ints), *of_rows]

    def spec(self, arch: str) -> Spec:
        return LayerSpec(self.kernel, experts=capacity_of(self.sizes[1]), arch=arch)

    @staticmethod
    def backward(saved: Any, options: Any, needed: Any, *gradients: Any) -> Gradients:
        logits, ids, row_of = saved
        _, score, normalize, _, _, scale = options
        d_weights = _of_weights(gradients[1], gradients[5], row_of)
        return () if d_weights is None else (route_backward(d_weights, logits, ids, score, normalize, scale),)


class RouteBackwardCall(_Choosing):
    kernel = "route_backward"
    returns = ("d_logits",)
    unaligned = frozenset(("d_weights", "logits", "ids"))
    on_cpu = staticmethod(reference.route_backward)
    definition = _Choosing.definition.extended(constants=(lambda call: {"k": call.ids.shape[1]},))


class SortCall(LayerCall):
    op, kernel = "from_topk", "sort"
    leads = "ids"
    returns = ("offs", "token_of_row", "row_of", "weight_of_row")
    sources = {"weights": "id_weights"}
    shared = frozenset(("num_tokens", "expert_map"))
    unaligned = frozenset(("ids", "id_weights", "num_tokens", "expert_map"))
    differentiable = True
    saves = ("row_of",)
    integers = ("offs", "token_of_row", "row_of")
    on_cpu = staticmethod(reference.sort)
    definition = LayerCall.definition.extended(of_rows=(_sizes_of_sort,))

    def check_inputs(self) -> None:
        check_choices(self.op, self.ids, self.id_weights, self.expert_map, self.num_experts, self.first)

    def likes(self) -> Sequence[Like | None]:
        ids, ints, rows = self.ids, torch.int32, (self.ids.numel(),)
        floats = torch.promote_types(self.id_weights.dtype, torch.float32)
        return [((self.num_experts,), ints), (rows, ints), (ids.shape, ints), (rows, floats)]

    def spec(self, arch: str) -> Spec:
        return LayerSpec(self.kernel, experts=capacity_of(self.num_experts), arch=arch)

    @staticmethod
    def backward(saved: Any, options: Any, needed: Any, *gradients: Any) -> Gradients:
        return None, _of_weights(None, gradients[3], *saved)


class RowWeightsBackwardCall(LayerCall):
    op, kernel = "routing", "row_weights_backward"
    leads = "row_of"
    returns = ("d_weights",)
    unaligned = frozenset(("d_rows", "row_of"))
    on_cpu = staticmethod(reference.row_weights_backward)
    definition = LayerCall.definition.extended(
        of_rows=(lambda call: {"bound": call.d_rows.numel(), "k": call.row_of.shape[1]},)
    )

    def likes(self) -> Sequence[Like | None]:
        return [(self.row_of.shape, self.d_rows.dtype)]


@operator(RouteCall)
def route_tokens(
    logits: Tensor, bias: Tensor | None, num_tokens: Tensor | None, k: int, score: str, normalize: bool,
    num_groups: int, top_groups: int, scale: float,
) -> Any:  # fmt: skip
    """Choose experts as `route` does; return (ids, weights, offs, token_of_row, row_of, weight_of_row).

    These are attributes of a `Routing`. For the arguments see `route`.
    """


@operator(RouteBackwardCall)
def route_backward(d_weights: Tensor, logits: Tensor, ids: Tensor, score: str, normalize: bool, scale: float) -> Any:
    """Return the gradient of logits [N, E].

    d_weights: gradient of the weights [N, K]. For the other arguments see `route`.
    """


@operator(SortCall)
def sort_choices(
    ids: Tensor, id_weights: Tensor, num_tokens: Tensor | None, expert_map: Tensor | None, num_experts: int, first: int
) -> Any:  # fmt: skip
    """Sort choices by expert, as `Routing.from_topk` does; return (offs, token_of_row, row_of, weight_of_row).

    These are attributes of a `Routing`. id_weights: from_topk's `weights`; num_tokens: see `route`; for the other
    arguments see `Routing.from_topk`.
    """


@operator(RowWeightsBackwardCall)
def row_weights_backward(d_rows: Tensor, row_of: Tensor) -> Any:
    """Return the gradient of weights [N, K] from d_rows, the gradient of the rows' weights, viewed as [N, K]."""


def _of_weights(d_weights: Tensor | None, d_rows: Tensor | None, row_of: Tensor) -> Tensor | None:
    """Return the gradient of a Routing's weights [N, K], the sum over both results that use them; None: no gradient.

    Args:
        d_weights: gradient of the result `weights` [N, K]; None: the result was not used.
        d_rows: gradient of the result `weight_of_row` [T]; None: the result was not used.
        row_of: int32 [N, K], the row of each choice; -1: no row.
    """
    if d_rows is None:
        return d_weights
    by_rows: Tensor = row_weights_backward(d_rows.view(row_of.shape), row_of)
    return by_rows if d_weights is None else by_rows + d_weights


RouteCall.public = staticmethod(route)
