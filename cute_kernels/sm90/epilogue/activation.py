"""Epilogues of a forward: results as they are, or activated, with or without the preactivation."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ... import activation as act
from ...device.select import select
from ...memory.weights import row_of
from ...schedule.work import WorkTile
from ...specs import BLOCK_ROWS, LAYOUT_FORMS, LAYOUTS, GroupedGluSpec
from ..budget import SLOTS
from ..fragments import chunk_of, registers
from .base import Epilogue, WarpgroupState
from .store import RaggedStore, Slots, halves, narrowed


class LinearEpilogue(Epilogue):
    """y = acc + bias * scale[row]."""

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
    """act = activation(acc + bias) * scale[row]; with a second store, the preactivation acc + bias as well.

    Gated, the accumulators are [a | u]: a thread holds both halves of each of its outputs. `in_order`: they are columns
    of w1 as they lie (natural_order.py), and so their biases and preactivations are as without a gate.
    """

    def __init__(self, dtype: type[cutlass.Numeric], spec: GroupedGluSpec, in_order: bool = False):
        self.spec = spec
        self.preact_chunks = spec.tile.n // spec.tile.chunk_columns if spec.save_preact else 0
        self.act_n = spec.tile.n // (1 + spec.gated)
        parts = 2 if spec.gated and not in_order else 1
        super().__init__(dtype, spec.tile, parts, spec.glu_layout)
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
        """One chunk of `cols` outputs."""
        outputs = act.activate(self.spec.activation, self.arguments_of(acc, chunk, cols), state.params)
        for i in cutlass.range_constexpr(cute.size(outputs)):
            outputs[i] *= scales[self.row_of_output(i)]
        return self.ordered(outputs, state.lane)

    def arguments_of(self, acc: cute.Tensor, chunk: int, cols: int) -> tuple[cute.Tensor, ...]:
        """What the activation takes: a chunk's accumulators, and, gated, their partners half a tile on."""
        return tuple(chunk_of(acc, part * (self.part_n // cols) + chunk, cols) for part in range(self.parts))

    def row_of_output(self, i: int) -> int:
        """Which of the thread's two rows the i-th of its outputs is in."""
        return i // 2 % 2

    def ordered(self, outputs: cute.Tensor, lane: Int32) -> cute.Tensor:
        """Outputs in the order of accumulators."""
        return outputs

    @cute.jit
    def _store_preact(
        self, state: WarpgroupState, acc: cute.Tensor, target: RaggedStore, work: WorkTile, row: Int32,
        first_slot: cutlass.Constexpr[int],
    ):  # fmt: skip
        """The accumulators in the order that `glu_layout` gives the columns of w1."""
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


@cute.jit
def store_gate_pair(
    slots: Slots, served: cutlass.Constexpr[str], layout: Int32, a: cute.Tensor, u: cute.Tensor, target: RaggedStore,
    work: WorkTile, row: Int32, column: Int32, first_slot: cutlass.Constexpr[int],
):  # fmt: skip
    """Store a slot's columns of each half, from `column` of a half on, as the two slots that the layout makes of them:
    `served`, or the one of its several that `layout` is.

    `target` has a mode for the half where the layout may be concat.
    """
    a, u = narrowed(a, slots.dtype), narrowed(u, slots.dtype)
    names = LAYOUT_FORMS[served]
    for i in cutlass.range_constexpr(2):
        slot = (first_slot + i) % SLOTS
        slots.acquire()
        _write_one_of(slots, names, layout, a, u, i, slot)
        in_halves, joined = column, 2 * column + i * slots.cols
        if const_expr(len(names) > 1):
            is_concat = layout == LAYOUTS["concat"]
            at, half = select(is_concat, in_halves, joined), select(is_concat, Int32(i), Int32(0))
        else:
            at, half = (in_halves, i) if const_expr(served == "concat") else (joined, None)
        slots.store(target, target.tile(work, row, at, half, slots.cols), slot)


@cute.jit
def _write_one_of(
    slots: Slots, names: cutlass.Constexpr[tuple], layout: Int32, a: cute.Tensor, u: cute.Tensor,
    i: cutlass.Constexpr[int], slot: cutlass.Constexpr[int],
):  # fmt: skip
    """Fill slot i of a pair from converted halves, in that of the layouts which `layout` is."""
    if const_expr(len(names) == 1):
        _write_of_pair(slots, names[0], a, u, i, slot)
    elif layout == LAYOUTS[names[0]]:
        _write_of_pair(slots, names[0], a, u, i, slot)
    else:
        _write_one_of(slots, names[1:], layout, a, u, i, slot)


def _write_of_pair(slots: Slots, name: str, a: cute.Tensor, u: cute.Tensor, i: int, slot: int) -> None:
    half = cute.size(a) // 2
    half_a, half_u = registers(a, i * half, half), registers(u, i * half, half)
    if name == "interleaved":
        _write_interleaved(slots, half_a, half_u, slot)
    elif name == "concat" or slots.cols == BLOCK_ROWS:
        slots.write(a if i == 0 else u, slot)
    else:
        slots.write(_joined(half_a, half_u), slot)


def _joined(first: cute.Tensor, second: cute.Tensor) -> cute.Tensor:
    """Two register vectors as one."""
    both = cute.make_rmem_tensor(cute.size(first) + cute.size(second), first.element_type)
    registers(both, 0, cute.size(first)).store(first.load())
    registers(both, cute.size(first)).store(second.load())
    return both


@cute.jit
def _write_interleaved(slots: Slots, a: cute.Tensor, u: cute.Tensor, slot: cutlass.Constexpr[int]):
    """A slot's columns a0 u0 a1 u1 ...: a thread's two a and two u of a row are 8 neighbouring bytes."""
    lane = slots.thread % 32
    for i in cutlass.range_constexpr(cute.size(a) // 2):
        quad = cute.make_rmem_tensor(4, a.element_type)
        for pair in cutlass.range_constexpr(2):
            quad[2 * pair] = a[2 * i + pair]
            quad[2 * pair + 1] = u[2 * i + pair]
        line = slots.smem[slots.thread // 32 * 16 + lane // 4 + i % 2 * 8, None, slot]
        cute.autovec_copy(quad, cute.local_tile(line, (4,), (i // 2 * 4 + lane % 4,)))
