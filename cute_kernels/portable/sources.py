"""Where the lines of a tile's operands begin in global memory: rows of x, in order or by index, and weight rows."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..device.gmem import vector_at
from ..memory.weights import UNIT_BYTES, ExpertAddress, GateRows, expert_offset, part_offset, row_of
from ..schedule.groups import clamp
from ..schedule.work import WorkTile
from .mainloop import STEP, Operand, Sources


class Rows(NamedTuple):
    """Rows of x, `pitch` times 16 bytes apart, and the address of int32 [T], which of them each is; 0: in order. An
    index out of range is clamped.
    """

    address: Int64
    pitch: Int32
    count: Int32
    indices: Int64


class Weights(NamedTuple):
    """Weight rows of experts, `pitch` times 16 bytes apart from `base` on, `count` of each part."""

    base: Int64
    expert: ExpertAddress
    pitch: Int32
    count: Int32
    gate: GateRows


@cute.jit
def row_sources(rows: Rows, work: WorkTile, operand: Operand) -> Sources:
    """Of a thread's copies. Behind the group's last row it is that one, which nothing stores."""
    distances = cute.make_rmem_tensor(operand.copies, Int32)
    for i in cutlass.range_constexpr(operand.copies):
        row = cutlass.min(work.row + operand.line + i * STEP, work.group_end - 1)
        if rows.indices != 0:
            row = clamp(vector_at(Int32, rows.indices)[row], Int32(0), rows.count - 1)
        distances[i] = row * rows.pitch
    return Sources((rows.address,), distances)


@cute.jit
def weight_sources(
    weights: Weights, work: WorkTile, operand: Operand, part_n: cutlass.Constexpr[int],
    layout: cutlass.Constexpr[str],
) -> Sources:  # fmt: skip
    """Of a thread's copies: `part_n` columns of the tile are of one part. Behind an expert's last row it is that one,
    which nothing stores."""
    first = expert_offset(weights.expert, work.expert)
    distances = cute.make_rmem_tensor(operand.copies, Int32)
    for i in cutlass.range_constexpr(operand.copies):
        column = work.n_tile * part_n + i * STEP % part_n + operand.line
        row = row_of(layout, weights.gate, cutlass.min(column, weights.count - 1), 0, weights.count)
        distances[i] = row * weights.pitch
    parts = operand.copies * STEP // part_n
    begins = [weights.base + (first + part_offset(weights.expert, part)) * UNIT_BYTES for part in range(parts)]
    return Sources(tuple(begins), distances)
