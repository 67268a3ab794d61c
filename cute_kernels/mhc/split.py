"""A float32 number as two that the tensor cores take: the nearest, and what that leaves.

Of bfloat16 the two hold 16 bits of a number (an error of 2^-18 at most), of float16 and TF32 22. Three products of two
such pairs, all but that of the rests, are a product to the same precision; an exact third part would be beyond what
float32 sums keep of thousands of terms, and cost a third product.

A rest of float16 is kept times 2^11, or that of a number below 2^-3 would lie where float16 loses bits: sums of
products with rests are then scaled back. So the two hold multiples of 2^-35, and less than 22 bits of the smallest.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from ..device.warp_mma import as_operands


class Split(NamedTuple):
    """Words of operands: of the nearest numbers, and of rests times `rest_scale`."""

    near: cute.Tensor
    rest: cute.Tensor


def rest_scale(dtype: type[cutlass.Numeric]) -> float:
    return 2.0**11 if dtype is Float16 else 1.0


def split(values: cute.Tensor, dtype: type[cutlass.Numeric]) -> Split:
    """float32 registers as operands of `dtype`: float32 as TF32, 16-bit elements in pairs."""
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
