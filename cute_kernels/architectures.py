"""The architectures for which kernels are compiled, and facts about each. Plain Python that imports nothing.

An architecture's decisions (tiles, choices, times) are in its folder's `policy` (`arch.ArchPolicy`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

KIB = 1024


class Architecture(NamedTuple):
    """Facts about an architecture for which kernels are compiled.

    Attributes:
        folder: the folder of this package that has its configs, policy and GEMMs.
        gpus: some GPUs that run its kernels.
        tested_on: GPUs that ran the tests of all its kernels; empty: none.
        smem_bytes: bytes of shared memory that a CTA may have. Portable kernels are the same on all GPUs, so they get
            the smallest limit, that of sm_86, sm_89 and sm_120.
        schedules: schedules that its tiles can have (`tiles.SCHEDULES`).
        lacks: operands (`formats.OPERANDS`) that none of its GEMMs multiplies.
        recipes: names of quantisation recipes, each with the recipe that replaces it on this architecture.
        adapts: True if GEMMs of 16-bit weights can also add the product of LoRA adapters.
        constructs: names in CONSTRUCTS that its kernels use unless a build turns them off (`plain.py`).
    """

    folder: str
    gpus: str
    tested_on: str = ""
    smem_bytes: int = 99 * KIB
    schedules: tuple[str, ...] = ("warps",)
    lacks: tuple[str, ...] = ("mxfp8", "mxfp8_blocks", "mxfp4", "fp8_block")
    recipes: Mapping[str, str] = {}
    adapts: bool = False
    constructs: tuple[str, ...] = ()


CONSTRUCTS = {
    "tmem_loads": "tcgen05.ld 16x256b, which reads accumulators in the order of mma's registers",
    "rows": "TMA addresses that wrap, which clip rows where a group ends",
}
"""Constructs of Blackwell kernels, by name, that are not yet proven: NVIDIA's examples do not use them, and no GPU
available to us has run them."""

BY_BLOCKS = {"mxfp8": "mxfp8_blocks", "mxfp8_exact": "mxfp8_blocks"}
"""Quantisation recipes, each with its replacement on architectures whose tensor cores apply block scales themselves. On
these, weights with block scales are exact without being folded (to one scale a row)."""

_HOPPER = (
    "cooperative", "pingpong", "swapped", "swapped_single", "swapped_in_order", "swapped_halves", "swapped_quarters",
    "swapped_whole",
)  # fmt: skip
_B200 = Architecture(
    "sm100", "B200", "", 227 * KIB, ("tensor_memory", "warps"), ("mxfp8", "mxfp4", "fp8_block"), BY_BLOCKS,
    constructs=tuple(CONSTRUCTS),
)  # fmt: skip

ARCHS: dict[str, Architecture] = {
    "sm_90a": Architecture("sm90", "H100, H200", "H100 and H200", 227 * KIB, _HOPPER, ("mxfp8_blocks",), adapts=True),
    "sm_100a": _B200,
    "sm_103a": _B200._replace(gpus="B300"),
    "sm_80": Architecture("portable", "A100, A30"),
    "sm_86": Architecture("portable", "A10, A40, RTX 30"),
    "sm_89": Architecture("portable", "L4, L40S, RTX 40"),
    "sm_90": Architecture("portable", "H100, H200", "an H100"),
    "sm_100": Architecture("portable", "B200, B300"),
    "sm_120": Architecture("portable", "RTX 50, RTX PRO 6000"),
}


def capability(arch: str) -> tuple[int, int]:
    """Return the compute capability in an architecture's name: (9, 0) for sm_90a."""
    major, minor = divmod(int(arch.removeprefix("sm_").rstrip("a")), 10)
    return major, minor
