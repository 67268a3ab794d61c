"""Access to global memory by address, for inputs that are optional or have more than one type."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from .select import select

# The most that a lane moves at once.
CHUNK_BYTES = 16
# Addresses have no length, and kernels guard their own indices. A static bound above any index keeps the stride 1.
UNBOUNDED = 1 << 30


def vector_at(dtype: type[cutlass.Numeric], address: Int64) -> cute.Tensor:
    """Return a view of the elements of `dtype` at `address`, which is aligned to one element. The view has no length:
    callers guard their own indices."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(UNBOUNDED))


def offset_by(first: Int64, distance: Int32) -> Int64:
    """Return the address `first` plus `distance` times 16 bytes. This takes one instruction; a 64-bit product takes
    four."""
    return cute.arch.inline_ptx(
        f"mad.wide.u32 {{$w0}}, {{$r0}}, {CHUNK_BYTES}, {{$r1}};",
        write_only_types=[Int64],
        read_only_args=[distance, first],
    )


def copy_chunk(target: Int32, source: Int64, num_bytes: Int32) -> None:
    """Start to copy `num_bytes` bytes (at most 16) from global to shared memory by cp.async. The target gets 16 bytes
    in any case; those after `num_bytes` become zeros.

    target, source: addresses.
    """
    cute.arch.inline_ptx(
        f"cp.async.cg.shared.global.L2::128B [{{$r0}}], [{{$r1}}], {CHUNK_BYTES}, {{$r2}};",
        read_only_args=[target, source, num_bytes],
    )


def bytes_if(wanted: Boolean) -> Int32:
    """Return the argument `num_bytes` of `copy_chunk`: 16 if `wanted`, else 0."""
    return select(wanted, Int32(CHUNK_BYTES), Int32(0))
