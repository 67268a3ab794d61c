"""Gradients of x, row scales and biases through quantised weights, which are frozen (never trained).

Forward and backward decode the same quantised bytes, so no weight is ever stored in 16 bits; dx = dy W is `grouped_mm`
with transpose_w. Forward of a grouped_mlp computes h = x w1^T + b1, the activation and y in three calls, and keeps h
for backward. With `recompute`, forward is one fused call that keeps x, and backward recomputes h.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations import packed
from ..calls.roles import SUFFIXES, WEIGHTS
from ..errors import GradientNotSupported
from ..formats.scaled import Parts
from ..host import device as gpus
from ..host.groups import caller, is_after_groups
from ..ops.gate import gate, gate_gradients
from ..ops.mlp_training import DataGradients
from ..ops.quantized_mlp import QuantizedMlpCall
from ..ops.quantized_mm import QuantizedMmCall
from ..ops.quantized_weights import FORMS
from .data_path import NEED_ACT_GRADIENT, DataPath
from .mm import MmPath
from .parts import Targets
from .path import Declared, Path


@functools.cache
def part_names(name: str) -> tuple[str, ...]:
    """Return the names of the arguments that hold quantised weight `name`: its elements, scales and global scale."""
    return tuple(name + suffix for suffix in SUFFIXES)


def parts_of(given: dict[str, Any], name: str) -> Parts:
    """Return the tensors of a quantised weight as Parts: elements, scales and global scale.

    A part that `given` lacks is None, such as the global scale of a format that has none.

    Args:
        given: a call's arguments by name.
        name: the weight's name, such as "w1".
    """
    return Parts(*[given.get(part) for part in part_names(name)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frozen(Path):
    """Base of paths whose GEMMs multiply 16-bit matrices (x, or gradients) with quantised weights that are not trained.

    Attributes:
        recipe: the recipe's name.
    """

    recipe: str

    def reads(self, wanted: frozenset[str]) -> dict[str, bool]:
        """Return {argument: True if backward reads it} (`Path.reads`). A weight's scales are read if the weight is.

        wanted: names of the arguments that require a gradient.
        """
        read = super().reads(wanted)
        return {**read, **{part: read[name] for name in read if name in WEIGHTS for part in part_names(name)}}

    def product(
        self, part: str, x: Tensor, w: Parts, groups: Tensor, over_rows: bool = False, bias: Any = None,
        bias_scale: Tensor | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute x w_e^T plus the bias, or with `over_rows` x w_e plus the bias; return [T, N].

        Args:
            part: name of this GEMM in the step.
            x: [T, K].
            w: the weight's elements, scales and global scale.
            groups: group sizes.
            over_rows: True: contract over the rows of each expert's weight (transpose_w). False: over its columns.
            bias: [E, N], or a list of E tensors. None: no bias.
            bias_scale: [T], a factor of each row's bias. None: 1.
            out: buffer for the result. None: a new tensor.
        """

        def call() -> Declared:
            absent = dict.fromkeys(QuantizedMmCall.names)
            return QuantizedMmCall, {**absent, "recipe": self.recipe, "transpose_w": over_rows}

        data, scale, global_scale = w
        made: Tensor = self.part(part, call)(
            x=x, w=data, w_scale=scale, w_global_scale=global_scale, bias=bias, bias_scale=bias_scale, groups=groups,
            out=out,
        )  # fmt: skip
        return made

    def input_gradient(
        self, targets: Targets | None, dy: Tensor, w: Parts, groups: Tensor, over_rows: bool
    ) -> Tensor:  # fmt: skip
        """Compute x's gradient, the `product` of dy and w.

        Args:
            targets: buffers for gradients. The gradient goes into its buffer, or else into a new tensor, with zeros
                after the last group. None: the gradient goes into a new tensor, uninitialised after the last group,
                where nobody reads.
            dy: gradient of the GEMM's result.
            w: the weight's elements, scales and global scale.
            groups: group sizes.
            over_rows: True: contract over the rows of each expert's weight. False: over its columns.
        """
        if targets is None:
            return self.product("x", dy, w, groups, over_rows)
        if gpus.is_traced(dy):  # inductor takes no operator that writes a buffer and reads E8M0 scales
            dx = self.product("x", dy, w, groups, over_rows)
            return dx.masked_fill(is_after_groups(dx, **self.sizes(groups))[:, None], 0)
        columns = FORMS[self.recipe].columns(w.data) if over_rows else int(w.data.shape[1])
        return self.product("x", dy, w, groups, over_rows, out=targets.new_grad_input(dy, columns))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenMm(Frozen, MmPath):
    """The path (forward and gradients, see `path.Path`) of grouped_mm with a quantised weight."""

    @classmethod
    def of(cls, call: Any) -> FrozenMm:
        """Return the path of a QuantizedMmCall."""
        return cls(recipe=call.recipe, transpose_w=call.transpose_w)

    def forward(
        self, given: dict[str, Any], wanted: frozenset[str], out: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        addends = {name: given[name] for name in ("bias", "bias_scale")}
        w = parts_of(given, "w")
        return self.product("forward", given["x"], w, given["groups"], self.transpose_w, **addends, out=out), {}

    def gradient_of_x(self, saved: dict[str, Any], targets: Targets, dy: Tensor) -> Tensor:
        return self.input_gradient(targets, dy, parts_of(saved, "w"), saved["groups"], not self.transpose_w)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenPath(Frozen, DataPath):
    """The path (forward and gradients, see `path.Path`) of grouped_mlp and moe with 16-bit x and quantised weights.

    In a moe, tokens are copied to T rows for the GEMMs, since these GEMMs cannot read tokens by index.
    """

    need_preact = NEED_ACT_GRADIENT - {"w1"}
    reads_by_index = fuses = False

    @property
    def op(self) -> str:
        """The operator's name in errors. A planned step knows its call; other steps run in a `part_of`."""
        return (self.kind or QuantizedMlpCall).op

    def copies(self, x: Tensor, row_of: Any, w2: Any) -> bool:
        """Return True for a moe: tokens are always copied to T rows, whatever the arguments; see the class."""
        return self.tokens is not None

    def _forward(
        self, given: dict[str, Any], keep_preact: bool, keep_act: bool, out: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        groups = given["groups"]
        if not keep_preact:
            tensors = {name: given.get(name) for name in (*self.inputs, *QuantizedMlpCall.beside_weights)}
            y: Tensor = self.part("forward", self._call)(**tensors, groups=groups, out=out)
            return y, {}
        preact = self._new_preact(given)
        act = gate(preact, given["row_scale"], **self.activation_options)
        bias = given["b2"]
        scale = None if bias is None else given["row_scale"]
        y = self.product("fc2", act, parts_of(given, "w2"), groups, bias=bias, bias_scale=scale, out=out)
        return y, {"preact": preact}

    def _call(self) -> Declared:
        absent = dict.fromkeys(QuantizedMlpCall.names)
        return QuantizedMlpCall, {
            **absent,
            **packed(self.activation_options),
            "recipe": self.recipe,
            "recompute": False,
        }

    def _new_preact(self, saved: dict[str, Any]) -> Tensor:
        groups, bias = saved["groups"], saved["b1"]
        w1, factors = without_factors(parts_of(saved, "w1"), self.op)
        if factors is None:
            return self.product("preact", saved["x"], w1, groups, bias=bias)
        return times_factors(self.product("preact", saved["x"], w1, groups), factors, self.sizes(groups), bias)

    def _gradients(
        self, saved: dict[str, Any], targets: Targets | None, dy: Tensor, wanted: frozenset[str]
    ) -> DataGradients:
        groups, w1, w2 = saved["groups"], parts_of(saved, "w1"), parts_of(saved, "w2")
        d_act = self.product("activation", dy, w2, groups, over_rows=True)
        preact, row_scale, sizes = self._take_preact(saved), saved.get("row_scale"), self.sizes(groups)
        dpreact, d_scale = gate_gradients(
            d_act, preact, row_scale, "row_scale" in wanted, sizes, **self.activation_options
        )
        dx = None
        if "x" in wanted:
            w1, factors = without_factors(w1, self.op)
            # dx = dh w1_e sums over w1's rows, so their factors are applied to dh.
            dh = dpreact if factors is None else times_factors(dpreact, factors, sizes)
            dx = self.input_gradient(targets, dh, w1, groups, over_rows=True)
        return DataGradients(dpreact, d_act, dx, d_scale)


def without_factors(w1: Parts, op: str = QuantizedMlpCall.op) -> tuple[Parts, Tensor | None]:
    """Separate the global scales from w1 if its two halves (gate and up-projection) have their own global scales.

    A GEMM that does not apply the activation treats w1 as one matrix, with one global scale; `times_factors` then
    applies the two.

    Args:
        w1: the weight.
        op: the operator's name in errors.

    Returns:
        (w1, None) if an expert has at most one global scale. Otherwise (w1 with the global scale 1, the global scales
        of the two halves, float32 [E, 2]).

    Raises:
        GradientNotSupported: each half has its own grid of block scales, which only FC1 fused with its activation can
            read.
    """
    data, scale, global_scale = w1
    if scale is not None and scale.dim() > data.dim():
        raise GradientNotSupported(
            f"{caller(op)}: w1 has halves of {data.shape[1] // 2} rows, which end inside a block of scales, "
            "so that neither gradients nor lora are served; give w1.dequantize(torch.bfloat16) and recipe 'bf16'"
        )
    if global_scale is None or global_scale.dim() < 2:
        return w1, None
    return w1._replace(global_scale=global_scale.new_ones(())), global_scale


def times_factors(rows: Tensor, factors: Tensor, groups: dict[str, Any], bias: Any = None) -> Tensor:
    """Multiply the two halves of each row by the two factors of its expert, and add the expert's bias.

    Args:
        rows: [T, 2I].
        factors: [E, 2], one for each half of the columns.
        groups: group sizes as a keyword, offs or splits.
        bias: [E, 2I], or a list of E. None: no bias.
    """
    ends = groups["offs"] if "offs" in groups else groups["splits"].cumsum(0)
    row = torch.arange(rows.shape[0], device=rows.device)
    expert = torch.searchsorted(ends.long(), row, right=True)  # E for rows after the last group
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32)).unflatten(1, (2, -1))
    scaled = (wide * factors[expert.clamp(max=len(factors) - 1)][:, :, None]).flatten(1)
    if bias is not None:
        packed_bias = bias if isinstance(bias, Tensor) else torch.stack(bias)
        scaled += F.pad(packed_bias, (0, 0, 0, 1))[expert]  # rows after the last group get zeros
    return scaled.to(rows.dtype)
