"""Features of the GPU that a kernel is compiled for."""

from __future__ import annotations

import os
from typing import Any

import cutlass.cute as cute

from ..architectures import ARCHS, capability
from ..plain import plain_in

HOPPER = (9, 0)


def _target() -> str:
    """Return the architecture that this process compiles for, for example sm_90a. It is read from the variable that the
    DSL itself reads."""
    return os.environ["CUTE_DSL_ARCH"]


def has_early_launch() -> bool:
    """Return True if the GPU has programmatic dependent launch."""
    return capability(_target()) >= HOPPER


def has_packed_integers() -> bool:
    """Return True if the GPU has instructions for minimum and maximum of two 16-bit integers in a word."""
    return capability(_target()) >= HOPPER


def is_for_hopper_alone() -> bool:
    """Return True if the target is sm_90a, whose kernels run only on Hopper.

    Kernels for all GPUs are compiled for six other architectures, and must not spill registers on any of them.
    """
    return ARCHS[_target()].folder == "sm90"


def has_fp8() -> bool:
    """Return True if kernels convert to FP8 by the hardware's instructions. Only Hopper's own kernels do.

    All other kernels convert by arithmetic. There are two reasons: sm_80 and sm_86 have no such instructions, and an
    H100 can then test the code that all other GPUs run.
    """
    return is_for_hopper_alone()


def has_float_pairs() -> bool:
    """Return True if the GPU has an instruction that adds two pairs of float32 numbers at once. Its operands are pairs
    of registers, so a kernel that uses it needs more registers."""
    return capability(_target())[0] == 10


def is_plain(construct: str) -> bool:
    """Return True if kernels must be compiled without a construct, because $GLULAM_PLAIN names it (plain.py).

    construct: a key of architectures.CONSTRUCTS.
    """
    return construct in plain_in(_target())


def smem_of_cta() -> int:
    """Return the most bytes of shared memory that a CTA can have."""
    return ARCHS[_target()].smem_bytes


def early(wanted: Any) -> Any:
    """Return the argument `use_pdl` of a launch: `wanted` if the GPU has programmatic dependent launch, else False."""
    return wanted if has_early_launch() else False


def wait_for_earlier() -> None:
    """Wait until the previous kernel has ended. This matters on GPUs with programmatic dependent launch, where this
    kernel may begin before that."""
    if has_early_launch():
        cute.arch.griddepcontrol_wait()


def let_next_begin() -> None:
    """Let the next kernel begin, on GPUs with programmatic dependent launch. Where the next kernel needs this kernel's
    results, it waits by itself (`wait_for_earlier`)."""
    if has_early_launch():
        cute.arch.griddepcontrol_launch_dependents()
