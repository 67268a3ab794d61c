"""Chunks of 16 bytes in shared memory, read and written as four int32 words."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from .gmem import CHUNK_BYTES

CHUNK_WORDS = CHUNK_BYTES // 4


def chunk_at(address: Int32) -> cute.Tensor:
    """Return the 16-byte chunk at an address in shared memory, as four int32 words."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=CHUNK_BYTES)
    return cute.make_tensor(pointer, cute.make_layout(CHUNK_WORDS))


def load_chunk(address: Int32) -> cute.Tensor:
    """Load the 16-byte chunk at an address in shared memory into four int32 registers."""
    words = cute.make_rmem_tensor(CHUNK_WORDS, Int32)
    cute.autovec_copy(chunk_at(address), words)
    return words
