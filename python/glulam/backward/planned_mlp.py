"""The common differentiable grouped_mlp or moe, by `planned`: gradients behind the activation.

Forward is one launch; backward is one for its data path (the gradients of h, x and row_scale), and one for each weight.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..calls.call import Call
from ..choose.problem import Problem, training_parts
from ..ops.mlp_training import SMALL_BYTES, DataGradients, FoldsColumns, GradientsCall, forward_kind
from ..ops.quantized_mlp import QuantizedMlpCall
from . import mlp
from .data_path import QuantisedPath
from .parts import Targets, contracted
from .paths import path_of
from .planned import Part, TrainingPlan, is_common, requires, weight_part

OF_GRADIENTS = ("w2", "row_scale", "activation", "glu_layout", "numbers")


class Options(NamedTuple):
    """What launches depend on.

    Attributes:
        copies_forward, copies_backward: whether a layer's rows are copied.
        is_small: forward's activation is.
    """

    copies_forward: bool
    copies_backward: bool
    is_small: bool


class MlpPlan(TrainingPlan):
    formula = mlp.FORMULA
    makes = ("preact",)
    need_preact = QuantisedPath.need_preact  # of either recipe: without, there is no plan

    @classmethod
    def check(cls, call: Call) -> Problem | None:
        """Weights that are not of x's dtype take the general path."""
        problem = call.check()
        if isinstance(call, QuantizedMlpCall) and call.is_frozen:
            return None
        needs_preact = any(requires(call, name) for name in path_of(call).need_preact)
        if not needs_preact or call.recompute or not is_common(call):
            return None
        if any(w.dtype != call.x.dtype for w in (call.w1, call.w2)):
            return None
        call.check_addresses()
        return problem

    @classmethod
    def options_of(cls, call: Call) -> Options:
        """Rows are copied of tokens without padding, which the kernel that copies does not know."""
        path, inner = path_of(call), contracted(call.w2, getattr(call, "transpose_w", False))
        copies = call.x.is_contiguous() and path.copies(call.x, getattr(call, "row_of", None), call.w2)
        is_small = call.num_rows * inner * call.x.element_size() <= SMALL_BYTES
        return Options(copies and path.copies_forward, copies, is_small)

    @classmethod
    def parts_of(cls, call: Call, problem: Problem, need: Collection[str], options: Options) -> dict[str, Part]:
        x, rows, tokens = call.x, call.indices, getattr(call, "row_of", None)
        forward_rows, rows = None if options.copies_forward else rows, None if options.copies_backward else rows
        for_x, trained = "x" in need, "w1" in need or "w2" in need
        problems = training_parts(problem, for_x, rows is not None)

        def forward() -> Call:
            kind: Any = type(call)
            others = {"rows": forward_rows, "out": x, "trained": trained, "is_small": options.is_small}
            return forward_kind(kind)(**{**vars(call), **others})

        def gradients() -> Call:
            return (FoldsColumns if isinstance(call, QuantizedMlpCall) else GradientsCall)(
                **{name: getattr(call, name) for name in OF_GRADIENTS}, offs=call.offs, splits=call.splits, preact=x,
                dy=x.new_empty(problem.rows, 0) if options.copies_backward else x, rows=rows,
                w1=call.w1 if for_x else None, row_of=tokens if for_x else None, out=x if for_x else None,
                row_scale_grad="row_scale" in need, input_grad=for_x, trained=trained,
            )  # fmt: skip

        parts = {"forward": Part(forward, problems.forward), "gradients": Part(gradients, problems.data_gradients)}
        for name, by, shape in zip(("w1", "w2"), ("x_rows", "dy_rows"), problem.weights, strict=True):
            if name in need:
                parts[name] = weight_part(call, problems.weight_gradients, shape, **{by: rows})
        return parts

    def as_read(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self.options.copies_forward:
            return inputs
        named = dict(zip(self.names, inputs, strict=True))
        return tuple({**named, "x": self.general.tokens.rows(named["x"], named["row_of"]), "rows": None}.values())

    # What the formula asks for, see `data_path.DataPath`:

    def gathered(self, saved: dict[str, Any], dy: Tensor) -> Tensor:
        copied: Tensor = self.general.copied(saved, dy) if self.options.copies_backward else dy
        return copied

    def data_gradients(
        self, saved: dict[str, Any], targets: Targets, d_result: Tensor, dy: Tensor, wanted: frozenset[str]
    ) -> DataGradients:
        launch, dx = self.parts["gradients"], None
        if "x" in wanted:
            dx = targets.given_grad_input(d_result)
            if dx is None:
                dx = d_result.new_empty(d_result.shape[0], launch.constants["out_features"])
        made: DataGradients = launch.run(
            dy=dy, w1=saved.get("w1"), w2=saved["w2"], preact=saved.pop("preact"), row_scale=saved.get("row_scale"),
            rows=saved.get("rows"), row_of=saved.get("row_of"), groups=saved[self.grouped_by], out=dx,
        )  # fmt: skip
        if targets.grad_input is not None:
            torch.autograd.graph.increment_version(targets.grad_input)
        return made
