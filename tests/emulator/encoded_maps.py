"""Tensor maps as host functions encode them: the words that `engines.tensor_maps` reads."""

from __future__ import annotations

import re
import struct

from .faults import Fault
from .host_text import quoted
from .layouts import View, dynamic_bytes, flat, nested

ELEMENT_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "f8E4M3FN": 1, "i8": 1, "ui8": 1, "i32": 4, "i64": 8}
TENSOR_MAP_BITS = 1 << 1 | 1 << 18  # bits of word 2 that are set in every map that the compiler encodes
LONG_SPAN = 128 * 1024  # bytes from a tensor's first to its last, from which on bit 21 of word 2 is set
TENSOR_MAP_TYPES = {"U8": 0, "U16": 1, "U32": 2, "F16_RN": 6, "F32_RN": 7, "BF16_RN": 10}


def tma_atom(view: View, text: str) -> tuple[bytes, bytes]:
    """Encode a TMA atom: its tensor map, and the coordinate tensor beside it."""
    basis = re.findall(r'tma_gbasis = <"([^"]*)">', text)[0]
    kind = re.findall(r"tma_format = (\w+)", text)[0]
    swizzle = int((re.findall(r"S<(\d)", text) or ["0"])[0])
    multicast = int((re.findall(r"num_multicast = (\d+)", text) or ["1"])[0])
    shape = quoted(text)[-1].split(":")[0]
    return _tensor_map(view, basis, kind, swizzle, multicast), dynamic_bytes(shape, view.shape)


def _tensor_map(view: View, basis: str, kind: str, swizzle: int, multicast: int) -> bytes:
    """Return a tensor map's 128 bytes, as the compiled host code encodes it.

    basis: the box, innermost dimension first, and for each of its dimensions the mode of the view, for example
    "(64,128):(1@1,1@0)".
    """
    sizes, modes = basis.split(":")
    box = [int(leaf) for leaf in flat(nested(sizes))]
    dims, strides = [], []
    for leaf in flat(nested(modes)):
        size, stride = view.shape, view.stride
        for step in reversed(leaf.split("@")[1:]):
            if isinstance(size, tuple):
                size, stride = size[int(step)], stride[int(step)]
        dims.append(size)
        strides.append(stride * ELEMENT_BYTES[view.element])
    for i in reversed(range(len(box))):  # each CTA of a multicast loads its share
        share = min(box[i], multicast)
        box[i], multicast = box[i] // share, multicast // share
    if strides[0] != ELEMENT_BYTES[view.element] or any(stride % 16 for stride in strides[1:]):
        raise Fault(f"a tensor map with strides of {strides} bytes")
    words = [0] * 32
    words[0], words[1] = view.address & 0xFFFFFFFF, view.address >> 32
    span = dims[0] * strides[0] + sum((size - 1) * stride for size, stride in zip(dims[1:], strides[1:], strict=True))
    words[2] = len(box) - 1 << 4 | TENSOR_MAP_TYPES[kind] << 7 | swizzle << 13 | TENSOR_MAP_BITS
    words[2] |= (span & (1 << 64) - 1 >= LONG_SPAN) << 21
    for i, stride in enumerate(strides[1:]):
        words[3 + i] = stride // 16 & 0xFFFFFFFF
    for i, size in enumerate(dims):
        words[8 + i] = size - 1
    edges = [size - 1 for size in box] + [0] * (5 - len(box))
    words[13], words[14] = edges[0] << 24, edges[1] | edges[2] << 8 | edges[3] << 16 | edges[4] << 24
    return struct.pack("<32I", *words)
