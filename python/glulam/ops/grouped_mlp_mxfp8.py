"""grouped_mlp by the recipes that quantise: arguments in their forms, and what is checked of them.

An argument in MXFP8 is two tensors from here on, data and scale, so that a call is made of plain tensors, as torch's
operators are. A weight is what a caller gave (`scale` None: to be prepared) or what kernels read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from cute_kernels.chains import signature_of
from cute_kernels.specs import DECODED, QuantizeMxfp8Spec

from .. import recipes
from ..activations import kernel_params
from ..calls.call import Call
from ..calls.checks import (
    any_requires_grad,
    check_experts,
    check_indices,
    check_out,
    check_width,
    intermediate_width,
    mismatch,
    runs_kernels,
)
from ..calls.front import operator
from ..calls.launch import Made, launch_nothing
from ..choose import kernels
from ..choose.problem import Problem, changed, dtype_name
from ..errors import GradientNotSupported
from ..host import device as gpus
from ..host.experts import GateUp
from ..mxfp4 import MXFP4Tensor
from ..mxfp4.words import elements_of
from ..mxfp8 import FoldedWeight, MXFP8Tensor, mlp_reference, prepared, rebase_mxfp8
from ..mxfp8.layout import DATA_DTYPE, part_of_workspace
from ..mxfp8.prepared import BLOCKS, FOLDED_ROWS, FOUR_BITS, Prepared
from ..recipes import Recipe
from ..reference import take_rows
from ..scaled import BLOCK, SCALE_DTYPE, SOURCE_DTYPES


def mlp_in_mxfp8(front: Callable[..., Tensor], op: str, recipe: Recipe, given: dict[str, Any]) -> Tensor:
    """A call by a recipe that quantises, of `front`, which takes plain tensors: as these are given, by name."""
    flatten(recipe, op, given)
    x, rows = given["x"], given["rows"]
    if rows is not None and "row_of" not in given and recipe.operands in DECODED and isinstance(x, Tensor):
        check_indices(op, rows, x)
        given["x"], given["rows"] = take_rows(x, rows), None
    return front(**given)


def refuse_transposed(op: str, recipe: Recipe, transpose_w: Any) -> None:
    """Raises ValueError where weights are transposed, which scales along their rows do not allow."""
    if transpose_w:
        raise ValueError(
            f"{op}: transpose_w reads weights in 16 bits, and recipe is {recipe.name!r}; transpose them once, as "
            "w1.mT.contiguous() does, and leave out transpose_w, or choose recipe 'bf16'"
        )


def flatten(recipe: Recipe, op: str, given: dict[str, Any]) -> None:
    """Arguments by name as plain tensors, in place. `dtype`: of the result, where x is in MXFP8; else others tell it.

    Raises:
        ValueError, TypeError: an argument in MXFP8 is not what the recipe takes, or weights are transposed.
    """
    refuse_transposed(op, recipe, given.pop("transpose_w", False))
    others = given.get("dtype"), given.get("out"), given["b1"], given["b2"]
    given["x"], given["x_scale"], given["dtype"] = rows_as_read(op, given["x"], recipe, *others)
    given["w1"], given["w1_scale"] = _weight(op, "w1", given["w1"], recipe)
    given["w2"], given["w2_scale"] = _weight(op, "w2", given["w2"], recipe)
    given["recipe"] = recipe.name


def want_16_bits(op: str, name: str) -> NoReturn:
    """Raises GradientNotSupported: an argument is in MXFP8, and one requires a gradient."""
    raise GradientNotSupported(
        f"{op}: {name} is in MXFP8, and an argument requires a gradient, for which {name} is needed in 16 bits; give "
        "that, or call it under torch.no_grad() or torch.inference_mode()"
    )


def _result_dtype(*others: Any) -> torch.dtype:
    """Of an x in MXFP8: a dtype, or that of what else is 16-bit."""
    for value in others:
        if isinstance(value, torch.dtype):
            return value
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(first, Tensor):
            return first.dtype
    return torch.bfloat16


def rows_as_read(op: str, x: Any, recipe: Recipe, *others: Any) -> tuple[Any, Tensor | None, torch.dtype | None]:
    """x; its scales, where kernels read it in MXFP8; and the result's dtype, where x does not tell: as of `others`.

    Raises:
        ValueError, TypeError: an x in MXFP8 is not what the recipe takes.
    """
    if not isinstance(x, MXFP8Tensor):
        return x, None, None
    dtype = _result_dtype(*others)
    if recipe.x is None:
        raise TypeError(
            f"{op}: x is an MXFP8Tensor, but recipe {recipe.name!r} takes 16-bit rows; give x.dequantize({dtype}), or "
            "choose recipe 'mxfp8' or 'mxfp8_exact'"
        )
    if x.axis != "row":
        raise ValueError(f"{op}: x is quantised along its columns; a GEMM contracts its rows, so quantise along those")
    if recipe.x.block == "1x32":  # kernels read its values in 16 bits, which hold them exactly
        return x.dequantize(dtype), None, None
    if x.block == "1x128" and x.scale_layout == "plain":
        return x.data, x.scale, dtype
    wide = rebase_mxfp8(x.plain()) if x.shape[0] else x.plain()
    return wide.data.contiguous(), wide.scale.contiguous(), dtype


def _weight(op: str, name: str, w: Any, recipe: Recipe) -> tuple[Any, Tensor | None]:
    """A weight, and its scales where it is in MXFP8."""
    if w.__class__ is FoldedWeight:
        if not recipe.folds:
            raise TypeError(
                f"{op}: {name} is a FoldedWeight, but recipe {recipe.name!r} takes weights with a scale for 32 "
                "elements; give an MXFP8Tensor [E, N, K] or the 16-bit weight, or choose recipe 'mxfp8'"
            )
        if w.axis != "row":
            raise ValueError(
                f"{op}: {name} is folded along its columns, for the data gradient; give what "
                "prepare_mxfp8_weight(w, axis='row') returns"
            )
        return w.data, w.scale
    wanted = MXFP4Tensor if recipe.has_4_bits else MXFP8Tensor
    if isinstance(w, (MXFP8Tensor, MXFP4Tensor)) and w.__class__ is not wanted:
        raise TypeError(
            f"{op}: {name} is an {type(w).__name__}, but recipe {recipe.name!r} takes an {wanted.__name__} or the "
            f"16-bit weight; give {name}.dequantize(torch.bfloat16), or choose recipe {w.recipe!r}"
        )
    if w.__class__ is MXFP4Tensor:
        return w.data, w.scale
    if w.__class__ is MXFP8Tensor:
        if w.axis != "row" or w.scale_layout != "plain":
            raise ValueError(
                f"{op}: {name} is {w!r}; it must be quantised along its rows, with plain scales, as {name}.plain() has"
            )
        return w.data, w.scale
    if isinstance(w, GateUp):
        raise ValueError(
            f"{op}: {name} is a GateUp, and recipe {recipe.name!r} prepares one tensor; give torch.cat({name}, dim=1), "
            "or choose recipe 'bf16'"
        )
    return w, None


def prepared_form(recipe: str) -> str:
    """How a recipe's forward reads weights: one of `prepared.FORMS`."""
    found = recipes.RECIPES[recipe]
    return FOLDED_ROWS if found.folds else FOUR_BITS if found.has_4_bits else BLOCKS


def ready(recipe: str, w: Any, scale: Tensor | None) -> tuple[Any, Any]:
    """A weight as kernels read it, if it was prepared before; else itself."""
    form = prepared_form(recipe)
    if prepared.is_prepared(form, w, scale):
        return w, scale
    return prepared.PREPARED.find(form, w, scale) or (w, scale)


def check_weight(call: Any, name: str, letters: str, recipe: Recipe) -> tuple[int, ...]:
    """The shape [E, N, K] of a call's weight, in any form that the recipe takes."""
    value, scale = getattr(call, name), getattr(call, f"{name}_scale")
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    kind = MXFP4Tensor if recipe.has_4_bits else MXFP8Tensor
    valid = SOURCE_DTYPES if scale is None else kind.data_dtypes
    dtype = first.dtype if isinstance(first, Tensor) else torch.bfloat16
    if dtype not in valid:
        raise TypeError(
            f"{call.op}: {name} is {dtype}; recipe {recipe.name!r} takes "
            f"{'FoldedWeight, ' if recipe.folds else ''}{kind.__name__}, {', '.join(map(str, valid))}"
        )
    shape = check_experts(call.op, name, value, call.lead.new_empty(0, dtype=dtype), letters)
    if scale is not None and recipe.has_4_bits:
        shape = (*shape[:2], shape[2] * elements_of(dtype))
    check_width(call.op, name, shape[1], runs_kernels(call.lead))
    if scale is not None:
        folded = recipe.folds and scale.dim() == 2
        check_scale(call.op, name, scale, shape[:2] if folded else (*shape[:2], -(-shape[2] // BLOCK)), first)
    return shape


def check_scale(op: str, name: str, scale: Tensor, shape: tuple[int, ...], data: Tensor) -> None:
    """Check the scales of an argument's data: their dtype, shape, device and contiguity."""
    if scale.dtype != SCALE_DTYPE:
        raise TypeError(f"{op}: {name}'s scale is {scale.dtype}; it must be {SCALE_DTYPE}")
    if tuple(scale.shape) != tuple(shape):
        mismatch(op, f"{name}'s scale", scale.shape, shape, f"that is what its data {data.dtype} goes with")
    if scale.device != data.device or not scale.is_contiguous():
        raise ValueError(f"{op}: {name}'s scale must be contiguous, and on {data.device} as its data")


class Mxfp8MlpCall(Call):
    """A call by a recipe that quantises. `dtype`: of the result, where x is in MXFP8."""

    op = "grouped_mlp"
    torch_op = "grouped_mlp_mxfp8"
    differentiable = True
    sources = {"scale": "row_scale"}
    makes: tuple[Made, ...] = (Made("out", "y", ("num_rows", "out_features"), dtype="out_dtype"),)
    ready = staticmethod(ready)

    @property
    def result_dtype(self) -> torch.dtype:
        return self.x.dtype if self.dtype is None else self.dtype

    def refuse_gradients(self) -> None:
        """Where an argument requires one, and the recipe or an argument in MXFP8 has none."""
        names = ("x", "w1", "w2", "row_scale", "b1", "b2")
        trained = next((name for name in names if any_requires_grad(getattr(self, name))), None)
        if trained is None:
            return
        if not recipes.find(self.op, self.recipe).trains:
            raise GradientNotSupported(
                f"{self.op}: recipe {self.recipe!r} has no gradient, and {trained} requires one; call it under "
                f"torch.no_grad() or torch.inference_mode(), give {trained}.detach(), or choose recipe 'bf16'"
            )
        for name in ("x", "w1", "w2"):
            if getattr(self, f"{name}_scale") is not None:
                want_16_bits(self.op, name)

    def check(self) -> Problem:
        recipe = recipes.find(self.op, self.recipe)
        self.check_options()
        if self.recompute and not recipe.trains:
            raise ValueError(
                f"{self.op}: recompute is True, but recipe {self.recipe!r} has no gradient; leave it out, or choose "
                "recipe 'mxfp8' or 'bf16'"
            )
        columns, _ = self.check_lead(None if self.x_scale is None else (DATA_DTYPE,))
        like = self.x.new_empty(self.num_rows, 0, dtype=self.result_dtype)  # what biases and the result are like
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
            experts, columns, op=Mxfp8MlpCall.op, dtype=dtype, intermediate=width, out_features=out_features,
            quantized=self.x_scale is not None and recipe.operands == "mxfp8", operands=recipe.operands,
            fc2_operands=recipe.fc2_operands,
        )  # fmt: skip

    def check_result(self, width: int, like: Tensor) -> None:
        """`out`, and what the result is made of beside rows. `like`: a matrix of these."""
        check_out(self.op, "out", self.out, like, width)

    def _check_x_scale(self) -> None:
        if self.x_scale is None:
            return
        rows, columns = self.x.shape
        check_scale(self.op, "x", self.x_scale, (rows, -(-columns // BLOCK)), self.x)
        if not self.x.is_contiguous():
            raise ValueError(f"{self.op}: x is in MXFP8 and not contiguous; its data and scale must be, so clone() it")

    def _prepared_weights(self) -> tuple[Prepared, Prepared]:
        first, second = (self._prepared_weight(prepared_form(self.recipe), name) for name in self.weights)
        return first, second

    def _prepared_weight(self, form: str, name: str) -> Prepared:
        value, scale = getattr(self, name), getattr(self, f"{name}_scale")
        is_read = scale is not None and form == FOUR_BITS and not runs_kernels(self.lead)  # in either order
        if is_read or prepared.is_prepared(form, value, scale):
            return Prepared(value, scale)
        return prepared.PREPARED.get(form, value, scale)

    def prepared(self) -> Any:
        """As for any operator, with weights as the kernels read them."""
        first, second = self._prepared_weights()
        changes = {"w1": first.data, "w1_scale": first.scale, "w2": second.data, "w2_scale": second.scale}
        same = all(getattr(self, name) is value for name, value in changes.items())
        call = self if same else changed(self, **changes)
        return super(Mxfp8MlpCall, call).prepared()

    def reference(self, problem: Problem) -> Tensor:
        return self.reference_rows(self.results(problem))

    def reference_rows(self, out: Tensor) -> Tensor:
        form = (self.activation, self.glu_layout, self.params)
        biases, weights = (self.b1, self.b2), self._prepared_weights()
        mlp_reference.grouped_mlp(
            recipes.RECIPES[self.recipe], self.taken(), weights, self.host_ends(), biases, self.row_scale, form, out
        )
        return out

    def taken(self) -> tuple[Tensor, Tensor | None]:
        """x and its scales by rows."""
        rows, scale = self.rows, self.x_scale
        if rows is None:
            return self.x, scale
        return take_rows(self.x, rows), None if scale is None else take_rows(scale, rows)

    def constants(self, problem: Problem) -> dict[str, Any]:
        params = kernel_params(self.activation, self.glu_layout, self.params)
        return {"out_dtype": self.result_dtype, **params._asdict()}

    def scratch_of(self, problem: Problem) -> dict[str, str]:
        return self._rows_between(problem)

    def _rows_between(self, problem: Problem) -> dict[str, str]:
        """The activation, and rows as GEMMs read them: quantised, rounded to values of MXFP8, copied by index."""
        if problem.operands == "mxfp8":
            quantised = {"mid": "matrix", "mid_scale": "bytes"}
            return quantised if problem.quantized else {"x8": "matrix", "x8_scale": "bytes", **quantised}
        rows = {"rounded": "matrix"} if problem.operands == "mxfp8_exact" else {}
        return {"mid": "matrix", **rows, **({"copied": "matrix"} if self.of_tokens else {})}

    def memory(self, problem: Problem) -> list[Any]:
        x, of_rows = (self.x.shape[0], problem.in_features), (problem.rows, problem.in_features)
        shapes = {"x8": x, "rounded": x, "copied": of_rows, "mid": (problem.rows, problem.intermediate)}
        dtype = DATA_DTYPE if problem.operands == "mxfp8" else self.result_dtype
        return [
            part_of_workspace(shapes[name.removesuffix("_scale")], kind, dtype)
            for name, kind in self._rows_between(problem).items()
        ]

    def texts(self, problem: Problem) -> dict[str, str]:
        names = self.scratch_of(problem)
        rows = "rounded_memory" if "rounded" in names else "x"
        if "copied" in names:
            return {"x": "copied_memory", "x_tokens": f"{rows}.data_ptr()"}
        return {"x": rows} if "rounded" in names else {}

    def before(self, problem: Problem) -> tuple[str, ...]:
        names = self.scratch_of(problem)
        if "rounded" in names:
            until = self.offs is not None and self.rows is None
            end = {"offs": "groups_at", "num_groups": "num_groups"} if until else {"offs": "0", "num_groups": "1"}
            given = signature_of(QuantizeMxfp8Spec(rounded=True)).pack(x="aligned_row(x)", out="rounded_memory", **end)
            return (f"round({', '.join(given)})",)
        return ("x = x if x.is_contiguous() else x.contiguous()",) if "copied" in names else ()

    def kernels(self, problem: Problem) -> dict[str, Any]:
        """`round`: what rounds x to values of MXFP8."""
        if problem.operands != "mxfp8_exact":
            return {}
        if not problem.rows:
            return {"round": launch_nothing}
        rows, columns = self.x.shape
        wanted = Problem("quantize_mxfp8", problem.dtype, rows, 1, columns, axis="row", rounded=True)
        return {"round": kernels.serving(wanted, gpus.gpu(self.lead.get_device())).at(rows).function}

    @classmethod
    def look(cls, op: str, outs: list[Any], **read: Any) -> None:
        super().look(op, outs, **read)
        x, scale = read["x"], read.get("x_scale")
        if scale is not None and len(scale) != len(x):
            mismatch(op, "x's scale", scale.shape, (len(x), scale.shape[1]), "x has so many rows")


@operator(Mxfp8MlpCall)
def mlp_of_plain_tensors(
    x: Tensor, x_scale: Tensor | None, w1: Any, w1_scale: Tensor | None, w2: Any, w2_scale: Tensor | None, *, offs: Any,
    splits: Any, rows: Tensor | None, row_scale: Tensor | None, b1: Any, b2: Any, activation: str, glu_layout: str,
    limit: float, alpha: float, offset: float, recipe: str, recompute: bool, dtype: torch.dtype | None,
    out: Tensor | None,
) -> Any:  # fmt: skip
    """grouped_mlp by a recipe that quantises. An argument in MXFP8 is two: data and scale."""
    raise NotImplementedError  # `front` writes the body
