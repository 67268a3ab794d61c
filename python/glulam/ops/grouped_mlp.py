"""grouped_mlp: both GEMMs of each expert's MLP in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from .. import reference
from ..activations import NamedNumbers
from ..calls.call import Call
from ..calls.checks import check_recipe, check_width, mismatch, runs_kernels
from ..calls.definition import Definition, ScratchPart, numbers_of_activation
from ..calls.front import operator
from ..calls.launch import ResultTensor
from ..calls.sharding import SUM, Split, split_of_width
from ..calls.weight_checks import check_experts, check_w1
from ..choose.problem import Problem
from ..expert_lora import ExpertLora
from ..formats.mxfp8 import MXFP8Tensor
from ..formats.scaled import Scaled
from ..host.experts import Biases
from ..host.groups import UNINITIALISED, Splits
from ..names import ActivationName, GluLayout, RecipeName
from ..recipes import Recipe
from ..reference import take_rows
from .quantized_mlp import QuantizedMlpCall

if TYPE_CHECKING:
    from typing_extensions import Unpack

Weights = Tensor | Sequence[Tensor] | Scaled


def mid(call: Any, problem: Problem) -> dict[str, ScratchPart]:
    """Return the temporary memory of a launch for the activation between the two GEMMs, [T, I], by its name."""
    return {"mid": ((problem.rows, problem.intermediate), call.lead.dtype)}


def _reference(call: Any, problem: Problem, out: Tensor) -> None:
    x, how = take_rows(call.x, call.rows), (call.b1, call.b2, call.row_scale, call.function)
    reference.grouped_mlp(x, call.w1, call.w2, call.host_ends(), *how, out, call.transpose_w)


class GroupedMlpCall(Call):
    """A call of grouped_mlp in 16 bits: the operator's checks, results, kernel arguments and CPU reference."""

    op = "grouped_mlp"
    explains = True
    after_groups = UNINITIALISED
    differentiable = True
    sources = {"scale": "row_scale"}
    definition = Definition(
        results=(ResultTensor("out", "y", ("num_rows", "out_features")),),
        constants=(numbers_of_activation,),
        scratch=(mid,),
        reference=_reference,
    )
    added: tuple[str, ...] = ("b2",)
    """Names of the arguments that are added to the result."""
    with_lora: ClassVar[Callable[..., Any]]  # set by `lora.mlp`, which is made of operators, and so of calls

    @classmethod
    def arguments_of(cls, public: dict[str, Any]) -> dict[str, Any]:
        if public.pop("lora") is not None:
            raise ValueError(f"{cls.op}: lora is given, and such a call is several operators; leave out lora")
        return public

    def call_public_operator(self) -> Any:
        check_recipe(self.op, self.recipe)
        return super().call_public_operator()

    def check(self) -> Problem:
        for name in ("x", "w1", "w2"):
            if isinstance(given := getattr(self, name), Scaled):
                raise TypeError(
                    f"{self.op}: {name} is in {given.format}, and recipe is 'bf16'; choose a recipe that takes it, as "
                    f"{given.recipe!r}, or give {name}.dequantize() in 16 bits"
                )
        columns, like = self.check_lead()
        self.check_options()
        check_recipe(self.op, self.recipe)
        form = (self.activation, self.glu_layout, self.transpose_w)
        experts, w1_rows, width = check_w1(self.op, self.w1, self.x, *form)
        shape = check_experts(self.op, "w2", self.w2, self.x, "E I H" if self.transpose_w else "E H I")
        out_features = shape[2 if self.transpose_w else 1]
        wanted = (experts, width, out_features) if self.transpose_w else (experts, out_features, width)
        if shape != wanted:
            mismatch(self.op, "w2", shape, wanted, f"w1 gives E = {experts}, I = {width}")
        check_width(self.op, "w2", out_features, runs_kernels(self.x))
        self.check_addends(experts, "w1", like, b1=w1_rows, b2=out_features)
        self.check_result(out_features, like)
        sizes = {"intermediate": width, "out_features": out_features}
        return self.problem(experts, columns, op=GroupedMlpCall.op, **sizes)

    def served_splits(self) -> tuple[Split, ...]:
        rows, columns = (2, 1) if self.transpose_w else (1, 2)
        return (
            split_of_width(self, {"w1": rows, "w2": columns, "b1": 1, **dict.fromkeys(self.added, SUM)}, SUM, "b1"),
        )


@operator(GroupedMlpCall, quantized=QuantizedMlpCall, beside=("lora",))
def grouped_mlp(
    x: Tensor | MXFP8Tensor,
    w1: Weights,
    w2: Weights,
    *,
    offs: Tensor | None = None,
    splits: Splits | None = None,
    rows: Tensor | None = None,
    row_scale: Tensor | None = None,
    b1: Biases = None,
    b2: Biases = None,
    activation: ActivationName = "swiglu",
    glu_layout: GluLayout = "concat",
    recipe: RecipeName | Recipe = "bf16",
    recompute: bool = False,
    transpose_w: bool = False,
    lora: ExpertLora | None = None,
    out: Tensor | None = None,
    **numbers: Unpack[NamedNumbers],
) -> Tensor:
    """Compute y = m w2_e^T + s b2_e with m = activation(h) s and h = x w1_e^T + b1_e: each expert's MLP, in one call.

    s is row_scale[row], and e the expert of the row's group. Rows are sorted by expert. Rows after the last group do
    not affect any result, and are not written. The activation m [T, I] lies in memory that the calling thread reuses on
    the same stream (see `glulam.host.workspace`).

    Differentiable once in x, w1, w2, row_scale, b1 and b2, if an argument requires a gradient and the recipe trains
    weights: forward then saves x, h and row_scale for the backward. Only required gradients are computed; gradients
    of rows after the last group are zero.

    Args:
        x: [T, H], bfloat16 or float16; on the CPU also float32 or float64. The row stride may exceed H; on
            a GPU it is a multiple of 8 elements. With recipes that quantise x to MXFP8 also an MXFP8Tensor by rows; the
            result then has the dtype of `out`, else of a bias, else bfloat16.
        w1: [E, 2I, H] for an activation with a gate, else [E, I, H]; or a list of E tensors; contiguous, x's dtype.
            With recipe "bf16" also a GateUp: its two tensors [E, I, H] stand for one with glu_layout "concat".
            Recipes that quantise take weights of any 16-bit dtype or float32. They quantise (prepare) them once for
            each version of their contents, and keep the prepared weights as long as the originals live.
            These recipes also take prepared weights, so that the first call need not prepare them, and the originals
            need no memory: a FoldedWeight ("mxfp8"), or an MXFP8Tensor [E, 2I or I, H] by rows with plain scales; see
            `recipe` for other formats.
        w2: [E, H, I], or a list of E tensors; contiguous, x's dtype. H, I and 2I are multiples of 8 on a GPU. The
            number of w2's rows may differ from x's columns; the result has as many columns as w2 has rows.
        offs: int32 [E], each group's end: group e is rows offs[e-1] .. offs[e]. Give this or splits.
        splits: each group's number of rows: int32 or int64 [E] on x's device; or a CPU tensor or a list, which is
            checked and copied to the device.
        rows: int32 [T] on x's device: row t is x[rows[t]], x is [N, H]. Recipes that decode weights ("mxfp8_exact" and
            the weight-only ones) copy the rows; the others make no copy, and if they quantise x, quantise its N rows.
            An index out of range is clamped. Not differentiable when this is given. None: rows of x lie in order.
        row_scale: float32 [T], such as the router's probabilities; it scales m and also the second bias. None: 1.
        b1: [E, 2I or I] or a list of E tensors, laid out as w1's rows; x's dtype. None: no bias.
        b2: [E, H] or a list of E tensors; x's dtype. None: no bias.
        activation, glu_layout, **numbers: see `grouped_glu`.
        recipe: a name in `glulam.recipes.RECIPES`, or one of the objects there. Products are accumulated in float32.
            "bf16": 16-bit operands of x's dtype.
            "mxfp8": x and the activation in MXFP8 with a scale for 128 elements, folded weights (`FoldedWeight`).
            "mxfp8_blocks": x, the activation and weights in MXFP8 with a scale for 32 elements.
            "mxfp8_wgrad": as "mxfp8_blocks", and the GEMMs of weight gradients also multiply MXFP8 operands
            (docs/mxfp8-training.md).
            "mxfp8_exact": x, the activation and weights in MXFP8 with a scale for 32 elements, multiplied in bfloat16.
            "mxfp8_weight_only": weights as "mxfp8_exact", rows in bfloat16.
            "mxfp4": x and the activation as in "mxfp8", weights in MXFP4, as RebasedWeights or MXFP4Tensors, multiplied
            exactly in FP8 (docs/mxfp4.md).
            "mxfp4_weight_only", "nvfp4_weight_only": weights in MXFP4 or NVFP4, as MXFP4Tensors or NVFP4Tensors, rows
            in bfloat16 (docs/mxfp4.md, docs/nvfp4.md).
            "fp8_block": x and the activation in E4M3 with a float32 scale for 128 elements, weights in E4M3 with a
            float32 scale for 128 x 128 elements.
            "fp8_block_weight_only": weights as "fp8_block", rounded to bfloat16, rows in bfloat16 (docs/formats.md).
            16-bit weights are quantised once for each version of their contents. Recipes with MXFP8, MXFP4 or NVFP4
            need H, I and the result's columns to be multiples of 32, recipes with FP8 blocks multiples of 16.
        recompute: True: if gradients are recorded, save only x and row_scale, and compute h again in the backward
            ("mxfp8": by running the whole forward again).
        transpose_w: True: compute h = x w1_e + b1_e and y = m w2_e + s b2_e instead: w1 is [E, H, 2I or I] and w2
            [E, I, H], glu_layout is the order of w1's columns, and the weights' gradients have these shapes. The
            weights are not copied. Only with recipe "bf16".
        lora: adapters, an `ExpertLora`: w1_e + c b1_e a1_e and w2_e + c b2_e a2_e are multiplied in place of w1_e and
            w2_e, by additional GEMMs with few columns. c is the adapters' `scale`; a and b are the adapters' matrices,
            not the biases. Differentiable. Only with recipe "bf16" and with the weight-only recipes, without
            `recompute`. None: no adapters.
        out: buffer for the result, [T, H]; its row stride may exceed H. None: a new tensor, uninitialised after
            the last group.

    Returns:
        [T, H] in x's dtype; `out` if given.

    Raises:
        ValueError, TypeError: an argument does not fit; nothing was launched.
        GradientNotSupported: `out` or `rows` is given although an argument requires a gradient, or a second derivative
            is taken.
        UnsupportedDevice, BundleError (RuntimeErrors): there is no kernel for this GPU, or no usable bundle.
        FoldError (a ValueError): recipe "mxfp8" would change a weight too much, or recipe "mxfp4" cannot multiply a
            weight exactly.
        CaptureError: under CUDA graph capture, splits are on the host, or a weight is not prepared yet. Weights that
            are being trained may be captured: the graph prepares them at each replay.
    """
    raise NotImplementedError  # `front` writes the body
