"""Epilogue of a fused FC1 in MXFP8: the activation leaves as E4M3 with a scale for each 32 of a row."""

from __future__ import annotations

from ...sm90.epilogue import quantizing


class QuantizingEpilogue(quantizing.QuantizingEpilogue):
    """Hopper's, with blocks of 32 columns."""

    # A gated tile of 128 weight rows has no more.
    act_cols = 64
