"""Constructs of kernels (`architectures.CONSTRUCTS`) that a build can replace by plainer code. This is for the case
that a construct does not work on a GPU.

$GLULAM_PLAIN names constructs, separated by commas; docs/blackwell.md says when to set it. It applies to everything
that a process compiles and loads for architectures that have the construct. Functions keep their names and arguments.
"""

from __future__ import annotations

import os

from .architectures import ARCHS, CONSTRUCTS
from .tiles import SpecError

ENV = "GLULAM_PLAIN"


def avoided() -> tuple[str, ...]:
    """Return the constructs that $GLULAM_PLAIN names, in the order of CONSTRUCTS.

    Raises:
        SpecError: $GLULAM_PLAIN names an unknown construct.
    """
    named = {name.strip() for name in os.environ.get(ENV, "").split(",")} - {""}
    if unknown := named - CONSTRUCTS.keys():
        raise SpecError(f"{ENV}={os.environ[ENV]!r} names {min(unknown)!r}; choose among: {', '.join(CONSTRUCTS)}")
    return tuple(name for name in CONSTRUCTS if name in named)


def plain_in(arch: str) -> tuple[str, ...]:
    """Return the constructs that are left out when functions of an architecture are compiled."""
    return tuple(name for name in avoided() if name in ARCHS[arch].constructs)
