"""Where the lines of a tile's operands begin in global memory: rows of x, in order or by index, and weights."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..device.gmem import CHUNK_BYTES, vector_at
from ..memory.weights import UNIT_BYTES, ExpertAddress, GateRows, expert_offset, part_offset, row_of
from ..schedule.groups import clamp
from ..schedule.work import WorkTile
from .operands import BLOCK, Across, Along, Contraction, Lines


class Rows(NamedTuple):
    """Rows of x, `pitch` times 16 bytes apart, and the address of int32 [T], which of them each is; 0: in order. An
    index out of range is clamped. columns: elements of a row.
    """

    address: Int64
    pitch: Int32
    count: Int32
    indices: Int64
    columns: Int32


class Weights(NamedTuple):
    """Weight rows of experts, `pitch` times 16 bytes apart from `base` on, `count` of each part; of transposed weights
    so many columns."""

    base: Int64
    expert: ExpertAddress
    pitch: Int32
    count: Int32
    gate: GateRows


def rows_of(x: cute.Tensor, indices: Int64) -> Rows:
    """Host side, of a matrix of 16-bit rows."""
    unit = CHUNK_BYTES * 8 // x.element_type.width
    return Rows(x.iterator.toint(), Int32(x.stride[0] // unit), Int32(x.shape[0]), indices, Int32(x.shape[1]))


@cute.jit
def row_sources(rows: Rows, work: WorkTile, operand: Along) -> Lines:
    """Of a thread's copies. Behind the group's last row it is that one, which nothing stores."""
    distances = cute.make_rmem_tensor(operand.copies, Int32)
    for i in cutlass.range_constexpr(operand.copies):
        row = cutlass.min(work.row + operand.line + i * operand.step, work.group_end - 1)
        if rows.indices != 0:
            row = clamp(vector_at(Int32, rows.indices)[row], Int32(0), rows.count - 1)
        distances[i] = row * rows.pitch
    return Lines((rows.address,), distances)


@cute.jit
def weight_sources(
    weights: Weights, work: WorkTile, operand: Along, part_n: cutlass.Constexpr[int],
    layout: cutlass.Constexpr[str],
) -> Lines:  # fmt: skip
    """Of a thread's copies: `part_n` columns of the tile are of one part. Behind an expert's last row it is that one,
    which nothing stores."""
    distances = cute.make_rmem_tensor(operand.copies, Int32)
    for i in cutlass.range_constexpr(operand.copies):
        column = work.n_tile * part_n + i * operand.step % part_n + operand.line
        row = row_of(layout, weights.gate, cutlass.min(column, weights.count - 1), 0, weights.count)
        distances[i] = row * weights.pitch
    parts = range(operand.copies * operand.step // part_n)
    return Lines(tuple(part_address(weights, work, part) for part in parts), distances)


def part_address(weights: Weights, work: WorkTile, part: int) -> Int64:
    """Where a part of the tile's expert begins."""
    units = expert_offset(weights.expert, work.expert) + part_offset(weights.expert, part)
    return weights.base + units * UNIT_BYTES


def transposed_sources(
    weights: Weights, work: WorkTile, operand: Across, parts: int, half: Int32 | int = 0
) -> Contraction:  # fmt: skip
    """Of weights whose columns are the tile's; `half`: of two tensors the second."""
    per_part = operand.num_blocks // parts
    to_half = half * weights.expert.part_units * UNIT_BYTES
    blocks = []
    for number in range(operand.num_blocks):
        part = number // per_part
        column = (work.n_tile * per_part + number % per_part) * BLOCK + operand.chunk * 8
        begin = part_address(weights, work, part) + to_half + column * 2
        blocks.append((begin, column < weights.count))
    return Contraction(tuple(blocks), weights.pitch, Int32(0), Int64(0), Int32(0))


def column_sources(rows: Rows, work: WorkTile, operand: Across, tile: Int32) -> Contraction:
    """Of a group's rows, whose columns are those of a tile: the contraction of a weight gradient."""
    blocks = []
    for number in range(operand.num_blocks):
        column = (tile * operand.num_blocks + number) * BLOCK + operand.chunk * 8
        blocks.append((rows.address + column * 2, column < rows.columns))
    return Contraction(tuple(blocks), rows.pitch, work.row, rows.indices, rows.count)
