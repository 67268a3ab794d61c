"""Epilogues of the forward GEMMs. LinearEpilogue is for grouped_mm, y = x w^T with a scaled bias. ActivationEpilogue is
for FC1 (grouped_glu), which stores its activation with or without the preactivation. base.py explains the terms."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .. import activation as act
from ..device.select import select
from ..formats import OPERANDS
from ..memory.weights import row_of
from ..schedule.work import WorkTile
from ..specs import LAYOUTS, GroupedGluSpec
from .base import Epilogue, WarpgroupState
from .fragments import chunk_of
from .gate_pair import halves, store_gate_pair
from .sizes import SLOTS


class LinearEpilogue(Epilogue):
    """Epilogue of grouped_mm: y = acc + bias * scale[row]. The row scale multiplies only the bias, not acc."""

    @cute.jit
    def finish_slab(
        self, state: WarpgroupState, acc: cute.Tensor, scales: cute.Tensor, stores: tuple, work: WorkTile, row: Int32,
        first_slot: cutlass.Constexpr[int],
    ):  # fmt: skip
        self._scale_columns(state, acc)
        self._add_bias(state, acc, scales[0], scales[1])
        for chunk in cutlass.range_constexpr(self.tile_n // self.cols):
            tile = stores[0].tile(work, row, work.n_tile * self.tile_n + chunk * self.cols, cols=self.cols)
            state.slots.put(chunk_of(acc, chunk, self.cols), stores[0], tile, (first_slot + chunk) % SLOTS)


class ActivationEpilogue(Epilogue):
    """Epilogue of grouped_glu: act = activation(acc + bias) * scale[row]. If the spec saves the preactivation, a second
    store receives acc + bias.

    With a gate, the activation has two arguments: a (the activated half of w1's rows) and u (the linear half). The
    first half of a tile's columns is a and the second half is u, unless `in_order`. Either way a thread holds a and u
    of each of its outputs.

    Args:
        in_order: True: a and u alternate in the tile's columns as they do in w1's rows in memory (natural_order.py).
            Then biases and preactivations are handled as without a gate.

    Attributes:
        act_n: columns of a tile's activation.
        preact_chunks: chunks (columns that are stored at once) of the preactivation of a slab (64 rows); 0: not saved.
    """

    def __init__(self, dtype: type[cutlass.Numeric], spec: GroupedGluSpec, in_order: bool = False):
        self.spec = spec
        self.preact_chunks = spec.tile.n // spec.tile.chunk_columns if spec.save_preact else 0
        self.act_n = spec.tile.n // (1 + spec.gated)
        parts = 2 if spec.gated and not in_order else 1
        super().__init__(dtype, spec.tile, parts, spec.glu_layout, OPERANDS[spec.operands].w)
        self.chunks_per_slab = self.preact_chunks + self.act_n // self.cols

    def store_views(self, outputs: tuple, inputs: Any) -> tuple:
        if self.spec.save_preact and self.parts == 2:
            if self.layout == "concat":
                return outputs[0], halves(outputs[1])
            if self.layout not in LAYOUTS:
                return outputs[0], halves(outputs[1], inputs.gate.layout)
        return outputs

    def bias_index(self, state: WarpgroupState, column: Int32, part: Int32) -> Int32:
        if self.parts == 1:
            return column
        half = state.bias_size // 2
        element = row_of(self.layout, state.inputs.gate, column, part, half)
        return select(column < half, element, state.bias_size)

    @cute.jit
    def finish_slab(
        self, state: WarpgroupState, acc: cute.Tensor, scales: cute.Tensor, stores: tuple, work: WorkTile, row: Int32,
        first_slot: cutlass.Constexpr[int],
    ):  # fmt: skip
        self._scale_columns(state, acc)
        self._add_bias(state, acc, Float32(1.0), Float32(1.0))
        if const_expr(self.spec.save_preact):
            self._store_preact(state, acc, stores[1], work, row, first_slot)
        for chunk in cutlass.range_constexpr(self.act_n // self.cols):
            values = self._activated(state, acc, chunk, self.cols, scales)
            tile = stores[0].tile(work, row, work.n_tile * self.act_n + chunk * self.cols, cols=self.cols)
            state.slots.put(values, stores[0], tile, (first_slot + self.preact_chunks + chunk) % SLOTS)

    @cute.jit
    def _activated(
        self, state: WarpgroupState, acc: cute.Tensor, chunk: cutlass.Constexpr[int], cols: cutlass.Constexpr[int],
        scales: cute.Tensor,
    ) -> cute.Tensor:  # fmt: skip
        """Return the thread's activations of a chunk, times the row scales. They are in the order of accumulators
        (fragments.py). A chunk is the columns of a slab (64 rows) that are stored at once.

        Args:
            acc: the thread's accumulators of the slab, bias included.
            chunk: the chunk's number in the slab.
            cols: columns of a chunk.
            scales: row scales of the thread's two rows.
        """
        outputs = act.activate(self.spec.activation, self.arguments_of(acc, chunk, cols), state.params)
        for i in cutlass.range_constexpr(cute.size(outputs)):
            outputs[i] *= scales[self.row_of_output(i)]
        return self.ordered(outputs, state.lane)

    def arguments_of(self, acc: cute.Tensor, chunk: int, cols: int) -> tuple[cute.Tensor, ...]:
        """Return the activation's arguments for a chunk, from the thread's accumulators. They are a and, with a gate,
        u, which lies half a tile after a.

        Args:
            acc: the thread's accumulators of a slab (64 rows).
            chunk: the chunk's number in the slab.
            cols: columns of a chunk.
        """
        return tuple(chunk_of(acc, part * (self.part_n // cols) + chunk, cols) for part in range(self.parts))

    def row_of_output(self, i: int) -> int:
        """Return to which of its two rows (0 or 1) the thread's i-th output of a chunk belongs."""
        return i // 2 % 2

    def ordered(self, outputs: cute.Tensor, lane: Int32) -> cute.Tensor:
        """Return a chunk's outputs in the order of accumulators (fragments.py). They already are in this order here;
        subclasses reorder them."""
        return outputs

    @cute.jit
    def _store_preact(
        self, state: WarpgroupState, acc: cute.Tensor, target: Any, work: WorkTile, row: Int32,
        first_slot: cutlass.Constexpr[int],
    ):  # fmt: skip
        """Start to store the preactivation of a slab (64 rows of the tile), chunk by chunk. A chunk is the columns of
        the slab that fill one slot, a staging buffer in shared memory.

        In memory, the preactivation's columns have the order of w1's rows, which the spec's `glu_layout` names.

        Args:
            acc: the thread's accumulators of the slab, bias included.
            target: the object that stands for the preactivation [T, 2I or I] in global memory (a store, slots.py).
            row: the slab's first row.
            first_slot: the index of the slot of the first chunk. Further chunks take the next slots, around the ring.
        """
        for chunk in cutlass.range_constexpr(self.part_n // self.cols):
            a = chunk_of(acc, chunk, self.cols)
            if const_expr(self.parts == 2):
                u = chunk_of(acc, self.part_n // self.cols + chunk, self.cols)
                column = work.n_tile * self.part_n + chunk * self.cols
                layout = state.inputs.gate.layout
                store_gate_pair(state.slots, self.layout, layout, a, u, target, work, row, column, first_slot)
            else:
                tile = target.tile(work, row, work.n_tile * self.tile_n + chunk * self.cols, cols=self.cols)
                state.slots.put(a, target, tile, (first_slot + chunk) % SLOTS)
