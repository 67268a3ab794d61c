"""FP8 with block scales, as in the checkpoints of Qwen3-FP8 and DeepSeek-V3: E4M3 elements with float32 scales.

A weight has a scale for each block of 128 x 128; x has a scale for each 128 elements of a row. A w1 with gate layout
"concat" has two grids of scales, one for each half, one after the other (memory/block_scales.py).
"""

from __future__ import annotations

from dataclasses import replace

from .format import E4M3, FLOAT32, Format

FP8_ROWS = Format("fp8block", E4M3, FLOAT32, block=128, whole=False)
"""Rows of x: a scale for each 128 elements of a row."""
FP8_BLOCK = replace(FP8_ROWS, rows=128)
"""Weights: a scale for each block of 128 x 128."""
