"""Device memory by address: how kernels reach inputs that are optional or of more than one type."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

# What a lane moves at once, at most.
CHUNK_BYTES = 16
# Addresses carry no length, and kernels guard their own indexes; a static bound larger than any keeps the stride 1.
UNBOUNDED = 1 << 30


def vector_at(dtype: type[cutlass.Numeric], address: Int64) -> cute.Tensor:
    """A contiguous vector of `dtype` at `address`, aligned to one element."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(UNBOUNDED))


def offset_by(first: Int64, distance: Int32) -> Int64:
    """An address plus a distance in 16 bytes, in one instruction: a 64-bit product takes four."""
    return cute.arch.inline_ptx(
        f"mad.wide.u32 {{$w0}}, {{$r0}}, {CHUNK_BYTES}, {{$r1}};",
        write_only_types=[Int64],
        read_only_args=[distance, first],
    )
