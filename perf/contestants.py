"""The libraries that compete, each behind the same three calls: fc1, fc2 and mlp on one set of buffers.

All compute the same function (SwiGLU, no bias, no row scale), so that nobody is charged for what a peer
cannot do. `glu_layout` says how a library reads the 2I rows of w1: every layout is fair on random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from .cases import TINY
from .contest import check_error, or_left_out
from .problem import Buffers, make_problem
from .quack import Quack, quack_version

MAX_RELATIVE_ERROR = 0.02  # two BF16 roundings differ by about 0.004; a wrong group or layout by about 1


class Library(Protocol):
    """A contestant. Each call returns its result: [T,I] from fc1, [T,H] from fc2 and mlp."""

    name: str
    glu_layout: str

    def fc1(self, b: Buffers) -> torch.Tensor: ...

    def fc2(self, b: Buffers) -> torch.Tensor: ...

    def mlp(self, b: Buffers) -> torch.Tensor: ...


class Glulam:
    """Our own operators with caller-given outputs."""

    name = "glulam"
    glu_layout = "concat"

    def __init__(self) -> None:
        import glulam

        self.api: Any = glulam

    def fc1(self, b: Buffers) -> torch.Tensor:
        self.api.grouped_glu(b.x, b.w1, offs=b.offs, out=b.act)
        return b.act

    def fc2(self, b: Buffers) -> torch.Tensor:
        self.api.grouped_mm(b.mid, b.w2, offs=b.offs, out=b.y)
        return b.y

    def mlp(self, b: Buffers) -> torch.Tensor:
        self.api.grouped_mlp(b.x, b.w1, b.w2, offs=b.offs, out=b.y)
        return b.y


def _swiglu(h: torch.Tensor, glu_layout: str = "concat") -> torch.Tensor:
    a, u = (h[:, 0::2], h[:, 1::2]) if glu_layout == "interleaved" else h.chunk(2, dim=1)
    return F.silu(a) * u


class TorchGrouped:
    """torch's grouped_mm with silu and a multiplication between; the yardstick of correctness as well."""

    name = "torch"

    def __init__(self, glu_layout: str = "concat") -> None:
        self.glu_layout = glu_layout

    def fc1(self, b: Buffers) -> torch.Tensor:
        return _swiglu(F.grouped_mm(b.x, b.w1.mT, offs=b.offs), self.glu_layout)

    def fc2(self, b: Buffers) -> torch.Tensor:
        return F.grouped_mm(b.mid, b.w2.mT, offs=b.offs)

    def mlp(self, b: Buffers) -> torch.Tensor:
        return F.grouped_mm(self.fc1(b), b.w2.mT, offs=b.offs)


class Dense:
    """cuBLAS on one matrix of the same FLOP, no groups and no activation: what grouping and fusing cost."""

    name = "dense"
    glu_layout = "concat"

    def fc1(self, b: Buffers) -> torch.Tensor:
        return torch.mm(b.x, b.w1[0].mT)

    def fc2(self, b: Buffers) -> torch.Tensor:
        return torch.mm(b.mid, b.w2[0].mT)

    def mlp(self, b: Buffers) -> torch.Tensor:
        self.fc1(b)
        return self.fc2(b)


def calls(library: Library, op: str, sets: list[Buffers]) -> Callable[[int], torch.Tensor]:
    """The library's operator as a function of a call's number, which rotates through the buffer sets."""
    call = getattr(library, op)
    return lambda number: call(sets[number % len(sets)])


def check(library: Library, op: str, b: Buffers) -> float:
    """Relative error (Frobenius norms) of a library against torch on the same buffers; 0 for Dense, which computes
    something else. Raises RuntimeError above MAX_RELATIVE_ERROR: a wrong result's time says nothing.
    """
    if isinstance(library, Dense):
        return 0.0
    expected = getattr(TorchGrouped(library.glu_layout), op)(b)
    return check_error(f"{library.name} {op}", getattr(library, op)(b), expected, MAX_RELATIVE_ERROR)


def find_quack(mode: str) -> Quack | None:
    """QuACK in one of QUACK_MODES; None if it is "off", absent, or does not run beside ours."""
    if mode != "off" and quack_version() is not None:
        with or_left_out("QuACK"):
            check(Quack("default"), "mlp", make_problem(TINY).sets[0])
            return Quack(mode)
    return None


def libraries(quack: str) -> list[Library]:
    """The contestants of a run. quack: one of QUACK_MODES; left out where it is absent or does not work."""
    chosen: list[Library] = [Glulam(), Dense(), TorchGrouped()]
    peer = find_quack(quack)
    return [*chosen, peer] if peer else chosen
