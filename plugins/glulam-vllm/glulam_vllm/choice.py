"""GLULAM_VLLM: the environment variable that selects the weight formats which Glulam runs in vLLM.

This module does not import vLLM.
"""

from __future__ import annotations

import os

ENV = "GLULAM_VLLM"
BF16, FP8, MXFP8, MXFP4, NVFP4 = FORMATS = ("bf16", "fp8", "mxfp8", "mxfp4", "nvfp4")
"""Formats of weights. bf16: 16 bits; fp8: E4M3 with a scale for each block of 128 x 128."""


def chosen() -> frozenset[str]:
    """Return the formats that GLULAM_VLLM selects: all for "1"; none for "0" or if it is not set.

    Raises:
        ValueError: its value contains an unknown format.
    """
    value = os.environ.get(ENV, "").strip().lower()
    if value in ("", "0"):
        return frozenset()
    if value == "1":
        return frozenset(FORMATS)
    names = frozenset(name.strip() for name in value.split(","))
    if unknown := sorted(names - set(FORMATS)):
        raise ValueError(f"{ENV} is {value!r}, which names {unknown[0]!r}; give 1, 0, or some of {','.join(FORMATS)}")
    return names
