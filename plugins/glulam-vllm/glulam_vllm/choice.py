"""GLULAM_VLLM: the formats of experts' weights that Glulam computes in vLLM. Imports nothing of vLLM."""

from __future__ import annotations

import os

ENV = "GLULAM_VLLM"
BF16, FP8, MXFP8, MXFP4, NVFP4 = FORMATS = ("bf16", "fp8", "mxfp8", "mxfp4", "nvfp4")
"""bf16: weights in 16 bits; fp8: blocks of 128 x 128."""


def chosen() -> frozenset[str]:
    """Return the formats that GLULAM_VLLM names: all for "1", none for "0" or where it is not set.

    Raises:
        ValueError: it names something else.
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
