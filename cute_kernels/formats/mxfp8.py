"""MXFP8: E4M3 elements with powers of two (E8M0) as scales. There is one scale for each 32 elements, for each 128, or
for each row (docs/mxfp8.md)."""

from __future__ import annotations

from dataclasses import replace

from .format import E4M3, E8M0, ROW, Format

MXFP8 = Format("mxfp8", E4M3, E8M0, block=32)
MXFP8_WIDE = replace(MXFP8, block=128, copies=4)
"""Rows of x in FP8 GEMMs: one scale for each 128 elements, stored four times. So these scales lie in memory like the
scales of MXFP8."""
MXFP8_FOLDED = replace(MXFP8, block=ROW)
"""Weights of FP8 GEMMs: one scale for each row."""
MXFP8_VALUES = Format(holds=MXFP8)
"""16-bit rows that were rounded to values of MXFP8."""
