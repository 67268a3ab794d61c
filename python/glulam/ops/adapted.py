"""Grouped GEMMs with LoRA adapters: the operators of which a step with LoRA consists. They are not public.

Each is an operator of `glulam` whose kernel adds a second product, low @ low_w_e^T, to the GEMM's accumulators before
the rest of the epilogue. So both products are rounded once. `low` is [T, r], with r the rank of the adapters: x (in
backward a gradient) times one of an adapter's two matrices and the adapters' scale. `low_w` is the other matrix of each
expert, laid out like the weight: [E, N, r]; if the kernel contracts over the weight's rows, [E, r, N].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..activations import NamedNumbers
from ..calls.call import Call
from ..calls.checks import ALIGNMENT_ELEMENTS, check_rows_like, runs_kernels, shape_text
from ..calls.front import operator
from ..calls.weight_checks import check_experts
from ..choose.problem import Problem, changed
from ..host.experts import GateUp
from ..reference import take_rows
from .grouped_dglu import GluGradients, GroupedDgluCall
from .grouped_glu import GroupedGluCall
from .grouped_mm import GroupedMmCall

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Adapted(Call):
    """Base of calls of grouped GEMMs with LoRA adapters, whose product low @ low_w_e^T is added to the GEMM's result.

    `low` is [T, r], with r the adapters' rank.

    Attributes:
        weight: name of the weight's argument; low_w is laid out like this weight.
        serves: name of the operator without adapter, such as "grouped_mm", whose kernels with an adapter
            (`adapted` in their specs) compute the call.
    """

    explains = False
    differentiable = False
    weight: ClassVar[str]
    serves: ClassVar[str]

    @property
    def contracts_rows(self) -> bool:
        """Return True if the kernel contracts over rows of the weight, and so over rows of low_w."""
        return bool(self.transpose_w)

    def check(self) -> Problem:
        if isinstance(getattr(self, self.weight), GateUp):
            raise TypeError(
                f"{self.op}: {self.weight} is a GateUp; give one weight, as torch.cat({self.weight}, dim=1)"
            )
        problem: Problem = super().check()
        self._check_low(problem)
        return changed(problem, op=self.serves, adapted=True)

    def _check_low(self, problem: Problem) -> None:
        _, like = self.check_lead()
        rank = check_rows_like(self.op, "low", self.low, like, None, "it has a row for each of T")
        if runs_kernels(self.lead) and rank % ALIGNMENT_ELEMENTS:
            raise ValueError(f"{self.op}: low has {rank} columns; give a multiple of {ALIGNMENT_ELEMENTS}")
        if not isinstance(self.low_w, Tensor):
            raise TypeError(f"{self.op}: low_w is a {type(self.low_w).__name__}; give a tensor of all experts")
        shape = check_experts(self.op, "low_w", self.low_w, self.lead, "E N r")
        width = self._width(problem)
        wanted = (problem.experts, rank, width) if self.contracts_rows else (problem.experts, width, rank)
        if tuple(shape) != wanted or not self.low_w.is_contiguous():
            raise ValueError(f"{self.op}: low_w has shape {shape_text(shape)}; give {shape_text(wanted)}, contiguous")

    def _width(self, problem: Problem) -> int:
        """Return the number of columns of the GEMM's result."""
        raise NotImplementedError

    def reference(self, problem: Problem) -> Any:
        """Compute one GEMM of [x, low] with [weight, low_w], each pair joined along the contraction.

        So the sum of both products is rounded only once, as in the kernels.
        """
        lead = take_rows(self.lead, self.rows)
        w, dim = getattr(self, self.weight), 0 if self.contracts_rows else 1
        if isinstance(w, Tensor):
            both: Any = torch.cat((w, self.low_w), dim=1 + dim)
        else:
            both = [torch.cat(pair, dim=dim) for pair in zip(w, self.low_w, strict=True)]
        beside = {self.leads: torch.cat((lead, self.low), dim=1), self.weight: both, "rows": None}
        return super(Adapted, changed(self, **beside)).reference(problem)


class AdaptedMmCall(Adapted, GroupedMmCall):
    """A call of adapted_mm: grouped_mm with LoRA adapters, which add low @ low_w_e^T to y [T, N].

    low is [T, r]. low_w is [E, N, r], laid out like w; with transpose_w it is [E, r, N], and low @ low_w_e is added.
    """

    op, serves, weight = "adapted_mm", "grouped_mm", "w"
    tabled = ("w",)

    def _width(self, problem: Problem) -> int:
        return problem.out_features


class AdaptedGluCall(Adapted, GroupedGluCall):
    """A call of adapted_glu: grouped_glu with LoRA adapters, which add low @ low_w_e^T to the preactivation h [T, W].

    h is always returned. W is 2I or I. low is [T, r]. low_w is [E, W, r], laid out like w1 [E, W, H]; with transpose_w
    it is [E, r, W], and low @ low_w_e is added.
    """

    op, serves, weight = "adapted_glu", "grouped_glu", "w1"
    tabled = ("w1",)
    return_preact = True
    outputs = ()
    out = None

    def _width(self, problem: Problem) -> int:
        return problem.w1_rows


class AdaptedDgluCall(Adapted, GroupedDgluCall):
    """A call of adapted_dglu: grouped_dglu with LoRA adapters, which add low @ low_w_e to dm [T, I].

    dm is the gradient of the activation's result. low is [T, r]. low_w is [E, r, I], laid out like w2 [E, H, I]; with
    transpose_w it is [E, I, r], and low @ low_w_e^T is added.
    """

    op, serves, weight = "adapted_dglu", "grouped_dglu", "w2"
    tabled = ("w2",)

    @property
    def contracts_rows(self) -> bool:
        return not self.transpose_w

    def _width(self, problem: Problem) -> int:
        return problem.intermediate


@operator(AdaptedMmCall)
def adapted_mm(
    x: Tensor, w: Any, *, low: Tensor, low_w: Tensor, offs: Tensor | None = None, splits: Any = None,
    bias: Any = None, rows: Tensor | None = None, bias_scale: Tensor | None = None, transpose_w: bool = False,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute grouped_mm with LoRA adapters: add low @ low_w_e^T (with transpose_w: low @ low_w_e) to y, and return y.

    low is [T, r]; low_w is [E, N, r], with transpose_w [E, r, N]. For the other arguments, see `grouped_mm`.
    """
    raise NotImplementedError  # `front` writes the body


@operator(AdaptedGluCall)
def adapted_glu(
    x: Tensor, w1: Any, *, low: Tensor, low_w: Tensor, offs: Tensor | None = None, splits: Any = None,
    rows: Tensor | None = None, bias: Any = None, row_scale: Tensor | None = None, activation: str = "swiglu",
    glu_layout: str = "concat", transpose_w: bool = False, **numbers: Unpack[NamedNumbers],
) -> Any:  # fmt: skip
    """Compute grouped_glu with LoRA adapters; also return the preactivation h [T, W], where W is 2I or I.

    low @ low_w_e^T (with transpose_w: low @ low_w_e) is added to h. low is [T, r]; low_w is [E, W, r], with transpose_w
    [E, r, W]. For the other arguments, see `grouped_glu`.
    """
    raise NotImplementedError  # `front` writes the body


@operator(AdaptedDgluCall)
def adapted_dglu(
    dy: Tensor, w2: Any, preact: Tensor, *, low: Tensor, low_w: Tensor, offs: Tensor | None = None, splits: Any = None,
    rows: Tensor | None = None, row_scale: Tensor | None = None, activation: str = "swiglu",
    glu_layout: str = "concat", row_scale_grad: bool = True, transpose_w: bool = False,
    **numbers: Unpack[NamedNumbers],
) -> GluGradients:  # fmt: skip
    """Compute grouped_dglu with LoRA adapters: add low @ low_w_e (with transpose_w: low @ low_w_e^T) to dm [T, I].

    dm is the gradient of the activation's result. low is [T, r]; low_w is [E, r, I], with transpose_w [E, I, r]. For
    the other arguments, see `grouped_dglu`.
    """
    raise NotImplementedError  # `front` writes the body
