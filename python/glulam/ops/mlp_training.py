"""Stages of an MLP's training step: a forward that also returns the preactivation h, and the data gradients.

16 bits: these stages exist only as launches of a planned training step (`backward.data_path`). The attribute `step` of
their calls is the `Problem` (sizes and options) of the step's grouped_mlp.

MXFP8: the stages are also operators, registered with torch so that a trace sees each as one node; they are not public.
They take the weights that are trained, in 16 bits or float32, and prepare them: forward quantises along weight rows,
backward along weight columns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from cute_kernels.formats import OPERANDS

from .. import recipes
from ..activations import NamedNumbers
from ..calls.call import Call
from ..calls.checks import check_rows_like, mismatch
from ..calls.definition import Definition, PrologueStep, ScratchPart, numbers_of_activation
from ..calls.front import operator
from ..calls.launch import Line, ResultTensor
from ..calls.weight_checks import intermediate_width
from ..choose.problem import Problem, changed, training_parts
from ..formats import mlp_reference, prepared
from ..formats.form import Form
from ..formats.mlp_reference import Weight
from ..formats.scaled import Parts
from ..host import workspace
from ..recipes import Recipe
from ..reference import take_rows
from .grouped_dglu import ACT, D_ROW_SCALE, DPREACT, partial_sums
from .grouped_mlp import mid
from .grouped_wgrad import GroupedWgradCall
from .quantized_mlp import QuantizedMlpCall, quantised, reference_of_rows
from .quantized_weights import check_weight

if TYPE_CHECKING:
    from typing_extensions import Unpack

PREACT = ResultTensor("preact", "preact", ("num_rows", "preact_width"))


class DataGradients(NamedTuple):
    """Results of an MLP's backward, except the gradients of weights and biases.

    Attributes:
        dpreact: [T, 2I or I], the gradient of h.
        act: [T, I], the activation times the row scale, computed again for w2's gradient.
        dx: [T, H], the gradient of x; in an MoE layer, where it is summed by token, [num_tokens, H]. None: it was not
            requested.
        d_row_scale: float32 [T], the gradient of row_scale. None: it was not requested.
    """

    dpreact: Tensor
    act: Tensor
    dx: Tensor | None = None
    d_row_scale: Tensor | None = None


def weights_forward(recipe: str, w1: Any, w2: Any, trained: bool) -> tuple[Parts, Parts]:
    """Return w1 and w2, prepared now if necessary, as the forward's kernels read them.

    Args:
        recipe: the recipe's name.
        trained: True: a weight requires a gradient, so a graph that is being captured prepares the weights at every
            replay. False: a weight must be prepared before a capture.
    """
    form, get = _form(recipe, "weights"), prepared.PREPARED.get
    return get(form, Parts(w1), trained), get(form, Parts(w2), trained)


def weights_backward(recipe: str, w1: Any, w2: Any, trained: bool) -> tuple[Parts | None, Parts]:
    """Return w1 and w2, prepared now if necessary, as the kernels of data gradients read them.

    Args:
        recipe: the recipe's name.
        w1: None: dx is not wanted, and None is returned for w1.
        trained: True: a weight requires a gradient, so a graph that is being captured prepares the weights at every
            replay. False: a weight must be prepared before a capture.
    """
    form, get = _form(recipe, "gradient_weights"), prepared.PREPARED.get
    return None if w1 is None else get(form, Parts(w1), trained), get(form, Parts(w2), trained)


def _form(recipe: str, which: str) -> Form:
    form: Form = getattr(recipes.RECIPES[recipe], which)
    return form


def _read(call: Any, prepare: Callable[..., Any], w1: str = "w1") -> PrologueStep:
    """Return the prologue step that calls `prepare` on the weights and hands their data and scales to the kernels.

    Args:
        call: the call.
        prepare: `weights_forward` or `weights_backward`.
        w1: the first weight as a Python expression, "None" if it is not read.
    """
    name = prepare.__name__
    return PrologueStep(
        Line(f"read_w1, read_w2 = {name}({call.recipe!r}, {w1}, w2, trained)"),
        {
            "w1": "read_w1.data", "w1_scale": "read_w1.scale.data_ptr()",
            "w2": "read_w2.data", "w2_scale": "read_w2.scale.data_ptr()",
        },
        {"trained": call.trained, name: prepare},
    )  # fmt: skip


def _reads_rows(call: Any, problem: Problem) -> PrologueStep:
    return _read(call, weights_forward)


def _reads_columns(call: Any, problem: Problem) -> PrologueStep:
    return _read(call, weights_backward, "w1" if call.input_grad else "None")


SMALL_BYTES = workspace.GRANULE
"""Largest activation, in bytes, that forward puts into the workspace, which is kept between calls.

A larger activation gets memory that is freed after the call.
"""
LARGE = ResultTensor("mid", "mid", ("num_rows", "intermediate"), returned=False, when="is_large")


def _small_mid(call: Any, problem: Problem) -> dict[str, ScratchPart]:
    return {} if call.is_large else mid(call, problem)


class KeepsPreact(Call):
    """Base of forward calls that also return the preactivation h.

    `is_large`: the activation, in 16 bits, takes more than SMALL_BYTES.
    """

    is_large: Any = False

    def check(self) -> Problem:
        return training_parts(self.step).forward


class PreparesRows(KeepsPreact):
    """Base of forward calls in MXFP8 that also return the preactivation h; x and the weights are passed unquantised.

    The launch quantises x. It takes the weights from the cache of prepared weights (`formats.prepared`), which
    quantises each version of a weight once. `trained`: True: a weight requires a gradient.
    """

    tabled = ()  # a launch looks prepared weights up
    x_scale = w1_scale = w2_scale = w1_global_scale = w2_global_scale = dtype = None


@functools.cache
def forward_kind(kind: Any) -> Any:
    """Make a subclass of `kind`, a class of calls of an MLP or MoE layer. Its calls return the preactivation h, too.

    The result is cached, so that each `kind` has one such subclass.
    """
    if issubclass(kind, QuantizedMlpCall):
        how: Any = PreparesRows
        own = kind.definition.extended(results=(PREACT,), prologue=(_reads_rows,))
    else:
        how = KeepsPreact
        own = dataclasses.replace(kind.definition.extended(results=(PREACT, LARGE)), scratch=(_small_mid,))
    made: Any = type(f"{kind.__name__}KeepsPreact", (how, kind), {"definition": own})
    made.declare(kind.names)
    return made


def _forward_reference(call: Any, problem: Problem, out: Tensor, preact: Tensor) -> None:
    read, form = weights_forward(call.recipe, call.w1, call.w2, call.trained), _form(call.recipe, "weights")
    reference_of_rows(call, (Weight(form, read[0]), Weight(form, read[1])), out, preact)


class Mxfp8ForwardCall(PreparesRows, QuantizedMlpCall):
    """A call of `forward`, the forward in MXFP8 that returns (y, h).

    It is one stage of a training step, so it is not differentiable itself.
    """

    torch_op = "grouped_mlp_mxfp8_preact"
    differentiable = False
    definition = QuantizedMlpCall.definition.extended(
        results=(PREACT,), prologue=(_reads_rows,), reference=_forward_reference
    )  # fmt: skip
    recompute = False

    def refuse_gradients(self) -> None:
        Call.refuse_gradients(self)

    def check(self) -> Problem:
        return changed(QuantizedMlpCall.check(self), save_preact=True)

    def prepared(self) -> Any:
        return Call.prepared(self)


@operator(Mxfp8ForwardCall)
def forward(
    x: Tensor, w1: Any, w2: Any, *, offs: Any = None, splits: Any = None, row_scale: Tensor | None = None,
    b1: Any = None, b2: Any = None, activation: str, glu_layout: str, recipe: str, trained: bool,
    rows: Tensor | None = None, out: Tensor | None = None, **numbers: Unpack[NamedNumbers],
) -> Any:  # fmt: skip
    """Compute grouped_mlp in MXFP8 and return (y, h): the result (in `out` if given) and the preactivation.

    Args:
        trained: True: a weight requires a gradient, so a captured graph prepares the weights at every replay.
        Others: see `grouped_mlp`.
    """
    raise NotImplementedError  # `front` writes the body


DX = ResultTensor("out", "dx", ("num_rows", "out_features"), zeros=True, when="input_grad")


def _tokens(call: Any) -> dict[str, int]:
    tokens, k = (0, 0) if call.row_of is None else call.row_of.shape
    return {"tokens": tokens, "k": k}


class GradientsCall(Call):
    """A call that computes an MLP's data gradients (see `DataGradients`) in 16 bits.

    Attributes:
        out: buffer for dx. None: a new tensor.
        input_grad: True: compute dx.
        row_of: [num_tokens, K], the row of each token's choice, for a call of a layer: dx is then summed by token.
            None: the call is not of a layer; dx has a row for each row of dy.
    """

    op = "grouped_mlp_backward"
    leads = "dy"
    sources = {"scale": "row_scale"}
    definition = Definition(
        results=(DPREACT, ACT, DX, D_ROW_SCALE),
        returns=DataGradients,
        constants=(numbers_of_activation,),
        of_rows=(_tokens,),
        scratch=(partial_sums,),
    )

    row_of: Any = None

    def check(self) -> Problem:
        return training_parts(self.step, self.input_grad).data_gradients

    def result_tensors(self) -> tuple[ResultTensor, ...]:
        made = super().result_tensors()
        if self.row_of is None:
            return made
        dpreact, act, dx, d_row_scale = made  # dx of rows is not returned, the sums by token are
        sums = ResultTensor("out", "dx_tokens", ("tokens", "out_features"))
        return dpreact, act, dx._replace(name="dx", returned=False), sums, d_row_scale


def _quantised(call: Any, problem: Problem) -> dict[str, ScratchPart]:
    """Return the scratch memory of a launch for dy in MXFP8 and, if dx is wanted, for the gradient of h in MXFP8."""
    rows = OPERANDS[problem.operands].x
    dy8 = quantised(rows, "dy8", (call.dy.shape[0], problem.in_features))
    return {**dy8, **(quantised(rows, "dpreact8", (problem.rows, problem.w1_rows)) if call.input_grad else {})}


class PreparesColumns(GradientsCall):
    """Base of calls that compute an MLP's data gradients in MXFP8; the weights are passed unquantised.

    The launch takes the weights, quantised along their columns, from the cache of prepared weights
    (`formats.prepared`). `trained`: True: a weight requires a gradient.
    """

    tabled = ()
    definition = dataclasses.replace(
        GradientsCall.definition, scratch=(_quantised, partial_sums), prologue=(_reads_columns,)
    )  # fmt: skip


def _gradients_reference(call: Any, problem: Problem, *results: Any) -> None:
    if call.out is not None:
        call.out.zero_()
    form = _form(call.recipe, "gradient_weights")
    first, second = weights_backward(call.recipe, call.w1 if call.input_grad else None, call.w2, call.trained)
    w1, w2 = first and Weight(form, first), Weight(form, second)
    mlp_reference.data_gradients(
        recipes.RECIPES[call.recipe], take_rows(call.dy, call.rows), (w1, w2), call.preact, call.host_ends(),
        call.row_scale, call.function, *results,
    )  # fmt: skip


class Mxfp8GradientsCall(PreparesColumns):
    """A call of `backward`, the data gradients in MXFP8; dx has a row for each row of dy, not for each token."""

    torch_op = "grouped_mlp_mxfp8_backward"
    definition = PreparesColumns.definition.extended(reference=_gradients_reference)
    torch_types = {"w1": "Tensor[]?"}
    has_torch_out = False  # torch cannot functionalise an operator that returns a list and writes a buffer
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
        self.check_result(hidden, like)
        sizes = {"intermediate": width, "out_features": hidden}
        return self.problem(experts, columns, op="grouped_dglu", **sizes, operands=recipe.operands)

    def _check_w1(self, recipe: Recipe, experts: int, rows: int) -> int:
        """Check that w1 has `experts` experts of `rows` rows, and return its number of columns, which is dx's."""
        shape = check_weight(self, "w1", "E 2I H", recipe)
        if shape[:2] != (experts, rows):
            mismatch(self.op, "w1", shape, (experts, rows, shape[2]), "preact has that many columns")
        return shape[2]


class WeightGradientCall(GroupedWgradCall):
    """A weight gradient as a launch of a planned training step; one kernel serves both weights of an MLP."""

    def check(self) -> Problem:
        gathers = self.dy_rows is not None or self.x_rows is not None
        operands = recipes.find(self.op, self.recipe).wgrad_operands
        return changed(training_parts(self.step, gathers=gathers).weight_gradients, operands=operands)

    definition = GroupedWgradCall.definition.extended(
        constants=(lambda call: {"out_features": call.dy.shape[1], "in_features": call.x.shape[1]},),
        overrides=("out_features", "in_features"),  # one problem stands for the gradients of both weights
    )


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
    """Compute the data gradients of grouped_mlp in MXFP8: all gradients except weights' and biases'.

    Args:
        dy: the gradient of y.
        preact: h as returned by `forward`.
        w1: may be None without input_grad.
        rows: indices of rows of dy, see `grouped_dglu`; dx has the selected rows. None: rows of dy lie in order.
        trained: True: a weight requires a gradient, so a captured graph prepares the weights at every replay.
        input_grad, row_scale_grad: True: compute dx, d_row_scale. False: the result has None instead.
        out: buffer for dx. None: a new tensor.
        Others: see `grouped_mlp`.
    """
    raise NotImplementedError  # `front` writes the body
