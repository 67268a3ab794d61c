"""Dtypes that specs name, with their short names."""

from __future__ import annotations

DTYPES = {"bfloat16": "bf16", "float16": "f16"}
"""16-bit operands."""
WIDE_DTYPES = {**DTYPES, "float32": "f32"}
"""Matrices that a kernel reads once: rows to quantise, tokens, streams."""
PARAM_FORMS = {"float32": 0, "bfloat16": 1, "float16": 2}
"""How a kernel reads parameters: their dtype is a run-time value, since they are few."""
