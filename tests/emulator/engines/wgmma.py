"""wgmma: asynchronous multiplications of a warpgroup, Hopper's tensor core."""

from __future__ import annotations

import re

import numpy as np

from ..faults import Fault
from .asynchronous import Operation, finish
from .mma import a_matrix
from .operands import BYTES, read_matrix

SWIZZLES = {0: 0, 1: 3, 2: 2, 3: 1}  # bits 62 and 63 of a descriptor -> mode as in tensor maps


def is_index(registers) -> bool:
    """Return True if registers are given as an array of indices; False: as rows or values."""
    return isinstance(registers, np.ndarray) and registers.dtype.kind == "i"


def rows_of(unit, registers) -> np.ndarray:
    """Copy registers, given by indices in `b32` or as rows, to an array [registers, lanes]."""
    return unit.b32[registers] if is_index(registers) else np.stack(registers).view(np.uint32)


def set_rows(unit, registers, lanes: slice, values: np.ndarray) -> None:
    """Set float32 registers of some lanes."""
    if is_index(registers):
        unit.f32[registers, lanes] = values
    else:
        for register, value in zip(registers, values, strict=True):
            register.view(np.float32)[lanes] = value


class WarpgroupMma:
    """wgmma.mma_async and its groups.

    PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions": "wgmma.mma_async", "wgmma.fence",
    "wgmma.commit_group", "wgmma.wait_group"; "Matrix Descriptor Format": start, leading and stride byte offsets in
    units of 16 bytes, swizzle in bits 62-63. Types bf16, f16, tf32 and e4m3 with float32 accumulators; A in shared
    memory or in registers. Each warp computes its 16 rows. A group runs when it is committed or as late as it is waited
    for, as the machine's schedule decides. It then reads and writes memory and registers, so that a missing wait gives
    a wrong result. A missing wgmma.fence is found only by the race check. guess: sums are in float64, rounded once for
    each instruction; see WarpMma.
    """

    def begin(self) -> None:
        """Start without multiplications."""
        self.wgmma_open: list[Operation] = []
        self.wgmma_groups: list[list[Operation]] = []

    def end(self) -> None:
        """Raise Fault if a thread ended without waiting for its multiplications."""
        if self.wgmma_open or self.wgmma_groups:
            raise Fault("wgmma was not waited for")

    def wgmma(self, op: str, acc, a, b, scale_d, *rest, m=True) -> None:
        """Issue D = A B + D. `rest`: signs of A and B, 1 or -1; then, for operands in memory, flags that are set if
        MN-major.
        """
        shape = re.search(r"\.m64n(\d+)k(\d+)\.f32\.(\w+)\.(\w+)", op)
        if shape is None or shape[3] != shape[4] or shape[3] not in BYTES:
            raise Fault(f"{op} is not modelled")
        n, depth, kind = int(shape[1]), int(shape[2]), shape[3]
        if m is not True and not m.all():
            raise Fault(f"{op} by {int(m.sum())} lanes of {self.warps} warps: not by whole warps")
        signs = [self._uniform(x, op) for x in rest[:2]]
        sign = -1.0 if len(signs) == 2 and signs[0] * signs[1] < 0 else 1.0
        majors = [bool(self._uniform(x, op)) for x in rest[2:]]
        in_registers = isinstance(a, (tuple, list)) or is_index(a)
        if in_registers:
            majors = [False, *majors]
        a_major, b_major = (majors + [False, False])[:2]
        if (a_major or b_major) and BYTES[kind] != 2:
            raise Fault(f"{op}: {kind} operands are K-major only")
        keep = bool(self._uniform(scale_d, op))
        left = None if in_registers else self._descriptor(a, op)
        right = self._descriptor(b, op)

        def run(operation: Operation) -> None:
            columns = read_matrix(self, operation, op, kind, *right, b_major, 0, n, depth).T
            old = rows_of(self, acc).view(np.float32) if keep else None
            registers = a_matrix(rows_of(self, a).reshape(-1, self.warps, 32), depth, kind) if in_registers else None
            for warp in range(self.warps):
                if registers is not None:
                    rows = registers[warp]
                else:
                    first = 16 * ((self.first_warp + warp) % 4)
                    rows = read_matrix(self, operation, op, kind, *left, a_major, first, 16, depth)
                new = sign * (rows @ columns)  # [16, n]
                new = new.reshape(2, 8, n // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(n // 2, 32)
                lanes = slice(32 * warp, 32 * warp + 32)
                if old is not None:
                    new = new + old[:, lanes]
                set_rows(self, acc, lanes, new.astype(np.float32))

        self.wgmma_open.append(Operation(self, op, run))

    def _uniform(self, x, op: str) -> int:
        if isinstance(x, (int, bool)):
            return int(x)
        values = self.full(x)
        if (values != values[0]).any():
            raise Fault(f"{op}: an operand differs between lanes")
        return int(values[0])

    def _descriptor(self, d, op: str) -> tuple[int, tuple[int, int], int]:
        word = self._uniform(d, op)
        if word >> 49 & 7:
            raise Fault(f"{op}: descriptor {word:#x} has a base offset, which is not modelled")
        strides = (word >> 16 & 0x3FFF) << 4, (word >> 32 & 0x3FFF) << 4
        return (word & 0x3FFF) << 4, strides, SWIZZLES[word >> 62 & 3]

    def wgmma_fence(self, m=True) -> None:
        """Report a wgmma.fence to the observer; multiplications here read registers only when they run."""
        self.acting = m
        if self.observer is not None:
            self.observer.fence(self, "wgmma.fence")

    def wgmma_commit(self, m=True) -> None:
        """Close the current group."""
        self.wgmma_groups.append(self.wgmma_open)
        self.wgmma_open = []
        if self.machine.happens_at_once():
            for group in self.wgmma_groups:
                for operation in group:
                    operation()

    def wgmma_wait(self, n: int, m=True) -> None:
        """Wait until at most the last `n` groups are pending."""
        while len(self.wgmma_groups) > n:
            for operation in self.wgmma_groups.pop(0):
                finish(operation, self)
