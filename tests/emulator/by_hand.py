"""Kernels written by hand as Python blocks, for tests of the machine and its engines without PTX."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import numpy as np

from .engines import PARAM_BASE
from .lanes import SHARED_BASE
from .machine import Machine
from .memory import Memory

REGISTERS = {"p": 8, "b16": 8, "b32": 160, "b64": 8}
ELEMENT_TYPES = {"u8": 0, "u32": 2, "f16": 6, "f32": 7, "bf16": 10}


def make(
    *blocks, threads=32, shared=8192, params=b"", memory=None, grid=None, cluster=(1, 1, 1), ctas_per_sm=1, **options
) -> Machine:
    """Make a machine that launches a kernel of the given basic blocks; the kernel ends after the last one.

    A block is a function of (u, m), or a tuple (function, terminator).
    """
    program = [(block[0], 1, block[1]) if isinstance(block, tuple) else (block, 1, None) for block in blocks]
    program.append((nothing, 1, ("ret", None, None)))
    kernel = SimpleNamespace(name="kernel", counts=REGISTERS, shared_bytes=0, code=[], ctas_per_sm=ctas_per_sm)
    options.setdefault("unit_warps", 1)
    return Machine(kernel, memory or Memory(), grid or cluster, (threads, 1, 1), shared, params, cluster,
                   program=SimpleNamespace(blocks=program, source="", places={}), **options)  # fmt: skip


def launch(*blocks, **options) -> Machine:
    """Run a launch of blocks to its end."""
    machine = make(*blocks, **options)
    machine.run()
    return machine


def nothing(u, m) -> None:
    """Do nothing: for blocks that consist only of a terminator."""


def lane(u, number: int = 0) -> np.ndarray:
    """Return the mask of one lane of a unit."""
    return np.arange(u.n) == number


def shared(offset: int, rank: int = 0) -> np.uint32:
    """Return the shared-memory address of a byte of the CTA `rank`."""
    return np.uint32(SHARED_BASE + offset + (rank << 24))


def initialise(*barriers: tuple[int, int]):
    """Return a block in which warp 0 initialises mbarriers: (offset, count)."""

    def block(u, m) -> None:
        if u.first_warp == 0:
            for offset, count in barriers:
                u.mbar_init(shared(offset, u.cta.rank), np.uint32(count), lane(u))

    return block, ("bar_sync", None, [0])


def wait(at: int, offset: int, parity: int = 0):
    """Return a block that loops until the phase of a parity has ended at the mbarrier at `offset`.

    at: the block's own number, to which it loops back.
    """

    def block(u, m) -> None:
        u.p[0] = u.mbar_try(shared(offset, u.cta.rank), np.uint32(parity), m)

    return block, ("bra", (0, True), at)


def tensor_map(address: int, kind: str, dims, strides, box, swizzle: int = 0) -> bytes:
    """Encode a tensor map.

    `strides`: bytes, for all dimensions except the innermost; `swizzle`: a mode of `swizzled`.
    """
    word = [0] * 16
    word[0], word[1] = address & 0xFFFFFFFF, address >> 32
    word[2] = (len(dims) - 1) << 4 | ELEMENT_TYPES[kind] << 7 | swizzle << 13
    word[3 : 3 + len(strides)] = [stride // 16 for stride in strides]
    word[8 : 8 + len(dims)] = [dim - 1 for dim in dims]
    word[13] = (box[0] - 1) << 24
    word[14] = sum((size - 1) << 8 * at for at, size in enumerate(box[1:]))
    return struct.pack("<16I", *word) + bytes(64)


def keep(u, name: str, value) -> None:
    """Store a warp's result in the machine's `results`, under (name, CTA rank, warp)."""
    u.machine.__dict__.setdefault("results", {})[name, u.cta.rank, u.first_warp] = value


# Threads of a cluster meet.
MEET = [(nothing, ("cluster_arrive", None, None)), (nothing, ("cluster_wait", None, None))]


def exact(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return random multiples of 1/4 up to 2: sums of their products are exact in every format."""
    return rng.integers(-8, 9, shape) * 0.25


__all__ = ["MEET", "PARAM_BASE", "SHARED_BASE", "exact", "initialise", "keep", "lane", "launch", "make", "nothing",
           "shared", "tensor_map", "wait"]  # fmt: skip
