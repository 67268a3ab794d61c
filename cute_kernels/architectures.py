"""Architectures: what kernels are compiled for, and what is known of each. Plain Python that imports nothing.

What an architecture decides (tiles, choices, times) is its folder's `policy` (`arch.Room`).
"""

from __future__ import annotations

from typing import NamedTuple

KIB = 1024


class Architecture(NamedTuple):
    """An architecture.

    Attributes:
        folder: of its configs, policy and GEMMs.
        gpus: some that run its kernels.
        tested_on: GPUs that ran the tests of all its kernels; empty: none.
        smem_bytes: of shared memory that a CTA may have. Portable kernels are the same on all GPUs, so they get the
            least of all: what sm_86, sm_89 and sm_120 have.
    """

    folder: str
    gpus: str
    tested_on: str = ""
    smem_bytes: int = 99 * KIB


ARCHS: dict[str, Architecture] = {
    "sm_90a": Architecture("sm90", "H100, H200", "H100 and H200", 227 * KIB),
    "sm_100a": Architecture("sm100", "B200", smem_bytes=227 * KIB),
    "sm_103a": Architecture("sm100", "B300", smem_bytes=227 * KIB),
    "sm_80": Architecture("portable", "A100, A30"),
    "sm_86": Architecture("portable", "A10, A40, RTX 30"),
    "sm_89": Architecture("portable", "L4, L40S, RTX 40"),
    "sm_90": Architecture("portable", "H100, H200", "an H100"),
    "sm_100": Architecture("portable", "B200, B300"),
    "sm_120": Architecture("portable", "RTX 50, RTX PRO 6000"),
}


def capability(arch: str) -> tuple[int, int]:
    """The compute capability that an architecture names: (9, 0) of sm_90a."""
    major, minor = divmod(int(arch.removeprefix("sm_").rstrip("a")), 10)
    return major, minor
