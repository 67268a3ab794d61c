"""Epilogues: what happens to accumulators between the last wgmma and the store.

wgmma's accumulator of 64 x n gives thread t of the warpgroup, for each 8 columns j and v = 0..3, the element
(16 (t / 32) + (t % 32) / 4 + 8 (v / 2), 8 j + 2 (t % 4) + v % 2) at register 4 j + v.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, const_expr

from .. import activation as act
from ..chosen import chosen
from ..gmem import vector_at
from ..invariant import Invariant
from ..specs import BLOCK_ROWS, LAYOUT_FORMS, LAYOUTS, GroupedGluSpec
from ..tiles import TileConfig
from .scales import power_of_two
from .store import ROWS, SLOTS, RaggedStore, Slots, halves, narrowed
from .tile_scheduler import Groups, WorkTile
from .turns import THREADS
from .weights import NO_GATE, GateRows, row_of

UPPER_HALF = -(1 << 16)


class Addends(NamedTuple):
    """Optional inputs of an epilogue as device addresses, 0 where absent.

    Biases are packed [E, columns] at `bias`, or `bias_table` holds an address for each expert. `scale` is float32 [T].
    """

    bias: Int64
    bias_table: Int64
    scale: Int64


def registers(acc: cute.Tensor, first: int = 0, count: int | None = None) -> cute.Tensor:
    """A thread's accumulators as a vector, in the order above."""
    count = cute.size(acc) - first if count is None else count
    return cute.make_tensor(acc.iterator + first, cute.make_layout(count))


def chunk_of(acc: cute.Tensor, chunk: int, cols: int) -> cute.Tensor:
    """A thread's accumulators of one chunk of `cols` columns."""
    regs = ROWS * cols // THREADS
    return registers(acc, chunk * regs, regs)


class TileShare(NamedTuple):
    """A warpgroup's share of a tile: its slabs from `first_slab` on. `turn`: the tiles that the CTA had before."""

    first_slab: Int32
    turn: Int32


def share_of(tile: TileConfig, turn: Int32, warpgroup: Int32) -> TileShare:
    """A warpgroup's share of the CTA's tile number `turn`."""
    return TileShare(Int32(0) if tile.takes_turns else warpgroup, turn)


class Inputs(NamedTuple):
    """Run-time inputs of a GEMM's epilogue.

    bias_size: the number of elements of an expert's bias, and of its weight rows. w_scale: the address of a scale byte
    for each weight row, [E, bias_size], where weights are folded. out_scale: where those of a quantised result go.
    gate: where a gated layer's weight rows lie.
    """

    addends: Addends
    params: act.ActivationParams
    bias_size: Int32
    w_scale: Int64 = Int64(0)
    out_scale: Int64 = Int64(0)
    gate: GateRows = NO_GATE


class ColumnSmem(NamedTuple):
    """A warpgroup's shared memory for its tile's columns: biases, and scale bytes where weights have them."""

    bias: cute.Tensor
    scales: Any  # cute.Tensor | None


class Begun(NamedTuple):
    """A thread's row scales, two a slab, and scale bytes of columns, on their way while the mainloop runs."""

    row_scales: cute.Tensor
    column_scales: cute.Tensor | None


class WarpgroupState(Invariant):
    """What one MMA warpgroup's epilogue holds while the kernel runs."""

    def __init__(self, inputs: Any, slots: Slots, smem: ColumnSmem):
        self.inputs = inputs
        self.addends = inputs.addends
        self.params = inputs.params
        self.bias_size = inputs.bias_size
        self.slots = slots
        self.smem = smem
        self.lane = slots.thread % 32
        self.row_in_slab = slots.thread // 32 * 16 + self.lane // 4

    def has_bias(self) -> cutlass.Boolean:
        return (self.addends.bias | self.addends.bias_table) != 0


class Epilogue(Invariant):
    """Compile-time half of an epilogue; a warpgroup calls `begin` before a tile's mainloop and `finish` after it.

    `begin` fetches what the tile needs beside the accumulators, so that its latency hides behind the MMAs: two row
    scales a thread and slab, and the tile's biases into the warpgroup's row of shared memory.

    scales_columns: weights are folded, with a scale for each of their rows.
    parts: how many row ranges of the weights one tile takes. layout: where they lie (weights.py).
    num_slots: staging slots of each warpgroup, or of all together (`shares_slots`). num_barriers: for loads, if any.
    has_load_role: a warp of its own makes them (`load`).
    cols: of a chunk, which a slot holds. slot_row_bytes: of its rows.
    chunks_per_slab: chunks that a slab of 64 rows stores, over all outputs.
    """

    shares_slots = False

    def __init__(
        self, dtype: type[cutlass.Numeric], tile: TileConfig, parts: int = 1, layout: str = "concat",
        scales_columns: bool = False,
    ):  # fmt: skip
        self.tile = tile
        self.scales_columns = scales_columns
        self.tile_n = tile.n
        self.slabs = tile.slabs
        self.parts = parts
        self.part_n = tile.n // parts
        self.layout = layout
        self.cols = tile.chunk_columns
        self.dtype = dtype
        self.slot_dtype = dtype
        self.slot_row_bytes = self.cols * dtype.width // 8
        self.num_slots = SLOTS
        self.num_barriers = 0
        self.has_load_role = False
        self.chunks_per_slab = self.part_n // self.cols

    def kernel_inputs(self, inputs: Any) -> Any:
        """Host side: the epilogue's inputs as the kernel takes them."""
        return inputs

    def make_ring(self, barriers: cute.Pointer, staging: cute.Tensor) -> Any:
        """The ring through which `load` feeds `finish`; made by all threads before the roles part."""
        return None

    def load(self, ring: Any, inputs: Any, work: WorkTile, turn: Int32) -> None:
        """Bring what `finish` reads of the CTA's tile number `turn`; called by a warp of its own if there is a ring."""

    def make_state(self, inputs: Any, groups: Groups, slots: Slots, smem: ColumnSmem, ring: Any) -> WarpgroupState:
        return WarpgroupState(inputs, slots, smem)

    def store_views(self, outputs: tuple, inputs: Any) -> tuple:
        """How the outputs look to TMA stores."""
        return outputs

    def bias_index(self, state: WarpgroupState, column: Int32, part: Int32) -> Int32:
        """The element of the bias behind a column of a part of the tile; past the end where there is none."""
        return column

    def finish_slab(
        self, state: Any, acc: cute.Tensor, scales: cute.Tensor, stores: tuple, work: WorkTile, row: Int32,
        first_slot: int,
    ) -> None:  # fmt: skip
        """Turn the accumulators of the 64 rows from `row` on into stores, the first of them from `first_slot`."""
        raise NotImplementedError

    @cute.jit
    def finish(
        self, state: WarpgroupState, acc: cute.Tensor, begun: Begun, stores: tuple, work: WorkTile,
        share: TileShare,
    ):  # fmt: skip
        """Turn a warpgroup's accumulators into stores."""
        scales = begun.row_scales
        if const_expr(self.scales_columns):
            self._put_column_scales(state, begun.column_scales)
        for slab in cutlass.range_constexpr(self.slabs):
            row = work.row + (share.first_slab + slab) * ROWS
            first_slot = slab * self.chunks_per_slab % SLOTS
            count = cute.size(acc) // self.slabs
            values, two_scales = registers(acc, slab * count, count), registers(scales, 2 * slab, 2)
            # Of a cooperative tile a warpgroup may have no rows, and it holds back nobody by going on.
            if const_expr(self.tile.takes_turns):
                self.finish_slab(state, values, two_scales, stores, work, row, first_slot)
            elif row < work.group_end:
                self.finish_slab(state, values, two_scales, stores, work, row, first_slot)

    @cute.jit
    def begin(self, state: WarpgroupState, work: WorkTile, share: TileShare) -> Begun:
        """Fetch the biases into shared memory and return this thread's two row scales of each slab."""
        scales = cute.make_rmem_tensor(2 * self.slabs, Float32)
        scales.fill(1.0)
        if state.addends.scale != 0:
            scale = vector_at(Float32, state.addends.scale)
            for i in cutlass.range_constexpr(2 * self.slabs):
                row = work.row + (share.first_slab + i // 2) * ROWS + state.row_in_slab + i % 2 * 8
                if row < work.group_end:
                    scales[i] = scale[row]
        if state.has_bias():
            self._fetch_bias(state, work)
        return Begun(scales, self._fetch_column_scales(state, work) if const_expr(self.scales_columns) else None)

    @cute.jit
    def _fetch_bias(self, state: WarpgroupState, work: WorkTile):
        address = state.addends.bias + Int64(work.expert) * state.bias_size * (self.dtype.width // 8)
        if state.addends.bias_table != 0:
            address = vector_at(Int64, state.addends.bias_table)[work.expert]
        bias = vector_at(self.dtype, address)
        for i in cutlass.range_constexpr((self.tile_n + THREADS - 1) // THREADS):
            column, element = self._element(state, work, i)
            if column < self.tile_n:
                # Columns without a weight row count in the scale of a quantised result: zeros.
                if element < state.bias_size:
                    state.smem.bias[column] = bias[element]
                else:
                    state.smem.bias[column] = self.dtype(0)

    @cute.jit
    def _fetch_column_scales(self, state: WarpgroupState, work: WorkTile) -> cute.Tensor:
        """Scale bytes of the columns that this thread fetches for."""
        scales = vector_at(Uint8, state.inputs.w_scale + Int64(work.expert) * state.bias_size)
        count = (self.tile_n + THREADS - 1) // THREADS
        fetched = cute.make_rmem_tensor(count, Int32)
        for i in cutlass.range_constexpr(count):
            column, element = self._element(state, work, i)
            fetched[i] = Int32(0)
            if (column < self.tile_n) & (element < state.bias_size):
                fetched[i] = Int32(scales[element]) & 0xFF
        return fetched

    @cute.jit
    def _put_column_scales(self, state: WarpgroupState, fetched: cute.Tensor):
        for i in cutlass.range_constexpr(cute.size(fetched)):
            column = state.slots.thread + i * THREADS
            if column < self.tile_n:
                state.smem.scales[column] = power_of_two(fetched[i]).to(BFloat16)
        state.slots.sync()

    def _element(self, state: WarpgroupState, work: WorkTile, i: int) -> tuple[Int32, Int32]:
        """The i-th column of the tile that this thread fetches for, and the weight row behind it."""
        column = state.slots.thread + i * THREADS
        part, column_in_part = column // self.part_n, column % self.part_n
        return column, self.bias_index(state, work.n_tile * self.part_n + column_in_part, part)

    @cute.jit
    def _scale_columns(self, state: WarpgroupState, acc: cute.Tensor):
        """acc *= the scales of the weight rows behind its columns."""
        if const_expr(self.scales_columns):
            values = registers(acc)
            pairs = cute.recast_tensor(state.smem.scales, Int32)
            for i in cutlass.range_constexpr(self.tile_n // 8):
                two = pairs[4 * i + state.lane % 4]
                for pair in cutlass.range_constexpr(2):
                    # A bfloat16 is the upper half of a float32.
                    bits = two << 16 if const_expr(pair == 0) else two & Int32(UPPER_HALF)
                    values[4 * i + pair] *= bits.bitcast(Float32)
                    values[4 * i + 2 + pair] *= bits.bitcast(Float32)

    @cute.jit
    def _add_bias(self, state: WarpgroupState, acc: cute.Tensor, scale_upper_row: Float32, scale_lower_row: Float32):
        """acc += bias, times a scale for each of the thread's two rows."""
        if state.has_bias():
            state.slots.sync()
            values = registers(acc)
            for i in cutlass.range(self.tile_n // 8 * 2, unroll_full=True):
                group, pair = i // 2, i % 2
                bias = Float32(state.smem.bias[8 * group + 2 * (state.lane % 4) + pair])
                values[4 * group + pair] += bias * scale_upper_row
                values[4 * group + 2 + pair] += bias * scale_lower_row


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
        return chosen(column < half, element, state.bias_size)

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
    slots: Slots, form: cutlass.Constexpr[str], layout: Int32, a: cute.Tensor, u: cute.Tensor, target: RaggedStore,
    work: WorkTile, row: Int32, column: Int32, first_slot: cutlass.Constexpr[int],
):  # fmt: skip
    """Store a slot's columns of each half, from `column` of a half on, as the two slots that the layout makes of them:
    `form`, or the one of its several that `layout` is.

    `target` has a mode for the half where the layout may be concat.
    """
    a, u = narrowed(a, slots.dtype), narrowed(u, slots.dtype)
    names = LAYOUT_FORMS[form]
    for i in cutlass.range_constexpr(2):
        slot = (first_slot + i) % SLOTS
        slots.acquire()
        _write_one_of(slots, names, layout, a, u, i, slot)
        in_halves, joined = column, 2 * column + i * slots.cols
        if const_expr(len(names) > 1):
            is_concat = layout == LAYOUTS["concat"]
            at, half = chosen(is_concat, in_halves, joined), chosen(is_concat, Int32(i), Int32(0))
        else:
            at, half = (in_halves, i) if const_expr(form == "concat") else (joined, None)
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
