"""Tensor memory (TMEM): 128 lanes x 512 columns of 4 bytes that a CTA allocates, loads and stores."""

from __future__ import annotations

import numpy as np

from ..faults import Fault
from ..lanes import SHARED_BASE
from .asynchronous import Operation, finish
from .mma import PAIR, ROW
from .wgmma import is_index

LANES, COLUMNS = 128, 512


def tensor_words(cta) -> np.ndarray:
    """Return a CTA's tensor memory, which is initially NaN."""
    if cta.tensor_memory is None:
        cta.tensor_memory = np.full((LANES, COLUMNS), 0xFFFFFFFF, np.uint32)
    return cta.tensor_memory


def check_columns(cta, column: int, count: int, what: str) -> None:
    """Raise a Fault unless columns [column, column + count) lie in one allocation."""
    if not any(low <= column and column + count <= high for low, high in cta.tensor_columns):
        raise Fault(f"{what}: TMEM columns {column}..{column + count} were not allocated ({cta.tensor_columns})")


class TensorMemory:
    """Allocation and loads (PTX ISA, "TensorCore 5th Generation Family Instructions").

    "Tensor Memory Allocation and Management Instructions": columns are a power of two, at least 32; the CTA frees them;
    none are allocated after relinquish_alloc_permit. "Tensor Memory and Register Load/Store Instructions: tcgen05.ld",
    shapes 32x32b and 16x256b: a warp reaches the quarter of lanes that its number modulo 4 names ("Access
    restrictions"). Loads are done at once, since ptxas tracks their registers: NVIDIA's compiler reads registers before
    tcgen05.wait::ld. The race check orders a load's read of tensor memory by that wait alone.
    """

    def begin(self) -> None:
        """Start without loads."""
        self.tensor_loads: list[Operation] = []

    def end(self) -> None:
        """Do nothing: the CTA checks that columns were freed."""

    def allocate(self, to: int, count: int) -> None:
        """Allocate columns, and write the address of the first one to shared memory."""
        cta = self.cta
        if not cta.may_allocate:
            raise Fault("tcgen05.alloc after relinquish_alloc_permit")
        if count < 32 or count & (count - 1) or count > COLUMNS:
            raise Fault(f"tcgen05.alloc of {count} columns: not a power of two in [32, {COLUMNS}]")
        at = 0
        for low, high in sorted(cta.tensor_columns):
            if low - at >= count:
                break
            at = high
        if at + count > COLUMNS:
            raise Fault(f"tcgen05.alloc of {count} columns would wait for ever: {cta.tensor_columns} are taken")
        cta.tensor_columns.append((at, at + count))
        tensor_words(cta)[:, at : at + count] = 0xFFFFFFFF
        owner, offset = cta.owner(to)
        if offset % 4 or not 0 <= offset <= owner.size - 4:
            raise Fault(f"tcgen05.alloc writes to {to:#x}, outside of shared memory from {SHARED_BASE:#x} on")
        owner.words[4][offset // 4] = at

    def free(self, at: int, count: int) -> None:
        """Free columns; there must be no pending operation."""
        if (at, at + count) not in self.cta.tensor_columns:
            raise Fault(f"tcgen05.dealloc of {at}..{at + count}: not an allocation ({self.cta.tensor_columns})")
        if self.cta.tensor_queue:
            raise Fault("tcgen05.dealloc while operations are under way")
        self.cta.tensor_columns.remove((at, at + count))

    def tcgen05_ld(self, op: str, m, out, address) -> None:
        """Load columns to registers, `out`: indices in `b32` or rows."""
        address = self.full(address)
        self.acting = m
        load = Operation(self, op, lambda operation: self._load_warps(operation, m, out, address))
        load()
        if self.observer is not None:
            self.tensor_loads.append(load)

    def wait_for_tensor_loads(self, m) -> None:
        """Wait for all loads so far, which matters only to the observer since loads run at once."""
        self.acting = m
        for load in self.tensor_loads:
            finish(load, self)
        self.tensor_loads.clear()

    def _load_warps(self, operation: Operation, m, out, address) -> None:
        for warp in range(self.warps):
            if m is not True and not m[32 * warp]:
                continue
            values = self._load(operation, self.first_warp + warp, int(address[32 * warp]), len(out))
            lanes = slice(32 * warp, 32 * warp + 32)
            if is_index(out):
                self.b32[out, lanes] = values
            else:
                for register, value in zip(out, values, strict=True):
                    register[lanes] = value

    def _load(self, operation: Operation, warp: int, address: int, count: int) -> np.ndarray:
        """Return registers [count, 32] of one warp."""
        op, cta, quarter = operation.what, self.cta, 32 * (warp % 4)
        parts = op.split(".")
        lane, column = address >> 16, address & 0xFFFF
        words = tensor_words(cta)
        if "16x256b" in parts:  # 16 lanes, 8 columns to 4 registers: the order of mma's accumulators
            allowed, columns = (quarter, quarter + 16), 2 * count
            j = np.arange(count)[:, None]
            lanes, cols = lane + ROW + 8 * (j // 2 % 2), column + 8 * (j // 4) + 2 * PAIR + j % 2
        elif "32x32b" in parts:
            allowed, columns = (quarter,), count
            lanes, cols = lane + np.arange(32)[None, :], column + np.arange(count)[:, None]
        else:
            raise Fault(f"{op} is not modelled")
        if lane not in allowed:
            raise Fault(f"warp {warp} reads TMEM lane {lane}: its quarter begins at {quarter}")
        check_columns(cta, column, columns, "tcgen05.ld")
        if self.observer is not None:
            self.observer.read("tensor", cta, lanes * COLUMNS + cols, 4, operation)
        return words[lanes, cols]
