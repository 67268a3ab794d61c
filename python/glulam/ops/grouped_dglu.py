"""grouped_dglu: the data gradients of an MLP's FC2 and activation in one call: dy times w2, then times act'(h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..activations import NamedNumbers
from ..calls.call import Call
from ..calls.checks import check_rows_like, check_width, mismatch, runs_kernels
from ..calls.definition import Definition, ScratchPart
from ..calls.front import operator
from ..calls.launch import ResultTensor
from ..calls.weight_checks import check_contraction, check_experts, intermediate_width
from ..choose.problem import Problem
from ..host.groups import UNINITIALISED, Splits
from ..names import ActivationName, GluLayout
from ..reference import take_rows

if TYPE_CHECKING:
    from typing_extensions import Unpack

PARTIAL_COLUMNS = 64
"""Columns of the narrowest tile. A row's d_row_scale is the sum of one partial sum for each tile of the row."""


class GluGradients(NamedTuple):
    """Results of grouped_dglu.

    Attributes:
        dpreact: [T, 2I or I], laid out as preact.
        act: [T, I], the activation times the row scale, computed again.
        d_row_scale: float32 [T], the gradient of row_scale, zero after the last group. None: it was not requested.
    """

    dpreact: Tensor
    act: Tensor
    d_row_scale: Tensor | None = None


def _reference(call: Any, problem: Problem, dpreact: Tensor, act: Tensor, d_row_scale: Tensor | None) -> None:
    given = take_rows(call.dy, call.rows), call.w2, call.preact, call.host_ends(), call.row_scale, call.function
    reference.grouped_dglu(*given, dpreact, act, d_row_scale, call.transpose_w)


DPREACT = ResultTensor("dpreact", "dpreact", ("num_rows", "preact_width"))
ACT = ResultTensor("act", "act", ("num_rows", "intermediate"))
D_ROW_SCALE = ResultTensor("d_row_scale", "d_scale", ("num_rows",), like="row_scale", zeros=True, when="row_scale_grad")


def partial_sums(call: Any, problem: Problem) -> dict[str, ScratchPart]:
    """Return the scratch memory of a launch for partial sums of d_row_scale: one for each row and tile.

    It is sized for the narrowest tiles.
    """
    shape = -(-problem.intermediate // PARTIAL_COLUMNS), problem.rows
    return {"partials": (shape, torch.float32)} if call.makes_result(D_ROW_SCALE) and problem.rows else {}


class GroupedDgluCall(Call):
    """A call of grouped_dglu: a `Call` with the operator's checks, results, kernel arguments and CPU reference."""

    op = "grouped_dglu"
    explains = True
    leads = "dy"
    after_groups = UNINITIALISED
    outputs = ()
    sources = {"scale": "row_scale"}
    definition = Definition(
        results=(DPREACT, ACT, D_ROW_SCALE),
        returns=GluGradients,
        constants=(lambda call: call.function.params,),
        scratch=(partial_sums,),
        reference=_reference,
    )

    def check(self) -> Problem:
        columns, like = self.check_lead()
        self.check_options()
        shape = check_experts(self.op, "w2", self.w2, self.dy, "E I H" if self.transpose_w else "E H I")
        width = check_contraction(self.op, "w2", shape, columns, self.transpose_w, not self.transpose_w)
        check_width(self.op, "w2", width, runs_kernels(self.dy))
        preact_width = check_rows_like(self.op, "preact", self.preact, like, None, "it has the rows of dy")
        inner = intermediate_width(self.op, "preact", preact_width, self.activation, self.glu_layout)
        if inner != width:
            preact = (self.num_rows, width * preact_width // inner)
            mismatch(self.op, "preact", self.preact.shape, preact, f"w2 gives I = {width}")
        self.check_addends(shape[0], "w2", like)
        return self.problem(shape[0], columns, intermediate=width)


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
    activation: ActivationName = "swiglu",
    glu_layout: GluLayout = "concat",
    row_scale_grad: bool = True,
    transpose_w: bool = False,
    **numbers: Unpack[NamedNumbers],
) -> GluGradients:
    """Compute the gradients of h and row_scale for y = m w2_e^T with m = activation(h) row_scale[row].

    h is preact. With dm = dy w2_e: dpreact = dm * row_scale * activation'(h), and d_row_scale is the sum of
    dm * activation(h) over the columns. m is computed again and returned, too. Rows after the last group do not affect
    any result, and are not written.

    Args:
        dy: [T, H], bfloat16 or float16; on the CPU also float32 or float64. The row stride may exceed H; on
            a GPU it is a multiple of 8 elements.
        w2: [E, H, I], or a list of E tensors; contiguous, dy's dtype. H, I and 2I are multiples of 8 on a GPU.
        preact: [T, 2I] for an activation with a gate, else [T, I], as `grouped_glu` returns it; dy's dtype.
        offs: int32 [E], each group's end: group e is rows offs[e-1] .. offs[e]. Give this or splits.
        splits: each group's number of rows: int32 or int64 [E] on dy's device; or a CPU tensor or a list, which is
            checked and copied to the device.
        rows: int32 [T] on dy's device: row t is dy[rows[t]], dy is [N, H], and no copy of the rows is made. An index
            out of range is clamped. None: rows of dy lie in order.
        row_scale: float32 [T], as in the forward. None: 1.
        activation, glu_layout, **numbers: as in the forward; see `grouped_glu`. The gradient is zero where
            clamped_swiglu clamps, and at the kink of a relu.
        row_scale_grad: False: do not compute d_row_scale. It is not computed without a row_scale, either.
        transpose_w: True: differentiate y = m w2_e instead: w2 is [E, I, H], and dm = dy w2_e^T. w2 is not copied.

    Returns:
        GluGradients: dpreact and act (m) in dy's dtype, d_row_scale in float32 (row_scale's dtype) or None. After the
            last group, dpreact and act are uninitialised and d_row_scale is zero.

    Raises:
        ValueError, TypeError: an argument does not fit; nothing was launched.
        GradientNotSupported: grad mode is on and an argument requires a gradient.
        UnsupportedDevice, BundleError (RuntimeErrors): there is no kernel for this GPU, or no usable bundle.
        CaptureError: host splits under CUDA graph capture.
    """
    raise NotImplementedError  # `front` writes the body
