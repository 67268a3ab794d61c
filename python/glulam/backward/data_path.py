"""The gradient of grouped_mlp, and of moe: h = x w1_e^T + b1_e; m = act(h) s; y = m w2_e^T + s b2_e; s is row_scale.

Forward saves x, h and s; the kernel that computes the gradient of h recomputes m. With `recompute` forward saves x and
s, and backward recomputes h. If only w2 is trained, forward saves m, and neither h nor a data gradient is made.

A planned step (a forward and its backward with kept launches, see `planned`) has one launch for forward and one for
the gradients of h, x and s, if each expert's weights are [outputs, inputs], as nn.Linear's; otherwise each GEMM is a
separate launch. A recipe that quantises rows (of x and m in forward, of gradients in backward) also quantises the
weights that these rows are multiplied with. Weight gradients are GEMMs of the tensors stored in 16 bits, or of these
tensors quantised to MXFP8 (`wgrad_recipe`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..calls.call import Call
from ..choose.problem import Problem
from ..ops.grouped_bias_grad import grouped_bias_grad
from ..ops.grouped_dglu import GroupedDgluCall
from ..ops.grouped_glu import GroupedGluCall
from ..ops.mlp_training import (
    SMALL_BYTES,
    DataGradients,
    GradientsCall,
    Mxfp8ForwardCall,
    Mxfp8GradientsCall,
    PreparesColumns,
    WeightGradientCall,
    forward_kind,
)
from .parts import Targets, contracted, scale_of_bias_grad
from .path import Declared, Path

NEED_ACT_GRADIENT = frozenset({"x", "w1", "b1", "row_scale"})
"""Arguments whose gradients are computed from the gradient of the activation."""


class TokenFunctions(NamedTuple):
    """Functions between a layer's N tokens and its T rows.

    Each token has K rows, one for each of its experts; `row_of`, int32 [N, K], holds the rows of each token.

    Attributes:
        copies: (tokens, row_of, I) -> True if tokens are first copied to T rows, which GEMMs then read in order; False
            if GEMMs read tokens by index.
        rows: (tokens, row_of) -> [T, .], the copy of a token in each of its rows.
        sums: (rows, row_of, residual or None, buffer or None) -> [N, .], the sum of each token's rows, plus the
            residual, in the buffer or a new tensor.
    """

    copies: Callable[[Tensor, Tensor, int], bool]
    rows: Callable[[Tensor, Tensor], Tensor]
    sums: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataPath(Path):
    """The path (forward and gradients, see `path.Path`) of grouped_mlp and moe in 16 bits.

    Attributes:
        need_preact: arguments for whose gradients forward keeps h (the preactivation).
        copies_forward: if backward reads gathered copies of tokens instead of tokens by index, forward does, too.
        reads_by_index: GEMMs can read tokens by index.
        fuses: all GEMMs of forward, or all of the data gradients, may be one launch.
        gradients_kind: class of the call whose launch computes the data gradients.
        activation_options: the activation, its layout and its numbers, as keywords of the operators.
        recompute: see `grouped_mlp`.
        tokens: functions that gather tokens into experts' rows and sum rows by token (moe); None: grouped_mlp.
        kind: class of the call, in a planned step.
        problem: the problem, in a planned step.
        is_copied: in a planned step of a layer, GEMMs read tokens that were copied to T rows, not tokens by index.
        is_small: forward's activation has at most SMALL_BYTES, in a planned step.
        has_fused_gradients: one launch of a planned step computes the gradients of h, x and row_scale.
    """

    inputs: ClassVar = ("x", "w1", "w2", "row_scale", "b1", "b2")
    need_preact: ClassVar[frozenset[str]] = NEED_ACT_GRADIENT
    copies_forward: ClassVar[bool] = True
    reads_by_index: ClassVar[bool] = True
    fuses: ClassVar[bool] = True
    gradients_kind: ClassVar[type[Call]] = GradientsCall
    activation_options: dict[str, Any]
    recompute: bool
    tokens: TokenFunctions | None
    kind: Any = None
    problem: Problem | None = None
    is_copied: bool = False
    is_small: bool = False
    has_fused_gradients: bool = False

    def planned(self, call: Call, problem: Problem, like: Path | None) -> DataPath:
        """Return a copy of this path whose parts are launches, planned when they first run.

        Tokens that are not contiguous are read by index if GEMMs can: the kernel that copies rows takes no padding.
        Arguments: see `Path.planned`.
        """
        may_copy = call.x.is_contiguous() or not self.reads_by_index
        is_copied = may_copy and self.copies(call.x, getattr(call, "row_of", None), call.w2)
        is_small = call.num_rows * contracted(call.w2, self.transpose_w) * call.x.element_size() <= SMALL_BYTES
        has_fused = self.fuses and not (self.transpose_w or self.in_halves)
        flags = {"is_copied": is_copied, "is_small": is_small, "has_fused_gradients": has_fused}
        made = dataclasses.replace(self, kind=type(call), problem=problem, **flags)
        if isinstance(like, DataPath) and (like.is_copied, like.is_small) != (is_copied, is_small):
            like = None
        return super(DataPath, made).planned(call, problem, like)  # type: ignore[return-value]

    def forward(
        self, given: dict[str, Any], wanted: frozenset[str], out: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the result; return (the result, {name: the tensor to save for backward}).

        The tensor is "preact" (h) or "act" (m); the dict is empty if backward needs neither. Arguments: see
        `Path.forward`.
        """
        keep_preact = not (self.recompute or wanted.isdisjoint(self.need_preact))
        keep_act = "w2" in wanted and not self.recompute
        if self.tokens is not None and self.copies_forward and self.reads_copies(given["x"], given):
            given = {**given, "x": self.tokens.rows(given["x"].contiguous(), given["row_of"]), "rows": None}
        if self.fuses and self.launches is not None and keep_preact and not self.transpose_w:
            return self._forward_launch(given, wanted, out)
        if self.tokens is None:
            return self._forward(given, keep_preact, keep_act, out)
        y, kept = self._forward(given, keep_preact, keep_act, None)
        return self.tokens.sums(y, given["row_of"], given["residual"], out), kept

    def _forward_launch(
        self, given: dict[str, Any], wanted: frozenset[str], out: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
        """Compute the result and h with one launch, and return the result and {"preact": h}."""

        def call() -> Declared:
            trained = "w1" in wanted or "w2" in wanted
            options = {
                **self.activation_options,
                "step": self.problem,
                "is_large": not self.is_small,
                "trained": trained,
            }
            return forward_kind(self.kind), options

        y, preact = self.part("forward", call)(**given, out=out)
        return y, {"preact": preact}

    def reads(self, wanted: frozenset[str]) -> dict[str, bool]:
        """Return, by argument name, True if backward reads the argument when the arguments in `wanted` need gradients.

        Arguments that the dict lacks are read, too.
        """
        needs_act_gradient = not wanted.isdisjoint(self.need_preact)
        again = self.recompute and (needs_act_gradient or "w2" in wanted)
        return {
            "x": again or "w1" in wanted,
            "w1": again or "x" in wanted,
            "b1": again,
            "w2": needs_act_gradient,
            "b2": "row_scale" in wanted,
            "residual": False,
        }

    def gradients(
        self, saved: dict[str, Any], targets: Targets, wanted: frozenset[str], *dy: Tensor
    ) -> dict[str, Any]:  # fmt: skip
        """Compute the gradients of the arguments in `wanted`, return them by name, and remove h from `saved`.

        Data gradients come first, then weight gradients, so that each intermediate is freed as soon as nothing needs
        it: h before any weight gradient is allocated, the gradient of h before the last weight gradient.
        """
        (d_result,) = dy
        d_y = self._gathered(saved, d_result)
        groups, rows = saved["groups"], saved.get("rows")
        result: dict[str, Any] = {}
        act = None
        if not wanted.isdisjoint(self.need_preact):
            make = self._gradients_launch if self.has_fused_gradients else self._data_gradients
            dpreact, act, result["x"], d_scale = make(saved, targets, d_result, d_y, wanted)
            if "w1" in wanted:
                result["w1"] = self.weight_gradient(targets, "w1", dpreact, saved["x"], groups, x_rows=rows)
            if "b1" in wanted:
                result["b1"] = grouped_bias_grad(dpreact, **self.sizes(groups))
            del dpreact
            if d_scale is not None:
                if saved.get("b2") is not None:
                    d_scale = d_scale + scale_of_bias_grad(d_y, saved["b2"], {**self.sizes(groups), "rows": rows})
                result["row_scale"] = d_scale
        if "w2" in wanted:
            act = self._act(saved) if act is None else act
            result["w2"] = self.weight_gradient(targets, "w2", d_y, act, groups, dy_rows=rows)
        if "b2" in wanted:
            result["b2"] = grouped_bias_grad(d_y, row_scale=saved.get("row_scale"), rows=rows, **self.sizes(groups))
        if "residual" in wanted:
            result["residual"] = d_result
        return result

    def weight_gradient_call(self, name: str) -> Declared:
        kind, options = super().weight_gradient_call(name)
        return (WeightGradientCall, {**options, "step": self.problem}) if self.has_fused_gradients else (kind, options)

    def copies(self, x: Tensor, row_of: Any, w2: Any) -> bool:
        """Return True if tokens are copied to T rows for the GEMMs, False if GEMMs read tokens by index.

        False if w2 is None: w2 is saved only if a data gradient is needed, and other gradients do not need copies.
        """
        if self.tokens is None or w2 is None:
            return False
        return self.tokens.copies(x, row_of, contracted(w2, self.transpose_w))

    def reads_copies(self, x: Tensor, given: dict[str, Any]) -> bool:
        """Return True if tokens are copied to T rows for the GEMMs; a planned step decided this when it was made.

        Args:
            x: the tokens.
            given: arguments or saved tensors by name.
        """
        if self.launches is None:
            return self.copies(x, given.get("row_of"), given.get("w2"))
        return self.is_copied and given.get("w2") is not None

    def _gathered(self, saved: dict[str, Any], dy: Tensor) -> Tensor:
        """Return dy, copied to one row for each of T rows if this step's GEMMs read copies of tokens; otherwise
        unchanged.

        In the first case saved["x"] is also replaced by such copies, and saved["rows"] by None.
        """
        if self.tokens is None or not self.reads_copies(dy, saved):
            return dy
        saved["rows"] = None
        if saved.get("x") is not None:
            saved["x"] = self.tokens.rows(saved["x"].contiguous(), saved["row_of"])
        return self.tokens.rows(dy, saved["row_of"])

    def _data_gradients(
        self, saved: dict[str, Any], targets: Targets, d_result: Tensor, dy: Tensor, wanted: frozenset[str]
    ) -> DataGradients:
        """Compute the data gradients with a separate launch or call for each GEMM; for a layer, also sum the gradients
        of each token's rows.

        Args:
            saved: saved tensors by name.
            targets: buffers for gradients.
            d_result: the incoming gradient.
            dy: the result of `_gathered` for it.
            wanted: names of the arguments that require a gradient.
        """
        if self.tokens is None:
            return self._gradients(saved, targets, dy, wanted)
        made = self._gradients(saved, None, dy, wanted)
        if made.dx is None:
            return made
        out = targets.given_grad_input(d_result)
        return made._replace(dx=self.tokens.sums(made.dx, saved["row_of"], None, out))

    def _gradients_launch(
        self, saved: dict[str, Any], targets: Targets, d_result: Tensor, dy: Tensor, wanted: frozenset[str]
    ) -> DataGradients:
        """Compute with one launch what `_data_gradients`, which has the same arguments, computes GEMM by GEMM."""
        for_x = "x" in wanted
        dx = targets.given_grad_input(d_result) if for_x else None

        def call() -> Declared:
            flags = {"row_scale_grad": "row_scale" in wanted, "input_grad": for_x}
            trained = "w1" in wanted or "w2" in wanted
            return self.gradients_kind, {**self.activation_options, **flags, "step": self.problem, "trained": trained}

        made: DataGradients = self.part("gradients", call)(
            dy=dy, preact=self._take_preact(saved), w1=saved["w1"] if for_x else None, w2=saved["w2"],
            row_scale=saved["row_scale"], rows=saved.get("rows"), row_of=saved.get("row_of") if for_x else None,
            groups=saved["groups"], out=dx,
        )  # fmt: skip
        if dx is not None:
            torch.autograd.graph.increment_version(dx)
        return made

    def _take_preact(self, saved: dict[str, Any]) -> Tensor:
        """Remove h from `saved` and return it, or recompute it."""
        preact: Tensor | None = saved.pop("preact", None)
        return self._new_preact(saved) if preact is None else preact

    def _forward(
        self, given: dict[str, Any], keep_preact: bool, keep_act: bool, out: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute FC1 with its activation, and FC2, as two parts of the step.

        Args:
            given: arguments by name.
            keep_preact, keep_act: the tensor to keep for backward: h, or else the activation.
            out: buffer for the result. None: a new tensor.

        Returns:
            The result [T, .], one row for each of T rows; the kept tensor by its name, "preact" or "act".
        """
        made = self._glu("glu", given, keep_preact)
        act, *preact = made if keep_preact else (made,)
        bias = given["b2"]
        scale = None if bias is None else given["row_scale"]
        fc2 = self.times_w("fc2", self.transpose_w)
        y = fc2(x=act, w=given["w2"], bias=bias, bias_scale=scale, groups=given["groups"], out=out)
        return y, {"preact": preact[0]} if keep_preact else {"act": act} if keep_act else {}

    def _glu(self, part: str, given: dict[str, Any], return_preact: bool = False) -> Any:
        """Compute and return FC1 with its activation, as the part named `part`; with `return_preact`, also return h."""

        def call() -> Declared:
            return GroupedGluCall, {
                **self.activation_options,
                "return_preact": return_preact,
                "transpose_w": self.transpose_w,
            }

        return self.part(part, call)(
            x=given["x"], w1=given["w1"], bias=given["b1"], row_scale=given["row_scale"], rows=given.get("rows"),
            groups=given["groups"],
        )  # fmt: skip

    def _act(self, saved: dict[str, Any]) -> Tensor:
        """Return the activation, saved or recomputed."""
        act: Tensor = saved["act"] if "act" in saved else self._glu("act", saved)
        return act

    def _new_preact(self, saved: dict[str, Any]) -> Tensor:
        """Recompute the preactivation h from saved tensors."""
        if self.in_halves:  # only grouped_glu multiplies a GateUp in one call
            preact: Tensor = self._glu("preact", saved, return_preact=True)[1]
            return preact
        made: Tensor = self.times_w("preact", self.transpose_w)(
            x=saved["x"], w=saved["w1"], bias=saved["b1"], rows=saved.get("rows"), groups=saved["groups"]
        )
        return made

    def _gradients(
        self, saved: dict[str, Any], targets: Targets | None, dy: Tensor, wanted: frozenset[str]
    ) -> DataGradients:
        """Compute the data gradients: of h, x and row_scale, for each of T rows.

        Args:
            saved: saved tensors by name; h is removed.
            targets: buffers for gradients. None: x's gradient is a new tensor, uninitialised after the last group.
            dy: the gradient of the rows' results.
            wanted: names of the arguments that require a gradient.
        """
        groups, dx = saved["groups"], None

        def call() -> Declared:
            options = {"row_scale_grad": "row_scale" in wanted, "transpose_w": self.transpose_w}
            return GroupedDgluCall, {**self.activation_options, **options}

        dpreact, act, d_scale = self.part("dglu", call)(
            dy=dy, w2=saved["w2"], preact=self._take_preact(saved), row_scale=saved["row_scale"],
            rows=saved.get("rows"), groups=groups,
        )  # fmt: skip
        if "x" in wanted:
            w1 = saved["w1"]
            dx = None if targets is None else targets.new_grad_input(dy, contracted(w1, self.transpose_w))
            dx = self.times_w("x", not self.transpose_w)(x=dpreact, w=w1, groups=groups, out=dx)
        return DataGradients(dpreact, act, dx, d_scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantisedPath(DataPath):
    """The path (forward and gradients, see `path.Path`) of grouped_mlp and moe in MXFP8, with weights that are trained.

    Forward is one call or launch. In a layer it reads tokens by index instead of copying them to rows, so that each
    token is quantised once. It never has the activation in 16 bits, so the gradient of w2 needs h, too.

    Attributes:
        activation_options: as in `DataPath`, and also `recipe`, the recipe's name, and `trained`: a weight requires a
            gradient.
    """

    need_preact = NEED_ACT_GRADIENT | {"w2"}  # forward never has the activation in 16 bits
    copies_forward = False
    gradients_kind = PreparesColumns

    def _forward(
        self, given: dict[str, Any], keep_preact: bool, keep_act: bool, out: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        y, preact = self._rows("rows", given, out)
        return y, {"preact": preact} if keep_preact else {}

    def _rows(self, part: str, given: dict[str, Any], out: Tensor | None = None) -> Any:
        """Compute forward as the part named `part`; return the result and the preactivation h."""
        tensors = {name: given[name] for name in self.inputs}
        made = self.part(part, lambda: (Mxfp8ForwardCall, self.activation_options))
        return made(**tensors, rows=given.get("rows"), groups=given["groups"], out=out)

    def _new_preact(self, saved: dict[str, Any]) -> Tensor:
        preact: Tensor = self._rows("preact", {**saved, "b2": None})[1]
        return preact

    def _gradients(
        self, saved: dict[str, Any], targets: Targets | None, dy: Tensor, wanted: frozenset[str]
    ) -> DataGradients:
        out = targets.given_grad_input(dy) if targets is not None and "x" in wanted else None
        options = {**self.activation_options, "input_grad": "x" in wanted, "row_scale_grad": "row_scale" in wanted}
        made: DataGradients = self.part("gradients", lambda: (Mxfp8GradientsCall, options))(
            dy=dy, w1=saved.get("w1"), w2=saved["w2"], preact=self._take_preact(saved),
            row_scale=saved["row_scale"], rows=saved.get("rows"), groups=saved["groups"], out=out,
        )  # fmt: skip
        return made
