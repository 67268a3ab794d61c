"""MXFP4: E2M1 elements and a power of two for each 32. For FP8 MMAs a row also has a power of two; an element times its
block's scale, divided by the row's power of two, is an E4M3 number (decoding/rows_in_fp8.py).
"""

from __future__ import annotations

from dataclasses import replace

from .format import E2M1, E8M0, Format

MXFP4 = Format("mxfp4", E2M1, E8M0, block=32)
MXFP4_ROWS = replace(MXFP4, row_binades=12)
