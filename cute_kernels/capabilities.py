"""What names of architectures say. Plain Python."""

from __future__ import annotations


def capability(arch: str) -> tuple[int, int]:
    """The compute capability that an architecture names: (9, 0) of sm_90a."""
    major, minor = divmod(int(arch.removeprefix("sm_").rstrip("a")), 10)
    return major, minor
