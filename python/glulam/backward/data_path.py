"""A grouped_mlp's forward and backward by public operators, by recipe.

What is quantised, in a recipe that does, is this: the rows of both directions and the weights that they meet. Gradients
of weights are GEMMs of what is stored in 16 bits in any recipe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from ..ops import mlp_training as mxfp8
from ..ops.grouped_dglu import grouped_dglu
from ..ops.grouped_glu import grouped_glu
from ..ops.grouped_mm import grouped_mm
from ..ops.mlp_training import DataGradients
from .parts import Operators, Targets, contracted, groups_of

BEHIND_THE_ACTIVATION = frozenset({"x", "w1", "b1", "row_scale"})
"""Arguments whose gradients need that of the activation."""


class Tokens(NamedTuple):
    """Between a layer's tokens and its rows, of which `row_of` tells the place.

    Attributes:
        copies: of tokens, row_of and I: whether GEMMs read copies of rows, and do not read tokens by index.
        rows: of tokens and row_of: the copies.
        sums: of rows, row_of, a residual and a buffer: the tokens' sums.
    """

    copies: Callable[[Tensor, Tensor, int], bool]
    rows: Callable[[Tensor, Tensor], Tensor]
    sums: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataPath(Operators):
    """In 16 bits.

    Attributes:
        need_preact: arguments for whose gradients forward keeps h.
        copies_forward: whether forward reads copies of rows where backward does.
        form: the activation and its numbers, as keywords of the operators.
        recompute: see `grouped_mlp`. tokens: of a layer.
    """

    need_preact: ClassVar[frozenset[str]] = BEHIND_THE_ACTIVATION
    copies_forward: ClassVar[bool] = True
    form: dict[str, Any]
    recompute: bool
    tokens: Tokens | None

    def forward(
        self, given: dict[str, Any], wanted: frozenset[str], out: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What is saved besides is "preact", or else "act"."""
        keep_preact = bool(wanted & self.need_preact) and not self.recompute
        keep_act = "w2" in wanted and not self.recompute
        if self.tokens is None:
            return self._forward(given, keep_preact, keep_act, out)
        row_of = given["row_of"]
        if self.copies_forward and self.copies(given["x"], row_of, given["w2"]):
            given = {**given, "x": self.tokens.rows(given["x"].contiguous(), row_of), "rows": None}
        y, kept = self._forward(given, keep_preact, keep_act, None)
        return self.tokens.sums(y, row_of, given["residual"], out), kept

    def reads(self, wanted: frozenset[str]) -> dict[str, bool]:
        behind = bool(wanted & self.need_preact)
        again = self.recompute and (behind or "w2" in wanted)
        return {
            "x": again or "w1" in wanted,
            "w1": again or "x" in wanted,
            "b1": again,
            "w2": behind,
            "b2": "row_scale" in wanted,
            "residual": False,
        }

    def copies(self, x: Tensor, row_of: Any, w2: Any) -> bool:
        """Whether GEMMs read a copy of each row's token; where no data gradient needs w2, they do not."""
        if self.tokens is None or w2 is None:
            return False
        return self.tokens.copies(x, row_of, contracted(w2, self.transpose_w))

    def gathered(self, saved: dict[str, Any], dy: Tensor) -> Tensor:
        """dy as the GEMMs read it, and what was saved as well, in place."""
        return self.copied(saved, dy) if self.copies(dy, saved.get("row_of"), saved.get("w2")) else dy

    def copied(self, saved: dict[str, Any], dy: Tensor) -> Tensor:
        """The same where it is a copy."""
        assert self.tokens is not None
        saved["rows"] = None
        if saved.get("x") is not None:
            saved["x"] = self.tokens.rows(saved["x"].contiguous(), saved["row_of"])
        return self.tokens.rows(dy, saved["row_of"])

    def data_gradients(
        self, saved: dict[str, Any], targets: Targets, d_result: Tensor, dy: Tensor, wanted: frozenset[str]
    ) -> DataGradients:
        """`d_result`: the incoming gradient; `dy`: as `gathered` returned it."""
        if self.tokens is None:
            return self._gradients(saved, targets, dy, wanted)
        made = self._gradients(saved, None, dy, wanted)
        if made.dx is None:
            return made
        out = targets.given_grad_input(d_result)
        return made._replace(dx=self.tokens.sums(made.dx, saved["row_of"], None, out))

    def take_preact(self, saved: dict[str, Any]) -> Tensor:
        """h, which leaves `saved`, or is made again."""
        preact: Tensor | None = saved.pop("preact", None)
        return self._new_preact(saved) if preact is None else preact

    def _forward(
        self, given: dict[str, Any], keep_preact: bool, keep_act: bool, out: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Of rows."""
        made = self._glu(given, keep_preact)
        act, *preact = made if keep_preact else (made,)
        bias = given["b2"]
        y = grouped_mm(
            act, given["w2"], bias=bias, bias_scale=None if bias is None else given["row_scale"],
            transpose_w=self.transpose_w, out=out, **groups_of(given),
        )  # fmt: skip
        return y, {"preact": preact[0]} if keep_preact else {"act": act} if keep_act else {}

    def _glu(self, given: dict[str, Any], return_preact: bool = False) -> Any:
        return grouped_glu(
            given["x"], given["w1"], bias=given["b1"], row_scale=given["row_scale"], rows=given.get("rows"),
            return_preact=return_preact, transpose_w=self.transpose_w, **groups_of(given), **self.form,
        )  # fmt: skip

    def act(self, saved: dict[str, Any]) -> Tensor:
        """The activation, saved or made again."""
        act: Tensor = saved["act"] if "act" in saved else self._glu(saved)
        return act

    def _new_preact(self, saved: dict[str, Any]) -> Tensor:
        if self.in_halves:  # which grouped_glu alone multiplies in one call
            preact: Tensor = self._glu(saved, return_preact=True)[1]
            return preact
        return grouped_mm(
            saved["x"], saved["w1"], bias=saved["b1"], rows=saved.get("rows"), transpose_w=self.transpose_w,
            **groups_of(saved),
        )  # fmt: skip

    def _gradients(
        self, saved: dict[str, Any], targets: Targets | None, dy: Tensor, wanted: frozenset[str]
    ) -> DataGradients:
        """Of rows; x's goes where `targets` says, or, without, to a new tensor whose tail is uninitialised."""
        groups, dx = groups_of(saved), None
        dpreact, act, d_scale = grouped_dglu(
            dy, saved["w2"], self.take_preact(saved), rows=saved.get("rows"), row_scale=saved.get("row_scale"),
            row_scale_grad="row_scale" in wanted, transpose_w=self.transpose_w, **groups, **self.form,
        )  # fmt: skip
        if "x" in wanted:
            w1 = saved["w1"]
            dx = None if targets is None else targets.new_grad_input(dy, contracted(w1, self.transpose_w))
            dx = grouped_mm(dpreact, w1, transpose_w=not self.transpose_w, out=dx, **groups)
        return DataGradients(dpreact, act, dx, d_scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantisedPath(DataPath):
    """In MXFP8; `form` has the recipe as well, and whether a weight is trained. Forward quantises each token once."""

    need_preact = BEHIND_THE_ACTIVATION | {"w2"}  # the activation was never there in 16 bits
    copies_forward = False

    def _forward(
        self, given: dict[str, Any], keep_preact: bool, keep_act: bool, out: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        y, preact = mxfp8.forward(
            given["x"], given["w1"], given["w2"], row_scale=given["row_scale"], b1=given["b1"], b2=given["b2"],
            rows=given.get("rows"), out=out, **groups_of(given), **self.form,
        )  # fmt: skip
        return y, {"preact": preact} if keep_preact else {}

    def _new_preact(self, saved: dict[str, Any]) -> Tensor:
        return self._forward({**saved, "b2": None}, True, False, None)[1]["preact"]

    def _gradients(
        self, saved: dict[str, Any], targets: Targets | None, dy: Tensor, wanted: frozenset[str]
    ) -> DataGradients:
        out = targets.given_grad_input(dy) if targets is not None and "x" in wanted else None
        return mxfp8.backward(
            dy, saved.get("w1"), saved["w2"], self.take_preact(saved), row_scale=saved.get("row_scale"),
            input_grad="x" in wanted, row_scale_grad="row_scale" in wanted, rows=saved.get("rows"), out=out,
            **groups_of(saved), **self.form,
        )  # fmt: skip
