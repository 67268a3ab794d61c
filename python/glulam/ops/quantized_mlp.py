"""grouped_mlp by the recipes that quantise: arguments in their parts, and what is checked of them."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from cute_kernels.chains import signature_of
from cute_kernels.formats import BITS, DECODED, OPERANDS, Format
from cute_kernels.specs import QuantizeMxfp8Spec

from .. import recipes
from ..calls.checks import (
    any_requires_grad,
    check_out,
    intermediate_width,
    mismatch,
    runs_kernels,
)
from ..calls.launch import BYTES, MATRIX, Line, Made, launch_nothing
from ..calls.quantized import Quantized
from ..choose import kernels
from ..choose.problem import Problem, dtype_name
from ..errors import GradientNotSupported
from ..formats import mlp_reference
from ..formats.mxfp8 import MXFP8Tensor, rebase_mxfp8
from ..formats.mxfp8.forms import Rows as MXFP8Rows
from ..formats.mxfp8.layout import DATA_DTYPE
from ..formats.scaled import BLOCK
from ..host import device as gpus
from ..host.groups import UNINITIALISED
from ..recipes import Recipe
from ..reference import take_rows
from .quantized_weights import (
    READY_AS,
    check_scale,
    check_weight,
    global_counts,
    look_at_scales,
    ready,
    weight_as_read,
    weight_parts,
    with_parts_as_read,
)


def refuse_transposed(op: str, recipe: Recipe) -> NoReturn:
    """Raises ValueError: weights are transposed, which scales along their rows do not allow."""
    raise ValueError(
        f"{op}: transpose_w reads weights in 16 bits, and recipe is {recipe.name!r}; transpose them once, as "
        "w1.mT.contiguous() does, and leave out transpose_w, or choose recipe 'bf16'"
    )


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
    if not isinstance(recipe.x, MXFP8Rows):
        raise TypeError(
            f"{op}: x is an MXFP8Tensor, but recipe {recipe.name!r} takes 16-bit rows; give x.dequantize({dtype}), or "
            "choose recipe 'mxfp8' or 'mxfp8_exact'"
        )
    if x.axis != "row":
        raise ValueError(f"{op}: x is quantised along its columns; a GEMM contracts its rows, so quantise along those")
    if not OPERANDS[recipe.operands].has_scaled_rows:  # kernels read its values in 16 bits, which hold them exactly
        return x.dequantize(dtype), None, None
    if recipe.x.block == "1x32":  # which a scale for 128 elements, four times, is as well
        x = x.plain()
        return x.data, x.scale, dtype
    if x.block == "1x128" and x.scale_layout == "plain":
        return x.data, x.scale, dtype
    wide = rebase_mxfp8(x.plain()) if x.shape[0] else x.plain()
    return wide.data.contiguous(), wide.scale.contiguous(), dtype


def part_of_workspace(rows: Format, shape: tuple[int, int], kind: str, dtype: torch.dtype = DATA_DTYPE) -> Any:
    """Rows' elements, or where `kind` is BYTES their scales, as `Launching.memory` lists them."""
    count, columns = shape
    return count * int(rows.num_scales(columns)) * BITS[rows.scale] // 8 if kind == BYTES else (shape, dtype)


class QuantizedMlpCall(Quantized):
    """A call by a recipe that quantises. `dtype`: of the result, where x is in MXFP8."""

    in_parts: ClassVar = {"x": 2, "w1": 3, "w2": 3}
    unwraps = "x", "x_scale", "dtype", "rows", "w1", "w1_scale", "w1_global_scale", "w2", "w2_scale", "w2_global_scale"

    op = "grouped_mlp"
    after_groups = UNINITIALISED
    torch_op = "grouped_mlp_mxfp8"
    differentiable = True
    sources = {"scale": "row_scale"}
    makes: tuple[Made, ...] = (Made("out", "y", ("num_rows", "out_features"), dtype="out_dtype"),)
    ready, ready_as = staticmethod(ready), READY_AS
    on_device = staticmethod(recipes.on_device)
    recipe_of, recipes = staticmethod(recipes.find), recipes.RECIPES

    @property
    def result_dtype(self) -> torch.dtype:
        return self.x.dtype if self.dtype is None else self.dtype

    @classmethod
    def unwrap(
        cls, recipe: Recipe, x: Any, w1: Any, w2: Any, rows: Any, row_of: Any, transpose_w: Any, dtype: Any, out: Any,
        b1: Any, b2: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        """The parts. Rows that kernels do not take by index are copied: of a layer, within the call."""
        if transpose_w:
            refuse_transposed(cls.op, recipe)
        x_scale = None
        if x.__class__ is MXFP8Tensor:
            x, x_scale, dtype = rows_as_read(cls.op, x, recipe, dtype, out, b1, b2)
        if rows is not None and row_of is None and recipe.operands in DECODED and isinstance(x, Tensor):
            x, rows = cls.rows_in_order(x, rows), None
        form: Any = recipe.weights
        kinds, name = form.classes, form.name  # `weight_parts` of tensors that are read as they are, without its calls
        first = w1.parts if w1.__class__ in kinds and w1.reads_as == name else weight_parts(cls.op, "w1", w1, recipe)
        second = w2.parts if w2.__class__ in kinds and w2.reads_as == name else weight_parts(cls.op, "w2", w2, recipe)
        return x, x_scale, dtype, rows, *first, *second

    def refuse_gradients(self) -> None:
        """Where an argument requires one, and it, the recipe or an argument in MXFP8 has none."""
        if self.is_frozen:
            self.refuse_trained_weights()
            return
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
        if self.recompute and not (recipe.trains or recipe.freezes_weights):
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
            experts, columns, op=QuantizedMlpCall.op, dtype=dtype, intermediate=width, out_features=out_features,
            quantized=self.x_scale is not None and OPERANDS[recipe.operands].has_scaled_rows, operands=recipe.operands,
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

    def prepared(self) -> Any:
        """As for any operator, with weights as the kernels read them."""
        return super(QuantizedMlpCall, with_parts_as_read(self)).prepared()

    def reference(self, problem: Problem) -> Tensor:
        return self.reference_rows(self.results(problem))

    def reference_rows(self, out: Tensor) -> Tensor:
        recipe, biases = recipes.RECIPES[self.recipe], (self.b1, self.b2)
        first, second = (weight_as_read(self, name) for name in self.weights)
        mlp_reference.grouped_mlp(
            recipe, self.taken(), (first, second), self.host_ends(), biases, self.row_scale, self.function, out
        )
        return out

    def taken(self) -> tuple[Tensor, Tensor | None]:
        """x and its scales by rows."""
        rows, scale = self.rows, self.x_scale
        if rows is None:
            return self.x, scale
        return take_rows(self.x, rows), None if scale is None else take_rows(scale, rows)

    def constants(self, problem: Problem) -> dict[str, Any]:
        return {"out_dtype": self.result_dtype, **self.function.kernel_params, **global_counts(self)}

    def scratch_of(self, problem: Problem) -> dict[str, str]:
        return self._rows_between(problem)

    def _rows_between(self, problem: Problem) -> dict[str, str]:
        """The activation, and rows as GEMMs read them: quantised, rounded to values of MXFP8, copied by index."""
        if OPERANDS[problem.operands].has_scaled_rows:
            quantised = {"mid": MATRIX, "mid_scale": BYTES}
            return quantised if problem.quantized else {"x8": MATRIX, "x8_scale": BYTES, **quantised}
        rows = {"rounded": MATRIX} if problem.operands == "mxfp8_exact" else {}
        return {"mid": MATRIX, **rows, **({"copied": MATRIX} if self.of_tokens else {})}

    def memory(self, problem: Problem) -> list[Any]:
        x, of_rows = (self.x.shape[0], problem.in_features), (problem.rows, problem.in_features)
        shapes = {"x8": x, "rounded": x, "copied": of_rows, "mid": (problem.rows, problem.intermediate)}
        rows = OPERANDS[problem.operands].x
        dtype = DATA_DTYPE if rows.scale else self.result_dtype
        return [
            part_of_workspace(rows, shapes[name.removesuffix("_scale")], kind, dtype)
            for name, kind in self._rows_between(problem).items()
        ]

    def texts(self, problem: Problem) -> dict[str, str]:
        names = self.scratch_of(problem)
        rows = "rounded_memory" if "rounded" in names else "x"
        if "copied" in names:
            return {"x": "copied_memory", "x_tokens": f"{rows}.data_ptr()"}
        return {"x": rows} if "rounded" in names else {}

    def before(self, problem: Problem) -> tuple[Line, ...]:
        names = self.scratch_of(problem)
        if "rounded" in names:
            until = self.offs is not None and self.rows is None
            end = {"offs": "groups_at", "num_groups": "num_groups"} if until else {"offs": "0", "num_groups": "1"}
            given = signature_of(QuantizeMxfp8Spec(rounded=True)).pack(x="aligned_row(x)", out="rounded_memory", **end)
            return (Line(f"round({', '.join(given)})", ("groups",) if until else ()),)
        return (Line("x = x if x.is_contiguous() else x.contiguous()"),) if "copied" in names else ()

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
        look_at_scales(op, cls.labels, read)
        x, scale = read["x"], read.get("x_scale")
        if scale is not None and scale.shape[0] != x.shape[0]:
            mismatch(op, "x's scale", scale.shape, (x.shape[0], scale.shape[1]), "x has so many rows")
