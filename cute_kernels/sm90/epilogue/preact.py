"""Preactivations in the backward: TMA brings them, their gradients take their place, TMA stores those.

A chunk of 64 x 64 outputs has two slots of preactivations (one where there is no gate), in the layout that memory has.
The gradient of an element lies where the element does, so a warpgroup reads the pair of slots, overwrites it piece by
piece and stores it: neither the preactivations nor the gradients ever fill registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp

from ...device.invariant import Invariant
from ...schedule.work import WorkTile
from ..budget import PAIRS as PAIRS
from ..budget import ROWS, SLOT_BYTES
from .store import COLS, RaggedStore, Slots, halves, matrix_copy, smem_layout

# Columns of one ldmatrix or stmatrix of four 8 x 8 matrices, and a thread's elements in it.
PIECE = 16
PIECE_REGS = 8


class PreactLoads(NamedTuple):
    """A TMA load from the preactivations: (T, columns), or (T, I, half) where the layout is concat."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class PreactLayout(Invariant):
    """Where the columns of a and u lie: "concat", "interleaved", "interleaved32", or one part alone ("single")."""

    def __init__(self, glu_layout: str, gated: bool):
        self.name = glu_layout if gated else "single"
        self.slots = 2 if gated else 1

    def view(self, tensor: cute.Tensor) -> cute.Tensor:
        """A tensor of preactivations, or of their gradients, as TMA sees it."""
        return halves(tensor) if self.name == "concat" else tensor

    def slot_of(self, part: int, piece: int) -> tuple[int, int]:
        """The slot of a pair that holds a piece of 16 columns of a (part 0) or u (1), and its index there."""
        if self.name == "interleaved32":
            return piece // 2, part * 2 + piece % 2
        return part, piece

    def column(self, column: Int32, slot: int) -> tuple[Int32, int | None]:
        """The column in memory, and the half, of a slot of the chunk that begins at an output's `column`."""
        if self.name == "concat":
            return column, slot
        return (column, None) if self.name == "single" else (2 * column + slot * COLS, None)


def make_loads(preact: cute.Tensor, layout: PreactLayout) -> PreactLoads:
    """Host side: the descriptor for loading slots."""
    atom, view = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), layout.view(preact), smem_layout(preact.element_type), (ROWS, COLS)
    )
    return PreactLoads(atom, view)


class PreactRing(Invariant):
    """Staging slots of a CTA's chunks, which are numbered in the order of work: an act slot and a pair of them each.

    Pipeline of PAIRS stages. full: the bytes of a pair (epilogue load warp). empty: 1 arrival (the warp that stored the
    chunk, once its stores have read the slots). A full pair so means that its act slot is free, too.
    """

    def __init__(self, barriers: cute.Pointer, staging: cute.Tensor, layout: PreactLayout):
        self.layout = layout
        self.smem = staging[None, None, None, 0]
        self.pipeline = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=PAIRS,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
            tx_count=layout.slots * SLOT_BYTES,
            defer_sync=True,
        )

    def act_slot(self, number: Int32) -> Int32:
        """The staging slot of a chunk's act."""
        return number & (PAIRS - 1)

    def slot(self, number: Int32, slot: int) -> Int32:
        """The staging slot of one of the slots of a chunk's pair."""
        return PAIRS + self.act_slot(number) * self.layout.slots + slot

    def _state(self, number: Int32, is_producer: bool) -> pipeline.PipelineState:
        phase = number // PAIRS & 1
        return pipeline.PipelineState(PAIRS, number, self.act_slot(number), phase ^ 1 if is_producer else phase)

    @cute.jit
    def load(self, loads: PreactLoads, number: Int32, row: Int32, column: Int32):
        """Bring a chunk's preactivations; called by the epilogue load warp."""
        state = self._state(number, True)
        self.pipeline.producer_acquire(state)
        barrier = self.pipeline.producer_get_barrier(state)
        smem = cute.group_modes(self.smem, 0, 2)
        for slot in cutlass.range_constexpr(self.layout.slots):
            at, half = self.layout.column(column, slot)
            view = loads.tensor if const_expr(half is None) else loads.tensor[None, None, half]
            tile = cute.local_tile(cute.domain_offset((row, at), view), (ROWS, COLS), (0, 0))
            to, source = cpasync.tma_partition(loads.atom, 0, cute.make_layout(1), smem, cute.group_modes(tile, 0, 2))
            cute.copy(loads.atom, source, to[None, self.slot(number, slot)], tma_bar_ptr=barrier)

    def wait(self, number: Int32) -> None:
        self.pipeline.consumer_wait(self._state(number, False))

    def release(self, number: Int32) -> None:
        """Called by the storing warp."""
        self.pipeline.consumer_release(self._state(number, False))


class PreactPair(Invariant):
    """One thread's access to pairs, in accumulator order (fragments.py) within a piece of 16 columns."""

    def __init__(self, ring: PreactRing, slots: Slots):
        self.ring: Any = ring
        self.layout = ring.layout
        self.slots: Any = slots
        self.dtype = slots.dtype
        self.tiled_copy = matrix_copy(warp.LdMatrix8x8x16bOp(False, 4), self.dtype, COLS)
        self.source = self.tiled_copy.get_slice(slots.thread).partition_S(slots.smem)

    @cute.jit
    def read(self, number: Int32, piece: cutlass.Constexpr[int]) -> tuple:
        """A piece of a and of u (of a alone where there is no gate), 16-bit."""
        parts = tuple(cute.make_rmem_tensor(PIECE_REGS, self.dtype) for _ in range(self.layout.slots))
        if const_expr(self.layout.name == "interleaved"):
            for i in cutlass.range_constexpr(PIECE_REGS // 2):
                quad = self._quad(number, piece, i).load()
                for j in cutlass.range_constexpr(4):
                    parts[j % 2][2 * i + j // 2] = quad[j]
        else:
            for part in cutlass.range_constexpr(self.layout.slots):
                slot, index = self.layout.slot_of(part, piece)
                self.load_piece(parts[part], self.ring.slot(number, slot), index)
        return parts

    def load_piece(self, target: cute.Tensor, slot: Int32, index: int) -> None:
        source = cute.append_ones(self.source[(None, index), 0, 0, slot], 2)
        cute.copy(self.tiled_copy, source, cute.append_ones(target, 2))

    @cute.jit
    def write(self, number: Int32, piece: cutlass.Constexpr[int], parts: tuple):
        """Put gradients where `read` found their elements."""
        if const_expr(self.layout.name == "interleaved"):
            for i in cutlass.range_constexpr(PIECE_REGS // 2):
                quad = cute.make_rmem_tensor(4, self.dtype)
                for j in cutlass.range_constexpr(4):
                    quad[j] = parts[j % 2][2 * i + j // 2]
                cute.autovec_copy(quad, self._quad(number, piece, i))
        else:
            for part in cutlass.range_constexpr(self.layout.slots):
                slot, index = self.layout.slot_of(part, piece)
                self.slots.fill_piece(parts[part], self.ring.slot(number, slot), index)

    def _quad(self, number: Int32, piece: int, pair: int) -> cute.Tensor:
        """a0 u0 a1 u1 of a thread's pair of columns: 8 bytes in shared memory."""
        lane = self.slots.thread % 32
        row = self.slots.thread // 32 * 16 + lane // 4 + pair % 2 * 8
        line = self.slots.smem[row, None, self.ring.slot(number, piece // 2)]
        return cute.local_tile(line, (4,), (piece % 2 * 8 + pair // 2 * 4 + lane % 4,))

    @cute.jit
    def store(self, target: RaggedStore, work: WorkTile, number: Int32, row: Int32, column: Int32):
        """Start storing a published pair; called by the storing warp."""
        for slot in cutlass.range_constexpr(self.layout.slots):
            at, half = self.layout.column(column, slot)
            self.slots.start(target.atom, target.tile(work, row, at, half), self.ring.slot(number, slot))
