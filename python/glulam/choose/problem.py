"""What the host knows of a call: a problem, for which a kernel is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from cute_kernels.arch import Gemm
from cute_kernels.specs import GATED

One = TypeVar("One")


def changed(one: One, **changes: Any) -> One:
    """As `dataclasses.replace` but for __init__ and __post_init__, with which it takes 3 to 6 us of a call's time."""
    other = object.__new__(type(one))
    other.__dict__.update(one.__dict__, **changes)
    return other


def dtype_name(dtype: Any) -> str:
    """As specs and problems have it."""
    return str(dtype).removeprefix("torch.")


class Part(NamedTuple):
    """One GEMM of a problem. family: "glu", "nt" or "nn", the kernels whose times are its own."""

    family: str
    gemm: Gemm

    @property
    def key(self) -> tuple[str, int, int, int]:
        """What times are found by, beside rows."""
        return self.family, self.gemm.experts, self.gemm.columns, self.gemm.depth


@dataclass(frozen=True)
class Problem:
    """What the host knows of a call. Widths are in elements; `intermediate` is I, 0 where there is none.

    grouped_mm: x [T, in_features] -> [T, out_features]; grouped_glu: [T, in_features] -> [T, intermediate];
    grouped_mlp: [T, in_features] -> [T, intermediate] -> [T, out_features]; `quantized`: x already arrives in MXFP8.
    grouped_dglu: dy [T, in_features] -> [T, intermediate]; if out_features is not 0, also dx [T, out_features].
    grouped_wgrad: dy [T, out_features], x [T, in_features] -> [E, out_features, in_features]; quantize_mxfp8: x [T,
    in_features] along `axis`, `rounded` to values or as elements and scales.
    `transpose_w`: of the first four, forward's weights are [E, K, N]. `operands`: what the first GEMM multiplies
    (`cute_kernels.specs.OPERANDS`); `fc2_operands`: that of FC2; `gathers`: the rows of an operand of grouped_wgrad
    come by index; `in_halves`: either half of x's columns in a grouped_mm has weights of its own; `adapted`: the GEMM
    of a grouped_mm, grouped_glu or grouped_dglu contracts a second pair of operands, too.
    `invariant`: only kernels that add in one order may serve, whatever the rows (`choose.invariance`).
    `world_experts`: experts of all ranks that the T choices are spread over, so that few of the T rows are used; 0:
    those here.
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
        """The rows that get here if all experts of the world are chosen alike; T if they are all here."""
        if self.world_experts <= self.experts:
            return self.rows
        return -(-self.rows * self.experts // self.world_experts)

    @property
    def expected(self) -> Problem:
        """The problem that a kernel is chosen for: it has the rows that are expected here."""
        return changed(self, rows=self.expected_rows, world_experts=0) if self.world_experts else self

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of tensors, by the names that launches have for them (`launch.Made`)."""
        return {
            "num_rows": self.rows, "num_groups": self.experts, "in_features": self.in_features,
            "intermediate": self.intermediate, "out_features": self.out_features, "preact_width": self.w1_rows,
        }  # fmt: skip

    @property
    def but_rows(self) -> tuple[Any, ...]:
        """All fields but `rows`."""
        return _BUT_ROWS(self)

    @property
    def w1_rows(self) -> int:
        """Rows of an expert's w1, and columns of the preactivation: 2I with a gate, else I."""
        return 2 * self.intermediate if self.activation in GATED else self.intermediate

    @property
    def weights(self) -> tuple[tuple[int, int], ...]:
        """(N, K) of an expert's weights: of an MLP's both, else of the one."""
        if not self.intermediate:
            return ((self.out_features, self.in_features),)
        w1 = self.w1_rows, self.in_features
        return (w1, (self.out_features, self.intermediate)) if self.out_features else (w1,)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The GEMMs of grouped_mm, grouped_glu or grouped_mlp."""
        depth = self.intermediate or self.in_features
        mm = Part(
            "nn" if self.transpose_w else "nt",
            Gemm(self.rows, self.experts, self.out_features, depth, self.out_features),
        )
        stored = self.intermediate + (self.w1_rows if self.save_preact else 0)
        glu = Part("glu", Gemm(self.rows, self.experts, self.w1_rows, self.in_features, stored))
        return {"grouped_mm": (mm,), "grouped_glu": (glu,), "grouped_mlp": (glu, mm)}[self.op]


_BUT_ROWS: Callable[[Problem], tuple[Any, ...]] = attrgetter(*(f.name for f in fields(Problem) if f.name != "rows"))


class TrainingParts(NamedTuple):
    """The three functions that a grouped_mlp's forward and backward launch."""

    forward: Problem
    data_gradients: Problem
    weight_gradients: Problem


def training_parts(mlp: Problem, input_grad: bool = True, gathers: bool = False) -> TrainingParts:
    """Of a grouped_mlp whose weights are not transposed. `input_grad`: whether x's gradient is wanted; `gathers`:
    whether rows come by index.
    """
    hidden = mlp.in_features if input_grad else 0
    return TrainingParts(
        changed(mlp, save_preact=True),
        changed(mlp, op="grouped_dglu", in_features=mlp.out_features, out_features=hidden),
        changed(mlp, op="grouped_wgrad", out_dtype=mlp.dtype, operands="16bit", gathers=gathers),
    )
