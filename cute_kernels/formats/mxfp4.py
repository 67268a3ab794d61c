"""MXFP4: E2M1 elements, with a power of two (E8M0) as scale for each 32 elements."""

from __future__ import annotations

from dataclasses import replace

from .format import E2M1, E8M0, Format

MXFP4 = Format("mxfp4", E2M1, E8M0, block=32)
MXFP4_ROWS = replace(MXFP4, row_binades=12)
"""MXFP4 weights for FP8 MMAs, for which kernels decode them to E4M3. Each weight row has a power of two besides its
blocks' scales. An element times its block's scale, divided by its row's power of two, is an E4M3 number
(decoding/rows_in_fp8.py)."""
