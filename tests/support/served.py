"""The architecture whose kernels GPU tests run (`--arch`)."""

from __future__ import annotations

import os

from cute_kernels.arch import policy_of
from cute_kernels.portable.configs import TILES as PORTABLE_TILES
from cute_kernels.sm90.configs import TILES_W8

ARCH = os.environ.get("GLULAM_ARCH", "sm_90a")
IS_PORTABLE = ARCH != "sm_90a"
DECODING_TILES = PORTABLE_TILES if IS_PORTABLE else TILES_W8
glu_form = policy_of(ARCH).glu_form
