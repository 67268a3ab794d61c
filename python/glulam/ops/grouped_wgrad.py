"""grouped_wgrad: the weight gradient, one GEMM for each expert that contracts over the expert's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from .. import recipes, reference
from ..calls.call import Call
from ..calls.checks import check_out_dtype, check_rows_like, check_x, runs_kernels
from ..calls.definition import Definition, ScratchPart
from ..calls.front import operator
from ..calls.group_checks import check_indices, check_mask, count_groups
from ..calls.launch import ResultTensor
from ..calls.weight_checks import check_gradient_buffers
from ..choose.problem import Problem, changed, dtype_name
from ..formats.mxfp8.layout import DATA_DTYPE, band_bytes
from ..host.experts import ExpertList
from ..host.groups import REACH_NO_RESULT, Splits
from ..names import RecipeName
from ..recipes import Recipe
from ..reference import take_rows


def _constants(call: Any) -> dict[str, Any]:
    return {"dtype": call.result_dtype, "accumulate": int(call.accumulate)}


def _reference(call: Any, problem: Problem, out: Tensor | Sequence[Tensor]) -> None:
    adds = [call.accumulate] * problem.experts if call.mask is None else call.mask.tolist()
    dy, x = take_rows(call.dy, call.dy_rows), take_rows(call.x, call.x_rows)
    format = recipes.find(call.op, call.recipe).wgrad
    rounded = {} if format is None else {"rounded": format.rounded}
    reference.grouped_wgrad(dy, x, call.host_ends(), adds, out, **rounded)


def _in_mxfp8(call: Any, problem: Problem) -> dict[str, ScratchPart]:
    """Return the scratch memory of a launch for dy and x in MXFP8, with one scale for each 32 rows of a column.

    Empty unless the recipe multiplies in MXFP8.
    """
    if problem.operands == recipes.BF16.wgrad_operands:
        return {}
    found: dict[str, ScratchPart] = {}
    for name, width in (("dy8", call.dy.shape[1]), ("x8", call.x.shape[1])):
        found[name] = (problem.rows, width), DATA_DTYPE
        found[f"{name}_scale"] = band_bytes(problem.rows, problem.experts, width)
    return found


class GroupedWgradCall(Call):
    """A call of grouped_wgrad: a `Call` with the operator's checks, results, kernel arguments and CPU reference."""

    op = "grouped_wgrad"
    explains = True
    after_groups = REACH_NO_RESULT
    gradients = ("out",)
    fixed_without_out = {"accumulate": False, "mask": None}
    fixed_with_out = {"out_dtype": None}
    definition = Definition(
        results=(ResultTensor("out", "dw", ("num_groups", "out_features", "in_features"), dtype="dtype"),),
        constants=(_constants,),
        scratch=(_in_mxfp8,),
        reference=_reference,
    )

    @property
    def result_dtype(self) -> torch.dtype:
        if self.out is None:
            return self.out_dtype or self.x.dtype
        first: Any = self.out if isinstance(self.out, (Tensor, ExpertList)) else self.out[0]
        dtype: torch.dtype = first.dtype
        return dtype

    def check(self) -> Problem:
        _, k = check_x(self.op, self.x)
        if self.dy_rows is not None and self.x_rows is not None:
            raise ValueError(f"{self.op}: got both dy_rows and x_rows; give one of them, and the other's rows in order")
        check_indices(self.op, self.x_rows, self.x, "x_rows")
        n = self._check_dy()
        experts = count_groups(self.op, self.offs, self.splits, self.x)
        self.check_options()
        check_mask(self.op, self.mask, self.x, experts)
        check_out_dtype(self.op, self.out_dtype, self.x)
        if self.out is not None:
            check_gradient_buffers(self.op, self.out, self.x, (experts, n, k))
        self._check_contradictions()
        operands = self._check_recipe(n, k)
        gathers = self.dy_rows is not None or self.x_rows is not None
        out_dtype = dtype_name(self.result_dtype)
        return self.problem(experts, k, out_features=n, out_dtype=out_dtype, gathers=gathers, operands=operands)

    def _check_recipe(self, n: int, k: int) -> str:
        """Check the recipe, and return the operands of its weight gradients, a key of `formats.OPERANDS`.

        Args:
            n, k: columns of dy and of x.
        """
        recipe = recipes.find(self.op, self.recipe)
        if not recipe.trains:
            trained = ", ".join(repr(name) for name, one in recipes.RECIPES.items() if one.trains)
            raise ValueError(
                f"{self.op}: recipe is {recipe.name!r}, which trains no weights; choose one of {trained}"
            )  # fmt: skip
        if recipe.wgrad is not None:
            widths = {"N (dy's columns)": n, "K (x's columns)": k}
            recipes.check_fits(self.op, recipe, dtype_name(self.x.dtype), runs_kernels(self.x), **widths)
        return recipe.wgrad_operands

    def _check_dy(self) -> int:
        """Check dy and dy_rows, and return the number of dy's columns."""
        by_index = self.dy_rows is not None and isinstance(self.dy, Tensor) and self.dy.dim()
        rows = self.dy.shape[0] if by_index else self.num_rows
        like = self.x if rows == self.x.shape[0] else self.x.new_empty(rows, 0)
        columns = check_rows_like(self.op, "dy", self.dy, like, None, f"x has {rows} rows")
        check_indices(self.op, self.dy_rows, self.dy, "dy_rows", "dy", self.num_rows)
        return columns

    @property
    def indices(self) -> Tensor | None:
        return self.x_rows

    @property
    def gathered_places(self) -> tuple[int, ...]:
        return tuple(place for place, rows in enumerate((self.dy_rows, self.x_rows)) if rows is not None)

    def _check_contradictions(self) -> None:
        """Raise ValueError for options that contradict each other."""
        if self.out is None and (self.accumulate or self.mask is not None):
            name = "accumulate" if self.accumulate else "mask"
            raise ValueError(f"{self.op}: {name} is given but out is not; give the buffer to add to as out")
        if self.accumulate and self.mask is not None:
            raise ValueError(f"{self.op}: got both accumulate and mask; give mask alone, True where to add")
        if self.out is not None and self.out_dtype not in (None, self.result_dtype):
            raise ValueError(
                f"{self.op}: out_dtype is {self.out_dtype} but out is {self.result_dtype}; leave out_dtype out"
            )

    def without_rows(self, problem: Problem) -> Any:
        """Return the results if every group is empty: zeros, except for experts whose result is added to `out`."""
        out = self.results(problem)
        if self.accumulate:
            return out
        for expert in range(problem.experts):
            one = out[expert]
            if self.mask is None:
                one.zero_()
            else:
                one.masked_fill_(~self.mask[expert], 0)
        return out

    def dispatch(self) -> Any:
        """Dispatch to torch's operator, whose schema takes the recipe's name in place of the recipe."""
        named: Any = changed(self, recipe=recipes.find(self.op, self.recipe).name)
        return super(GroupedWgradCall, named).dispatch()


@overload
def grouped_wgrad(
    dy: Tensor, x: Tensor, *, offs: Tensor | None = None, splits: Splits | None = None, dy_rows: Tensor | None = None,
    x_rows: Tensor | None = None, out: Tensor | None = None, accumulate: bool = False, mask: Tensor | None = None,
    out_dtype: torch.dtype | None = None, recipe: RecipeName | Recipe = "bf16",
) -> Tensor: ...  # fmt: skip
@overload
def grouped_wgrad(
    dy: Tensor, x: Tensor, *, offs: Tensor | None = None, splits: Splits | None = None, dy_rows: Tensor | None = None,
    x_rows: Tensor | None = None, out: Sequence[Tensor], accumulate: bool = False, mask: Tensor | None = None,
    out_dtype: torch.dtype | None = None, recipe: RecipeName | Recipe = "bf16",
) -> Sequence[Tensor]: ...  # fmt: skip
@operator(GroupedWgradCall)
def grouped_wgrad(
    dy: Tensor,
    x: Tensor,
    *,
    offs: Tensor | None = None,
    splits: Splits | None = None,
    dy_rows: Tensor | None = None,
    x_rows: Tensor | None = None,
    out: Tensor | Sequence[Tensor] | None = None,
    accumulate: bool = False,
    mask: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    recipe: RecipeName | Recipe = "bf16",
) -> Tensor | Sequence[Tensor]:
    """Compute dw_e = dy_e^T x_e, contracting the rows of each expert's group: the gradient of w in y = x w_e^T.

    Rows are sorted by expert. Rows after the last group do not affect any result. Every element is summed in one fixed
    order, so the same inputs give the same bits.

    Args:
        dy, x: [T, N] and [T, K], of one dtype, bfloat16 or float16; on the CPU also float32 or float64. The row
            stride may exceed the width; on a GPU row stride, N and K are multiples of 8 elements.
        offs: int32 [E], each group's end: group e is rows offs[e-1] .. offs[e]. Give this or splits. Their length
            defines E, with which out and mask must agree.
        splits: each group's number of rows: int32 or int64 [E] on x's device; or a CPU tensor or a list, which is
            checked and copied to the device.
        dy_rows, x_rows: int32 [T] on x's device; at most one of the two. Row t is dy[dy_rows[t]], or x[x_rows[t]], and
            no copy of the rows is made. An index out of range is clamped. None: rows lie in order.
        out: buffer for the result [E, N, K], or a list of E tensors [N, K]; contiguous, x's dtype, or float32 for
            16-bit inputs. For an expert without rows, zeros are written, or nothing if the call adds. None: a new
            tensor.
        accumulate: True: add dw_e to out[e]. False: overwrite out[e]. The sum is rounded to out's dtype. If out is
            16-bit, dw_e may also be rounded before the addition: on sm_90 and sm_100 only with 384 rows an expert or
            more (on average); on other devices always.
        mask: bool [E] on x's device: add where it is True, overwrite elsewhere. Give this or `accumulate`. None:
            `accumulate` decides.
        out_dtype: dtype of a new result: x's dtype, or float32. None: x's dtype.
        recipe: the name of a recipe in `glulam.recipes.RECIPES` that trains weights, or the recipe itself. With
            "mxfp8_wgrad" the call first quantises dy and x to E4M3, with a power of two as the scale for each 32 rows
            of a column. Blocks start at a group's first row. N and K must be multiples of 32. With the other recipes
            dy and x are multiplied as they are.

    Returns:
        [E, N, K]; `out` if given.

    Raises:
        ValueError, TypeError: an argument does not fit; nothing was launched.
        GradientNotSupported: grad mode is on and an argument requires a gradient.
        UnsupportedDevice, BundleError (RuntimeErrors): there is no kernel for this GPU, or no usable bundle.
        CaptureError: host splits under CUDA graph capture.
    """
    raise NotImplementedError  # `front` writes the body
