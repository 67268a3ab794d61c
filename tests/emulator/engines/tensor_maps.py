"""Tensor maps: 128 bytes that describe a tensor, and a box of it that the TMA copies."""

from __future__ import annotations

import struct
from functools import lru_cache

import numpy as np

from ..faults import Fault

ELEMENTS = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32", "f64", "bf16")
SIZES = {"u8": 1, "u16": 2, "u32": 4, "s32": 4, "u64": 8, "s64": 8, "f16": 2, "f32": 4, "f64": 8, "bf16": 2}


def swizzled(at, mode: int):
    """Permute the 16-byte chunks of rows of 16 << mode bytes (PTX ISA, "Tensors: Swizzling Modes").

    `mode`: 0 none, 1 32 bytes, 2 64 bytes, 3 128 bytes. Address bits from 4 on are exclusive-ored with those from 7 on.
    """
    if not mode:
        return at
    return at ^ ((at >> 7 & ((1 << mode) - 1)) << 4)


class TensorMap:
    """A tiled tensor map's fields; PTX ISA, "Tensors: Tensor-map", calls the encoding opaque.

    The places of the fields are those that the DSL's lowered host code and its kernels that make maps write to; loads
    and stores of the project's and of NVIDIA's kernels come out right with them. Interleaving, element strides, fills
    other than zero and strides of 2^36 bytes are not read: the DSL encodes none of them. Bytes from 64 on mean nothing:
    a kernel of NVIDIA's leaves them as they were.
    """

    def __init__(self, blob: bytes):
        w = struct.unpack("<16I", blob[:64])
        self.base = w[0] | w[1] << 32
        kind = w[2] >> 7 & 15
        if kind >= len(ELEMENTS):
            raise Fault(f"tensor map: element type {kind} is not modelled")
        self.rank = (w[2] >> 4 & 7) + 1
        if self.rank > 5:
            raise Fault(f"tensor map: rank {self.rank} is not in 1..5")
        self.element = ELEMENTS[kind]
        self.size = SIZES[self.element]
        self.swizzle = w[2] >> 13 & 3
        self.strides = [self.size] + [16 * s for s in w[3 : 3 + self.rank - 1]]
        self.dims = [d + 1 for d in w[8 : 8 + self.rank]]
        boxes = [w[13] >> 24, *(w[14] >> 8 * i & 255 for i in range(4))]
        self.box = [b + 1 for b in boxes[: self.rank]]
        self.count = int(np.prod(self.box))
        self.bytes = self.count * self.size
        inner = self.box[0] * self.size
        if self.base % 16 or inner % 16:
            raise Fault(f"tensor map: base {self.base:#x} or {inner} bytes of a box's rows: not multiples of 16")
        if self.swizzle and inner > 16 << self.swizzle:
            raise Fault(f"tensor map: a box's rows of {inner} bytes exceed the swizzle's {16 << self.swizzle}")

    def addresses(self, coords: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the addresses of a box's elements, innermost first, modulo 2^64, and a mask of those inside the
        tensor.
        """
        if len(coords) != self.rank:
            raise Fault(f"{len(coords)} coordinates of a tensor map of rank {self.rank}")
        base, whole = self.base, True  # base address and mask over modes of size 1 in the box
        address, inside = np.zeros(1, np.uint64), np.ones(1, bool)
        for coord, dim, stride, box in zip(coords, self.dims, self.strides, self.box, strict=True):
            if box == 1:
                base, whole = base + coord * stride, whole and 0 <= coord < dim
                continue
            at = np.arange(coord, coord + box, dtype=np.int64)
            step = at.astype(np.uint64) * np.uint64(stride)
            address = (address[None, :] + step[:, None]).reshape(-1)
            inside = (inside[None, :] & ((at >= 0) & (at < dim))[:, None]).reshape(-1)
        return address + np.uint64(base % (1 << 64)), inside & whole

    def places(self, shared: int) -> np.ndarray:
        """Return the shared addresses of a box's elements, if the box lies at `shared`."""
        if shared % 128:
            raise Fault(f"a box at shared address {shared:#x}, which is not a multiple of 128")
        return swizzled(shared + _steps(self.count, self.size), self.swizzle)


@lru_cache(maxsize=256)
def read_tensor_map(blob: bytes) -> TensorMap:
    """Decode a tensor map. Results are cached, since all loads and stores use a few maps."""
    return TensorMap(blob)


@lru_cache(maxsize=64)
def _steps(count: int, size: int) -> np.ndarray:
    return np.arange(count, dtype=np.int64) * size
