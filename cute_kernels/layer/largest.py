"""The largest of a warp's numbers, found by integer keys that are ordered like the numbers."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from ..device.select import select
from ..device.warps import WARP

ABSENT = -(2**31)
"""The key of an absent number, below the keys of all numbers."""
NAN_KEY = MAGNITUDE = 2**31 - 1


def key_of(value: Float32) -> Int32:
    """Return a number's key. Keys are ordered like numbers; NaN of either sign is greatest, and -0 equals 0."""
    bits = (value + Float32(0.0)).bitcast(Int32)
    ordered = select(bits < 0, bits ^ MAGNITUDE, bits)
    return select(value != value, Int32(NAN_KEY), ordered)


def number_of(key: Int32) -> Float32:
    """Return the number of a key; NAN_KEY gives a NaN."""
    return select(key < 0, key ^ MAGNITUDE, key).bitcast(Float32)


def place_of(index: int) -> Int32:
    """Return the place, among the warp's numbers, of a lane's number `index`: a lane's numbers are a warp apart."""
    return cute.arch.lane_idx() + WARP * index


def largest(keys: list[Int32]) -> tuple[Int32, Int32]:
    """Return the largest of a warp's keys and its place, the first among equal keys, to every lane."""
    mine, at = keys[0], Int32(0)
    for i, key in enumerate(keys[1:], start=1):
        is_larger = key > mine
        mine, at = select(is_larger, key, mine), select(is_larger, Int32(WARP * i), at)
    key = Int32(cute.arch.warp_redux_sync(mine, "max"))
    place = Int32(cute.arch.warp_redux_sync(select(mine == key, at + cute.arch.lane_idx(), Int32(MAGNITUDE)), "min"))
    return key, place


def sum_of_two_largest(first: Int32, second: Int32) -> Float32:
    """Return the sum of the two largest numbers of a warp. `first`, `second`: the two largest keys of each lane."""
    lane = cute.arch.lane_idx()
    most = Int32(cute.arch.warp_redux_sync(first, "max"))
    owner = Int32(cute.arch.warp_redux_sync(select(first == most, lane, Int32(WARP)), "min"))
    next_most = Int32(cute.arch.warp_redux_sync(select(lane == owner, second, first), "max"))
    return number_of(most) + number_of(next_most)
