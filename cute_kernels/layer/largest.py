"""Search for the largest of the numbers that a warp holds. Numbers are compared by integer keys that have the same
order.

Each lane holds the same count of numbers. A lane's number `index` has place lane + 32 index among the warp's numbers.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from ..device.select import select
from ..device.warps import WARP

ABSENT = -(2**31)
"""The key for "no number"; it is less than the keys of all numbers."""
NAN_KEY = MAGNITUDE = 2**31 - 1


def key_of(value: Float32) -> Int32:
    """Return a number's key. Keys have the order of the numbers. The key of any NaN is the greatest, and -0 has 0's
    key."""
    bits = (value + Float32(0.0)).bitcast(Int32)
    ordered = select(bits < 0, bits ^ MAGNITUDE, bits)
    return select(value != value, Int32(NAN_KEY), ordered)


def number_of(key: Int32) -> Float32:
    """Return the number whose key (`key_of`) is `key`; a NaN for NAN_KEY."""
    return select(key < 0, key ^ MAGNITUDE, key).bitcast(Float32)


def place_of(index: int) -> Int32:
    """Return the place of this lane's number `index` among the warp's numbers: lane + 32 index."""
    return cute.arch.lane_idx() + WARP * index


def largest(keys: list[Int32]) -> tuple[Int32, Int32]:
    """Return, on every lane, the largest of a warp's keys and the place of this key (lane + 32 index). If several keys
    are the largest, the place is the lowest of their places.

    keys: this lane's keys.
    """
    mine, at = keys[0], Int32(0)
    for i, key in enumerate(keys[1:], start=1):
        is_larger = key > mine
        mine, at = select(is_larger, key, mine), select(is_larger, Int32(WARP * i), at)
    key = Int32(cute.arch.warp_redux_sync(mine, "max"))
    place = Int32(cute.arch.warp_redux_sync(select(mine == key, at + cute.arch.lane_idx(), Int32(MAGNITUDE)), "min"))
    return key, place


def sum_of_two_largest(first: Int32, second: Int32) -> Float32:
    """Return the sum of the two largest numbers of a warp.

    first, second: this lane's largest and second largest key.
    """
    lane = cute.arch.lane_idx()
    most = Int32(cute.arch.warp_redux_sync(first, "max"))
    owner = Int32(cute.arch.warp_redux_sync(select(first == most, lane, Int32(WARP)), "min"))
    next_most = Int32(cute.arch.warp_redux_sync(select(lane == owner, second, first), "max"))
    return number_of(most) + number_of(next_most)
