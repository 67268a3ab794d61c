"""Routing: which experts each token goes to, with which weights, and which row of the experts' input is whose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cute_kernels.layer.kernels import CAPACITIES
from cute_kernels.specs import PARAM_FORMS, LayerSpec, Spec

from ..calls.addressed import AddressedCall, Gradients, Like, check_dtype, forms
from ..calls.checks import check_plain, check_tensor, mismatch, runs_kernels, shape_text
from ..calls.front import operator
from ..choose.problem import Problem, dtype_name
from ..host.device import Gpu
from ..host.groups import with_spare_rows
from ..host.plans import Plans
from . import reference

MAX_ROWS = 2**31 - 1
SCORES = ("softmax", "sigmoid", "topk_softmax")
MAX_K = 32
"""A warp has a token, a lane one of its choices."""
MAX_EXPERTS = CAPACITIES[-1]
COUNTED = "a CTA counts the choices of each"
"""Why MAX_EXPERTS, in errors."""
MAX_GROUPS = 32
MOST_SORTED, MOST_CHOOSING = 2048, 64
"""Choices that one CTA sorts, and tokens that it chooses for: up to here a second launch costs more than the SMs that
it would employ. Of 128 experts 8, on an H200: 64 tokens 8.8 us in one launch, 128 tokens 15.0 in one and 9.7 in two.
"""
LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(eq=False)  # frozen, it would take 3 us to make
class Routing:
    """N tokens' choices of `num_experts` experts, K each, and the rows that these have in the experts' input.

    Rows of an expert lie together, in the order of tokens, experts in their order; T = N K is room for all. A choice of
    an expert that is not here (-1, outside `first` .. `first` + `num_experts` - 1, or without a place in `expert_map`)
    has no row.

    Attributes:
        offs: int32 [num_experts], where each expert's rows end; what lies behind the last of them is never read.
        token_of_row: int32 [T], the token of each row.
        row_of: int32 [N, K], the row of each choice; -1 without one.
        weight_of_row: float32 [T], the weight of each row; differentiable as `weights` is.
        ids: [N, K], the experts chosen, int32, or what `from_topk` was given.
        weights: float32 [N, K], or what `from_topk` was given; differentiable.
        num_experts, first, expert_map: which experts are here, and where.
        logits, score: what `route` was given, for losses; None of a routing `from_topk`.
        world_experts: experts of all ranks that `ids` choose among. Kernels are chosen for T num_experts /
            world_experts rows, and serve any number of rows up to T.
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
        """int32 [num_experts], the rows of each expert; computed at every access. Raises TypeError where offs was
        replaced by something that is no tensor.
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
        """Return the routing of any other router's choices.

        Args:
            ids: int32 or int64 [N, K], contiguous, K at most 32. Ids outside `first` .. `first` + `num_experts` - 1
                (other ranks' experts, -1) have no row, and their weights' gradients are 0.
            weights: [N, K], float32 (float64 on the CPU), or of 16 bits, of which rows get a copy in float32.
            num_experts: experts here, at most 1024. first: the id of the first of them.
            expert_map: int32 [experts of all ranks], contiguous: where the expert of each id is among those here, 0 ..
                num_experts - 1; ids with another value (-1), and those outside the map, have no row. None: the experts
                here have consecutive ids from `first` on.
            world_experts: experts that `ids` choose among. Kernels are chosen for the rows that are expected here, T
                num_experts / world_experts; results are right for any number of rows. None: the length of
                `expert_map`; without a map `num_experts`, since then all choices may be here.

        Raises:
            ValueError, TypeError: an argument that does not fit; nothing was launched.
            UnsupportedDevice, BundleError (RuntimeErrors): no kernel for this GPU, or no usable bundle.
        """
        world = experts_of_world("from_topk", num_experts, expert_map, world_experts)
        offs, token_of_row, row_of, weight_of_row = sort_choices(ids, weights, None, expert_map, num_experts, first)
        return cls(
            offs, token_of_row, row_of, weight_of_row, ids, weights, num_experts, first, expert_map=expert_map,
            world_experts=world,
        )  # fmt: skip


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
    ids, weights, offs, token_of_row, row_of, weight_of_row = route_tokens(
        logits, bias, num_tokens, k, score, normalize, num_groups, top_groups, scale
    )
    experts = logits.shape[1]
    return Routing(offs, token_of_row, row_of, weight_of_row, ids, weights, experts, logits=logits, score=score)


def capacity_of(experts: int) -> int:
    """The most experts of the kernel that serves so many."""
    return next(most for most in CAPACITIES if experts <= most)


def _chunks(is_one: bool, tokens: int, experts: int, sm_count: int) -> tuple[int, int]:
    """Tokens of a CTA, and the int32 elements of the counts that CTAs leave for each other: none where there is one."""
    if is_one:
        return max(tokens, 1), 0
    chunk = -(-tokens // sm_count)
    return chunk, -(-tokens // chunk) * experts


def _number(op: str, name: str, value: Any, least: int, most: int, why: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} is {value!r}; give an integer")
    if not least <= value <= most:
        raise ValueError(f"{op}: {name} is {value}; it must be {least} to {most}, since {why}")


def check_rule(
    op: str, experts: int, k: int, score: str, normalize: bool, num_groups: int, top_groups: int, scale: float,
    name_of_k: str = "k", of: str = "",
) -> None:  # fmt: skip
    """Raise ValueError or TypeError where `experts` cannot be chosen from like that. `of`: who has them, for errors."""
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"{op}: {of}E = {experts} experts; 1 to {MAX_EXPERTS} are possible")
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


def check_matrix(
    op: str, name: str, value: Any, letters: str, like: Tensor | None = None, dtypes: Sequence[torch.dtype] = ()
) -> tuple[int, int]:  # fmt: skip
    """A contiguous tensor of two dimensions, on the device of `like`; its sizes."""
    tensor = check_tensor(op, name, value, f"a tensor [{letters}]", like, dtypes=dtypes)
    if tensor.dim() != 2:
        raise ValueError(f"{op}: {name} has shape {shape_text(tensor.shape)}; give [{letters}]")
    rows, columns = tensor.shape
    return rows, columns


def check_row_of(op: str, name: str, row_of: Any, like: Any = None) -> None:
    """Raise ValueError or TypeError where `Routing.row_of` is not int32 [N, K], contiguous, on the device of `like`."""
    _, k = check_matrix(op, name, row_of, "N, K", like, (torch.int32,))
    if k == 0:
        raise ValueError(f"{op}: {name} has shape {shape_text(row_of.shape)}; a token has 1 choice or more")
    check_plain(op, name, row_of)


def experts_of_world(op: str, num_experts: Any, expert_map: Any, given: Any) -> Any:
    """Return the number of experts that ids choose among. `given`: what the user says; None: nothing.

    Raises:
        ValueError, TypeError: it is no number of experts, those here included.
    """
    if given is not None:
        _number(op, "num_experts", num_experts, 1, MAX_EXPERTS, COUNTED)
        check_world(op, "world_experts", given, num_experts)
        return given
    if isinstance(expert_map, Tensor) and expert_map.dim() and isinstance(num_experts, int):
        return max(expert_map.shape[0], num_experts)
    return num_experts  # if it is wrong, sorting says so


def check_world(op: str, name: str, world_experts: Any, num_experts: int) -> None:
    """Raise ValueError or TypeError if so many experts of all ranks cannot have `num_experts` of them here."""
    _number(op, name, world_experts, num_experts, MAX_ROWS, f"{num_experts} experts are here")


def check_choices(op: str, ids: Any, weights: Any, expert_map: Any, num_experts: Any, first: Any) -> None:
    """Raises ValueError or TypeError where these are not what `Routing.from_topk` takes."""
    shape = check_matrix(op, "ids", ids, "N, K", dtypes=(torch.int32, torch.int64))
    _number(op, "the number of ids a token", shape[1], 1, MAX_K, "a warp has a lane for each")
    valid = LOGITS_DTYPES if runs_kernels(ids) else (*LOGITS_DTYPES, torch.float64)
    if check_matrix(op, "weights", weights, "N, K", ids, valid) != shape:
        mismatch(op, "weights", weights.shape, shape, "each id has a weight")
    _number(op, "num_experts", num_experts, 1, MAX_EXPERTS, COUNTED)
    _number(op, "first", first, 0, MAX_ROWS - MAX_EXPERTS, "it is the id of an expert")
    if ids.numel() > MAX_ROWS:
        raise ValueError(f"{op}: {ids.numel()} choices are more than {MAX_ROWS} rows; split the batch")
    if expert_map is not None:
        _check_map(op, expert_map, ids)
        if first:
            raise ValueError(f"{op}: first is {first}, and expert_map is given, which maps ids itself; leave out first")


def _check_map(op: str, expert_map: Any, ids: Tensor) -> None:
    """Raise ValueError or TypeError if it is not int32 [experts of all ranks], contiguous, on the device of ids."""
    what = "[experts of all ranks]"
    tensor = check_tensor(op, "expert_map", expert_map, f"a tensor {what}", ids, dtypes=(torch.int32,))
    if tensor.dim() != 1 or not tensor.shape[0]:  # an empty tensor has address 0, which means no map
        raise ValueError(f"{op}: expert_map has shape {shape_text(tensor.shape)}; give {what}, which has a place or more")


def num_mapped(expert_map: Tensor | None) -> int:
    """Return the number of ids that a map has a place for; 0 without a map."""
    return 0 if expert_map is None else expert_map.shape[0]


def forms_of_choices(ids: Tensor, weights: Tensor) -> tuple[int, int]:
    """How a kernel reads them: whether ids have 64 bits, and the weights' dtype."""
    return int(ids.dtype == torch.int64), forms(weights)


class LayerCall(AddressedCall):
    """Of what is around a layer's experts. Tokens are the first dimension of what has any."""

    family = "layer"
    trailing = 1

    def settled(self, key: Hashable, plans: Plans[Any]) -> tuple[Problem, Any] | None:
        """Find a plan as any call does. A leading tensor of another rank has none: checks refuse it."""
        return super().settled(key, plans) if self.lead.dim() == 1 + self.trailing else None

    def spec(self, arch: str) -> Spec:
        return LayerSpec(self.kernel, arch=arch)


class _Choosing(LayerCall):
    """What kernels of both directions take: softmax over the k largest is softmax with its weights normalised."""

    op = "route"
    leads = "logits"

    @property
    def sizes(self) -> tuple[int, int]:
        """Tokens and experts."""
        tokens, experts = self.logits.shape
        return tokens, experts

    @property
    def logits_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.logits.dtype
        return dtype

    def constants(self, problem: Problem) -> dict[str, Any]:
        is_normalized = self.normalize or self.score == "topk_softmax"
        rule = {"score": int(self.score == "sigmoid"), "normalize": int(is_normalized)}
        sizes = {"forms": PARAM_FORMS[dtype_name(self.logits_dtype)], "experts": self.sizes[1]}
        return {**super().constants(problem), **sizes, **rule}


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

    def check_inputs(self) -> None:
        check_matrix(self.op, "logits", self.logits, "N, E")
        check_dtype(self.op, "logits", self.logits)
        self._check_choice()

    def _check_choice(self) -> None:
        tokens, experts = self.sizes
        options = self.score, self.normalize, self.num_groups, self.top_groups, self.scale
        check_rule(self.op, experts, self.k, *options, of="logits has ")
        if tokens * self.k > MAX_ROWS:
            raise ValueError(
                f"{self.op}: {tokens} tokens of {self.k} experts are more than {MAX_ROWS} rows; split the batch"
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

    def numbers_of_rows(self, gpu: Gpu) -> dict[str, Any]:
        tokens, experts = self.sizes
        is_one = tokens <= MOST_CHOOSING and tokens * self.k <= MOST_SORTED
        chunk, counts = _chunks(is_one, tokens, experts, gpu.sm_count)
        return {"chunk": chunk, "workspace": counts}

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

    def constants(self, problem: Problem) -> dict[str, Any]:
        return {**super().constants(problem), "k": self.ids.shape[1]}


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

    def check_inputs(self) -> None:
        check_choices(self.op, self.ids, self.id_weights, self.expert_map, self.num_experts, self.first)

    def likes(self) -> Sequence[Like | None]:
        ids, ints, rows = self.ids, torch.int32, (self.ids.numel(),)
        floats = torch.promote_types(self.id_weights.dtype, torch.float32)
        return [((self.num_experts,), ints), (rows, ints), (ids.shape, ints), (rows, floats)]

    def numbers_of_rows(self, gpu: Gpu) -> dict[str, Any]:
        (tokens, k), experts = self.ids.shape, self.num_experts
        chunk, counts = _chunks(tokens * k <= MOST_SORTED, tokens, experts, gpu.sm_count)
        of_ids = dict(zip(("wide", "weight_form"), forms_of_choices(self.ids, self.id_weights), strict=True))
        of_ids["num_mapped"] = num_mapped(self.expert_map)
        return {**of_ids, "experts": experts, "k": k, "chunk": chunk, "workspace": counts}

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

    def likes(self) -> Sequence[Like | None]:
        return [(self.row_of.shape, self.d_rows.dtype)]

    def numbers_of_rows(self, gpu: Gpu) -> dict[str, Any]:
        return {"bound": self.d_rows.numel()}

    def constants(self, problem: Problem) -> dict[str, Any]:
        return {**super().constants(problem), "k": self.row_of.shape[1]}


@operator(RouteCall)
def route_tokens(
    logits: Tensor, bias: Tensor | None, num_tokens: Tensor | None, k: int, score: str, normalize: bool,
    num_groups: int, top_groups: int, scale: float,
) -> Any:  # fmt: skip
    """What `RouteCall` returns, of the arguments of `route`."""


@operator(RouteBackwardCall)
def route_backward(d_weights: Tensor, logits: Tensor, ids: Tensor, score: str, normalize: bool, scale: float) -> Any:
    """The gradient of logits."""


@operator(SortCall)
def sort_choices(
    ids: Tensor, id_weights: Tensor, num_tokens: Tensor | None, expert_map: Tensor | None, num_experts: int, first: int
) -> Any:  # fmt: skip
    """What `SortCall` returns, of the arguments of `Routing.from_topk`; `num_tokens`: as of `route`."""


@operator(RowWeightsBackwardCall)
def row_weights_backward(d_rows: Tensor, row_of: Tensor) -> Any:
    """The gradient of [N, K] weights from that of the rows that took them."""


def _of_weights(d_weights: Tensor | None, d_rows: Tensor | None, row_of: Tensor) -> Tensor | None:
    """The gradient of weights, which were used as they are, by rows, or both."""
    if d_rows is None:
        return d_weights
    by_rows: Tensor = row_weights_backward(d_rows.view(row_of.shape), row_of)
    return by_rows if d_weights is None else by_rows + d_weights


RouteCall.public = staticmethod(route)
