"""The store of a gated layer's preactivation [T, 2I]. The accumulators of a (the activated half) and of u (the linear
half) go to memory in the column order of the gate layout. base.py explains the terms."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..device.select import select
from ..schedule.work import WorkTile
from ..specs import BLOCK_ROWS, LAYOUT_FORMS, LAYOUTS
from .fragments import registers
from .sizes import SLOTS
from .slots import Slots, narrowed


def halves(tensor: cute.Tensor, layout: Int32 | None = None) -> cute.Tensor:
    """Return a view (T, I, half) of a preactivation [T, 2I] in layout "concat". With it, a store clips each half at the
    half's own last column.

    layout: the number of the gate layout, if it is known only at run time. Layouts other than "concat" then give (T,
    2I, 1).
    """
    rows, cols = tensor.shape
    half = cols // 2
    shape = rows, half, 2
    if layout is not None:
        is_concat = layout == LAYOUTS["concat"]
        shape = rows, select(is_concat, half, cols), select(is_concat, Int32(2), Int32(1))
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=(*tensor.stride, half)))


@cute.jit
def store_gate_pair(
    slots: Slots, served: cutlass.Constexpr[str], layout: Int32, a: cute.Tensor, u: cute.Tensor, target: Any,
    work: WorkTile, row: Int32, column: Int32, first_slot: cutlass.Constexpr[int],
):  # fmt: skip
    """Store a chunk's columns of a (the activated half) and of u (the linear half), in the order of the gate layout. A
    chunk is the columns of a slab (64 rows) that are stored at once. a and u each fill one slot, so the pair fills two.

    Args:
        served: the layouts for which the kernel is compiled, a key of specs.LAYOUT_FORMS.
        layout: the number of the call's layout; read only if `served` has several.
        a, u: the thread's accumulators.
        target: the object that stands for the preactivation in memory (a store, slots.py). Its tensor has a dimension
            for the half if the layout may be "concat".
        row: the chunk's first row.
        column: the chunk's first column within a half.
        first_slot: the index of the first of the two slots (staging buffers in shared memory).
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
    """Fill slot i (0 or 1) of a pair, in the gate layout whose number is `layout`. The number is known at run time; it
    selects one of `names`.

    Args:
        a, u: the thread's registers of the chunk's columns of a and u, converted to the slot's dtype.
        slot: the slot's index.
    """
    if const_expr(len(names) == 1):
        _write_of_pair(slots, names[0], a, u, i, slot)
    elif layout == LAYOUTS[names[0]]:
        _write_of_pair(slots, names[0], a, u, i, slot)
    else:
        _write_one_of(slots, names[1:], layout, a, u, i, slot)


def _write_of_pair(slots: Slots, name: str, a: cute.Tensor, u: cute.Tensor, i: int, slot: int) -> None:
    """Fill slot i (0 or 1) of the pair of slots that takes a chunk's preactivation, in the gate layout `name`.

    Args:
        a, u: the thread's registers of the chunk's columns of a and u, converted to the slot's dtype.
        slot: the slot's index.
    """
    half = cute.size(a) // 2
    half_a, half_u = registers(a, i * half, half), registers(u, i * half, half)
    if name == "interleaved":
        _write_interleaved(slots, half_a, half_u, slot)
    elif name == "concat" or slots.cols == BLOCK_ROWS:
        slots.write(a if i == 0 else u, slot)
    else:
        slots.write(_joined(half_a, half_u), slot)


def _joined(first: cute.Tensor, second: cute.Tensor) -> cute.Tensor:
    """Concatenate two vectors of registers."""
    both = cute.make_rmem_tensor(cute.size(first) + cute.size(second), first.element_type)
    registers(both, 0, cute.size(first)).store(first.load())
    registers(both, cute.size(first)).store(second.load())
    return both


@cute.jit
def _write_interleaved(slots: Slots, a: cute.Tensor, u: cute.Tensor, slot: cutlass.Constexpr[int]):
    """Write the columns a0 u0 a1 u1 ... into a slot. Of each row, a thread has two neighbouring a and two u, which
    become 8 neighbouring bytes."""
    lane = slots.thread % 32
    for i in cutlass.range_constexpr(cute.size(a) // 2):
        quad = cute.make_rmem_tensor(4, a.element_type)
        for pair in cutlass.range_constexpr(2):
            quad[2 * pair] = a[2 * i + pair]
            quad[2 * pair + 1] = u[2 * i + pair]
        line = slots.smem[slots.thread // 32 * 16 + lane // 4 + i % 2 * 8, None, slot]
        cute.autovec_copy(quad, cute.local_tile(line, (4,), (i // 2 * 4 + lane % 4,)))
