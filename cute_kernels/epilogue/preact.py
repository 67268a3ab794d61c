"""Preactivations in the backward: they come into slots, their gradients take their place, and leave from there.

A chunk of 64 x 64 outputs has two slots of preactivations (one where there is no gate), in the layout that memory has.
The gradient of an element lies where the element does, so a warpgroup reads the pair of slots, overwrites it piece by
piece and stores it: neither the preactivations nor the gradients ever fill registers.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..device.invariant import Invariant
from ..schedule.work import WorkTile
from .gate_pair import halves
from .sizes import COLS
from .slots import Slots

# Columns of a slab that four 8 x 8 matrices a warp have, and a thread's elements of them.
PIECE = 16
PIECE_REGS = 8


class PreactLayout(Invariant):
    """Where the columns of a and u lie: "concat", "interleaved", "interleaved32", or one part alone ("single")."""

    def __init__(self, glu_layout: str, gated: bool):
        self.name = glu_layout if gated else "single"
        self.slots = 2 if gated else 1

    def view(self, tensor: cute.Tensor) -> cute.Tensor:
        """A tensor of preactivations, or of their gradients, as it is loaded and stored."""
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


class PreactPair(Invariant):
    """One thread's access to pairs, in accumulator order (fragments.py) within a piece of 16 columns.

    `ring`: has the layout, and knows by a chunk's number `act_slot(number)`, `slot(number, slot)` of its pair, and when
    to `wait` for that and to `release` it.
    """

    def __init__(self, ring: Any, slots: Slots):
        self.ring, self.layout, self.slots, self.dtype = ring, ring.layout, slots, slots.dtype

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
        """A slot's piece number `index` into registers."""
        raise NotImplementedError

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
    def store(self, target: Any, work: WorkTile, number: Int32, row: Int32, column: Int32):
        """Start storing a published pair; called by the storing warp."""
        for slot in cutlass.range_constexpr(self.layout.slots):
            at, half = self.layout.column(column, slot)
            self.slots.start(target.atom, target.tile(work, row, at, half), self.ring.slot(number, slot))
