"""grouped_dglu: the backward of grouped_glu and of the GEMM behind it, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..activations import NamedNumbers
from ..calls.call import Call
from ..calls.checks import check_experts, check_rows_like, check_width, intermediate_width, mismatch, runs_kernels
from ..calls.front import operator
from ..calls.launch import MATRIX, Made
from ..choose.problem import Problem
from ..host.groups import UNINITIALISED, Splits
from ..reference import take_rows

if TYPE_CHECKING:
    from typing_extensions import Unpack

PARTIAL_COLUMNS = 64
"""Columns of the narrowest tile: a row's sum has a part in each tile."""


class GluGradients(NamedTuple):
    """What grouped_dglu returns.

    Attributes:
        dpreact: [T, 2I or I], laid out as preact.
        act: [T, I], the activation times the row scale, computed again.
        d_row_scale: float32 [T], zero in the tail; None where it was not asked for.
    """

    dpreact: Tensor
    act: Tensor
    d_row_scale: Tensor | None = None


def partials_shape(rows: int, intermediate: int) -> tuple[int, int]:
    """Of the memory for parts of d_row_scale, float32: one a tile of any width."""
    return -(-intermediate // PARTIAL_COLUMNS), rows


class GroupedDgluCall(Call):
    """A call of grouped_dglu."""

    op = "grouped_dglu"
    explains = True
    leads = "dy"
    after_groups = UNINITIALISED
    outputs = ()
    torch_results = {
        "": ("(Tensor, Tensor)", {"row_scale_grad": False}),
        "_scale": ("(Tensor, Tensor, Tensor)", {"row_scale_grad": True}),
    }
    sources = {"scale": "row_scale"}
    makes = (
        Made("dpreact", "dpreact", ("num_rows", "preact_width")),
        Made("act", "act", ("num_rows", "intermediate")),
        Made("d_row_scale", "d_scale", ("num_rows",), like="row_scale", zeros=True),
    )
    scratch = {"partials": MATRIX}

    @property
    def wants_d_row_scale(self) -> bool:
        return self.row_scale is not None and self.row_scale_grad

    def check(self) -> Problem:
        columns, like = self.check_lead()
        self.check_options()
        shape = check_experts(self.op, "w2", self.w2, self.dy, "E I H" if self.transpose_w else "E H I")
        experts, hidden, width = (shape[0], shape[2], shape[1]) if self.transpose_w else shape
        if hidden != columns:
            wanted = (experts, width, columns) if self.transpose_w else (experts, columns, width)
            other = f", or give transpose_w={not self.transpose_w}" if width == columns else ""
            mismatch(self.op, "w2", shape, wanted, f"dy has {columns} columns{other}")
        check_width(self.op, "w2", width, runs_kernels(self.dy))
        preact_width = check_rows_like(self.op, "preact", self.preact, like, None, "it has the rows of dy")
        inner = intermediate_width(self.op, "preact", preact_width, self.activation, self.glu_layout)
        if inner != width:
            preact = (self.num_rows, width * preact_width // inner)
            mismatch(self.op, "preact", self.preact.shape, preact, f"w2 gives I = {width}")
        self.check_addends(experts, "w2", like)
        return self.problem(experts, columns, intermediate=width)

    @property
    def variant(self) -> str:
        return "_scale" if self.wants_d_row_scale else ""

    def assembled(self, returned: Any) -> GluGradients:
        return GluGradients(*returned)

    def reference(self, problem: Problem) -> GluGradients:
        results: GluGradients = self.results(problem)
        dy = self.dy if self.rows is None else take_rows(self.dy, self.rows)
        given = (dy, self.w2, self.preact, self.host_ends(), self.row_scale, self.function)
        reference.grouped_dglu(*given, *results, self.transpose_w)
        return results

    def made(self) -> tuple[Made, ...]:
        return self.makes if self.wants_d_row_scale else self.makes[:2]

    def scratch_of(self, problem: Problem) -> dict[str, str]:
        return self.scratch if self.wants_d_row_scale and problem.rows else {}

    def constants(self, problem: Problem) -> dict[str, Any]:
        return {"result": GluGradients, **self.function.params}

    def memory(self, problem: Problem) -> list[Any]:
        shape = partials_shape(problem.rows, problem.intermediate)
        return [(shape, torch.float32)] if self.scratch_of(problem) else []


@operator(GroupedDgluCall)
def grouped_dglu(
    dy: Tensor,
    w2: Tensor | Sequence[Tensor],
    preact: Tensor,
    *,
    offs: Tensor | None = None,
    splits: Splits | None = None,
    rows: Tensor | None = None,
    row_scale: Tensor | None = None,
    activation: str = "swiglu",
    glu_layout: str = "concat",
    row_scale_grad: bool = True,
    transpose_w: bool = False,
    **numbers: Unpack[NamedNumbers],
) -> GluGradients:
    """The gradient of y = m w2_e^T, m = activation(h) * row_scale[row], by h and row_scale, and m again; h is preact.

    With dm = dy w2_e: dpreact = dm * row_scale * activation'(h), d_row_scale = sum of dm * activation(h) over columns.
    Rows behind the last group are neither read into a result nor written.

    Args:
        dy: [T, H], bfloat16 or float16; on the CPU also float32 or float64. Rows may be padded.
        w2: [E, H, I], or a list of E tensors; contiguous, dy's dtype. H, I and 2I are multiples of 8 on a GPU.
        preact: [T, 2I] for an activation with a gate, else [T, I], as `grouped_glu` returns it; dy's dtype.
        offs: int32 [E], each group's end: group e is rows offs[e-1] .. offs[e]. Give this or splits.
        splits: row counts: int32 or int64 [E] on dy's device, or a CPU tensor or a list, which is checked and copied.
        rows: int32 [T] on dy's device: row t is dy[rows[t]], dy is [N, H], and no copy of the rows is made. An index
            out of range is clamped.
        row_scale: float32 [T], as in the forward.
        activation, glu_layout, **numbers: as in the forward; see `grouped_glu`. The gradient is zero where
            clamped_swiglu clamps, and at the kink of a relu.
        row_scale_grad: False leaves d_row_scale out. It is left out without a row_scale, too.
        transpose_w: of y = m w2_e instead: w2 is [E, I, H], and dm = dy w2_e^T. No copy of it is made.

    Returns:
        GluGradients: dpreact and act in dy's dtype, d_row_scale in float32 (row_scale's dtype) or None. The
        tails of dpreact and act are uninitialised, that of d_row_scale is zero.

    Raises:
        ValueError, TypeError: an argument that does not fit; nothing was launched.
        GradientNotSupported: grad mode is on and an argument requires a gradient.
        UnsupportedDevice, BundleError (RuntimeErrors): no kernel for this GPU, or no usable bundle.
        CaptureError: host splits under CUDA graph capture.
    """
    raise NotImplementedError  # `front` writes the body
