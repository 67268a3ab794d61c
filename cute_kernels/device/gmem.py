"""Device memory by address: how kernels reach inputs that are optional or of more than one type."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int64

# Addresses carry no length, and kernels guard their own indexes; a static bound larger than any keeps the stride 1.
UNBOUNDED = 1 << 30


def vector_at(dtype: type[cutlass.Numeric], address: Int64) -> cute.Tensor:
    """A contiguous vector of `dtype` at `address`, aligned to one element."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(UNBOUNDED))
