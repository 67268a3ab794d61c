"""Class `Problem`: everything about a call (sizes, dtypes, options) from which a kernel is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from cute_kernels.arch import Gemm
from cute_kernels.specs import GATED

One = TypeVar("One")


def changed(one: One, **changes: Any) -> One:
    """Return a copy of an object with other values for the attributes in `changes`.

    Unlike `dataclasses.replace`, this runs neither __init__ nor __post_init__, which would take 3 to 6 us of each call.
    """
    other = object.__new__(type(one))
    other.__dict__.update(one.__dict__, **changes)
    return other


def dtype_name(dtype: Any) -> str:
    """Return a torch dtype's name as specs and problems write it: "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


class ProblemGemm(NamedTuple):
    """One GEMM of a problem.

    Attributes:
        family: the kernels whose measured times apply: "glu": FC1 with its activation; "nt": a plain GEMM with weights
            [N, K]; "nn": a plain GEMM with weights [K, N].
        gemm: the sizes.
    """

    family: str
    gemm: Gemm

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Return the key of this GEMM's measured times in `estimates.Measured.curves`. It does not include the rows."""
        return self.family, self.gemm.experts, self.gemm.columns, self.gemm.depth


@dataclass(frozen=True)
class Problem:
    """Sizes, dtypes and options of a call: everything that the choice of a kernel may depend on.

    The widths depend on the operator (T rows, E experts):
    grouped_mm: x [T, in_features] -> [T, out_features]; grouped_glu: [T, in_features] -> [T, intermediate];
    grouped_mlp: [T, in_features] -> [T, intermediate] -> [T, out_features];
    grouped_dglu: dy [T, in_features] -> [T, intermediate]; if out_features is not 0, also dx [T, out_features];
    grouped_wgrad: dy [T, out_features], x [T, in_features] -> [E, out_features, in_features];
    quantize_mxfp8: x [T, in_features].

    Attributes:
        op: the operator.
        dtype: name of a dtype, such as "bfloat16": usually the dtype of the leading argument.
        rows: T.
        experts: E.
        in_features, intermediate, out_features: widths in elements, see above. intermediate is I; 0: there is none.
        activation, glu_layout: the activation, and the order of gate and up-projection rows.
        save_preact: True: the preactivation is stored.
        transpose_w: True: each expert's weights in forward are [inputs, outputs], not [outputs, inputs]; for the first
            four operators.
        out_dtype: name of the dtype of weight gradients; for a grouped_wgrad.
        axis: the axis of the blocks; for quantize_mxfp8.
        rounded: True: round to values of the format; False: make elements and scales; for quantize_mxfp8.
        quantized: True: the caller passes x in MXFP8; for a grouped_mlp.
        operands: the operands of the first GEMM, a key of `cute_kernels.specs.OPERANDS`.
        fc2_operands: the operands of FC2, in the same way.
        gathers: True: the rows of an operand of grouped_wgrad are selected by index.
        in_halves: True: weights are a GateUp, one tensor for each half of x's columns; for a grouped_mm.
        adapted: True: the GEMM also contracts a second pair of operands (LoRA); for grouped_mm, grouped_glu and
            grouped_dglu.
        world_experts: with expert parallelism, the number of experts of all ranks, over which the T choices are spread;
            so only few of the T rows are used here. 0: the T rows are spread over the experts here.
        invariant: True: only kernels that add in one order may serve, whatever the rows (`choose.invariance`).
    """

    op: str
    dtype: str
    rows: int
    experts: int
    in_features: int
    intermediate: int = 0
    out_features: int = 0
    activation: str = "none"
    glu_layout: str = "concat"
    save_preact: bool = False
    transpose_w: bool = False
    out_dtype: str = ""
    axis: str = ""
    rounded: bool = False
    quantized: bool = False
    operands: str = "16bit"
    fc2_operands: str = "16bit"
    gathers: bool = False
    in_halves: bool = False
    adapted: bool = False
    world_experts: int = 0
    invariant: bool = False

    @property
    def expected_rows(self) -> int:
        """Return the number of rows for the experts of this rank if all experts of the world are equally popular.

        It is T if all experts are on this rank.
        """
        if self.world_experts <= self.experts:
            return self.rows
        return -(-self.rows * self.experts // self.world_experts)

    @property
    def expected(self) -> Problem:
        """Return the problem for which a kernel is chosen: this problem with `expected_rows` rows."""
        return changed(self, rows=self.expected_rows, world_experts=0) if self.world_experts else self

    @property
    def dims(self) -> dict[str, int]:
        """Return {name: size}, with the names that shapes of results use (`launch.ResultTensor.shape`)."""
        return {
            "num_rows": self.rows, "num_groups": self.experts, "in_features": self.in_features,
            "intermediate": self.intermediate, "out_features": self.out_features, "preact_width": self.w1_rows,
        }  # fmt: skip

    @property
    def key_without_rows(self) -> tuple[Any, ...]:
        """Return the values of all fields except `rows`."""
        return _WITHOUT_ROWS(self)

    @property
    def w1_rows(self) -> int:
        """Return the number of rows of an expert's w1, the preactivation's columns: 2I with a gate, else I."""
        return 2 * self.intermediate if self.activation in GATED else self.intermediate

    @property
    def weights(self) -> tuple[tuple[int, int], ...]:
        """Return (N, K) of each weight matrix of an expert: w1 and w2 for an MLP, else the only weight."""
        if not self.intermediate:
            return ((self.out_features, self.in_features),)
        w1 = self.w1_rows, self.in_features
        return (w1, (self.out_features, self.intermediate)) if self.out_features else (w1,)

    @property
    def parts(self) -> tuple[ProblemGemm, ...]:
        """Return the GEMMs of a grouped_mm, grouped_glu or grouped_mlp, in order."""
        depth = self.intermediate or self.in_features
        mm = ProblemGemm(
            "nn" if self.transpose_w else "nt",
            Gemm(self.rows, self.experts, self.out_features, depth, self.out_features),
        )
        stored = self.intermediate + (self.w1_rows if self.save_preact else 0)
        glu = ProblemGemm("glu", Gemm(self.rows, self.experts, self.w1_rows, self.in_features, stored))
        return {"grouped_mm": (mm,), "grouped_glu": (glu,), "grouped_mlp": (glu, mm)}[self.op]


_WITHOUT_ROWS: Callable[[Problem], tuple[Any, ...]] = attrgetter(*(f.name for f in fields(Problem) if f.name != "rows"))


class TrainingParts(NamedTuple):
    """The three problems into which training with a grouped_mlp divides: forward, data and weight gradients."""

    forward: Problem
    data_gradients: Problem
    weight_gradients: Problem


def training_parts(mlp: Problem, input_grad: bool = True, gathers: bool = False) -> TrainingParts:
    """Return the problems of a grouped_mlp's forward and backward.

    Args:
        mlp: the grouped_mlp; its weights are not transposed.
        input_grad: True: x's gradient is computed, too.
        gathers: True: rows of x are selected by index.
    """
    hidden = mlp.in_features if input_grad else 0
    return TrainingParts(
        changed(mlp, save_preact=True),
        changed(mlp, op="grouped_dglu", in_features=mlp.out_features, out_features=hidden),
        changed(mlp, op="grouped_wgrad", out_dtype=mlp.dtype, operands="16bit", gathers=gathers),
    )
