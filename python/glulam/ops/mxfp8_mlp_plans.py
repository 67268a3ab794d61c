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
from ..groups import OFFS_INT32
from ..mxfp8.layout import BLOCK, DATA_DTYPE
from ..plan import Launch, address, addresses, aligned_row
from ..signature import mismatch
from .rows import NO_SUMS, Sums, check_tokens, sums_of


def layout(launch: Launch, shape: tuple[int, int], dtype: torch.dtype) -> workspace.Layout:
    return workspace.Layout(shape, dtype, launch.device, launch.index)


def layouts_in_mxfp8(launch: Launch, *shapes: tuple[int, int]) -> list[Any]:
    """Of matrices of these shapes, and the bytes of their scales."""
    data = [layout(launch, shape, DATA_DTYPE) for shape in shapes]
    return [*data, *[rows * -(-width // BLOCK) for rows, width in shapes]]


Memory = workspace.Several
Tensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""x, w1, w2 and y."""
Addresses = tuple[int, ...]
"""Of group sizes and tickets, the weights' scales, biases and tables of biases, the row scale, and rows' indices."""
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

    def launch(
        self, tensors: Tensors, x_scale: Tensor | None, memory: Memory, at: Addresses, sums: Sums
    ) -> None:  # fmt: skip
        """Call the function: what the recipes differ in."""
        raise NotImplementedError

    def run(
        self, x: Tensor, x_scale: Tensor | None, w1: Tensor, w1_scale: Tensor, w2: Tensor, w2_scale: Tensor,
        groups: Tensor, b1: Any, b2: Any, scale: Tensor | None, out: Tensor | None, rows: Tensor | None = None,
        row_of: Tensor | None = None, residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if not self.only and gpus.current() != self.index:
            with torch.cuda.device(self.index):
                return self.run(
                    x, x_scale, w1, w1_scale, w2, w2_scale, groups, b1, b2, scale, out, rows, row_of, residual
                )
        groups_at, w1_scale_at, w2_scale_at = groups.data_ptr(), w1_scale.data_ptr(), w2_scale.data_ptr()
        scale_at = 0 if scale is None else scale.data_ptr()
        b1_at = b1_table = b1_mark = b2_at = b2_table = b2_mark = 0
        if b1 is not None:
            b1_at, b1_table, b1_mark = addresses(b1)
        if b2 is not None:
            b2_at, b2_table, b2_mark = addresses(b2)
        rows_at = 0 if rows is None else rows.data_ptr()
        at: Any = (
            x.data_ptr(), 0 if x_scale is None else x_scale.data_ptr(), w1.data_ptr(), w1_scale_at, w2.data_ptr(),
            w2_scale_at, groups_at, scale_at, b1_mark, b2_mark, rows_at, 0 if out is None else out.data_ptr(),
        )  # fmt: skip
        if row_of is not None:
            at = (*at[:-1], row_of.data_ptr(), address(residual), at[-1])
        if at not in self.apart:
            of_tokens = {} if row_of is None else {"row_of": row_of, "residual": residual}
            if row_of is not None:
                check_tokens(self.op, row_of.shape[0], x=x, residual=residual, out=out)
            if x_scale is not None and len(x_scale) != len(x):
                mismatch(self.op, "x's scale", x_scale.shape, (len(x), x_scale.shape[1]), "x has so many rows")
            self.check_apart(
                at, out, x=x, x_scale=x_scale, w1=w1, w1_scale=w1_scale, w2=w2, w2_scale=w2_scale, groups=groups,
                row_scale=scale, b1=b1, b2=b2, rows=rows, **of_tokens,
            )  # fmt: skip
        if self.rows == 1 or rows is not None:
            x = aligned_row(x)
        if row_of is None:
            y = out = x.new_empty(self.rows, self.width, dtype=self.dtype) if out is None else out
            sums = NO_SUMS
        else:
            y = x.new_empty(self.rows, self.width, dtype=self.dtype)
            out = x.new_empty(row_of.shape[0], self.width, dtype=self.dtype) if out is None else out
            sums = sums_of(row_of, residual, out)
        if self.rows == 1:
            y = aligned_row(y)
        memory = workspace.take_all(self.memory)  # held until all is launched: a graph's own is freed with it
        tickets = self.tickets() if self.draws_tickets else 0
        given = groups_at, tickets, w1_scale_at, w2_scale_at, b1_at, b1_table, b2_at, b2_table, scale_at, rows_at
        self.launch((x, w1, w2, y), x_scale, memory, given, sums)
        return out


class QuantisedPlan(Mxfp8MlpPlan):
    """FP8 GEMMs; x in 16 bits, which the same function quantises. `memory`: x and the activation, and their scales."""

    @by_name(function=_signature("mxfp8", _TILE))
    def launch(
        self, tensors: Tensors, x_scale: Tensor | None, memory: Memory, at: Addresses, sums: Sums
    ) -> None:  # fmt: skip
        x, w1, w2, y = tensors
        x8, mid8, x8_scale, mid_scale = memory
        groups, tickets, w1_scale, w2_scale, b1, b1_table, b2, b2_table, scale, rows = at
        kind, layout, limit, alpha, offset = self.params
        self.function(
            x=x, x8=x8, x8_scale=x8_scale, w1=w1, w1_scale=w1_scale, w2=w2, w2_scale=w2_scale,
            mid=mid8, mid_scale=mid_scale, y=y,
            groups=groups, group_form=self.group_form, num_groups=self.experts, tickets=tickets,
            b1=b1, b1_table=b1_table, b2=b2, b2_table=b2_table,
            scale=scale, kind=kind, glu_layout=layout, limit=limit, alpha=alpha, offset=offset, num_sms=self.sm_count,
            rows=rows, row_of=sums.row_of, residual=sums.residual, out=sums.out, tokens=sums.tokens, k=sums.k,
        )  # fmt: skip


class ReadyPlan(Mxfp8MlpPlan):
    """FP8 GEMMs on an x in MXFP8. `memory`: the activation and its scales."""

    @by_name(function=_signature("mxfp8", _TILE, quantized=True))
    def launch(
        self, tensors: Tensors, x_scale: Tensor | None, memory: Memory, at: Addresses, sums: Sums
    ) -> None:  # fmt: skip
        x, w1, w2, y = tensors
        mid8, mid_scale = memory
        groups, tickets, w1_scale, w2_scale, b1, b1_table, b2, b2_table, scale, rows = at
        kind, layout, limit, alpha, offset = self.params
        self.function(
            x=x, x_scale=x_scale.data_ptr(), w1=w1, w1_scale=w1_scale, w2=w2, w2_scale=w2_scale,  # type: ignore[union-attr]
            mid=mid8, mid_scale=mid_scale, y=y,
            groups=groups, group_form=self.group_form, num_groups=self.experts, tickets=tickets,
            b1=b1, b1_table=b1_table, b2=b2, b2_table=b2_table,
            scale=scale, kind=kind, glu_layout=layout, limit=limit, alpha=alpha, offset=offset, num_sms=self.sm_count,
            rows=rows, row_of=sums.row_of, residual=sums.residual, out=sums.out, tokens=sums.tokens, k=sums.k,
        )  # fmt: skip


class WeightOnlyPlan(Mxfp8MlpPlan):
    """Weights decoded for 16-bit GEMMs. `memory`: the activation; of a layer also a copy of each row's token."""

    @by_name(function=_signature("mxfp8_weight_only", _SWAPPED))
    def launch(
        self, tensors: Tensors, x_scale: Tensor | None, memory: Memory, at: Addresses, sums: Sums
    ) -> None:  # fmt: skip
        x, w1, w2, y = tensors
        groups, tickets, w1_scale, w2_scale, b1, b1_table, b2, b2_table, scale, _ = at
        mid, x_tokens = memory[0], 0
        if sums.row_of:
            given = x if x.is_contiguous() else x.contiguous()
            x, x_tokens = memory[1], given.data_ptr()
        kind, layout, limit, alpha, offset = self.params
        self.function(
            x=x, x_tokens=x_tokens, w1=w1, w1_scale=w1_scale, w2=w2, w2_scale=w2_scale, mid=mid, y=y,
            groups=groups, group_form=self.group_form, num_groups=self.experts, tickets=tickets,
            b1=b1, b1_table=b1_table, b2=b2, b2_table=b2_table,
            scale=scale, kind=kind, glu_layout=layout, limit=limit, alpha=alpha, offset=offset, num_sms=self.sm_count,
            row_of=sums.row_of, residual=sums.residual, out=sums.out, tokens=sums.tokens, k=sums.k,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ExactPlan(WeightOnlyPlan):
    """The same of an x that is rounded to MXFP8 values, by a call of its own. `memory`: the activation, such an x, a
    layer's copy as above.
    """

    round: Callable[..., Any]

    @by_name(round=signature_of(QuantizeMxfp8Spec(rounded=True)))
    def launch(
        self, tensors: Tensors, x_scale: Tensor | None, memory: Memory, at: Addresses, sums: Sums
    ) -> None:  # fmt: skip
        x, w1, w2, y = tensors
        mid, rounded, *copy = memory
        until = self.group_form == OFFS_INT32 and not at[-1]
        self.round(x=x, out=rounded, offs=at[0] if until else 0, num_groups=self.experts if until else 1)
        WeightOnlyPlan.launch(self, (rounded, w1, w2, y), None, (mid, *copy), at, sums)
