"""grouped_glu: one GEMM for each expert's rows, with the activation in its epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from .. import reference
from ..activations import NamedNumbers
from ..calls.call import Call
from ..calls.definition import Definition, numbers_of_activation
from ..calls.front import operator
from ..calls.launch import ResultTensor
from ..calls.sharding import Split, split_of_width
from ..calls.weight_checks import check_w1
from ..choose.problem import Problem
from ..host.experts import Biases
from ..host.groups import UNINITIALISED, Splits
from ..names import ActivationName, GluLayout
from ..reference import take_rows

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _reference(call: Any, problem: Problem, out: Tensor, preact: Tensor | None = None) -> None:
    x, how = take_rows(call.x, call.rows), (call.bias, call.row_scale, call.function)
    reference.grouped_glu(x, call.w1, call.host_ends(), *how, out, preact, call.transpose_w)


class GroupedGluCall(Call):
    """A call of grouped_glu: a `Call` with the operator's checks, results, kernel arguments and CPU reference."""

    op = "grouped_glu"
    explains = True
    after_groups = UNINITIALISED
    differentiable = True
    sources = {"w": "w1", "scale": "row_scale"}
    definition = Definition(
        results=(
            ResultTensor("out", "act", ("num_rows", "intermediate")),
            ResultTensor("preact", "preact", ("num_rows", "preact_width"), when="return_preact"),
        ),
        constants=(numbers_of_activation,),
        reference=_reference,
    )

    def check(self) -> Problem:
        columns, like = self.check_lead()
        self.check_options()
        form = (self.activation, self.glu_layout, self.transpose_w)
        experts, w1_rows, width = check_w1(self.op, self.w1, self.x, *form)
        self.check_addends(experts, "w1", like, bias=w1_rows)
        self.check_result(width, like)
        return self.problem(experts, columns, intermediate=width, save_preact=self.return_preact)

    def served_splits(self) -> tuple[Split, ...]:
        return (split_of_width(self, {"w1": 2 if self.transpose_w else 1, "bias": 1}, 1, "bias"),)


@overload
def grouped_glu(
    x: Tensor, w1: Tensor | Sequence[Tensor], *, offs: Tensor | None = None, splits: Splits | None = None,
    rows: Tensor | None = None, bias: Biases = None, row_scale: Tensor | None = None,
    activation: ActivationName = "swiglu", glu_layout: GluLayout = "concat", return_preact: Literal[False] = False,
    transpose_w: bool = False, out: Tensor | None = None, **numbers: Unpack[NamedNumbers],
) -> Tensor: ...  # fmt: skip
@overload
def grouped_glu(
    x: Tensor, w1: Tensor | Sequence[Tensor], *, offs: Tensor | None = None, splits: Splits | None = None,
    rows: Tensor | None = None, bias: Biases = None, row_scale: Tensor | None = None,
    activation: ActivationName = "swiglu", glu_layout: GluLayout = "concat", return_preact: Literal[True],
    transpose_w: bool = False, out: Tensor | None = None, **numbers: Unpack[NamedNumbers],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def grouped_glu(
    x: Tensor, w1: Tensor | Sequence[Tensor], *, offs: Tensor | None = None, splits: Splits | None = None,
    rows: Tensor | None = None, bias: Biases = None, row_scale: Tensor | None = None,
    activation: ActivationName = "swiglu", glu_layout: GluLayout = "concat", return_preact: bool = False,
    transpose_w: bool = False, out: Tensor | None = None, **numbers: Unpack[NamedNumbers],
) -> Any: ...  # fmt: skip
@operator(GroupedGluCall)
def grouped_glu(
    x: Tensor,
    w1: Tensor | Sequence[Tensor],
    *,
    offs: Tensor | None = None,
    splits: Splits | None = None,
    rows: Tensor | None = None,
    bias: Biases = None,
    row_scale: Tensor | None = None,
    activation: ActivationName = "swiglu",
    glu_layout: GluLayout = "concat",
    return_preact: bool = False,
    transpose_w: bool = False,
    out: Tensor | None = None,
    **numbers: Unpack[NamedNumbers],
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute act = activation(h) * row_scale[row], h = x w1_e^T (+ bias_e), where e is the expert of the row's group.

    Rows are sorted by expert. Rows after the last group do not affect any result, and are not written. Differentiable
    once in x, w1, bias and row_scale; gradients of rows after the last group are zero.

    Args:
        x: [T, H], bfloat16 or float16; on the CPU also float32 or float64. The row stride may exceed H; on
            a GPU it is a multiple of 8 elements.
        w1: [E, 2I, H] for an activation with a gate, else [E, I, H]; or a list of E tensors; contiguous, x's dtype.
            H, I and 2I are multiples of 8 on a GPU. A GateUp is accepted, too: its two tensors [E, I, H] stand for one
            with glu_layout "concat".
        offs: int32 [E], each group's end: group e is rows offs[e-1] .. offs[e]. Give this or splits.
        splits: each group's number of rows: int32 or int64 [E] on x's device; or a CPU tensor or a list, which is
            checked and copied to the device.
        rows: int32 [T] on x's device: row t is x[rows[t]], x is [N, H], and no copy of the rows is made. An index out
            of range is clamped. Not differentiable when this is given. None: rows of x lie in order.
        bias: [E, 2I or I] or a list of E tensors, x's dtype, laid out as w1's rows. None: no bias.
        row_scale: float32 [T], a factor for the activation of each row. None: 1.
        activation: with a gate: "swiglu", "clamped_swiglu", "geglu" (tanh form), "reglu", "situ" (SwiGLU with caps).
            Without a gate: "srelu" (squared relu), "silu", "gelu" (erf form), "none".
        glu_layout: order of the gate half a (which is activated) and the linear half u along the rows of w1: "concat"
            (a, then u), "interleaved" (a0 u0 a1 u1 ...) or "interleaved32" (32 of a, 32 of u, repeating; I a multiple
            of 32).
        limit, alpha, offset: constants of clamped_swiglu: a' sigmoid(alpha a') (clamp(u, -limit, limit) + offset) with
            a' = min(a, limit).
        gate_cap, up_cap: constants of situ: a' sigmoid(a) u' with a' = gate_cap tanh(a / gate_cap) and
            u' = up_cap tanh(u / up_cap). up_cap None: u' = u.
        return_preact: True: return h as well.
        transpose_w: True: compute h = x w1_e (+ bias_e) instead: w1 is [E, H, 2I or I], and glu_layout is the order of
            w1's columns. w1 is not copied.
        out: buffer for the activation, [T, I]; its row stride may exceed I. None: a new tensor, uninitialised
            after the last group.

    Returns:
        act [T, I] in x's dtype. With return_preact (act, preact): preact is h [T, 2I or I], laid out as w1's rows.

    Raises:
        ValueError, TypeError: an argument does not fit; nothing was launched.
        GradientNotSupported: `out` or `rows` is given although an argument requires a gradient, or a second derivative
            is taken.
        UnsupportedDevice, BundleError (RuntimeErrors): there is no kernel for this GPU, or no usable bundle.
        CaptureError: host splits under CUDA graph capture.
    """
    raise NotImplementedError  # `front` writes the body
