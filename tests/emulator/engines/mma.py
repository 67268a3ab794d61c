"""mma.sync, and the fragments in which warps hold matrices."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..faults import Fault
from .operands import decoded

LANE = np.arange(32)
ROW, PAIR = LANE // 4, LANE % 4


def a_places(k: int, kind: str) -> np.ndarray:
    """Return row * k + column of A's elements, [registers, lanes, elements of a register], of 16 rows.

    PTX ISA, "Matrix Fragments for mma.m16n8k16" and its siblings: a register has 32 bits of a row, 2 x 2 registers have
    16 rows x 32 bytes. wgmma's A in registers has the same order ("Register Fragments for wgmma.mma_async").
    """
    per = {"tf32": 1, "bf16": 2, "f16": 2, "e4m3": 4}[kind]
    registers = k // (4 * per) * 2
    return np.array([[(ROW + 8 * (r % 2)) * k + per * PAIR + 4 * per * (r // 2) + e for e in range(per)]
                     for r in range(registers)]).transpose(0, 2, 1)  # fmt: skip


def b_places(k: int, kind: str) -> np.ndarray:
    """Return k * 8 + column of B's elements, [registers, lanes, elements of a register], of 8 columns."""
    per = {"tf32": 1, "bf16": 2, "f16": 2, "e4m3": 4}[kind]
    return np.array([[(per * PAIR + 4 * per * r + e) * 8 + ROW for e in range(per)]
                     for r in range(k // (4 * per))]).transpose(0, 2, 1)  # fmt: skip


@lru_cache(maxsize=32)
def _orders(k: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    return np.argsort(a_places(k, kind).reshape(-1)), np.argsort(b_places(k, kind).reshape(-1))


def elements(registers: np.ndarray, kind: str) -> np.ndarray:
    """Convert registers [registers, warps, 32] to float64 elements [warps, registers * 32 * elements of a register]."""
    x = np.ascontiguousarray(registers.transpose(1, 0, 2))
    words = x.view({"tf32": np.uint32, "bf16": np.uint16, "f16": np.uint16, "e4m3": np.uint8}[kind])
    return decoded(words, kind).reshape(x.shape[0], -1)


def a_matrix(registers: np.ndarray, k: int, kind: str) -> np.ndarray:
    """Return matrices A [warps, 16, k] from their registers [registers, warps, 32]."""
    return elements(registers, kind)[:, _orders(k, kind)[0]].reshape(-1, 16, k)


class WarpMma:
    """mma.sync with float32 accumulators (PTX ISA, "Warp-level Matrix Multiply-Accumulate Instructions: mma").

    guess: products are summed in float64 and rounded once. The order and width of the hardware's adder are not
    documented, so results can be compared only if every order of addition is exact.
    """

    def begin(self) -> None:
        """Do nothing: there is no state to set up."""

    def end(self) -> None:
        """Do nothing: mma.sync leaves no pending work."""

    def mma(self, shape: str, kind: str, a, b, c, m=True) -> np.ndarray:
        """Return D of m16n8k* as [registers, lanes]."""
        if kind not in ("bf16", "f16", "tf32", "e4m3") or not shape.startswith("m16n8k"):
            raise Fault(f"mma.sync.{shape} of {kind} is not modelled")
        if m is not True:
            self.whole_warps(m, "mma.sync")
        k = int(shape[6:])
        left = a_matrix(np.stack(a).reshape(len(a), self.warps, 32), k, kind)
        right = elements(np.stack(b).reshape(len(b), self.warps, 32), kind)[:, _orders(k, kind)[1]]
        old = np.stack(c).reshape(2, 2, self.warps, 8, 4).transpose(2, 0, 3, 4, 1).reshape(self.warps, 16, 8)
        new = (left @ right.reshape(self.warps, k, 8) + old).astype(np.float32)
        return new.reshape(self.warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, self.n)
