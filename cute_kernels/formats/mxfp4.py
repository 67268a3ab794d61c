"""MXFP4: E2M1 elements and a power of two for each 32."""

from __future__ import annotations

from .format import E2M1, E8M0, Format

MXFP4 = Format("mxfp4", E2M1, E8M0, block=32)
