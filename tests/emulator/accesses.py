"""Loads, stores and atomics of a unit's lanes, which belong to the generic proxy."""

from __future__ import annotations

import numpy as np

from .faults import Fault
from .memory import SHIFTS

LANES = np.arange(32)
ROWS, PAIRS = LANES // 4, LANES % 4  # a lane's place in an 8 x 8 matrix of 16-bit elements: row, pair of columns


def _apply(op: str, old, args):
    """Compute an atomic operation's new value (PTX ISA, "atom")."""
    if op == "cas":
        return args[1] if old == args[0] else old
    new = args[0]
    if op == "inc":
        return 0 if old >= new else old + 1
    if op == "dec":
        return new if old == 0 or old > new else old - 1
    if op == "exch":
        return new
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum, "or": np.bitwise_or, "and": np.bitwise_and,
                 "xor": np.bitwise_xor}  # fmt: skip
    if op not in functions:
        raise Fault(f"atom.{op} is not modelled")
    return functions[op](old, new)


class Accesses:
    """Memory accesses by the active lanes, in program order (PTX ISA, "Data Movement and Conversion Instructions").

    Scopes make no difference: all accesses happen in one order, and each is visible to everyone at once.
    """

    def begin(self) -> None:
        """Do nothing: there is no state to set up."""

    def end(self) -> None:
        """Do nothing: accesses leave no pending work."""

    def load_global(self, address, size: int, n: int, m) -> list[np.ndarray]:
        """Load `n` words of `size` bytes for each lane (PTX ISA, "ld")."""
        (a,) = self.active(m, address)
        view, at = self.machine.memory.place(a, size * n, "ld.global", width=size)
        if self.observer is not None:
            self.observer.read("global", None, a, size * n, self)
        return self.spread([view[at + j] for j in range(n)], m)

    def store_global(self, address, size: int, values, m) -> None:
        """Store words of `size` bytes for each lane (PTX ISA, "st").

        If lanes store to one address, the highest lane wins here. The ISA does not define which lane wins, so the
        observer is told, unless the lanes store equal values.
        """
        (a, *vs) = self.active(m, address, *values)
        view, at = self.machine.memory.place(a, size * len(values), "st.global", write=True, width=size)
        if self.observer is not None:
            self.observer.write("global", None, a, size * len(values), self)
        for j, v in enumerate(vs):
            view[at + j] = v
            if self.observer is not None and (view[at + j] != v.astype(view.dtype)).any():
                self.observer.overwritten(self)

    def load_shared(self, address, size: int, n: int, m) -> list[np.ndarray]:
        """Load from the shared memory of any CTA of the cluster."""
        (a,) = self.active(m, address)
        spans = self.cta.place(a, size * n)
        if self.observer is not None:
            for cta, _, at in spans:
                self.observer.read("shared", cta, at, size * n, self)
        if len(spans) == 1:
            cta, _, at = spans[0]
            words, at = cta.words[size], at >> SHIFTS[size]
            return self.spread([words[at + j] for j in range(n)], m)
        out = [np.empty(a.size, f"u{size}") for _ in range(n)]
        for cta, which, at in spans:
            for j in range(n):
                out[j][which] = cta.words[size][(at >> SHIFTS[size]) + j]
        return self.spread(out, m)

    def store_shared(self, address, size: int, values, m) -> None:
        """Store to the shared memory of any CTA of the cluster."""
        (a, *vs) = self.active(m, address, *values)
        for cta, which, at in self.cta.place(a, size * len(values), write=True):
            if self.observer is not None:
                self.observer.write("shared", cta, at, size * len(values), self)
            at = at >> SHIFTS[size]
            for j, v in enumerate(vs):
                cta.words[size][at + j] = v[which]
                if self.observer is not None and (cta.words[size][at + j] != v[which].astype(f"u{size}")).any():
                    self.observer.overwritten(self)

    def atomic(self, space: str, op: str, address, dtype, m, *rest) -> np.ndarray:
        """Do an atomic operation, one lane after the other, and return the old values (PTX ISA, "atom", "red")."""
        size = np.dtype(dtype).itemsize
        (a, *args) = self.active(m, address, *rest)
        old = np.empty(a.size, dtype)
        if space == "global":
            view, at = self.machine.memory.place(a, size, "atom.global", write=True)
            spans = [(None, slice(None), view.view(dtype), at, a)]
        else:
            spans = [(cta, which, cta.words[size].view(dtype), at >> SHIFTS[size], at)
                     for cta, which, at in self.cta.place(a, size, write=True)]  # fmt: skip
        for cta, which, view, at, places in spans:
            if self.observer is not None:
                self.observer.atomic(space, cta, places, size, self)
            for lane, where in zip(np.arange(a.size)[which], at, strict=True):
                old[lane] = view[where]
                view[where] = _apply(op, old[lane], [x[lane] for x in args])
        return self.spread([old], m)[0]

    def ldmatrix(self, address, count: int, trans: bool, m=True) -> list[np.ndarray]:
        """Load 8 x 8 matrices of 16-bit elements (PTX ISA, "ldmatrix").

        The addresses of a matrix's rows come from 8 lanes.
        """
        acts = self.whole_warps(m, "ldmatrix")
        out = []
        a = self.by_warp(address)[acts]
        for j in range(count):
            cta, at = self._rows(a[:, 8 * j : 8 * j + 8], write=False)
            if trans:
                low = cta.words[2][(at[:, 2 * PAIRS] >> 1) + ROWS].astype(np.uint32)
                high = cta.words[2][(at[:, 2 * PAIRS + 1] >> 1) + ROWS].astype(np.uint32)
                out.append(low | high << np.uint32(16))
            else:
                out.append(cta.words[4][(at[:, ROWS] >> 2) + PAIRS])
        return self.spread([value.reshape(-1) for value in out], m)

    def stmatrix(self, address, values, trans: bool, m=True) -> None:
        """Store 8 x 8 matrices of 16-bit elements (PTX ISA, "stmatrix")."""
        acts = self.whole_warps(m, "stmatrix")
        a = self.by_warp(address)
        for j, value in enumerate(values):
            cta, at = self._rows(a[acts, 8 * j : 8 * j + 8], write=True)
            v = self.by_warp(value)[acts]
            if trans:
                cta.words[2][(at[:, 2 * PAIRS] >> 1) + ROWS] = v & np.uint32(0xFFFF)
                cta.words[2][(at[:, 2 * PAIRS + 1] >> 1) + ROWS] = v >> np.uint32(16)
            else:
                cta.words[4][(at[:, ROWS] >> 2) + PAIRS] = v

    def whole_warps(self, m, what: str) -> np.ndarray:
        """Return the mask of active warps.

        Raises Fault if a warp is partly active, which .aligned instructions forbid.
        """
        self.acting = m
        if m is True:
            return np.ones(self.warps, bool)
        acts = m.reshape(self.warps, 32)
        if (acts.any(1) != acts.all(1)).any():
            raise Fault(f"{what} by {int(m.sum())} lanes: not by whole warps")
        return acts.all(1)

    def _rows(self, addresses: np.ndarray, write: bool):
        """Check addresses [warps, 8] of 16-byte rows; return their CTA and their offsets in its shared memory."""
        spans = self.cta.place(np.ascontiguousarray(addresses).reshape(-1), 16, write)
        if len(spans) != 1:
            raise Fault("a matrix in the shared memory of several CTAs")
        cta, _, at = spans[0]
        if self.observer is not None:
            (self.observer.write if write else self.observer.read)("shared", cta, at, 16, self)
        return cta, at.reshape(-1, 8)
