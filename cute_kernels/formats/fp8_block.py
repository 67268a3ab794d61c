"""FP8 with block scales, as Qwen3-FP8 and DeepSeek-V3 ship it: E4M3 elements, and a float32 scale for each block of
128 x 128 of a weight and for each 128 of a row.

A concatenated w1 has a grid of scales for each of its halves, one after the other (memory/block_scales.py).
"""

from __future__ import annotations

from dataclasses import replace

from .format import E4M3, FLOAT32, Format

FP8_ROWS = Format("fp8block", E4M3, FLOAT32, block=128, whole=False)
FP8_BLOCK = replace(FP8_ROWS, rows=128)
