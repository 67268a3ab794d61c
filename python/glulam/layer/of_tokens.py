"""Calls of a whole layer: gather a row of x for each choice, compute the rows' MLPs, and sum the rows by token."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from ..backward.data_path import TokenFunctions
from ..calls.addressed import check_like
from ..calls.checks import check_alignment, mismatch, shape_text
from ..calls.definition import Definition
from ..calls.launch import ResultTensor
from ..choose.problem import Problem
from .checks import check_row_of
from .expert_rows import OP, OfWorld
from .rows import check_routed, combine_rows, permute_tokens, row_indices

COPIED_BYTES, COPIED_WIDTH = 2**28, 4096
"""Limits for copying rows when gradients are recorded.

GEMMs read copied rows if the copy has at most COPIED_BYTES and I is at least COPIED_WIDTH; else they read rows by
index. A GEMM that reads by index takes 3 to 9 % longer; a copy takes 5 us for 10 MB, for any I. Forward + backward of
8192 rows of Mixtral-8x7B (I 14336) are 3 % faster on copies; of 32768 rows of Qwen3-30B (I 768), 4 % faster by index.
"""


def _copies(x: Tensor, row_of: Tensor, inner: int) -> bool:
    return row_of.numel() * x.shape[1] * x.element_size() <= COPIED_BYTES and inner >= COPIED_WIDTH


def _rows(x: Tensor, row_of: Tensor) -> Tensor:
    copy: Tensor = permute_tokens(x, row_of)
    return copy.view(row_of.numel(), x.shape[1])


def _sums(rows: Tensor, row_of: Tensor, residual: Tensor | None, out: Tensor | None) -> Tensor:
    """Return the sum of each token's rows, plus the residual unless None."""
    sums: Tensor = combine_rows(rows.view(*row_of.shape, rows.shape[1]), row_of, residual, out=out)
    return sums


def check_tokens(op: str, tokens: int, **given: Tensor | None) -> None:
    """Raise ValueError if one of the tensors `given` does not have `tokens` rows, or is misaligned; None is skipped."""
    for name, tensor in given.items():
        if tensor is not None:
            if tensor.shape[0] != tokens:
                mismatch(op, name, tensor.shape, (tokens, tensor.shape[1]), f"routing is of {tokens} tokens")
            check_alignment(op, name, tensor)


def _check_choices_of_rows(op: str, row_of: Tensor, rows: int) -> None:
    """Raise ValueError if row_of does not have `rows` elements, as in a Routing that was changed by hand."""
    if row_of.numel() != rows:
        raise ValueError(
            f"{op}: routing.row_of has shape {shape_text(row_of.shape)}, {row_of.numel()} choices, but "
            f"routing.token_of_row has {rows} rows; route the tokens again"
        )


def of_tokens(rows: Definition) -> Definition:
    """Return the definition of a call of `moe`: a grouped_mlp call on rows, then the sum of each token's rows.

    rows: the definition of the grouped_mlp call.
    """
    y = rows.results[0]

    def reference(call: Any, problem: Problem, out: Tensor) -> None:
        made = call.x.new_zeros(problem.rows, problem.out_features, dtype=call.result_dtype)
        rows.reference(call, problem, made)
        _sums(made, call.row_of, call.residual, out)

    sums = ResultTensor("out", "out", ("tokens", "out_features"), dtype=y.dtype)
    own = rows.extended(of_rows=(_sizes,), address_checks=(_look,), reference=reference)
    return dataclasses.replace(own, results=(y._replace(name="y", returned=False), sums))


def _sizes(call: Any) -> dict[str, int]:
    tokens, k = call.choices.shape
    return {"tokens": tokens, "k": k}


def _look(kind: Any, outs: list[Any], read: dict[str, Any]) -> None:
    given, choices = {"out": outs[0]} if outs else {}, read["ids" if "ids" in read else "row_of"]
    check_tokens(kind.op, choices.shape[0], x=read["x"], residual=read.get("residual"), **given)
    if "row_of" in read:
        _check_choices_of_rows(kind.op, read["row_of"], read["rows"].shape[0])


class OfTokens(OfWorld):
    """Base of calls of `moe`: a grouped_mlp call on the layer's rows, plus the arguments and checks of tokens.

    In the grouped_mlp call, `rows` holds the token of each row, and `row_scale` the weight of each row.
    """

    op = OP
    after_groups = ""
    labels: ClassVar[dict[str, str]] = {
        **OfWorld.labels, "rows": "routing.token_of_row", "row_of": "routing.row_of", "offs": "routing.offs",
        "row_scale": "weights (routing.weight_of_row)",
    }  # fmt: skip
    tokens = TokenFunctions(_copies, _rows, _sums)

    @classmethod
    def arguments_of(cls, public: dict[str, Any]) -> dict[str, Any]:
        """Convert the arguments of `moe` to the call's arguments.

        routing is a Routing, or for `explain` the shape of its choices, (N, K[, world_experts]).
        """
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
        """[N, K]: for each token and choice, the number of its row; in `OfChoices`, the number of its expert."""
        row_of: Tensor = self.row_of
        return row_of

    def check_result(self, width: int, like: Tensor) -> None:
        """Check `out` [N, width], `residual` and `row_of`, the tensors that have a row for each token."""
        if self.row_of is not None:
            check_row_of(self.op, self.labels["row_of"], self.row_of, self.x)
            _check_choices_of_rows(self.op, self.row_of, self.num_rows)
        shape, why = (self.choices.shape[0], width), "the result has a row for each token"
        for name, tensor in (("residual", self.residual), ("out", self.out)):
            if tensor is not None:
                check_like(self.op, name, tensor, shape, like, why)
