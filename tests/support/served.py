"""The architecture whose kernels GPU tests run (`--arch`)."""

from __future__ import annotations

import os

from cute_kernels.arch import policy_of
from cute_kernels.portable.configs import TILES as PORTABLE_TILES
from cute_kernels.sm90.configs import DECODING_TILES
from cute_kernels.tiles import TileConfig

ARCH = os.environ.get("GLULAM_ARCH", "sm_90a")
IS_PORTABLE = ARCH != "sm_90a"
glu_form = policy_of(ARCH).glu_form


def decoding_tiles(operands: str) -> tuple[TileConfig, ...]:
    """Return the tiles that ship for operands whose weights are decoded to 16 bits. operands: a key of OPERANDS."""
    return PORTABLE_TILES if IS_PORTABLE else DECODING_TILES[operands]
