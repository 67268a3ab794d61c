"""Routing: which experts each token goes to, with which weights, and which row of the experts' input is whose."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from cute_kernels.specs import ROUTING_EXPERTS

from ..addressed import Layout, Tensors, forms, recorded
from ..backward.parts import once_differentiable, usable, without_graph
from ..signature import check_tensor, mismatch, runs_kernels, shape_text
from . import reference
from .operator import MAX_ROWS, LayerOperator, check_matrix, check_shape

SCORES = ("softmax", "sigmoid", "topk_softmax")
MAX_K = 32
"""A warp has a token, a lane one of its choices."""
MAX_EXPERTS = ROUTING_EXPERTS[-1]
MAX_GROUPS = 32
MOST_SORTED, MOST_CHOOSING = 2048, 64
"""Choices that one CTA sorts, and tokens that it chooses for: up to here a second launch costs more than the SMs that
it would employ. Of 128 experts 8, on an H200: 64 tokens 8.8 us in one launch, 128 tokens 15.0 in one and 9.7 in two.
"""
LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ID_DTYPES = (torch.int32, torch.int64)


@dataclasses.dataclass(eq=False)  # frozen, it would take 3 us to make
class Routing:
    """N tokens' choices of `num_experts` experts, K each, and the rows that these have in the experts' input.

    Rows of an expert lie together, in the order of tokens, experts in their order; T = N K is room for all. A choice of
    an expert that is not here (-1, or outside `first` .. `first` + `num_experts` - 1) has no row.

    Attributes:
        offs: int32 [num_experts], where each expert's rows end; what lies behind the last of them is never read.
        token_of_row: int32 [T], the token of each row.
        row_of: int32 [N, K], the row of each choice; -1 without one.
        weight_of_row: float32 [T], the weight of each row; differentiable as `weights` is.
        ids: [N, K], the experts chosen, int32, or what `from_topk` was given.
        weights: float32 [N, K]; differentiable.
        logits, score: what `route` was given, for losses; None of a routing `from_topk`.
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

    @property
    def counts(self) -> Tensor:
        """int32 [num_experts], the rows of each expert; computed at every access."""
        return self.offs.diff(prepend=self.offs.new_zeros(1))

    @classmethod
    def from_topk(cls, ids: Tensor, weights: Tensor, num_experts: int, first: int = 0) -> Routing:
        """The routing of any other router.

        Args:
            ids: int32 or int64 [N, K], contiguous, K at most 32. Ids outside `first` .. `first` + `num_experts` - 1
                (other ranks' experts, -1) have no row, and their weights' gradients are 0.
            weights: [N, K], float32 (float64 on the CPU) or 16-bit, which is widened.
            num_experts: experts here, at most 1024; `first`: the id of the first of them.

        Raises:
            ValueError, TypeError: an argument that does not fit; nothing was launched.
            UnsupportedDevice, BundleError (RuntimeErrors): no kernel for this GPU, or no usable bundle.
        """
        if isinstance(weights, Tensor) and weights.dtype in (torch.bfloat16, torch.float16):
            weights = weights.float()
        options = (num_experts, first)
        if is_grad_enabled() and recorded("from_topk", None, weights):
            made = Sort.apply(ids, weights, *options)  # type: ignore[no-untyped-call]
        else:
            made = SORT((ids, weights, None), options)
        offs, token_of_row, row_of, weight_of_row = made
        return cls(offs, token_of_row, row_of, weight_of_row, ids, weights, num_experts, first)


def route(
    logits: Tensor, k: int, *, score: str = "softmax", bias: Tensor | None = None, num_groups: int = 1,
    top_groups: int = 1, normalize: bool = True, scale: float = 1.0, num_tokens: Tensor | None = None,
) -> Routing:  # fmt: skip
    """Each token's k best experts, their weights and their rows, in one launch, or two of many tokens. Differentiable.

    Args:
        logits: [N, E], contiguous, float32 or 16-bit (float64 on the CPU), E at most 1024. NaN counts as largest, and
            of equal ones the lower expert is chosen.
        k: experts a token, at most 32.
        score: "softmax": over all experts, in float32, then the k largest (Qwen3, Mixtral); "topk_softmax": softmax
            over the k largest logits (gpt-oss); "sigmoid": of each logit (DeepSeek-V3).
        bias: float32 [E], added to scores for the choice alone (to logits, where the score is a softmax).
        num_groups, top_groups: of equal ranges of experts, at most 32, those take part whose two best have the largest
            sum.
        normalize: divide a token's weights by their sum (of sigmoids, plus 1e-20).
        scale: of the weights, at last.
        num_tokens: int32 [1] on the device: tokens from there on are padding of a captured batch and have no row.

    Returns:
        Routing; its ids are int32, -1 of padding, in the order of their scores.

    Raises:
        ValueError, TypeError: an argument that does not fit; nothing was launched.
        UnsupportedDevice, BundleError (RuntimeErrors): no kernel for this GPU, or no usable bundle.
    """
    tensors, options = (logits, bias, num_tokens), (k, score, normalize, num_groups, top_groups, scale)
    if is_grad_enabled() and recorded("route", None, logits):
        made = Route.apply(*tensors, *options)  # type: ignore[no-untyped-call]
    else:
        made = ROUTE(tensors, options)
    ids, weights, offs, token_of_row, row_of, weight_of_row = made
    experts = logits.shape[1]
    return Routing(offs, token_of_row, row_of, weight_of_row, ids, weights, experts, logits=logits, score=score)


def _capacity(experts: int) -> int:
    return next(most for most in ROUTING_EXPERTS if experts <= most)


def _chunks(is_one: bool, tokens: int, experts: int, sm_count: int) -> tuple[int, int]:
    """Tokens of a CTA, and the int32 elements of the counts that CTAs leave for each other: none where there is one."""
    if is_one:
        return max(tokens, 1), 0
    chunk = -(-tokens // sm_count)
    return chunk, -(-tokens // chunk) * experts


def _rule(logits: Tensor, k: int, score: str, normalize: bool, scale: float) -> dict[str, float]:
    """What kernels of both directions take: softmax over the k largest is softmax with its weights normalised."""
    tokens, experts = logits.shape
    return {
        "forms": forms(logits), "tokens": tokens, "experts": experts, "k": k, "score": int(score == "sigmoid"),
        "normalize": int(normalize or score == "topk_softmax"), "scale": float(scale),
    }  # fmt: skip


def _number(op: str, name: str, value: Any, least: int, most: int, why: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name} is {value!r}; give an integer")
    if not least <= value <= most:
        raise ValueError(f"{op}: {name} is {value}; it must be {least} to {most}, since {why}")


def check_rule(
    op: str, experts: int, k: int, score: str, normalize: bool, num_groups: int, top_groups: int, scale: float,
    name_of_k: str = "k",
) -> None:  # fmt: skip
    """Raises ValueError or TypeError where `experts` cannot be chosen from like that."""
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"{op}: E = {experts} experts; 1 to {MAX_EXPERTS} are possible")
    if score not in SCORES:
        raise ValueError(f"{op}: score={score!r}; choose {', '.join(map(repr, SCORES))}")
    if not isinstance(normalize, bool):
        raise TypeError(f"{op}: normalize is {normalize!r}; give True or False")
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"{op}: scale is {scale!r}; give a Python float")
    _number(op, "num_groups", num_groups, 1, MAX_GROUPS, "a warp has a lane for each group")
    if experts % num_groups or (num_groups > 1 and experts == num_groups):
        raise ValueError(
            f"{op}: num_groups is {num_groups}; it must cut {experts} experts into equal groups of 2 or more"
        )
    _number(op, "top_groups", top_groups, 1, num_groups, f"there are {num_groups} groups")
    available = experts // num_groups * top_groups
    _number(op, name_of_k, k, 1, min(MAX_K, available), f"{available} experts take part, and a warp chooses {MAX_K}")


class RouteForward(LayerOperator):
    op = kernel = "route"
    inputs = ("logits", "bias", "num_tokens")
    outputs = ("ids", "weights", "offs", "token_of_row", "row_of", "weight_of_row")
    loose = (*inputs, *outputs)
    streams = "logits"
    shared = frozenset(("bias", "num_tokens"))
    schema = (
        "(Tensor logits, Tensor? bias, Tensor? num_tokens, int k, str score, bool normalize, int num_groups, "
        "int top_groups, float scale) -> Tensor[]"
    )

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> None:
        logits: Any = tensors[0]
        k, score, normalize, num_groups, top_groups, scale = options
        tokens, experts = check_matrix(self.op, "logits", logits, "N, E")
        valid = LOGITS_DTYPES if runs_kernels(logits) else (*LOGITS_DTYPES, torch.float64)
        if logits.dtype not in valid:
            raise TypeError(f"{self.op}: logits is {logits.dtype}; it must be {', '.join(map(str, valid))}, so cast it")
        check_rule(self.op, experts, k, score, normalize, num_groups, top_groups, scale)
        if tokens * k > MAX_ROWS:
            raise ValueError(
                f"{self.op}: {tokens} tokens of {k} experts are more than {MAX_ROWS} rows; split the batch"
            )
        self._check_vector("bias", tensors[1], (experts,), (torch.float32, logits.dtype), logits)
        self._check_vector("num_tokens", tensors[2], (1,), (torch.int32,), logits)

    def _check_vector(self, name: str, value: Any, shape: tuple[int, ...], dtypes: Any, like: Tensor) -> None:
        """`dtypes`: the first is what kernels take."""
        if value is None:
            return
        tensor = check_tensor(self.op, name, value, f"a tensor {shape_text(shape)}", like)
        if tensor.dtype not in (dtypes[:1] if runs_kernels(like) else dtypes):
            raise TypeError(f"{self.op}: {name} is {tensor.dtype}; it must be {dtypes[0]}, so cast it")
        check_shape(self.op, name, tensor, shape, "logits has E experts" if name == "bias" else "it is one number")

    def results(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        logits, k = tensors[0], options[0]
        tokens, experts = logits.shape
        ints, floats = {"dtype": torch.int32}, {"dtype": torch.promote_types(logits.dtype, torch.float32)}
        return (
            logits.new_empty(tokens, k, **ints), logits.new_empty(tokens, k, **floats),
            logits.new_empty(experts, **ints), logits.new_empty(tokens * k, **ints),
            logits.new_empty(tokens, k, **ints), logits.new_empty(tokens * k, **floats),
        )  # fmt: skip

    def reference(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        return reference.route(*tensors, *options)

    def layout(self, tensors: Any, options: Any, sm_count: int) -> Layout:
        logits = tensors[0]
        tokens, experts = logits.shape
        k, score, normalize, num_groups, top_groups, scale = options
        is_one = tokens <= MOST_CHOOSING and tokens * k <= MOST_SORTED
        chunk, counts = _chunks(is_one, tokens, experts, sm_count)
        rule = _rule(logits, k, score, normalize, scale)
        numbers = {**rule, "num_groups": num_groups, "top_groups": top_groups, "chunk": chunk}
        return Layout(logits, self.kernel, _capacity(experts), numbers, tokens > 0, counts)

    def differentiable(self, tensors: Any, options: Any) -> tuple[Any, ...]:
        return Route.apply(*tensors, *options)  # type: ignore[no-untyped-call]


class RouteBackward(LayerOperator):
    op, kernel = "route", "route_backward"
    inputs, outputs = ("d_weights", "logits", "ids"), ("d_logits",)
    loose = (*inputs, *outputs)
    streams = "logits"
    schema = "(Tensor d_weights, Tensor logits, Tensor ids, str score, bool normalize, float scale) -> Tensor[]"

    def results(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        return (torch.empty_like(tensors[1]),)

    def reference(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        return reference.route_backward(*tensors, *options)

    def layout(self, tensors: Any, options: Any, sm_count: int) -> Layout:
        _, logits, ids = tensors
        return Layout(logits, self.kernel, 0, _rule(logits, ids.shape[1], *options), len(ids) > 0)


class SortForward(LayerOperator):
    """`num_tokens`: as of route."""

    op, kernel = "from_topk", "sort"
    inputs, outputs = ("ids", "weights", "num_tokens"), ("offs", "token_of_row", "row_of", "weight_of_row")
    loose = (*inputs, *outputs)
    streams = "ids"
    shared = frozenset(("num_tokens",))
    schema = "(Tensor ids, Tensor weights, Tensor? num_tokens, int num_experts, int first) -> Tensor[]"

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> None:
        ids: Any = tensors[0]
        weights: Any = tensors[1]
        num_experts, first = options
        shape = check_matrix(self.op, "ids", ids, "N, K")
        if ids.dtype not in ID_DTYPES:
            raise TypeError(f"{self.op}: ids is {ids.dtype}; it must be {' or '.join(map(str, ID_DTYPES))}, so cast it")
        _number(self.op, "the number of ids a token", shape[1], 1, MAX_K, "a warp has a lane for each")
        if check_matrix(self.op, "weights", weights, "N, K", ids) != shape:
            mismatch(self.op, "weights", weights.shape, shape, "each id has a weight")
        valid = (torch.float32,) if runs_kernels(weights) else (torch.float32, torch.float64)
        if weights.dtype not in valid:
            raise TypeError(f"{self.op}: weights is {weights.dtype}; it must be torch.float32, so cast it")
        _number(self.op, "num_experts", num_experts, 1, MAX_EXPERTS, "a CTA counts the choices of each")
        _number(self.op, "first", first, 0, MAX_ROWS - MAX_EXPERTS, "it is the id of an expert")
        if ids.numel() > MAX_ROWS:
            raise ValueError(f"{self.op}: {ids.numel()} choices are more than {MAX_ROWS} rows; split the batch")

    def results(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        ids, weights, _ = tensors
        ints = {"dtype": torch.int32}
        return (
            ids.new_empty(options[0], **ints), ids.new_empty(ids.numel(), **ints), ids.new_empty(ids.shape, **ints),
            weights.new_empty(ids.numel()),
        )  # fmt: skip

    def reference(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        return reference.sort(*tensors, *options)

    def layout(self, tensors: Any, options: Any, sm_count: int) -> Layout:
        ids = tensors[0]
        tokens, k = ids.shape
        num_experts, first = options
        chunk, counts = _chunks(tokens * k <= MOST_SORTED, tokens, num_experts, sm_count)
        numbers = {
            "wide": int(ids.dtype == torch.int64), "first": first, "tokens": tokens, "experts": num_experts, "k": k,
            "chunk": chunk,
        }  # fmt: skip
        return Layout(ids, self.kernel, _capacity(num_experts), numbers, tokens > 0, counts)

    def differentiable(self, tensors: Any, options: Any) -> tuple[Any, ...]:
        ids, weights, _ = tensors
        return Sort.apply(ids, weights, *options)  # type: ignore[no-untyped-call]


class RowWeightsBackward(LayerOperator):
    """The gradient of [N, K] weights from that of the rows that took them."""

    op, kernel = "routing", "row_weights_backward"
    inputs, outputs = ("d_rows", "row_of"), ("d_weights",)
    loose = (*inputs, *outputs)
    streams = "row_of"
    schema = "(Tensor d_rows, Tensor row_of) -> Tensor[]"

    def results(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        d_rows, row_of = tensors
        return (d_rows.new_empty(row_of.shape),)

    def reference(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        return reference.row_weights_backward(*tensors)

    def layout(self, tensors: Any, options: Any, sm_count: int) -> Layout:
        row_of = tensors[1]
        tokens, k = row_of.shape
        return Layout(tensors[0], self.kernel, 0, {"tokens": tokens, "k": k}, tokens > 0)


ROUTE, ROUTE_BACKWARD, SORT, ROW_WEIGHTS_BACKWARD = RouteForward(), RouteBackward(), SortForward(), RowWeightsBackward()


def _of_weights(d_weights: Tensor | None, d_rows: Tensor | None, row_of: Tensor) -> Tensor | None:
    """The gradient of weights, which were used as they are, by rows, or both."""
    if d_rows is None:
        return d_weights
    by_rows = ROW_WEIGHTS_BACKWARD((usable(d_rows).view(row_of.shape), row_of))[0]
    return by_rows if d_weights is None else by_rows + d_weights


class Route(torch.autograd.Function):
    """Saves logits, ids and row_of."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias: Tensor | None, num_tokens: Tensor | None, *options: Any) -> Any:
        _, score, normalize, _, _, scale = ctx.options = options
        results = ROUTE((logits, bias, num_tokens), options)
        ids, _, offs, token_of_row, row_of, _ = results
        ctx.save_for_backward(logits, ids, row_of)
        ctx.mark_non_differentiable(ids, offs, token_of_row, row_of)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        logits, ids, row_of = ctx.saved_tensors
        _, score, normalize, _, _, scale = ctx.options
        with without_graph():
            d_weights = _of_weights(given[1], given[5], row_of)
            d_logits = None
            if d_weights is not None:
                d_logits = ROUTE_BACKWARD((usable(d_weights), logits, ids), (score, normalize, scale))[0]
        return *once_differentiable("route", [d_logits]), *[None] * (len(ctx.options) + 2)


class Sort(torch.autograd.Function):
    """Saves row_of."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weights: Tensor, num_experts: int, first: int) -> Any:
        offs, token_of_row, row_of, weight_of_row = SORT((ids, weights, None), (num_experts, first))
        ctx.save_for_backward(row_of)
        ctx.mark_non_differentiable(offs, token_of_row, row_of)
        ctx.set_materialize_grads(False)
        return offs, token_of_row, row_of, weight_of_row

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        (row_of,) = ctx.saved_tensors
        with without_graph():
            d_weights = _of_weights(None, given[3], row_of)
        return None, *once_differentiable("from_topk", [d_weights]), None, None
