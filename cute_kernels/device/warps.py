"""Exchanges between the lanes of a warp."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

WARP = 32


@cute.jit
def inclusive_scan(value: Int32, lane: Int32) -> Int32:
    """Return the sum of `value` over this lane and all lower lanes of a warp. lane: this lane's index."""
    for log_distance in cutlass.range_constexpr(5):
        distance = 1 << log_distance
        below = cute.arch.shuffle_sync_up(value, distance)
        if lane >= distance:
            value += below
    return value


def last_lane(value: Int32) -> Int32:
    """Return, in every lane of a warp, the last lane's `value`."""
    return cute.arch.shuffle_sync(value, 31)


def warp_sum(value: Int32) -> Int32:
    """Return, in every lane of a warp, the sum of `value` over all lanes."""
    return cute.arch.warp_reduction(value, lambda x, y: x + y, threads_in_group=32)


def lanes_like(value: Int32) -> Int32:
    """Return a mask of the warp's lanes whose `value` is the same as this lane's."""
    return cute.arch.inline_ptx(
        "match.any.sync.b32 {$w0}, {$r0}, 0xffffffff;", write_only_types=[Int32], read_only_args=[value]
    )


def lanes_before() -> Int32:
    """Return a mask of the lanes below this lane."""
    return (Int32(1) << cute.arch.lane_idx()) - 1
