"""Dtypes that specs name, with their short names."""

from __future__ import annotations

DTYPES = {"bfloat16": "bf16", "float16": "f16"}
"""Of operands in 16 bits."""
WIDE_DTYPES = {**DTYPES, "float32": "f32"}
"""Of what is read once: rows that are quantised, tokens, streams."""
PARAM_FORMS = {"float32": 0, "bfloat16": 1, "float16": 2}
"""How a kernel reads parameters: their dtype is a run-time value, since they are few."""
