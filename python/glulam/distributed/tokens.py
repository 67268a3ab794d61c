"""The format in which tokens are sent between ranks: 16 bits, or MXFP8 if a layer's recipe multiplies MXFP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import recipes
from ..calls.checks import any_requires_grad, check_tensor, shape_text
from ..formats.mxfp8 import MXFP8Tensor, quantize_mxfp8
from ..formats.mxfp8.forms import BY_128
from ..formats.mxfp8.layout import BLOCK_SIZES, DATA_DTYPE
from ..formats.scaled import SCALE_DTYPE, SOURCE_DTYPES
from ..ops.quantized_mlp import rows_as_read, want_16_bits
from ..recipes import Recipe

Tokens = Tensor | MXFP8Tensor
SENT_AS = ("row", "1x128", "plain")
"""Axis, block and scale layout of tokens that are sent in MXFP8, as FC1's kernels read them."""
WIDE = BLOCK_SIZES["1x128"]
"""H of tokens in MXFP8 must be a multiple of this, so that each row's scales are whole, aligned 4-byte words."""


def status_of(x: Tokens) -> str:
    """Return the name of x's format in `windows.STATUSES`."""
    return "MXFP8 rows" if isinstance(x, MXFP8Tensor) else "16-bit rows"


def check_tokens(op: str, x: Any, hidden_size: int, max_tokens: int, dtype: torch.dtype) -> None:
    """Raise ValueError or TypeError unless x is [N, hidden_size], in `dtype` or in MXFP8, with N at most max_tokens."""
    data = x.data if isinstance(x, MXFP8Tensor) else x
    check_tensor(op, "x", data, "a tensor [N, H]", dtypes=(DATA_DTYPE if data is not x else dtype,))
    if data.dim() != 2 or data.shape[1] != hidden_size:
        raise ValueError(f"{op}: x has shape {shape_text(data.shape)}; it must be [N, {hidden_size}]")
    if len(data) > max_tokens:
        raise ValueError(f"{op}: x has {len(data)} tokens, and max_tokens is {max_tokens}; make it larger")
    if isinstance(x, MXFP8Tensor):
        _check_form(op, x, dtype)


def _check_form(op: str, x: MXFP8Tensor, dtype: torch.dtype) -> None:
    if (x.axis, x.block, x.scale_layout) != SENT_AS:
        raise ValueError(
            f"{op}: x is {x!r}; it must have axis 'row', block '1x128' and plain scales, as "
            "quantize_mxfp8(x, block='1x128') makes it, or glulam.formats.mxfp8.rebase_mxfp8(x.plain()) of another by "
            "rows"
        )
    if x.shape[1] % WIDE:
        raise ValueError(
            f"{op}: x is in MXFP8 and has {x.shape[1]} columns; it travels so where {WIDE} divides them, so give "
            f"x.dequantize({dtype})"
        )
    check_tensor(op, "x's scale", x.scale, "a tensor [N, H/32]", x.data, dtypes=(SCALE_DTYPE,))


def refuse_gradients(op: str, x: Any, weights: Any) -> None:
    """Raise GradientNotSupported if x is in MXFP8 and weights require a gradient, since backward needs 16-bit x."""
    if isinstance(x, MXFP8Tensor) and torch.is_grad_enabled() and any_requires_grad(weights):
        want_16_bits(op, "x")


def quantizes(recipe: Recipe, hidden_size: int, dtype: torch.dtype) -> bool:
    """Return True if a layer quantises its 16-bit tokens to MXFP8 before they are sent.

    That is so if FC1 would quantise the tokens anyway, to the format SENT_AS, and if no gradient is recorded: backward
    needs 16-bit tokens.
    """
    return recipe.x == BY_128 and not torch.is_grad_enabled() and not hidden_size % WIDE and dtype in SOURCE_DTYPES


def in_mxfp8(x: Tensor) -> MXFP8Tensor:
    """Quantise x to MXFP8 with blocks of 128, as FC1 would do on the receiving rank."""
    made: MXFP8Tensor = quantize_mxfp8(x, block=BY_128.block)
    return made


def as_read(op: str, recipe: str | Recipe, x: MXFP8Tensor, dtype: torch.dtype) -> Tokens:
    """Convert a caller's MXFP8 tokens to the format that the layer's recipe reads, before they are sent.

    If the recipe reads 16-bit tokens, they are decoded here, and not after the transfer: the receiving buffer has room
    for the tokens of all ranks, and decoding the whole buffer would take longer than the transfer.

    Args:
        op: the operator, for errors.
        recipe: the recipe.
        x: the tokens.
        dtype: the 16-bit dtype.

    Raises:
        ValueError, TypeError: the recipe does not take such tokens.
    """
    data, scale, _ = rows_as_read(op, x, recipes.find(op, recipe), dtype)
    return data if scale is None else MXFP8Tensor.unchecked(data, scale, *SENT_AS)
