"""Epilogue of a fused FC1 in MXFP8: the activation is stored as E4M3, with a scale for each 32 columns of a row."""

from __future__ import annotations

from ...sm90.epilogue import quantizing


class QuantizingEpilogue(quantizing.QuantizingEpilogue):
    """Hopper's quantising epilogue, with a scale for each 32 columns."""

    # A gated tile of 128 weight rows has 64 columns of the activation.
    act_cols = 64
