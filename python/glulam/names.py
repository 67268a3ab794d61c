"""Literal types of the names that public functions take as text.

With them an editor completes the names, and a type checker finds a misspelt one. Type checkers read only names that are
spelt out, so they are repeated here; `tests/test_types.py` compares each type with the code that declares the names. A
name that is known only at run time, for example from a configuration file, needs a `typing.cast` to satisfy a type
checker.
"""

from __future__ import annotations

from typing import Literal

ActivationName = Literal["swiglu", "clamped_swiglu", "geglu", "reglu", "srelu", "silu", "gelu", "none", "situ"]
GluLayout = Literal["concat", "interleaved", "interleaved32"]
RecipeName = Literal[
    "bf16", "mxfp8", "mxfp8_blocks", "mxfp8_wgrad", "mxfp8_exact", "mxfp8_weight_only", "mxfp4", "mxfp4_weight_only",
    "nvfp4_weight_only", "fp8_block", "fp8_block_weight_only",
]  # fmt: skip
TunedRecipe = Literal[
    "bf16", "mxfp8_weight_only", "mxfp4_weight_only", "nvfp4_weight_only", "fp8_block_weight_only"
]  # fmt: skip
TunedOp = Literal["grouped_mm", "grouped_glu", "grouped_mlp", "grouped_dglu", "grouped_wgrad"]
Dtype = Literal["bfloat16", "float16"]
Score = Literal["softmax", "sigmoid", "topk_softmax"]
Axis = Literal["row", "col"]
Axes = Literal["row", "col", "both"]
Block = Literal["1x32", "1x128"]
ScaleLayout = Literal["plain", "swizzled"]
Transport = Literal["auto", "symmetric", "all_to_all"]
