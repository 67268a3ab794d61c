"""Dtypes that specs name, with their short names."""

from __future__ import annotations

DTYPES = {"bfloat16": "bf16", "float16": "f16"}
"""Dtypes of 16-bit operands."""
WIDE_DTYPES = {**DTYPES, "float32": "f32"}
"""Dtypes of matrices that a kernel reads once: rows to quantise, tokens, streams."""
PARAM_FORMS = {"float32": 0, "bfloat16": 1, "float16": 2}
"""Numbers of parameters' dtypes, which are run-time values, since parameters are few."""
