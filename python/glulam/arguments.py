"""What an argument is, told by its name: the same in every operator that has it."""

from __future__ import annotations

MATRICES = ("x", "dy", "preact")
"""A row for each of T rows, or of tokens where indices are given."""
WEIGHTS, BIASES = ("w", "w1", "w2"), ("bias", "b1", "b2")
"""Packed, or a list with one tensor an expert."""
INDICES = ("rows", "dy_rows", "x_rows")
PER_ROW = ("row_scale", "bias_scale", "x_scale", *INDICES)
OF_TOKENS = ("row_of", "residual")
"""Of a layer: with a row for each token."""
VECTORS = (*PER_ROW, *OF_TOKENS, "w1_scale", "w2_scale", "mask")
"""Tensors that kernels take by address."""
GROUPS = ("offs", "splits")
FLAGS = (
    "return_preact", "recompute", "row_scale_grad", "accumulate", "transpose_w", "trained", "input_grad",
)  # fmt: skip
TENSORS = (*MATRICES, *WEIGHTS, *BIASES, *VECTORS, "out")
