"""grouped_mm with weights in MXFP4, which kernels decode on the way. Data and scales are two tensors from here on."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import recipes, reference
from ..calls.call import Call
from ..calls.checks import (
    any_requires_grad,
    check_experts,
    check_indices,
    check_out,
    check_width,
    mismatch,
    runs_kernels,
)
from ..calls.front import operator
from ..calls.launch import Made
from ..choose.problem import Problem, changed, dtype_name
from ..errors import GradientNotSupported
from ..mxfp4 import MXFP4Tensor
from ..mxfp4.words import elements_of
from ..mxfp8.mlp_reference import Values
from ..mxfp8.prepared import FOUR_BITS, PREPARED, Prepared, is_prepared
from ..recipes import MXFP4_WEIGHT_ONLY
from ..reference import take_rows
from ..scaled import BLOCK
from .grouped_mlp_mxfp8 import check_scale


class Mxfp4MmCall(Call):
    """A call of grouped_mm of which w is an MXFP4Tensor: its data, and its scales."""

    op = "grouped_mm"
    torch_op = "grouped_mm_mxfp4"
    sources = {"scale": "bias_scale", "w_scale": "w_scales"}
    makes = (Made("out", "y", ("num_rows", "out_features")),)
    tabled = ()

    def refuse_gradients(self) -> None:
        for name in ("x", "bias", "bias_scale"):
            if any_requires_grad(getattr(self, name)):
                raise GradientNotSupported(
                    f"{self.op}: w is an MXFP4Tensor, and {name} requires a gradient; call it under torch.no_grad(), "
                    "or give w.dequantize() in 16 bits"
                )

    def check(self) -> Problem:
        columns, like = self.check_lead()
        if self.w.dtype not in MXFP4Tensor.data_dtypes:
            raise TypeError(f"{self.op}: w's data is {self.w.dtype}; give that of an MXFP4Tensor")
        like_data = self.x.new_empty(0, dtype=self.w.dtype)
        experts, n, numbers = check_experts(self.op, "w", self.w, like_data, "E N K/2")
        k = numbers * elements_of(self.w.dtype)
        if k != columns:
            mismatch(self.op, "w", (experts, n, k), (experts, n, columns), f"x has {columns} columns")
        check_scale(self.op, "w", self.w_scales, (experts, n, -(-k // BLOCK)), self.w)
        on_gpu = runs_kernels(self.x)
        check_width(self.op, "w", n, on_gpu)
        recipes.check_fits(self.op, MXFP4_WEIGHT_ONLY, dtype_name(self.x.dtype), on_gpu)
        self.check_addends(experts, "w", like, bias=n)
        check_out(self.op, "out", self.out, like, n)
        return self.problem(experts, columns, out_features=n, operands=MXFP4_WEIGHT_ONLY.operands)

    def prepared(self) -> Any:
        """As for any operator, with w as kernels read it."""
        if is_prepared(FOUR_BITS, self.w, self.w_scales):
            return super().prepared()
        call = changed(self, w=PREPARED.get(FOUR_BITS, self.w, self.w_scales).data)
        return super(Mxfp4MmCall, call).prepared()

    def reference(self, problem: Problem) -> Tensor:
        out: Tensor = self.results(problem)
        w = Values(Prepared(self.w, self.w_scales))
        reference.grouped_mm(self.x, w, self.host_ends(), self.bias, self.bias_scale, False, out)
        return out


@operator(Mxfp4MmCall)
def mm_of_plain_tensors(
    x: Tensor, w: Tensor, w_scales: Tensor, *, offs: Any, splits: Any, bias: Any, bias_scale: Tensor | None,
    out: Tensor | None,
) -> Any:  # fmt: skip
    """y = x w_e^T + s b_e."""
    raise NotImplementedError  # `front` writes the body


def flatten(given: dict[str, Any]) -> None:
    """Arguments of grouped_mm by name as plain tensors, in place, with rows that come by index in order.

    Raises ValueError where weights are transposed, or are no [E, N, K].
    """
    op, w, rows = Mxfp4MmCall.op, given["w"], given.pop("rows")
    if given.pop("transpose_w"):
        raise ValueError(
            f"{op}: transpose_w is True, and w is an MXFP4Tensor, whose scales are of its rows; leave transpose_w out, "
            "or give w.dequantize() in 16 bits"
        )
    if not (w.data.is_contiguous() and w.scale.is_contiguous()):
        raise ValueError(f"{op}: w's data and scale must be contiguous, as those of w.clone() are")
    if rows is not None:
        check_indices(op, rows, given["x"])
        given["x"] = take_rows(given["x"], rows)
    given["w"], given["w_scales"] = w.data, w.scale
    if not (w.is_prepared or is_dynamo_compiling()) and (found := PREPARED.find(FOUR_BITS, w.data, w.scale)):
        given["w"] = found.data


def grouped_mm_mxfp4(**given: Any) -> Tensor:
    """grouped_mm, of which `w` is an MXFP4Tensor."""
    flatten(given)
    return mm_of_plain_tensors(**given)
