"""What the GPU that a kernel is compiled for has, of what kernels of any architecture would use."""

from __future__ import annotations

import os
from typing import Any

import cutlass.cute as cute

from ..architectures import ARCHS, capability
from ..plain import plain_in

HOPPER = (9, 0)


def _target() -> str:
    """A compile process serves one architecture, which the DSL reads there, too."""
    return os.environ["CUTE_DSL_ARCH"]


def has_early_launch() -> bool:
    """Programmatic dependent launch."""
    return capability(_target()) >= HOPPER


def has_packed_integers() -> bool:
    """Minimum and maximum of two 16-bit integers in a word."""
    return capability(_target()) >= HOPPER


def is_for_hopper_alone() -> bool:
    """Hopper's own kernels. What the others share is compiled for six architectures, of which none must spill."""
    return ARCHS[_target()].folder == "sm90"


def has_fp8() -> bool:
    """Whether FP8 conversions are the hardware's: on Hopper's own kernels alone, so that what all others run is tested
    on an H100 as well, sm_80 and sm_86 have none."""
    return is_for_hopper_alone()


def has_float_pairs() -> bool:
    """Additions of float32 numbers in two registers side by side, which takes more registers."""
    return capability(_target())[0] == 10


def is_plain(construct: str) -> bool:
    """Return whether kernels do without one of architectures.CONSTRUCTS."""
    return construct in plain_in(_target())


def smem_of_cta() -> int:
    """Bytes at most."""
    return ARCHS[_target()].smem_bytes


def early(wanted: Any) -> Any:
    """A launch's `use_pdl`."""
    return wanted if has_early_launch() else False


def wait_for_earlier() -> None:
    """Until the kernel before has ended, where this one may begin before."""
    if has_early_launch():
        cute.arch.griddepcontrol_wait()


def let_next_begin() -> None:
    """The kernel behind may begin, and waits where it needs this one's results."""
    if has_early_launch():
        cute.arch.griddepcontrol_launch_dependents()
