"""Blackwell's epilogue of a fused FC1 in MXFP8: stores the activation as E4M3, with a scale for each 32 columns."""

from __future__ import annotations

from ...sm90.epilogue import quantizing


class QuantizingEpilogue(quantizing.QuantizingEpilogue):
    """Hopper's quantising epilogue, with a scale for each 32 columns."""

    # A gated tile of 128 weight rows has 64 columns of the activation.
    act_cols = 64
