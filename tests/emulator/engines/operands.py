"""Matrices in shared memory as wgmma and tcgen05.mma read them: descriptors, core matrices, swizzles."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..faults import Fault
from ..formats import E4M3, bf16, f16
from ..lanes import SHARED_BASE
from .tensor_maps import swizzled

BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1}
CHUNK = 16


def decoded(words: np.ndarray, kind: str) -> np.ndarray:
    """Decode elements to float64."""
    if kind == "bf16":
        return bf16(words).astype(np.float64)
    if kind == "f16":
        return f16(words).astype(np.float64)
    if kind == "e4m3":
        return E4M3[words].astype(np.float64)
    if kind == "tf32":  # guess: the 13 lowest bits are ignored, as mma.sync's are
        return (words & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    raise Fault(f"operands of type {kind} are not modelled")


@lru_cache(maxsize=256)
def _chunks(first: int, rows: int, depth: int, size: int, mode: int, lbo: int, sbo: int, mn_major: bool) -> np.ndarray:
    """Return the offsets, before swizzling, of the 16-byte chunks of rows [first, first + rows) x depth elements.

    Shape: [rows, depth * size / 16] if K-major, else [rows * size / 16, depth]. PTX ISA, "Asynchronous Warpgroup Level
    Matrix Shared Memory Layout": core matrices are `lbo` (leading) and `sbo` (stride) bytes apart.
    """
    span = CHUNK << mode
    if mn_major:
        if not mode:
            raise Fault("MN-major matrices without a swizzle are not modelled")
        byte = (first * size + np.arange(0, rows * size, CHUNK))[:, None]
        k = np.arange(depth)[None, :]
        return byte // span * lbo + byte % span + k // 8 * sbo + k % 8 * span
    row = first + np.arange(rows)[:, None]
    byte = np.arange(0, depth * size, CHUNK)[None, :]
    if mode:
        if depth * size > span:
            raise Fault(f"{depth * size} bytes of K exceed the swizzle's span of {span}")
        return row // 8 * sbo + row % 8 * span + byte
    return row // 8 * sbo + row % 8 * CHUNK + byte // CHUNK * lbo


def read_matrix(unit, operation, what: str, kind: str, start: int, strides: tuple[int, int], mode: int, mn_major: bool,
                first: int, rows: int, depth: int) -> np.ndarray:  # fmt: skip
    """Read elements [rows, depth] of a matrix whose descriptor has `start`, `strides` and swizzle `mode`.

    The swizzle acts on the final address bits, so a start inside an atom, as K steps produce, is read correctly.
    """
    size = BYTES[kind]
    if mn_major and size == 4:  # their swizzles permute other units than 16 bytes
        raise Fault(f"{what}: MN-major {kind} operands are not modelled")
    cta = unit.cta
    at = swizzled(start + _chunks(first, rows, depth, size, mode, *strides, mn_major), mode) - SHARED_BASE
    unit.read_shared(cta, at, CHUNK, operation, what)
    words = cta.chunks[at >> 4].view(f"u{size}")  # [.., .., 16 / size]
    if mn_major:
        words = words.transpose(0, 2, 1)
        return decoded(np.ascontiguousarray(words).reshape(rows, depth), kind)
    return decoded(words.reshape(rows, depth), kind)
