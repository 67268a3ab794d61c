"""What names of architectures say. Plain Python."""

from __future__ import annotations


def capability(arch: str) -> tuple[int, int]:
    """The compute capability that an architecture names: (9, 0) of sm_90a."""
    major, minor = divmod(int(arch.removeprefix("sm_").rstrip("a")), 10)
    return major, minor


def most_smem(arch: str) -> int:
    """Bytes of shared memory that a CTA may have. Portable kernels are the same on all GPUs, so they get the least of
    all: what sm_86, sm_89 and sm_120 have."""
    return (227 if arch == "sm_90a" else 99) * 1024
