"""moe: the whole layer from tokens to tokens, given its routing."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from .. import recipes
from ..activations import NamedNumbers, Numbers, named_numbers, packed
from ..backward.data_path import Tokens
from ..calls.addressed import check_like
from ..calls.checks import any_requires_grad, check_alignment, mismatch, shape_text
from ..calls.front import operator, passed_to
from ..calls.launch import Made
from ..choose.problem import Problem
from ..expert_lora import ExpertLora
from ..host.groups import part_of
from ..lora.mlp import check_goes_with_lora
from ..ops.grouped_mlp import GroupedMlpCall
from ..ops.quantized_mlp import QuantizedMlpCall
from ..recipes import BF16, Recipe
from .adapted import moe_with_lora
from .checks import check_row_of
from .expert_rows import OP, OfWorld, expert_rows, rows_of_experts
from .routing import Routing
from .rows import check_routed, combine, combine_rows, permute_tokens, row_indices

if TYPE_CHECKING:
    from typing_extensions import Unpack

COPIED_BYTES, COPIED_WIDTH = 2**28, 4096
"""With gradients, GEMMs read a copy of rows up to this size, where I is at least this. By index a GEMM takes 3 to 9 %
longer; a copy takes 5 us for 10 MB, however wide the experts are. Forward + backward of 8192 rows of Mixtral-8x7B (I
14336) are 3 % faster on copies, those of 32768 of Qwen3-30B (I 768) 4 % faster by index.
"""


def _moe(
    x: Tensor, routing: Routing, w1: Any, w2: Any, b1: Any, b2: Any, activation: str, glu_layout: str, numbers: Numbers,
    recipe: str | Recipe, recompute: bool, transpose_w: bool, lora: ExpertLora | None, residual: Tensor | None,
    out: Tensor | None, parallel: Any,
) -> Tensor:  # fmt: skip
    """`moe`, with all arguments in order."""
    if parallel is not None:
        options: dict[str, Any] = {
            "b1": b1, "b2": b2, "activation": activation, "glu_layout": glu_layout, "recipe": recipe,
            "recompute": recompute, "transpose_w": transpose_w, **named_numbers(numbers),
        }  # fmt: skip
        if lora is not None:
            options["lora"] = lora
        return _over_ranks(parallel, x, routing, {"w1": w1, "w2": w2, **options}, residual, out)
    if lora is not None:
        found = check_goes_with_lora(MoeCall.op, lora, x, recipe, recompute)
        call = moe_call(
            x, routing, w1=w1, w2=w2, b1=b1, b2=b2, activation=activation, glu_layout=glu_layout, recipe=found,
            transpose_w=transpose_w, residual=residual, out=out, **named_numbers(numbers),
        )  # fmt: skip
        return moe_with_lora(call, routing, lora)
    rows, row_of, weights = row_indices(MoeCall.op, x, routing), routing.row_of, routing.weight_of_row
    is_plain = recipe == BF16.name or recipe is BF16  # objects that are equal would be compared field by field
    if not is_plain and _residual_alone_is_trained(residual, x, w1, w2, b1, b2, weights):
        y = expert_rows(
            x, w1, w2, offs=routing.offs, splits=None, rows=rows, row_scale=weights, b1=b1, b2=b2,
            activation=activation, glu_layout=glu_layout, numbers=numbers, recipe=recipe, recompute=recompute,
            transpose_w=transpose_w, world_experts=routing.world_experts,
        )  # fmt: skip
        with nullcontext() if is_dynamo_compiling() else part_of(MoeCall.op):
            return combine(y, routing, residual, out=out)
    return layer(
        x=x, w1=w1, w2=w2, offs=routing.offs, splits=None, rows=rows, row_of=row_of, residual=residual,
        row_scale=weights, b1=b1, b2=b2, activation=activation, glu_layout=glu_layout, numbers=numbers,
        recipe=recipe, recompute=recompute, transpose_w=transpose_w, world_experts=routing.world_experts, out=out,
    )  # fmt: skip


@passed_to(_moe)
def moe(
    x: Tensor, routing: Routing, w1: Any, w2: Any, *, b1: Any = None, b2: Any = None, activation: str = "swiglu",
    glu_layout: str = "concat", recipe: str | Recipe = "bf16", recompute: bool = False, transpose_w: bool = False,
    lora: ExpertLora | None = None, residual: Tensor | None = None, out: Tensor | None = None, parallel: Any = None,
    **numbers: Unpack[NamedNumbers],
) -> Tensor:  # fmt: skip
    """out[n] = residual[n] + sum over a token's choices of weight * MLP of the chosen expert (x[n]). Differentiable.

    Forward is one call, which reads tokens by index, and a recipe that quantises them does so once a token; recipes
    that decode weights copy rows within it. With gradients every GEMM, of either direction, reads by index; but of wide
    experts backward makes copies of at most COPIED_BYTES, and with recipe "bf16" forward as well. For it x is saved,
    and never its rows.
    The sum is in float32, in the order of the choices, and rounded once. Tokens without a row give the residual, or 0.

    Args:
        x: tokens [N, H]; as of `grouped_mlp`, an MXFP8Tensor included. With `parallel` all ranks give one form.
        routing: of these tokens, from `route` or `Routing.from_topk`; differentiable in its weights.
        w1, w2, b1, b2, activation, glu_layout, **numbers, recipe, recompute, transpose_w, lora: see `grouped_mlp`.
        residual: [N, H'] in the dtype of the result, contiguous.
        out: the result's buffer, contiguous; only where no gradient is recorded, and without `parallel`.
        parallel: a `glulam.distributed.ExpertParallel`: the weights are those of this rank's experts, and all ranks of
            its group call this, each with its own tokens. By recipe "mxfp8", in no_grad mode, they travel in MXFP8.

    Returns:
        [N, H'], H' the number of w2's rows, in x's dtype; with `parallel` in its dtype.

    Raises:
        As `grouped_mlp`, `permute` and `combine`.
    """
    raise NotImplementedError  # `passed_to` writes the body


def _residual_alone_is_trained(residual: Tensor | None, *others: Any) -> bool:
    return is_grad_enabled() and any_requires_grad(residual) and not any_requires_grad(*others)


def _over_ranks(
    parallel: Any, x: Any, routing: Any, given: dict[str, Any], residual: Tensor | None, out: Tensor | None
) -> Tensor:
    """moe whose experts are on several ranks; `given`: its other arguments."""
    if not hasattr(parallel, "layer"):
        kind = type(parallel).__name__
        raise TypeError(f"{MoeCall.op}: parallel is a {kind}; give a glulam.distributed.ExpertParallel")
    with parallel.refusing():
        row_indices(MoeCall.op, x, routing)
        if "lora" in given:
            check_goes_with_lora(MoeCall.op, given["lora"], x, given["recipe"], given["recompute"])
        if out is not None:
            raise ValueError(f"{MoeCall.op}: out is given, and so is parallel, whose result is new; leave out one")

    def experts(x: Tensor, here: Routing, is_summed: bool) -> Tensor:
        if is_summed:
            return moe(x, here, **given)
        return rows_of_experts(x, here, dtype=parallel.dtype, **given)

    made: Tensor = parallel.layer(MoeCall.op, given["recipe"], experts, given, x, routing, residual)
    return made


def moe_call(x: Tensor, routing: Routing, *, recipe: str | Recipe, **options: Any) -> MoeCall | QuantizedMoeCall:
    """A call of moe, with all of its options, for whom its gradients go elsewhere than to autograd."""
    rows = {"rows": row_indices(MoeCall.op, x, routing), "row_of": routing.row_of, "row_scale": routing.weight_of_row}
    given = {
        "x": x, "offs": routing.offs, "splits": None, **rows, "world_experts": routing.world_experts, "out": None,
        "recompute": False, **options,
    }  # fmt: skip
    found = recipes.find(MoeCall.op, recipe)
    if found is BF16:
        return MoeCall(**packed({"transpose_w": False, **given}), recipe=found.name)
    return QuantizedMoeCall(**QuantizedMoeCall.unwrapped(found, given))


def _copies(x: Tensor, row_of: Tensor, inner: int) -> bool:
    return row_of.numel() * x.shape[1] * x.element_size() <= COPIED_BYTES and inner >= COPIED_WIDTH


def _rows(x: Tensor, row_of: Tensor) -> Tensor:
    copy: Tensor = permute_tokens(x, row_of)
    return copy.view(row_of.numel(), x.shape[1])


def _sums(rows: Tensor, row_of: Tensor, residual: Tensor | None, out: Tensor | None) -> Tensor:
    """Those of each token's rows."""
    sums: Tensor = combine_rows(rows.view(*row_of.shape, rows.shape[1]), row_of, residual, out=out)
    return sums


def check_tokens(op: str, tokens: int, **given: Tensor | None) -> None:
    """Of what has a layer's tokens: as many of them, and addresses that kernels take. Raises ValueError, naming it."""
    for name, tensor in given.items():
        if tensor is not None:
            if tensor.shape[0] != tokens:
                mismatch(op, name, tensor.shape, (tokens, tensor.shape[1]), f"routing is of {tokens} tokens")
            check_alignment(op, name, tensor)


def _check_choices_of_rows(op: str, row_of: Tensor, rows: int) -> None:
    """Raise ValueError where a routing that was changed by hand has not as many choices as rows."""
    if row_of.numel() != rows:
        raise ValueError(
            f"{op}: routing.row_of has shape {shape_text(row_of.shape)}, {row_of.numel()} choices, but "
            f"routing.token_of_row has {rows} rows; route the tokens again"
        )


class OfTokens(OfWorld):
    """What a call of moe has besides its rows' grouped_mlp, whose `rows` are the tokens of its rows, and whose
    `row_scale` is the weights of these.
    """

    op = OP
    after_groups = ""
    labels: ClassVar[dict[str, str]] = {
        **OfWorld.labels, "rows": "routing.token_of_row", "row_of": "routing.row_of", "offs": "routing.offs",
        "row_scale": "weights (routing.weight_of_row)",
    }  # fmt: skip
    tokens = Tokens(_copies, _rows, _sums)

    @classmethod
    def arguments_of(cls, public: dict[str, Any]) -> dict[str, Any]:
        """For a routing may stand the shape (N, K) of its choices, or (N, K, world_experts)."""
        public = super().arguments_of(public)
        routing = public.pop("routing")
        if public.pop("parallel") is not None:
            raise ValueError(
                f"{cls.op}: kernels depend on the rows that a rank gets; give these, and leave out parallel"
            )
        given: dict[str, Any] = {"splits": None}
        if isinstance(routing, (tuple, list)) and len(routing) in (2, 3):
            tokens, k, *world = routing
            check_routed(cls.op, public["x"][0], tokens)
            rows = (tokens * k,)
            given.update(offs=None, rows=rows, row_of=(tokens, k), row_scale=rows)
            given["world_experts"] = world[0] if world else 0
        else:
            given.update(rows=row_indices(cls.op, public["x"], routing), row_of=routing.row_of)
            given.update(offs=routing.offs, row_scale=routing.weight_of_row, world_experts=routing.world_experts)
        return {**public, **given}

    @property
    def choices(self) -> Tensor:
        """Of each of N tokens K, in any form."""
        row_of: Tensor = self.row_of
        return row_of

    def check_result(self, width: int, like: Tensor) -> None:
        if self.row_of is not None:
            check_row_of(self.op, self.labels["row_of"], self.row_of, self.x)
            _check_choices_of_rows(self.op, self.row_of, self.num_rows)
        shape, why = (self.choices.shape[0], width), "the result has a row for each token"
        for name, tensor in (("residual", self.residual), ("out", self.out)):
            if tensor is not None:
                check_like(self.op, name, tensor, shape, like, why)

    def reference(self, problem: Problem) -> Tensor:
        rows = self.x.new_zeros(problem.rows, problem.out_features, dtype=self.result_dtype)
        return _sums(self.reference_rows(rows), self.row_of, self.residual, self.out)

    def dims(self) -> dict[str, Any]:
        tokens, k = self.choices.shape
        return {"tokens": tokens, "k": k}

    @classmethod
    def look(cls, op: str, outs: list[Any], **read: Any) -> None:
        super().look(op, outs, **read)
        given, choices = {"out": outs[0]} if outs else {}, read["ids" if "ids" in read else "row_of"]
        check_tokens(op, choices.shape[0], x=read["x"], residual=read.get("residual"), **given)
        if "row_of" in read:
            _check_choices_of_rows(op, read["row_of"], read["rows"].shape[0])


class MoeCall(OfTokens, GroupedMlpCall):
    """A call of moe in 16 bits."""

    added = ("b2", "residual")
    makes: tuple[Made, ...] = (
        GroupedMlpCall.makes[0]._replace(name="y", returned=False),
        Made("out", "out", ("tokens", "out_features")),
    )


class QuantizedMoeCall(OfTokens, QuantizedMlpCall):
    """The same by a recipe that quantises."""

    torch_op = "moe_mxfp8"
    makes: tuple[Made, ...] = (
        QuantizedMlpCall.makes[0]._replace(name="y", returned=False),
        Made("out", "out", ("tokens", "out_features"), dtype="out_dtype"),
    )


@operator(MoeCall, quantized=QuantizedMoeCall)
def layer(
    x: Tensor, w1: Any, w2: Any, *, offs: Any, splits: Any, rows: Any, row_of: Any, residual: Any, row_scale: Any,
    b1: Any, b2: Any, activation: str, glu_layout: str, numbers: Numbers, recipe: Any, recompute: bool,
    transpose_w: bool, world_experts: int, out: Any,
) -> Any:  # fmt: skip
    """moe, of what its routing holds."""
    raise NotImplementedError  # `front` writes the body


MoeCall.public = staticmethod(moe)
