"""Addresses of a tile's operands in global memory: rows of x, in order or by index, and weights."""

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
    """The rows of a matrix in global memory.

    Attributes:
        address: the address of the first row.
        pitch: distance of consecutive rows, in units of 16 bytes.
        count: number of rows.
        columns: number of elements of a row.
        indices: the address of int32 [T], the index of each row to read, clamped to 0 .. count - 1; 0: rows lie in
            order.
    """

    address: Int64
    pitch: Int32
    count: Int32
    indices: Int64
    columns: Int32


class Weights(NamedTuple):
    """Weight rows of experts in global memory.

    Attributes:
        base: the address from which offsets count.
        expert: the offset of each expert and part (memory/weights.py).
        pitch: distance of consecutive weight rows in memory, in units of 16 bytes.
        count: number of weight rows of each part, or of columns of each part if weights are transposed. A gated layer
            has two parts (a and u), other layers have one.
        gate: the order of a gated layer's weight rows.
    """

    base: Int64
    expert: ExpertAddress
    pitch: Int32
    count: Int32
    gate: GateRows


def rows_of(x: cute.Tensor, indices: Int64) -> Rows:
    """Host side: describe a 16-bit matrix x [rows, columns] as `Rows`.

    indices: the address of int32 [T], the index of each row to read; 0: rows lie in order.
    """
    unit = CHUNK_BYTES * 8 // x.element_type.width
    return Rows(x.iterator.toint(), Int32(x.stride[0] // unit), Int32(x.shape[0]), indices, Int32(x.shape[1]))


@cute.jit
def row_sources(rows: Rows, work: WorkTile, operand: Along) -> Lines:
    """Return the addresses from which a thread copies rows of x.

    Past the group's last row, the last row is read again; the results of these copies are never stored.

    Args:
        rows: the rows of x.
        work: the output tile.
        operand: the operand in shared memory that the rows become.
    """
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
    """Return the addresses from which a thread copies weight rows.

    Past an expert's last weight row, the last weight row is read again; the results of these copies are never stored.

    Args:
        weights: the experts' weight rows.
        work: the output tile.
        operand: the operand in shared memory that the weights become.
        part_n: columns of the tile for each part (a and u of a gated layer; otherwise there is one part).
        layout: the order of weight rows, a key of specs.LAYOUT_FORMS.
    """
    distances = cute.make_rmem_tensor(operand.copies, Int32)
    for i in cutlass.range_constexpr(operand.copies):
        column = work.n_tile * part_n + i * operand.step % part_n + operand.line
        row = row_of(layout, weights.gate, cutlass.min(column, weights.count - 1), 0, weights.count)
        distances[i] = row * weights.pitch
    parts = range(operand.copies * operand.step // part_n)
    return Lines(tuple(part_address(weights, work, part) for part in parts), distances)


def part_address(weights: Weights, work: WorkTile, part: int) -> Int64:
    """Return the address of one part of the weights of the tile's expert. part: 0 (a, or all rows without a gate) or 1
    (u)."""
    units = expert_offset(weights.expert, work.expert) + part_offset(weights.expert, part)
    return weights.base + units * UNIT_BYTES


def transposed_sources(
    weights: Weights, work: WorkTile, operand: Across, parts: int, half: Int32 | int = 0
) -> Contraction:  # fmt: skip
    """Return the addresses from which a thread copies an expert's weights if the GEMM contracts over weight rows.

    The weights' columns are then the tile's columns.

    Args:
        weights: the experts' weights.
        work: the output tile.
        operand: the operand in shared memory that the weights become.
        parts: 2 in a gated FC1, where half of the tile's columns belong to a (the activated half of the preactivation)
            and half to u (the linear half); else 1.
        half: if each half of x's columns has weights of its own (`GroupedMmSpec.in_halves`), the half whose weights are
            copied, 0 or 1. Otherwise 0.
    """
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
    """Return the addresses from which a thread copies columns of dy or x in a weight gradient, over all rows of the
    group.

    Args:
        rows: the rows of dy or x.
        work: the output tile.
        operand: the operand in shared memory that the columns become.
        tile: index of the tile along the matrix's columns.
    """
    blocks = []
    for number in range(operand.num_blocks):
        column = (tile * operand.num_blocks + number) * BLOCK + operand.chunk * 8
        blocks.append((rows.address + column * 2, column < rows.columns))
    return Contraction(tuple(blocks), rows.pitch, work.row, rows.indices, rows.count)
