"""Splits of float32 numbers into two numbers of a dtype that tensor cores multiply. The first is the nearest number of
the dtype; the second, called the rest, is the difference.

Two bfloat16 numbers hold 16 bits of a float32 number (an error of 2^-18 at most), two of float16 or TF32 hold 22. The
product of two split numbers has the same precision with three products: all except rest times rest. A third number
would make the split exact. But it would be below what float32 sums of thousands of terms resolve, and it would cost
further products (if only one operand is split, a third one).

A rest in float16 is stored times 2^11 (`rest_scale`); sums of products with rests are then scaled back. Without this
factor, the rest of a number below 2^-3 would lie where float16 loses bits. So a pair holds multiples of 2^-35, which is
less than 22 bits for the smallest numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from ..device.warp_mma import WarpMma, as_operands


class Split(NamedTuple):
    """Split numbers, as 32-bit words of MMA operands.

    Attributes:
        near: the nearest numbers.
        rest: the rests (number less nearest number), times `rest_scale`.
    """

    near: cute.Tensor
    rest: cute.Tensor


def rest_scale(dtype: type[cutlass.Numeric]) -> float:
    """Return the factor by which rests of a dtype are stored."""
    return 2.0**11 if dtype is Float16 else 1.0


def split(values: cute.Tensor, dtype: type[cutlass.Numeric]) -> Split:
    """Split float32 registers into MMA operands of `dtype`: nearest numbers and rests. For Float32, the two are TF32
    numbers, one in a word; otherwise a word has two 16-bit elements."""
    rest = cute.make_rmem_tensor(values.shape, Float32)
    if const_expr(dtype is Float32):
        near = as_operands(cute.recast_tensor(values, Int32), dtype)
        rest.store(values.load() - cute.recast_tensor(near, Float32).load())
        return Split(near, as_operands(cute.recast_tensor(rest, Int32), dtype))
    narrow, narrow_rest = (cute.make_rmem_tensor(values.shape, dtype) for _ in range(2))
    narrow.store(values.load().to(dtype))
    rest.store((values.load() - narrow.load().to(Float32)) * rest_scale(dtype))
    narrow_rest.store(rest.load().to(dtype))
    return Split(cute.recast_tensor(narrow, Int32), cute.recast_tensor(narrow_rest, Int32))


def append_pairs(operands: list, low: cute.Tensor, high: cute.Tensor, dtype: type[cutlass.Numeric]) -> None:
    """Append the words of a lane's MMA operands for one step (8 outputs) of the weight, made from two weight rows.

    Args:
        operands: lists of words, operands[j][part]: pair j of columns; part 0 for the nearest numbers, 1 for their
            rests. If the lists have one part, only the nearest numbers are appended.
        low, high: the lane's elements of the first and of the second weight row, in the same columns: two elements for
            each pair j.
        dtype: the dtype of the operands.
    """
    for j, parts in enumerate(operands):
        pair = split(_chosen(low, high, j), dtype)
        for part, words in enumerate(parts):
            words.append(pair[part][0])


@cute.jit
def _chosen(low: cute.Tensor, high: cute.Tensor, j: cutlass.Constexpr[int]) -> cute.Tensor:
    """Return element 2 j + g % 2 of both rows, as two float32 numbers. g = lane / 4 is the operand's column that this
    lane holds.

    low, high: the lane's elements of two weight rows.
    """
    pair = cute.make_rmem_tensor(2, Float32)
    pair[0], pair[1] = low[2 * j], high[2 * j]
    if cute.arch.lane_idx() // 4 % 2 == 1:
        pair[0], pair[1] = low[2 * j + 1], high[2 * j + 1]
    return pair


def add_split(mma: WarpMma, sums: cute.Tensor, near: tuple, with_rests: list) -> None:
    """Add the products of split operands to `sums` (4 registers of an MMA).

    Args:
        mma: the MMA instruction.
        near: two operands, the nearest numbers.
        with_rests: pairs of operands of which one is a rest; empty if nothing is split.
    """
    if with_rests and rest_scale(mma.dtype) != 1.0:
        small = cute.make_rmem_tensor(4, Float32)
        small.fill(0.0)
        for operands in with_rests:
            mma.add(small, *operands)
        sums.store(sums.load() + small.load() * (1.0 / rest_scale(mma.dtype)))
    else:
        for operands in with_rests:
            mma.add(sums, *operands)
    mma.add(sums, *near)
