"""grouped_mlp with the recipes that quantise. Quantised arguments are split into elements and scales, and checked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from cute_kernels.chains import signature_of
from cute_kernels.formats import BITS, DECODED, OPERANDS, Format
from cute_kernels.specs import QuantizeMxfp8Spec

from .. import recipes
from ..calls.checks import any_requires_grad, mismatch, runs_kernels
from ..calls.definition import Definition, PrologueStep, ScratchPart, numbers_of_activation
from ..calls.launch import Line, ResultTensor, launch_nothing
from ..calls.weight_checks import intermediate_width
from ..choose import kernels
from ..choose.problem import Problem, dtype_name
from ..errors import GradientNotSupported
from ..formats import mlp_reference
from ..formats.mlp_reference import Weight
from ..formats.mxfp8 import MXFP8Tensor, rebase_mxfp8
from ..formats.mxfp8.forms import Rows as MXFP8Rows
from ..formats.mxfp8.layout import DATA_DTYPE
from ..formats.scaled import BLOCK
from ..recipes import Recipe
from ..reference import take_rows
from .quantized_weights import (
    ReadsQuantized,
    check_scale,
    check_weight,
    global_counts,
    look_at_scales,
    weight_as_read,
    weight_parts,
)


def refuse_transposed(op: str, recipe: Recipe) -> NoReturn:
    """Raise ValueError: transpose_w is set, but quantised weights have scales along their rows only."""
    raise ValueError(
        f"{op}: transpose_w reads weights in 16 bits, and recipe is {recipe.name!r}; transpose them once, as "
        "w1.mT.contiguous() does, and leave out transpose_w, or choose recipe 'bf16'"
    )


def want_16_bits(op: str, name: str) -> NoReturn:
    """Raise GradientNotSupported: argument `name` is in MXFP8, and an argument requires a gradient."""
    raise GradientNotSupported(
        f"{op}: {name} is in MXFP8, and an argument requires a gradient, for which {name} is needed in 16 bits; give "
        "that, or call it under torch.no_grad() or torch.inference_mode()"
    )


def _result_dtype(*others: Any) -> torch.dtype:
    """Return the result's dtype for an x in MXFP8: the first dtype found in `others`, else bfloat16.

    others: dtypes, tensors, lists of tensors, or None.
    """
    for value in others:
        if isinstance(value, torch.dtype):
            return value
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(first, Tensor):
            return first.dtype
    return torch.bfloat16


def rows_as_read(op: str, x: Any, recipe: Recipe, *others: Any) -> tuple[Any, Tensor | None, torch.dtype | None]:
    """Convert a call's x for the operator that the recipe uses: return (a tensor, its scales or None, a dtype or None).

    A tensor x is returned as it is, with None and None; if the recipe's GEMMs read FP8 rows, x is quantised later. An
    MXFP8Tensor x is returned as elements and scales if the recipe's GEMMs read rows with scales. Otherwise it is
    dequantised, and has no scales.

    Args:
        op: the operator, for errors.
        x: a tensor, or an MXFP8Tensor.
        recipe: the call's recipe.
        others: the argument `dtype` and the 16-bit arguments; not used if x is a tensor. The first dtype among them
            becomes the dtype of the operator's result, and of an x that is dequantised. bfloat16 if there is none.

    Returns:
        x or its elements; its scales; the dtype of the operator's result, None if it is the dtype of the first item.

    Raises:
        TypeError: x is an MXFP8Tensor, and the recipe takes 16-bit rows.
        ValueError: x is an MXFP8Tensor whose blocks lie along columns.
    """
    if not isinstance(x, MXFP8Tensor):
        return x, None, None
    dtype = _result_dtype(*others)
    if not isinstance(recipe.x, MXFP8Rows):
        raise TypeError(
            f"{op}: x is an MXFP8Tensor, but recipe {recipe.name!r} takes 16-bit rows; give x.dequantize({dtype}), or "
            "choose recipe 'mxfp8' or 'mxfp8_exact'"
        )
    if x.axis != "row":
        raise ValueError(f"{op}: x is quantised along its columns; a GEMM contracts its rows, so quantise along those")
    if not OPERANDS[recipe.operands].has_scaled_rows:  # kernels read x in 16 bits, which hold its values exactly
        return x.dequantize(dtype), None, None
    if recipe.x.block == "1x32":  # plain() repeats a scale of 128 elements four times
        x = x.plain()
        return x.data, x.scale, dtype
    if x.block == "1x128" and x.scale_layout == "plain":
        return x.data, x.scale, dtype
    wide = rebase_mxfp8(x.plain()) if x.shape[0] else x.plain()
    return wide.data.contiguous(), wide.scale.contiguous(), dtype


def quantised(rows: Format, name: str, shape: tuple[int, int]) -> dict[str, ScratchPart]:
    """Return the scratch memory of a launch for quantised rows: {name: elements, name_scale: bytes of the scales}.

    Args:
        rows: the rows' format.
        name: the name of the elements' memory.
        shape: [rows, columns].
    """
    count, columns = shape
    scales = count * int(rows.num_scales(columns)) * BITS[rows.scale] // 8
    return {name: (shape, DATA_DTYPE), f"{name}_scale": scales}


def _scratch(call: Any, problem: Problem) -> dict[str, ScratchPart]:
    """Return the scratch memory of a launch: for the activation, and for x in the format that the GEMM reads.

    Depending on the recipe, x is quantised, rounded to values of MXFP8, copied, or read as it is (then without memory).
    """
    operands, dtype = OPERANDS[problem.operands], call.result_dtype
    x, mid = (call.x.shape[0], problem.in_features), (problem.rows, problem.intermediate)
    if operands.has_scaled_rows:
        x8 = {} if problem.quantized else quantised(operands.x, "x8", x)
        return {**x8, **quantised(operands.x, "mid", mid)}
    found: dict[str, ScratchPart] = {"mid": (mid, dtype)}
    if _rounds(problem):
        found["rounded"] = x, dtype
    if _copies(call, problem):
        found["copied"] = (problem.rows, problem.in_features), dtype
    return found


def _rounds(problem: Problem) -> bool:
    """Return True if x is rounded to values of MXFP8 before a GEMM."""
    return problem.operands == "mxfp8_exact"


def _copies(call: Any, problem: Problem) -> bool:
    """Return True if a layer's tokens are copied to rows, since kernels that decode weights cannot read by index."""
    return bool(call.of_tokens) and not OPERANDS[problem.operands].has_scaled_rows


def _rounding(call: Any, problem: Problem) -> PrologueStep | None:
    """Return the step before a launch that rounds x to values of MXFP8; None if x is not rounded.

    If rows lie in order and offs are given, x is rounded only up to the last group's end.
    """
    if not _rounds(problem):
        return None
    until = call.offs is not None and call.rows is None
    return PrologueStep(
        _line_that_rounds(until), {"x": "rounded_memory"}, {"round": _function_that_rounds(call, problem)}
    )


@functools.cache
def _line_that_rounds(until_last_group: bool) -> Line:
    end = {"offs": "groups_at", "num_groups": "num_groups"} if until_last_group else {"offs": "0", "num_groups": "1"}
    given = signature_of(QuantizeMxfp8Spec(rounded=True)).pack(x="aligned_row(x)", out="rounded_memory", **end)
    return Line(f"round({', '.join(given)})", ("groups",) if until_last_group else ())


def _function_that_rounds(call: Any, problem: Problem) -> Callable[..., None]:
    if not problem.rows:
        return launch_nothing
    rows, columns = call.x.shape
    wanted = Problem("quantize_mxfp8", problem.dtype, rows, 1, columns, axis="row", rounded=True)
    found: Callable[..., None] = kernels.serving(wanted, call.gpu).at(rows).function
    return found


def _copying(call: Any, problem: Problem) -> PrologueStep | None:
    """Return the prologue step for a launch whose kernel copies x's rows: it makes x contiguous.

    None: rows are not copied. They are copied only in a layer, for kernels that decode weights.
    """
    if not _copies(call, problem):
        return None
    if _rounds(problem):
        return PrologueStep(values={"x": "copied_memory", "x_tokens": "rounded_memory.data_ptr()"})
    line = Line("x = x if x.is_contiguous() else x.contiguous()")
    return PrologueStep(line, {"x": "copied_memory", "x_tokens": "x.data_ptr()"})


def _look_at_x_scale(kind: Any, outs: list[Any], read: dict[str, Any]) -> None:
    x, scale = read["x"], read.get("x_scale")
    if scale is not None and scale.shape[0] != x.shape[0]:
        mismatch(kind.op, "x's scale", scale.shape, (x.shape[0], scale.shape[1]), "x has so many rows")


def _reference(call: Any, problem: Problem, out: Tensor) -> None:
    reference_of_rows(call, (weight_as_read(call, "w1"), weight_as_read(call, "w2")), out)


def reference_of_rows(call: Any, weights: tuple[Weight, Weight], out: Tensor, preact: Tensor | None = None) -> None:
    """Write `out`, and `preact` if given, by the CPU reference. weights: w1 and w2 as kernels read them."""
    mlp_reference.grouped_mlp(
        recipes.RECIPES[call.recipe], call.taken(), weights, call.host_ends(), (call.b1, call.b2), call.row_scale,
        call.function, out, preact,
    )  # fmt: skip


class QuantizedMlpCall(ReadsQuantized):
    """A call of grouped_mlp with a recipe that quantises.

    Attributes:
        dtype: the result's dtype if x is in MXFP8. None: x's dtype.
    """

    in_parts: ClassVar = {"x": 2, "w1": 3, "w2": 3}
    unwraps = "x", "x_scale", "dtype", "rows", "w1", "w1_scale", "w1_global_scale", "w2", "w2_scale", "w2_global_scale"

    op = "grouped_mlp"
    torch_op = "grouped_mlp_mxfp8"
    sources = {"scale": "row_scale"}
    definition = Definition(
        results=(ResultTensor("out", "y", ("num_rows", "out_features"), dtype="out_dtype"),),
        constants=(lambda call: {"out_dtype": call.result_dtype}, numbers_of_activation, global_counts),
        scratch=(_scratch,),
        prologue=(_rounding, _copying),
        overrides=("x",),  # rows that are copied after they were rounded
        address_checks=(look_at_scales, _look_at_x_scale),
        reference=_reference,
    )
    on_device = staticmethod(recipes.on_device)

    @property
    def result_dtype(self) -> torch.dtype:
        return self.x.dtype if self.dtype is None else self.dtype

    @classmethod
    def unwrap(
        cls, recipe: Recipe, x: Any, w1: Any, w2: Any, rows: Any, row_of: Any, transpose_w: Any, dtype: Any, out: Any,
        b1: Any, b2: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return x, its scales, the result's dtype, rows, and elements, scales and global scale of w1, then of w2.

        If kernels cannot read rows by index, x is copied in the order of `rows`, and None is returned for rows. Only a
        call of a layer (with row_of) is not copied here, since its rows are copied within the call.

        Raises:
            ValueError, TypeError: the recipe does not take such an argument.
        """
        if transpose_w:
            refuse_transposed(cls.op, recipe)
        x_scale = None
        if x.__class__ is MXFP8Tensor:
            x, x_scale, dtype = rows_as_read(cls.op, x, recipe, dtype, out, b1, b2)
        if rows is not None and row_of is None and recipe.operands in DECODED and isinstance(x, Tensor):
            x, rows = cls.rows_in_order(x, rows), None
        form: Any = recipe.weights
        kinds, name = form.classes, form.name  # inlined `weight_parts` for tensors that are read as they are
        first = w1.parts if w1.__class__ in kinds and w1.reads_as == name else weight_parts(cls.op, "w1", w1, recipe)
        second = w2.parts if w2.__class__ in kinds and w2.reads_as == name else weight_parts(cls.op, "w2", w2, recipe)
        return x, x_scale, dtype, rows, *first, *second

    def refuse_gradients(self) -> None:
        """Raise GradientNotSupported if an argument requires a gradient that the call cannot compute.

        There is no gradient in quantised weights, with a recipe without gradients, or if an argument is in MXFP8.
        """
        if self.is_frozen:
            self.refuse_trained_weights()
            return
        names = ("x", "w1", "w2", "row_scale", "b1", "b2")
        trained = next((name for name in names if any_requires_grad(getattr(self, name))), None)
        if trained is None:
            return
        if not recipes.find(self.op, self.recipe).trains:
            raise GradientNotSupported(
                f"{self.op}: recipe {self.recipe!r} has no gradient, and {self.labels.get(trained, trained)} requires "
                "one; call it under torch.no_grad() or torch.inference_mode(), detach it, or choose recipe 'bf16'"
            )
        for name in ("x", "w1", "w2"):
            if getattr(self, f"{name}_scale") is not None:
                want_16_bits(self.op, name)

    def check(self) -> Problem:
        recipe = recipes.find(self.op, self.recipe)
        self.check_options()
        if self.recompute and not (recipe.trains or recipe.freezes_weights):
            raise ValueError(
                f"{self.op}: recompute is True, but recipe {self.recipe!r} has no gradient; leave it out, or choose "
                "recipe 'mxfp8' or 'bf16'"
            )
        columns, _ = self.check_lead(None if self.x_scale is None else (DATA_DTYPE,))
        like = self.x.new_empty(self.num_rows, 0, dtype=self.result_dtype)  # dtype and device of biases and result
        self._check_x_scale()
        experts, w1_rows, hidden = shape = check_weight(self, "w1", "E 2I H", recipe)
        if hidden != columns:
            mismatch(self.op, "w1", shape, (experts, w1_rows, columns), f"x has {columns} columns")
        width = intermediate_width(self.op, "w1", w1_rows, self.activation, self.glu_layout)
        shape = check_weight(self, "w2", "E H I", recipe)
        out_features = shape[1]
        if shape != (experts, out_features, width):
            mismatch(self.op, "w2", shape, (experts, out_features, width), f"w1 gives E = {experts}, I = {width}")
        dtype = dtype_name(self.result_dtype)
        widths = {"H (x's columns)": columns, "I": width, "the number of w2's rows": out_features}
        recipes.check_fits(self.op, recipe, dtype, runs_kernels(self.x), **widths)
        self.check_addends(experts, "w1", like, b1=w1_rows, b2=out_features)
        self.check_result(out_features, like)
        return self.problem(
            experts, columns, op=QuantizedMlpCall.op, dtype=dtype, intermediate=width, out_features=out_features,
            quantized=self.x_scale is not None and OPERANDS[recipe.operands].has_scaled_rows, operands=recipe.operands,
            fc2_operands=recipe.fc2_operands,
        )  # fmt: skip

    def _check_x_scale(self) -> None:
        if self.x_scale is None:
            return
        rows, columns = self.x.shape
        check_scale(self.op, "x", self.x_scale, (rows, -(-columns // BLOCK)), self.x)
        if not self.x.is_contiguous():
            raise ValueError(f"{self.op}: x is in MXFP8 and not contiguous; its data and scale must be, so clone() it")

    def taken(self) -> tuple[Tensor, Tensor | None]:
        """Return (x, x's scales), both with their rows in the order of `rows`.

        The scales are None if x is in 16 bits.
        """
        scale = self.x_scale
        return take_rows(self.x, self.rows), None if scale is None else take_rows(scale, self.rows)
