"""Dtypes that specs name. Each has a short name, which function names contain."""

from __future__ import annotations

DTYPES = {"bfloat16": "bf16", "float16": "f16"}
"""Dtypes of 16-bit operands."""
WIDE_DTYPES = {**DTYPES, "float32": "f32"}
"""Dtypes of matrices that a kernel only reads once: rows to quantise, tokens, residual streams."""
PARAM_FORMS = {"float32": 0, "bfloat16": 1, "float16": 2}
"""Numbers ("forms") by which a call tells a kernel the dtypes of its parameters and coefficients. These dtypes are
run-time values, not part of a spec, since parameters have few elements."""
