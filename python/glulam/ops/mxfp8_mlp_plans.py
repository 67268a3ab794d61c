"""Plans of grouped_mlp by the recipes that quantise: what a call in its usual form passes to kernels.

The recipes differ in what kernels read and need besides (`given`); the rest of a call is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_kernels.chains import signature_of
from cute_kernels.signatures import Signature
from cute_kernels.specs import GroupedGluSpec, GroupedMlpSpec, GroupedMmSpec, QuantizeMxfp8Spec
from cute_kernels.tiles import TileConfig

from .. import device as gpus
from .. import workspace
from ..activations import KernelParams
from ..by_name import by_name
from ..dispatch import Problem
from ..groups import OFFS_INT32
from ..mxfp8.layout import BLOCK, DATA_DTYPE
from ..plan import Launch, addresses, aligned_row


def layout_of_rows(problem: Problem, launch: Launch, columns: int, dtype: torch.dtype) -> workspace.Layout:
    """Of a matrix with the rows of x."""
    return workspace.Layout((problem.rows, columns), dtype, launch.device, launch.index)


def layouts_in_mxfp8(problem: Problem, launch: Launch, *widths: int) -> list[Any]:
    """Of matrices with the rows of x and so many columns, and the bytes of their scales."""
    data = [layout_of_rows(problem, launch, width, DATA_DTYPE) for width in widths]
    return [*data, *[problem.rows * -(-width // BLOCK) for width in widths]]


Memory = workspace.Several
Tensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""x, w1, w2 and y."""
Addresses = tuple[int, int, int, int, int, int, int, int, int]
"""Of group sizes and tickets, the weights' scales, biases and tables of biases, and the row scale."""
_TILE, _SWAPPED = TileConfig(k=128), TileConfig(m=64, n=128, k=128, schedule="swapped")


def _signature(operands: str, tile: TileConfig, quantized: bool = False) -> Signature:
    fc1, fc2 = GroupedGluSpec(tile=tile, operands=operands), GroupedMmSpec(tile=tile, operands=operands)
    return signature_of(GroupedMlpSpec(fc1, fc2, quantized))


@dataclasses.dataclass(frozen=True)
class Mxfp8MlpPlan(Launch):
    """The constants of a call. `dtype`: of the result; `width`: its columns; `memory`: what a call needs besides."""

    width: int
    memory: workspace.Layouts
    params: KernelParams

    def launch(self, tensors: Tensors, x_scale: Tensor | None, memory: Memory, at: Addresses) -> None:
        """Call the function: what the recipes differ in."""
        raise NotImplementedError

    def run(
        self, x: Tensor, x_scale: Tensor | None, w1: Tensor, w1_scale: Tensor, w2: Tensor, w2_scale: Tensor,
        groups: Tensor, b1: Any, b2: Any, scale: Tensor | None, out: Tensor | None,
    ) -> Tensor:  # fmt: skip
        if not self.only and gpus.current() != self.index:
            with torch.cuda.device(self.index):
                return self.run(x, x_scale, w1, w1_scale, w2, w2_scale, groups, b1, b2, scale, out)
        groups_at, w1_scale_at, w2_scale_at = groups.data_ptr(), w1_scale.data_ptr(), w2_scale.data_ptr()
        scale_at = 0 if scale is None else scale.data_ptr()
        b1_at = b1_table = b1_mark = b2_at = b2_table = b2_mark = 0
        if b1 is not None:
            b1_at, b1_table, b1_mark = addresses(b1)
        if b2 is not None:
            b2_at, b2_table, b2_mark = addresses(b2)
        at = (
            x.data_ptr(), 0 if x_scale is None else x_scale.data_ptr(), w1.data_ptr(), w1_scale_at, w2.data_ptr(),
            w2_scale_at, groups_at, scale_at, b1_mark, b2_mark, 0 if out is None else out.data_ptr(),
        )  # fmt: skip
        if at not in self.apart:
            self.check_apart(
                at, out, x=x, x_scale=x_scale, w1=w1, w1_scale=w1_scale, w2=w2, w2_scale=w2_scale, groups=groups,
                row_scale=scale, b1=b1, b2=b2,
            )  # fmt: skip
        y = out = x.new_empty(self.rows, self.width, dtype=self.dtype) if out is None else out
        if self.rows == 1:
            x, y = aligned_row(x), aligned_row(y)
        memory = workspace.take_all(self.memory)  # held until all is launched: a graph's own is freed with it
        tickets = self.tickets() if self.draws_tickets else 0
        given = groups_at, tickets, w1_scale_at, w2_scale_at, b1_at, b1_table, b2_at, b2_table, scale_at
        self.launch((x, w1, w2, y), x_scale, memory, given)
        return out


class QuantisedPlan(Mxfp8MlpPlan):
    """FP8 GEMMs; x in 16 bits, which the same function quantises. `memory`: x and the activation, and their scales."""

    @by_name(function=_signature("mxfp8", _TILE))
    def launch(self, tensors: Tensors, x_scale: Tensor | None, memory: Memory, at: Addresses) -> None:
        x, w1, w2, y = tensors
        x8, mid8, x8_scale, mid_scale = memory
        groups, tickets, w1_scale, w2_scale, b1, b1_table, b2, b2_table, scale = at
        kind, layout, limit, alpha, offset = self.params
        self.function(
            x=x, x8=x8, x8_scale=x8_scale, w1=w1, w1_scale=w1_scale, w2=w2, w2_scale=w2_scale,
            mid=mid8, mid_scale=mid_scale, y=y,
            groups=groups, group_form=self.group_form, num_groups=self.experts, tickets=tickets,
            b1=b1, b1_table=b1_table, b2=b2, b2_table=b2_table,
            scale=scale, kind=kind, glu_layout=layout, limit=limit, alpha=alpha, offset=offset, num_sms=self.sm_count,
        )  # fmt: skip


class ReadyPlan(Mxfp8MlpPlan):
    """FP8 GEMMs on an x in MXFP8. `memory`: the activation and its scales."""

    @by_name(function=_signature("mxfp8", _TILE, quantized=True))
    def launch(self, tensors: Tensors, x_scale: Tensor | None, memory: Memory, at: Addresses) -> None:
        x, w1, w2, y = tensors
        mid8, mid_scale = memory
        groups, tickets, w1_scale, w2_scale, b1, b1_table, b2, b2_table, scale = at
        kind, layout, limit, alpha, offset = self.params
        self.function(
            x=x, x_scale=x_scale.data_ptr(), w1=w1, w1_scale=w1_scale, w2=w2, w2_scale=w2_scale,  # type: ignore[union-attr]
            mid=mid8, mid_scale=mid_scale, y=y,
            groups=groups, group_form=self.group_form, num_groups=self.experts, tickets=tickets,
            b1=b1, b1_table=b1_table, b2=b2, b2_table=b2_table,
            scale=scale, kind=kind, glu_layout=layout, limit=limit, alpha=alpha, offset=offset, num_sms=self.sm_count,
        )  # fmt: skip


class WeightOnlyPlan(Mxfp8MlpPlan):
    """Weights decoded for 16-bit GEMMs. `memory`: the activation."""

    @by_name(function=_signature("mxfp8_weight_only", _SWAPPED))
    def launch(self, tensors: Tensors, x_scale: Tensor | None, memory: Memory, at: Addresses) -> None:
        x, w1, w2, y = tensors
        (mid,) = memory
        groups, tickets, w1_scale, w2_scale, b1, b1_table, b2, b2_table, scale = at
        kind, layout, limit, alpha, offset = self.params
        self.function(
            x=x, w1=w1, w1_scale=w1_scale, w2=w2, w2_scale=w2_scale, mid=mid, y=y,
            groups=groups, group_form=self.group_form, num_groups=self.experts, tickets=tickets,
            b1=b1, b1_table=b1_table, b2=b2, b2_table=b2_table,
            scale=scale, kind=kind, glu_layout=layout, limit=limit, alpha=alpha, offset=offset, num_sms=self.sm_count,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ExactPlan(WeightOnlyPlan):
    """The same of rows that are rounded to MXFP8 values, by a call of its own. `memory`: the activation, such rows."""

    round: Callable[..., Any]

    @by_name(round=signature_of(QuantizeMxfp8Spec(rounded=True)))
    def launch(self, tensors: Tensors, x_scale: Tensor | None, memory: Memory, at: Addresses) -> None:
        x, w1, w2, y = tensors
        mid, rows = memory
        has_offs = self.group_form == OFFS_INT32
        self.round(x=x, out=rows, offs=at[0] if has_offs else 0, num_groups=self.experts if has_offs else 1)
        WeightOnlyPlan.launch(self, (rows, w1, w2, y), None, (mid,), at)
