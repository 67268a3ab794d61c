"""Epilogues: what happens to accumulators between the last wgmma and the store.

wgmma's accumulator of 64 x n gives thread t of the warpgroup, for each 8 columns j and v = 0..3, the element
(16 (t / 32) + (t % 32) / 4 + 8 (v / 2), 8 j + 2 (t % 4) + v % 2) at register 4 j + v.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .. import activation as act
from ..gmem import vector_at
from ..invariant import Invariant
from ..specs import GroupedGluSpec
from .store import CHUNK_REGS, COLS, SLOTS, THREADS, RaggedStore, Slots
from .tile_scheduler import WorkTile


class Addends(NamedTuple):
    """Optional inputs of an epilogue as device addresses, 0 where absent.

    Biases are packed [E, columns] at `bias`, or `bias_table` holds an address for each expert. `scale` is float32 [T].
    """

    bias: Int64
    bias_table: Int64
    scale: Int64


def chunk_of(acc: cute.Tensor, chunk: int) -> list[Float32]:
    """A thread's accumulators of one chunk of COLS columns."""
    return [acc[chunk * CHUNK_REGS + i] for i in range(CHUNK_REGS)]


class Epilogue(Invariant):
    """One warpgroup's epilogue on one tile after another: `begin` before the mainloop, `finish` after it.

    `begin` fetches what the tile needs beside the accumulators, so that its latency hides behind the MMAs: two row
    scales a thread, and the tile's biases into the warpgroup's row of shared memory.
    """

    parts = 1

    def __init__(self, addends: Addends, tile_n: int, num_weight_rows: Int32, slots: Slots, sBias: cute.Tensor):
        self.addends = addends
        self.tile_n = tile_n
        self.part_n = tile_n // self.parts
        self.num_weight_rows = num_weight_rows
        self.slots = slots
        self.sBias = sBias
        self.lane = slots.thread % 32
        self.row_in_tile = slots.thread // 32 * 16 + self.lane // 4

    def weight_row(self, column: Int32, part: Int32) -> Int32:
        """The row of w (and element of the bias) behind a column of a part of the tile."""
        return column

    @cute.jit
    def begin(self, work: WorkTile, row: Int32) -> cute.Tensor:
        """Fetch the biases into shared memory and return this thread's two row scales."""
        scales = cute.make_rmem_tensor(2, Float32)
        scales.fill(1.0)
        if self.addends.scale != 0:
            scale = vector_at(Float32, self.addends.scale)
            for i in cutlass.range_constexpr(2):
                if row + self.row_in_tile + 8 * i < work.group_end:
                    scales[i] = scale[row + self.row_in_tile + 8 * i]
        if self.has_bias():
            self._fetch_bias(work)
        return scales

    def has_bias(self) -> cutlass.Boolean:
        return (self.addends.bias | self.addends.bias_table) != 0

    @cute.jit
    def _fetch_bias(self, work: WorkTile):
        dtype = self.slots.dtype
        address = self.addends.bias + Int64(work.expert) * self.num_weight_rows * (dtype.width // 8)
        if self.addends.bias_table != 0:
            address = vector_at(Int64, self.addends.bias_table)[work.expert]
        bias = vector_at(dtype, address)
        for i in cutlass.range_constexpr((self.tile_n + THREADS - 1) // THREADS):
            column = self.slots.thread + i * THREADS
            weight_row = self.weight_row(work.n_tile * self.part_n + column % self.part_n, column // self.part_n)
            if (column < self.tile_n) & (weight_row < self.num_weight_rows):
                self.sBias[column] = bias[weight_row]

    @cute.jit
    def add_bias(self, acc: cute.Tensor, scale_even_rows: Float32, scale_odd_rows: Float32):
        """acc += bias, times a scale for each of the thread's two rows."""
        if self.has_bias():
            self.slots.sync()
            for i in cutlass.range_constexpr(self.tile_n // 8 * 2):
                group, pair = i // 2, i % 2
                bias = Float32(self.sBias[8 * group + 2 * (self.lane % 4) + pair])
                acc[4 * group + pair] += bias * scale_even_rows
                acc[4 * group + 2 + pair] += bias * scale_odd_rows


class LinearEpilogue(Epilogue):
    """y = acc + bias * scale[row]."""

    @cute.jit
    def finish(self, acc: cute.Tensor, scales: cute.Tensor, stores: tuple, work: WorkTile, row: Int32):
        self.add_bias(acc, scales[0], scales[1])
        for chunk in cutlass.range_constexpr(self.tile_n // COLS):
            values = chunk_of(acc, chunk)
            self.slots.put(values, stores[0], work, row, work.n_tile * self.tile_n + chunk * COLS, None, chunk % SLOTS)


class ActivationEpilogue(Epilogue):
    """act = activation(acc + bias) * scale[row]; with a second store, the preactivation acc + bias as well.

    Gated, the accumulators are [a | u]: a thread holds both halves of each of its outputs.
    """

    def __init__(self, spec: GroupedGluSpec, params: act.ActivationParams, *args):
        self.spec = spec
        self.params = params
        self.parts = 2 if spec.gated else 1
        super().__init__(*args)

    def weight_row(self, column: Int32, part: Int32) -> Int32:
        if not self.spec.gated:
            return column
        inside = column < self.num_weight_rows // 2
        row = {
            "concat": part * (self.num_weight_rows // 2) + column,
            "interleaved": 2 * column + part,
            "interleaved32": column // 32 * 64 + part * 32 + column % 32,
        }[self.spec.glu_layout]
        return Int32(cutlass.select_(inside, row, self.num_weight_rows))

    @cute.jit
    def finish(self, acc: cute.Tensor, scales: cute.Tensor, stores: tuple, work: WorkTile, row: Int32):
        self.add_bias(acc, Float32(1.0), Float32(1.0))
        if const_expr(self.spec.save_preact):
            self._store_preact(acc, stores[1], work, row)
        preact_chunks = self.tile_n // COLS if self.spec.save_preact else 0
        for chunk in cutlass.range_constexpr(self.part_n // COLS):
            values = self._activated(acc, chunk * CHUNK_REGS, scales)
            col = work.n_tile * self.part_n + chunk * COLS
            self.slots.put(values, stores[0], work, row, col, None, (preact_chunks + chunk) % SLOTS)

    def _activated(self, acc: cute.Tensor, first: int, scales: cute.Tensor) -> list[Float32]:
        """CHUNK_REGS outputs from the accumulators at `first` and, gated, from their partners half a tile on."""
        if self.spec.gated:
            half = cute.size(acc) // 2
            gated = act.GATED[self.spec.activation]
            outputs = [gated(acc[first + i], acc[half + first + i], self.params) for i in range(CHUNK_REGS)]
        else:
            outputs = [act.UNGATED[self.spec.activation](acc[first + i]) for i in range(CHUNK_REGS)]
        return [output * scales[i // 2 % 2] for i, output in enumerate(outputs)]

    @cute.jit
    def _store_preact(self, acc: cute.Tensor, target: RaggedStore, work: WorkTile, row: Int32):
        """The accumulators, 64 columns at a time, in the order that `glu_layout` gives the columns of w1."""
        for chunk in cutlass.range_constexpr(self.tile_n // COLS):
            slot = chunk % SLOTS
            col = work.n_tile * self.tile_n + chunk * COLS
            if const_expr(self.spec.gated and self.spec.glu_layout == "concat"):
                part, col_in_part = divmod(chunk * COLS, self.part_n)
                col = work.n_tile * self.part_n + col_in_part
                self.slots.put(chunk_of(acc, chunk), target, work, row, col, part, slot)
            elif const_expr(self.spec.gated and self.spec.glu_layout == "interleaved32"):
                self.slots.put(self._a32_u32(acc, chunk), target, work, row, col, None, slot)
            elif const_expr(self.spec.gated):
                self._put_interleaved(acc, chunk, target, work, row, col)
            else:
                self.slots.put(chunk_of(acc, chunk), target, work, row, col, None, slot)

    def _a32_u32(self, acc: cute.Tensor, chunk: int) -> list[Float32]:
        """32 columns of a, then the same 32 of u."""
        regs = CHUNK_REGS // 2
        half = cute.size(acc) // 2
        return [acc[part * half + chunk * regs + i] for part in range(2) for i in range(regs)]

    @cute.jit
    def _put_interleaved(
        self, acc: cute.Tensor, chunk: cutlass.Constexpr[int], target: RaggedStore, work: WorkTile, row: Int32,
        col: Int32,
    ):  # fmt: skip
        """64 columns a0 u0 a1 u1 ...: a thread's two a and two u of a row are 8 neighbouring bytes."""
        slots = self.slots
        slot = chunk % SLOTS
        half_regs = cute.size(acc) // 2
        slots.acquire()
        for i in cutlass.range_constexpr(CHUNK_REGS // 4):
            at = chunk * (CHUNK_REGS // 2) + i // 2 * 4 + i % 2 * 2
            quad = cute.make_rmem_tensor(4, Float32)
            for pair in cutlass.range_constexpr(2):
                quad[2 * pair] = acc[at + pair]
                quad[2 * pair + 1] = acc[half_regs + at + pair]
            out = cute.make_rmem_tensor(4, slots.dtype)
            out.store(quad.load().to(slots.dtype))
            line = slots.smem[self.row_in_tile + i % 2 * 8, None, slot]
            cute.autovec_copy(out, cute.local_tile(line, (4,), (i // 2 * 4 + self.lane % 4,)))
        slots.store(target, work, row, col, None, slot)
