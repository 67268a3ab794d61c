"""The gradient of grouped_mlp, and of moe: h = x w1_e^T + b1_e; m = act(h) s; y = m w2_e^T + s b2_e; s is row_scale.

Saved tensors: x, h and s; the kernel that computes the gradient of h recomputes m. With `recompute`: x and s; backward
recomputes h. If only w2 is trained: m; neither h nor a data gradient is made.

Launches of a planned step (forward and backward with kept launches, see `planned`): if each expert's weights are
[outputs, inputs], as in nn.Linear, one launch for forward and one for the gradients of h, x and s. Otherwise each GEMM
is a separate launch.

Quantisation: a recipe that quantises rows (x and m in forward, gradients in backward) also quantises the weights with
which these rows are multiplied. Weight gradients are GEMMs of the tensors stored in 16 bits, or of these tensors
quantised to MXFP8 (`wgrad_recipe`).
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
"""Arguments whose gradients are computed from the gradient of the activation m, and so need h."""


class TokenFunctions(NamedTuple):
    """Functions of the MoE layer that convert between N tokens and T rows.

    Each token has K rows, one for each of its experts; `row_of`, int32 [N, K], holds the indices of each token's rows.

    Attributes:
        copies: function (tokens, row_of, I). True: tokens are first copied to T rows, which GEMMs then read in order.
            False: GEMMs read tokens by index.
        rows: function (tokens, row_of) that copies each token to all its rows, and returns [T, .].
        sums: function (rows, row_of, residual or None, buffer or None) that returns [N, .], the sum of each token's
            rows plus the residual, in the buffer or in a new tensor.
    """

    copies: Callable[[Tensor, Tensor, int], bool]
    rows: Callable[[Tensor, Tensor], Tensor]
    sums: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataPath(Path):
    """The path (forward and gradients, see `path.Path`) of grouped_mlp and moe in 16 bits.

    Attributes:
        need_preact: arguments whose gradients need h, the preactivation; forward keeps h if one of them is trained.
        copies_forward: True: if backward reads copies of tokens, gathered into rows, forward does so, too.
        reads_by_index: True: GEMMs can read tokens by index.
        fuses: True: all GEMMs of forward may be one launch, and all GEMMs of the data gradients, too.
        gradients_kind: class of the call whose launch computes the data gradients.
        activation_options: the activation, its layout and its numbers, as keywords of the operators.
        recompute: True: forward saves x and row_scale, and backward computes h again.
        tokens: functions that gather tokens into experts' rows and sum rows by token, for moe. None: grouped_mlp.
        kind: class of the call. This and the following attributes are set in planned steps only.
        problem: the call's problem.
        is_copied: True: the GEMMs of a moe read tokens that were copied to T rows. False: they read tokens by index.
        is_small: True: forward's activation has at most SMALL_BYTES.
        has_fused_gradients: True: one launch computes the gradients of h, x and row_scale.
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

        This decides whether tokens are copied to rows. Tokens that are not contiguous are read by index if GEMMs can do
        that, since the kernel that copies rows does not support padded rows.

        Args:
            call: a checked call.
            problem: the call's problem.
            like: the planned path of a call that differs only in its number of rows. None: there is none.
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
        """Compute the result; return (the result, a dict with the tensor to save for backward besides arguments).

        The dict is {"preact": h} or {"act": m}; it is empty if backward needs neither.

        Args:
            given: arguments by name, group sizes as "groups"; this method may change the dict.
            wanted: names of the arguments that require a gradient.
            out: buffer for the result. None: a new tensor.
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
        """Compute the result and h with one launch; return (the result, {"preact": h}).

        Args:
            given: arguments by name.
            wanted: names of the arguments that require a gradient.
            out: buffer for the result. None: a new tensor.
        """

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
        """Return {argument: True if backward reads it}, if the arguments in `wanted` need gradients.

        Arguments that are not in the dict are read, too.
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
        """Compute the gradients of the arguments in `wanted`, and return them by name; see `Path.gradients`.

        Data gradients come first, then weight gradients, so that each intermediate tensor is freed as soon as nothing
        needs it: h, which is removed from `saved`, before any weight gradient is allocated; the gradient of h before
        the last weight gradient.

        Args:
            saved: saved tensors by name.
            targets: buffers for gradients.
            dy: the gradient of the result.
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
        """Return True if a moe's tokens should be copied to T rows for the GEMMs; False: GEMMs read tokens by index.

        False also if w2 is None, since w2 is saved only if a data gradient is needed, and other gradients do not need
        copies.

        Args:
            x: the tokens.
            row_of: the index of each token's rows, see `TokenFunctions`.
            w2: the second weight, or None.
        """
        if self.tokens is None or w2 is None:
            return False
        return self.tokens.copies(x, row_of, contracted(w2, self.transpose_w))

    def reads_copies(self, x: Tensor, given: dict[str, Any]) -> bool:
        """Return True if this step copies tokens to T rows for the GEMMs. A planned step decided this when it was made.

        Args:
            x: the tokens.
            given: arguments or saved tensors by name.
        """
        if self.launches is None:
            return self.copies(x, given.get("row_of"), given.get("w2"))
        return self.is_copied and given.get("w2") is not None

    def _gathered(self, saved: dict[str, Any], dy: Tensor) -> Tensor:
        """Gather a moe's incoming gradient dy [N, .] and saved tokens to T rows, if this step's GEMMs read copies.

        Then dy's copy [T, .] is returned, saved["x"] is replaced by a copy, and saved["rows"] by None. Otherwise dy is
        returned, and nothing changes.
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
        """Compute the data gradients with a separate launch or call for each GEMM; for a moe, sum dx by token.

        Args:
            saved: saved tensors by name.
            targets: buffers for gradients.
            d_result: the incoming gradient, of the result as the caller got it: [N, .] in a moe, else [T, .].
            dy: the incoming gradient as GEMMs read it: a copy [T, .] if this step copies tokens to rows, else d_result.
            wanted: names of the arguments that require a gradient.

        Returns:
            The gradients of h (dpreact), x and row_scale, and the recomputed activation.
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
        """Compute the data gradients with one launch. `_data_gradients` describes the arguments and the result."""
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
        """Compute forward in two parts, first FC1 with its activation, then FC2. Each part is a kernel launch, or a
        call of a public operator if the step (this forward with its backward) is not a planned one.

        Args:
            given: arguments by name.
            keep_preact: True: keep h for backward.
            keep_act: True: keep the activation for backward, unless h is kept.
            out: buffer for the result. None: a new tensor.

        Returns:
            (the result [T, .], a dict with the kept tensor: "preact" or "act").
        """
        made = self._glu("glu", given, keep_preact)
        act, *preact = made if keep_preact else (made,)
        bias = given["b2"]
        scale = None if bias is None else given["row_scale"]
        fc2 = self.times_w("fc2", self.transpose_w)
        y = fc2(x=act, w=given["w2"], bias=bias, bias_scale=scale, groups=given["groups"], out=out)
        return y, {"preact": preact[0]} if keep_preact else {"act": act} if keep_act else {}

    def _glu(self, part: str, given: dict[str, Any], return_preact: bool = False) -> Any:
        """Compute FC1 with its activation, as the part named `part`; return the activation, and on request also h.

        Args:
            given: arguments by name.
            return_preact: True: return (activation, h).
        """

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
        """Compute the data gradients, that is, of h, x and row_scale, for each of T rows, and recompute the activation.

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
    """Forward and gradients (a `path.Path`) of grouped_mlp and moe in MXFP8, with weights that are trained.

    Forward is one part: one kernel launch in a planned step, otherwise one call of the public operator. In a moe,
    forward reads tokens by index instead of copying them to rows, so that each token is quantised only once. Forward
    computes the activation in MXFP8 alone. So for the gradient of w2, backward computes it again in 16 bits from the
    preactivation h, which is saved for that, too.

    Attributes:
        activation_options: as in `DataPath`, and also `recipe`, the recipe's name, and `trained`, True if a weight
            requires a gradient.
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
        """Compute forward as the part named `part`; return (the result, the preactivation h).

        Args:
            given: arguments by name.
            out: buffer for the result. None: a new tensor.
        """
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
