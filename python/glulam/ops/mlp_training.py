"""What a trained MLP is made of: its forward, which keeps the preactivation, and its data gradients.

In 16 bits they are launches of planned steps alone (`backward.data_path`), `step` their grouped_mlp's problem. Those in
MXFP8 are operators as well, of torch's too, so that a trace sees each as one, but no part of the public interface: they
take the weights that are trained, in 16 bits or float32, and prepare them themselves: forward along rows, backward
along columns.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.formats import OPERANDS

from .. import recipes
from ..activations import NamedNumbers
from ..calls.call import Call
from ..calls.checks import check_out, check_rows_like, intermediate_width, mismatch
from ..calls.front import operator
from ..calls.launch import BYTES, MATRIX, Line, Made
from ..choose.problem import Problem, changed, training_parts
from ..formats import mlp_reference, prepared
from ..formats.form import Form
from ..formats.mlp_reference import Weight
from ..formats.scaled import Parts
from ..host import workspace
from ..recipes import Recipe
from ..reference import take_rows
from .grouped_dglu import partials_shape
from .grouped_wgrad import GroupedWgradCall
from .quantized_mlp import QuantizedMlpCall, part_of_workspace
from .quantized_weights import check_weight

if TYPE_CHECKING:
    from typing_extensions import Unpack

PREACT = Made("preact", "preact", ("num_rows", "preact_width"))


class DataGradients(NamedTuple):
    """What a backward makes beside weight gradients; dx and d_row_scale where they are wanted."""

    dpreact: Tensor
    act: Tensor
    dx: Tensor | None = None
    d_row_scale: Tensor | None = None


def weights_forward(recipe: str, w1: Any, w2: Any, trained: bool) -> tuple[Parts, Parts]:
    """Weights as forward reads them. `trained`: whether one is; see `PreparedWeights.get`."""
    form, get = _form(recipe, "weights"), prepared.PREPARED.get
    return get(form, Parts(w1), trained), get(form, Parts(w2), trained)


def weights_backward(recipe: str, w1: Any, w2: Any, trained: bool) -> tuple[Parts | None, Parts]:
    """Weights as data gradients read them; w1 is None where dx is not wanted."""
    form, get = _form(recipe, "gradient_weights"), prepared.PREPARED.get
    return None if w1 is None else get(form, Parts(w1), trained), get(form, Parts(w2), trained)


def _form(recipe: str, which: str) -> Form:
    form: Form = getattr(recipes.RECIPES[recipe], which)
    return form


_READ = {
    "w1": "read_w1.data", "w1_scale": "read_w1.scale.data_ptr()",
    "w2": "read_w2.data", "w2_scale": "read_w2.scale.data_ptr()",
}  # fmt: skip


SMALL_BYTES = workspace.GRANULE
"""Up to here forward's activation lies in a workspace; a larger one is worth giving back after the call."""
LARGE = Made("mid", "mid", ("num_rows", "intermediate"), returned=False)


class KeepsPreact(Call):
    """Of a forward in 16 bits. `is_small`: whether its activation is."""

    is_small: Any = True

    def check(self) -> Problem:
        return training_parts(self.step).forward

    def made(self) -> tuple[Made, ...]:
        return self.makes if self.is_small else (*self.makes, LARGE)

    def scratch_of(self, problem: Problem) -> dict[str, str]:
        return super().scratch_of(problem) if self.is_small else {}

    def memory(self, problem: Problem) -> list[Any]:
        return super().memory(problem) if self.is_small else []


class PreparesRows(Call):
    """Of a forward in MXFP8: x and weights are in 16 bits. `trained`: whether a weight is."""

    tabled = ()  # a launch looks prepared weights up
    x_scale = w1_scale = w2_scale = w1_global_scale = w2_global_scale = dtype = None

    def check(self) -> Problem:
        return training_parts(self.step).forward

    def constants(self, problem: Problem) -> dict[str, Any]:
        return {**super().constants(problem), "trained": self.trained, "weights_forward": weights_forward}

    def before(self, problem: Problem) -> tuple[Line, ...]:
        return (Line(f"read_w1, read_w2 = weights_forward({self.recipe!r}, w1, w2, trained)"),)

    def texts(self, problem: Problem) -> dict[str, str]:
        return _READ


@functools.cache
def forward_kind(kind: Any) -> Any:
    """The kind of calls that are like those of an MLP or a layer, and keep h."""
    how = PreparesRows if issubclass(kind, QuantizedMlpCall) else KeepsPreact
    made: Any = type(f"{kind.__name__}KeepsPreact", (how, kind), {"makes": (*kind.makes, PREACT)})
    made.declare(kind.names)
    return made


class Mxfp8ForwardCall(PreparesRows, QuantizedMlpCall):
    """The result and h, a part of a step, which has no gradient of its own."""

    torch_op = "grouped_mlp_mxfp8_preact"
    differentiable = False
    torch_results = {"": ("(Tensor, Tensor)", {})}
    makes = (*QuantizedMlpCall.makes, PREACT)
    recompute = False

    def refuse_gradients(self) -> None:
        Call.refuse_gradients(self)

    def assembled(self, returned: Any) -> Any:
        return returned if self.out is None else (self.out, returned)

    def check(self) -> Problem:
        return changed(super(PreparesRows, self).check(), save_preact=True)

    def prepared(self) -> Any:
        return super(QuantizedMlpCall, self).prepared()

    def reference(self, problem: Problem) -> Any:
        out, preact = self.results(problem)
        read = weights_forward(self.recipe, self.w1, self.w2, self.trained)
        first, second = (Weight(_form(self.recipe, "weights"), parts) for parts in read)
        mlp_reference.grouped_mlp(
            recipes.RECIPES[self.recipe], self.taken(), (first, second), self.host_ends(), (self.b1, self.b2),
            self.row_scale, self.function, out, preact,
        )  # fmt: skip
        return out, preact


@operator(Mxfp8ForwardCall)
def forward(
    x: Tensor, w1: Any, w2: Any, *, offs: Any = None, splits: Any = None, row_scale: Tensor | None = None,
    b1: Any = None, b2: Any = None, activation: str, glu_layout: str, recipe: str, trained: bool,
    rows: Tensor | None = None, out: Tensor | None = None, **numbers: Unpack[NamedNumbers],
) -> Any:  # fmt: skip
    """(y, h), y in `out` where that is given. `trained`: whether a weight is; see `PreparedWeights.get`."""
    raise NotImplementedError  # `front` writes the body


class GradientsCall(Call):
    """Data gradients in 16 bits. `out`: where dx goes; where `input_grad` is not set, there is none."""

    op = "grouped_mlp_backward"
    leads = "dy"
    sources = {"scale": "row_scale"}
    makes: tuple[Made, ...] = (
        Made("dpreact", "dpreact", ("num_rows", "preact_width")),
        Made("act", "act", ("num_rows", "intermediate")),
        Made("out", "dx", ("num_rows", "out_features"), zeros=True),
        Made("d_row_scale", "d_scale", ("num_rows",), like="row_scale", zeros=True),
    )

    row_of: Any = None

    def check(self) -> Problem:
        return training_parts(self.step, self.input_grad).data_gradients

    @property
    def wants_d_row_scale(self) -> bool:
        return self.row_scale is not None and self.row_scale_grad

    def made(self) -> tuple[Made, ...]:
        dpreact, act, dx, d_row_scale = self.makes
        dx_of: tuple[Made, ...] = (dx._replace(wanted=self.input_grad),)
        if self.row_of is not None:  # rows, and the sums of a token's
            dx_of = dx._replace(name="dx", returned=False), Made("out", "dx_tokens", ("tokens", "out_features"))
        return dpreact, act, *dx_of, d_row_scale._replace(wanted=self.wants_d_row_scale)

    def scratch_of(self, problem: Problem) -> dict[str, str]:
        return {"partials": MATRIX} if self.wants_d_row_scale and problem.rows else {}

    def constants(self, problem: Problem) -> dict[str, Any]:
        return {**self.function.kernel_params, "result": DataGradients}

    def dims(self) -> dict[str, Any]:
        tokens, k = (0, 0) if self.row_of is None else self.row_of.shape
        return {"tokens": tokens, "k": k}

    def memory(self, problem: Problem) -> list[Any]:
        shapes = {"dy8": (self.dy.shape[0], problem.in_features), "dpreact8": (problem.rows, problem.w1_rows)}
        parts: list[Any] = []
        for name, kind in self.scratch_of(problem).items():
            if name == "partials":
                parts.append((partials_shape(problem.rows, problem.intermediate), torch.float32))
            else:
                rows = OPERANDS[problem.operands].x
                parts.append(part_of_workspace(rows, shapes[name.removesuffix("_scale")], kind))
        return parts


class PreparesColumns(GradientsCall):
    """The same in MXFP8. `trained`: whether a weight is."""

    tabled = ()

    def scratch_of(self, problem: Problem) -> dict[str, str]:
        """dy and the gradient of h in MXFP8, and partial sums of d_row_scale."""
        names = ["dy8", *(["dpreact8"] if self.input_grad else [])]
        quantised = {key: kind for name in names for key, kind in ((name, MATRIX), (f"{name}_scale", BYTES))}
        return {**quantised, **super().scratch_of(problem)}

    def constants(self, problem: Problem) -> dict[str, Any]:
        return {**super().constants(problem), "trained": self.trained, "weights_backward": weights_backward}

    def before(self, problem: Problem) -> tuple[Line, ...]:
        w1 = "w1" if self.input_grad else "None"
        return (Line(f"read_w1, read_w2 = weights_backward({self.recipe!r}, {w1}, w2, trained)"),)

    def texts(self, problem: Problem) -> dict[str, str]:
        return _READ


class Mxfp8GradientsCall(PreparesColumns):
    """The same as an operator, of rows."""

    torch_op = "grouped_mlp_mxfp8_backward"
    torch_results = {"": ("Tensor[]", {})}
    torch_types = {"w1": "Tensor[]?"}
    has_torch_out = False  # torch functionalises no operator that returns a list and writes a buffer
    w1_scale = w2_scale = w1_global_scale = w2_global_scale = None  # weights are not in MXFP8

    def check(self) -> Problem:
        recipe = recipes.find(self.op, self.recipe)
        columns, like = self.check_lead()
        self.check_options()
        width_of_h = check_rows_like(self.op, "preact", self.preact, like, None, "it has the rows of dy")
        width = intermediate_width(self.op, "preact", width_of_h, self.activation, self.glu_layout)
        experts, *_ = shape = check_weight(self, "w2", "E H I", recipe)
        if shape != (experts, columns, width):
            mismatch(self.op, "w2", shape, (experts, columns, width), "dy and preact have that many columns")
        hidden = self._check_w1(recipe, experts, width_of_h) if self.input_grad else 0
        self.check_addends(experts, "w2", like)
        check_out(self.op, "out", self.out, like, hidden)
        sizes = {"intermediate": width, "out_features": hidden}
        return self.problem(experts, columns, op="grouped_dglu", **sizes, operands=recipe.operands)

    def _check_w1(self, recipe: Recipe, experts: int, rows: int) -> int:
        """The columns of dx."""
        shape = check_weight(self, "w1", "E 2I H", recipe)
        if shape[:2] != (experts, rows):
            mismatch(self.op, "w1", shape, (experts, rows, shape[2]), "preact has that many columns")
        return shape[2]

    def assembled(self, returned: Any) -> DataGradients:
        dpreact, act, *others = returned
        dx = others.pop(0) if self.input_grad else None
        if dx is not None and self.out is not None:
            dx = self.out.copy_(dx)
        return DataGradients(dpreact, act, dx, others[0] if others else None)

    def reference(self, problem: Problem) -> DataGradients:
        results: DataGradients = self.results(problem)
        if self.out is not None:
            self.out.zero_()
        form = _form(self.recipe, "gradient_weights")
        first, second = weights_backward(self.recipe, self.w1 if self.input_grad else None, self.w2, self.trained)
        w1, w2 = first and Weight(form, first), Weight(form, second)
        dy = self.dy if self.rows is None else take_rows(self.dy, self.rows)
        mlp_reference.data_gradients(
            recipes.RECIPES[self.recipe], dy, (w1, w2), self.preact, self.host_ends(), self.row_scale,
            self.function, *results,
        )  # fmt: skip
        return results


class WeightGradientCall(GroupedWgradCall):
    """A weight's, of which an MLP has two by one kernel."""

    def check(self) -> Problem:
        gathers = self.dy_rows is not None or self.x_rows is not None
        return training_parts(self.step, gathers=gathers).weight_gradients

    def constants(self, problem: Problem) -> dict[str, Any]:
        return {**super().constants(problem), "out_features": self.dy.shape[1], "in_features": self.x.shape[1]}


_OF_ROWS = ("dy", "w1", "w2", "preact", "offs", "splits", "row_scale", "rows", "row_of")
_OPTIONS = ("activation", "glu_layout", "numbers", "row_scale_grad", "input_grad")
for _kind in (GradientsCall, PreparesColumns):
    _kind.declare((*_OF_ROWS, *_OPTIONS, "out"))
WeightGradientCall.declare(GroupedWgradCall.names)


@operator(Mxfp8GradientsCall)
def backward(
    dy: Tensor, w1: Any, w2: Any, preact: Tensor, *, offs: Any = None, splits: Any = None,
    row_scale: Tensor | None = None, activation: str, glu_layout: str, recipe: str, trained: bool, input_grad: bool,
    row_scale_grad: bool, rows: Tensor | None = None, out: Tensor | None = None, **numbers: Unpack[NamedNumbers],
) -> DataGradients:  # fmt: skip
    """All but weights' and biases' gradients, dx in `out` where that is given. `preact`: as forward returned it.

    `w1`: None will do without input_grad. `rows`: as of `grouped_dglu`, of dy; dx has these rows.
    """
    raise NotImplementedError  # `front` writes the body
