"""grouped_mm: one GEMM for each expert's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import reference
from ..calls.call import Call
from ..calls.checks import check_width, runs_kernels
from ..calls.definition import Definition
from ..calls.front import operator
from ..calls.launch import ResultTensor
from ..calls.sharding import SUM, Split
from ..calls.weight_checks import check_contraction, check_experts, check_halves
from ..choose.problem import Problem
from ..formats.scaled import Stored
from ..host.experts import Biases, GateUp
from ..host.groups import UNINITIALISED, Splits
from ..reference import take_rows
from .quantized_mm import QuantizedMmCall


def _reference(call: Any, problem: Problem, out: Tensor) -> None:
    x, how = take_rows(call.x, call.rows), (call.bias, call.bias_scale, call.transpose_w)
    reference.grouped_mm(x, call.w, call.host_ends(), *how, out)


class GroupedMmCall(Call):
    """A call of grouped_mm in 16 bits: the operator's checks, results, kernel arguments and CPU reference."""

    op = "grouped_mm"
    explains = True
    after_groups = UNINITIALISED
    differentiable = True
    sources = {"scale": "bias_scale"}
    definition = Definition(results=(ResultTensor("out", "y", ("num_rows", "out_features")),), reference=_reference)

    def check(self) -> Problem:
        columns, like = self.check_lead()
        self.check_options()
        in_halves = isinstance(self.w, GateUp)
        shape = self._check_halves() if in_halves else check_experts(self.op, "w", self.w, self.x, "E N K")
        width = check_contraction(self.op, "w", shape, columns, self.transpose_w, self.transpose_w)
        check_width(self.op, "w", width, runs_kernels(self.x))
        self.check_addends(shape[0], "w", like, bias=width)
        self.check_result(width, like)
        return self.problem(shape[0], columns, out_features=width, in_halves=in_halves)

    def served_splits(self) -> tuple[Split, ...]:
        contracted, width = (1, 2) if self.transpose_w else (2, 1)
        return Split({"w": width, "bias": 1}, 1), Split({"x": 1, "w": contracted, "bias": SUM}, SUM)

    def _check_halves(self) -> tuple[int, ...]:
        """Check a w that is a GateUp, and return the shape [E, 2N, K] of its two halves together."""
        if not self.transpose_w:
            raise ValueError(
                f"{self.op}: w is a GateUp, of which transpose_w=True alone is there; call it with w.gate and w.up"
            )
        for name in ("bias", "bias_scale", "rows"):
            if getattr(self, name) is not None:
                raise ValueError(f"{self.op}: {name} is given beside a GateUp; leave it out")
        experts, n, k = check_halves(self.op, "w", self.w, self.x, "E N K")
        check_width(self.op, "w.gate", n, runs_kernels(self.x))
        return experts, 2 * n, k


@operator(GroupedMmCall, quantized=QuantizedMmCall, when="w.__class__ in classes", recipe="w.weight_only")
def grouped_mm(
    x: Tensor,
    w: Tensor | Sequence[Tensor] | Stored,
    *,
    offs: Tensor | None = None,
    splits: Splits | None = None,
    bias: Biases = None,
    rows: Tensor | None = None,
    bias_scale: Tensor | None = None,
    transpose_w: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Compute y = x w_e^T (+ bias_e * bias_scale[row]), where e is the expert of the row's group.

    Rows are sorted by expert. Rows after the last group do not affect any result, and are not written. Differentiable
    once in x, w, bias and bias_scale; gradients of rows after the last group are zero.

    Args:
        x: [T, K], bfloat16 or float16; on the CPU also float32 or float64. The row stride may exceed K; on
            a GPU it is a multiple of 8 elements.
        w: one of the following; K and N are multiples of 8 on a GPU.
            A tensor [E, N, K], or a list of E tensors [N, K]; contiguous, x's dtype.
            A GateUp of two tensors [E, N, K], only with transpose_w, and without bias, rows and gradients: x is [T, 2N]
            and y = x[:, :N] gate_e + x[:, N:] up_e. In the backward of `grouped_glu` this computes x's gradient from
            h's.
            An MXFP8Tensor, MXFP4Tensor, NVFP4Tensor or FP8BlockTensor [E, N, K], quantised by rows, only without
            transpose_w and gradients: x is then bfloat16 on a GPU, and K a multiple of 32 (FP8BlockTensor: 16).
        offs: int32 [E], each group's end: group e is rows offs[e-1] .. offs[e]. Give this or splits.
        splits: each group's number of rows: int32 or int64 [E] on x's device; or a CPU tensor or a list, which is
            checked and copied to the device.
        bias: [E, N] or a list of E tensors [N], x's dtype; with transpose_w [E, K]. None: no bias.
        rows: int32 [T] on x's device: row t is x[rows[t]], x is [num_tokens, K], and no copy of the rows is made. An
            index out of range is clamped. Not differentiable when this is given. None: rows of x lie in order.
        bias_scale: float32 [T], a factor for the bias of each row. None: 1.
        transpose_w: True: compute y = x w_e instead: x is [T, N] and the result [T, K].
        out: buffer for the result, [T, N]; its row stride may exceed N. None: a new tensor, uninitialised after
            the last group.

    Returns:
        [T, N] in x's dtype, computed with float32 accumulation; `out` if given.

    Raises:
        ValueError, TypeError: an argument does not fit; nothing was launched.
        GradientNotSupported: `out` is given although an argument requires a gradient, or a second derivative is taken.
        UnsupportedDevice, BundleError (RuntimeErrors): there is no kernel for this GPU, or no usable bundle.
        CaptureError: host splits under CUDA graph capture.
    """
    raise NotImplementedError  # `front` writes the body
