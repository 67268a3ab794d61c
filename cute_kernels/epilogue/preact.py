"""Preactivations in the backward. They are loaded into slots of shared memory, overwritten there by their gradients,
and the gradients are stored.

A chunk of 64 x 64 outputs has a pair of slots for its preactivations (one slot without a gate). The slots' columns have
the order of global memory. The gradient of an element takes the element's place. A warpgroup reads the pair piece by
piece (16 columns), overwrites each piece, and at last stores the pair. So registers never hold all of a chunk's
preactivations or gradients.
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

# Columns of a piece: four 8 x 8 matrices of each warp's 16 rows. PIECE_REGS: a thread's elements of a piece.
PIECE = 16
PIECE_REGS = 8


class PreactLayout(Invariant):
    """The order of the columns of a and u, both in a preactivation [T, 2I] in memory and in a chunk's slots.

    Attributes:
        name: a gate layout, or "single" without a gate.
        slots: number of slots that a chunk's preactivation takes.
    """

    def __init__(self, glu_layout: str, gated: bool):
        self.name = glu_layout if gated else "single"
        self.slots = 2 if gated else 1

    def view(self, tensor: cute.Tensor) -> cute.Tensor:
        """Return the view of a preactivation, or of its gradient, from which loads and stores are made: (T, I, half) in
        layout "concat", else `tensor` itself."""
        return halves(tensor) if self.name == "concat" else tensor

    def slot_of(self, part: int, piece: int) -> tuple[int, int]:
        """Return where a piece of 16 columns lies in a chunk's pair of slots: the slot (0 or 1), and the piece's index
        in this slot.

        Args:
            part: 0 (a, the activated half) or 1 (u, the linear half).
            piece: the piece's index in the chunk's columns of the part.
        """
        if self.name == "interleaved32":
            return piece // 2, part * 2 + piece % 2
        return part, piece

    def column(self, column: Int32, slot: int) -> tuple[Int32, int | None]:
        """Return where the content of one of a chunk's slots lies in memory: its first column, and its half (None if
        memory has no halves).

        Args:
            column: the column of the chunk's first output.
            slot: 0 or 1, which slot of the chunk's pair.
        """
        if self.name == "concat":
            return column, slot
        return (column, None) if self.name == "single" else (2 * column + slot * COLS, None)


class PreactPair(Invariant):
    """A thread's access to the slots that hold a chunk's preactivations. Within a piece of 16 columns, the thread's
    registers are in the order of accumulators (fragments.py).

    Attributes:
        ring: an object with the `layout` and four methods, which take a chunk's number: `act_slot(number)`, the slot
            for act; `slot(number, slot)`, a slot of the pair; `wait(number)`, which waits until the pair is loaded;
            `release(number)`, called once the pair is stored.
    """

    def __init__(self, ring: Any, slots: Slots):
        self.ring, self.layout, self.slots, self.dtype = ring, ring.layout, slots, slots.dtype

    @cute.jit
    def read(self, number: Int32, piece: cutlass.Constexpr[int]) -> tuple:
        """Return the thread's elements of a and u (of a alone without a gate), in 16 bits: the elements of
        piece number `piece` (16 columns) of chunk `number`."""
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
        """Load the thread's elements of one piece (16 columns) of a slot into the registers `target`.

        Args:
            slot: the index of the slot, a buffer of 64 rows in shared memory.
            index: the piece's index in the slot.
        """
        raise NotImplementedError

    @cute.jit
    def write(self, number: Int32, piece: cutlass.Constexpr[int], parts: tuple):
        """Write gradients to the slots in shared memory, where `read` read the elements of the same piece.

        Args:
            number: the chunk's number in the CTA.
            piece: the number of the piece (16 columns) in the chunk.
            parts: the gradients of the thread's elements of a and u (of a alone without a gate), in 16 bits.
        """
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
        """Return a view of 8 bytes of shared memory, a0 u0 a1 u1: two neighbouring columns of a row, in piece number
        `piece` of chunk `number`.

        pair: a0 and a1 are the thread's registers 2 * pair and 2 * pair + 1 of the piece.
        """
        lane = self.slots.thread % 32
        row = self.slots.thread // 32 * 16 + lane // 4 + pair % 2 * 8
        line = self.slots.smem[row, None, self.ring.slot(number, piece // 2)]
        return cute.local_tile(line, (4,), (piece % 2 * 8 + pair // 2 * 4 + lane % 4,))

    @cute.jit
    def store(self, target: Any, work: WorkTile, number: Int32, row: Int32, column: Int32):
        """Start to store a chunk's gradients. The storing warp calls this, after `Slots.publish` made the filled slots
        visible to it.

        Args:
            target: the object that stands for dpreact in memory (a store, slots.py).
            number: the chunk's number in the CTA.
            row, column: the chunk's first output.
        """
        for slot in cutlass.range_constexpr(self.layout.slots):
            at, half = self.layout.column(column, slot)
            self.slots.start(target.atom, target.tile(work, row, at, half), self.ring.slot(number, slot))
