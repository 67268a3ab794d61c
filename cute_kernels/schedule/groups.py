"""Group sizes: the number of rows of each expert. Only the device knows them; this file says how kernels read them."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ..device.gmem import vector_at
from ..device.warps import inclusive_scan, warp_sum

OFFS_INT32, SPLITS_INT32, SPLITS_INT64 = 0, 1, 2
"""Encodings of group sizes. OFFS: cumulative; a number is the row after the last row of its group. SPLITS: the size of
each group."""
OFFS_OF_CALL = -1
"""The encoding of int32 offs that the previous kernel of the same call writes. A kernel with this encoding waits until
the previous kernel has ended before it reads the offs."""


class Groups(NamedTuple):
    """Group sizes on the device.

    Attributes:
        address: the address of the offs or splits.
        encoding: OFFS_INT32 or another of the constants above, which says what the numbers at `address` are.
        count: number of groups.
        tickets: the address of the counter from which clusters draw tickets (tickets.py); 0: each CTA's tiles are
            fixed.
        rows: number of rows of the tensor whose rows are grouped; rows after the last group belong to no group.
    """

    address: Int64
    encoding: Int32
    count: Int32
    tickets: Int64
    rows: Int32


def are_offs(groups: Groups) -> Boolean:
    """Return True if the numbers at `groups.address` are ends of groups (offs), False if they are sizes (splits)."""
    return groups.encoding <= OFFS_INT32


def clamp(value: Int32, low: Int32, high: Int32) -> Int32:
    """Return the number between `low` and `high` that is nearest to `value`."""
    return cutlass.max(low, cutlass.min(value, high))


def int32_at(groups: Groups, index: Int32) -> Int32:
    """Return the stored number of group `index`: its end (offs) or its size (splits). The encoding must have 32
    bits."""
    return vector_at(Int32, groups.address)[index]


@cute.jit
def group_size(groups: Groups, index: Int32) -> Int32:
    """Return the size of group `index`, read from splits. It is clamped to 0 .. `groups.rows`, which is less than 2^26,
    so that garbage cannot overflow a sum of 32 sizes."""
    size = Int32(0)
    if groups.encoding == SPLITS_INT64:
        wide = vector_at(Int64, groups.address)[index]
        size = Int32(cutlass.max(Int64(0), cutlass.min(wide, Int64(groups.rows))))
    else:
        size = clamp(int32_at(groups, index), Int32(0), groups.rows)
    return size


class GroupRows(NamedTuple):
    """Row ranges of 32 consecutive groups, one group in each lane of a warp.

    Attributes:
        present: True if the lane has a group; False past the last group, where begin = end.
        begin, end: the first row of the lane's group, and the row after its last row.
    """

    present: Boolean
    begin: Int32
    end: Int32


@cute.jit
def group_rows(groups: Groups, base: Int32, rows_before: Int32) -> GroupRows:
    """Return, in lane i of a warp, the first row of group base + i and the row after its last. All lanes call this.

    Rows are clamped to the `groups.rows` rows that exist.

    rows_before: the first row of group `base`; used only if the encoding is sizes (splits).
    """
    lane = cute.arch.lane_idx()
    group = base + lane
    present = group < groups.count
    begin = Int32(0)
    end = Int32(0)
    if are_offs(groups):
        if present:
            end = clamp(int32_at(groups, group), Int32(0), groups.rows)
            if group > 0:
                begin = clamp(int32_at(groups, group - 1), Int32(0), end)
    else:
        size = Int32(0)
        if present:
            size = group_size(groups, group)
        end = cutlass.min(rows_before + inclusive_scan(size, lane), groups.rows)
        begin = cutlass.max(end - size, Int32(0))
    return GroupRows(present, begin, end)


@cute.jit
def last_row_end(groups: Groups) -> Int32:
    """Return, in every lane of a warp, the row after the last row of all groups. Rows from this row on belong to no
    group."""
    end = Int32(0)
    lane = cute.arch.lane_idx()
    if are_offs(groups):
        for group in cutlass.range(lane, groups.count, 32):
            end = cutlass.max(end, clamp(int32_at(groups, group), Int32(0), groups.rows))
        end = cute.arch.warp_reduction(end, cutlass.max, threads_in_group=32)
    else:
        for group in cutlass.range(lane, groups.count, 32):
            end = cutlass.min(end + group_size(groups, group), groups.rows)
        end = cutlass.min(warp_sum(end), groups.rows)
    return end
