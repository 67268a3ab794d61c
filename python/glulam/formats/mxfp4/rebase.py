"""Re-basing: give each row of an MXFP4 weight one power of two, so that FP8 MMAs multiply the row exactly.

FP8 MMAs on Hopper do not apply block scales. But an E2M1 number times 2^k, k = -6 .. 6, is an E4M3 number. So the
kernel converts each element to E4M3, times (its block's scale / its row's power of two); after the MMA it multiplies
the result by the row's power of two. This is exact if the scales of a row's blocks are within 2^12 of each other.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from cute_kernels.formats import MXFP4_ROWS

from ...calls.checks import check_plain, shape_text
from ..mxfp8.fold import FoldError
from ..scaled import BLOCK, E8M0_NAN, SCALE_DTYPE, Stored
from ..words import WORD_BYTES, WORD_DTYPE, bytes_of, elements_of
from .codec import values_of
from .quantize import quantize_mxfp4
from .tensor import BLOCK_BYTES, MXFP4Tensor

OP = "prepare_mxfp4_weight"
REBASED = "mxfp4 rebased"
"""The name of the form `Mxfp4Rebased`."""
MAX_BINADES = MXFP4_ROWS.row_binades
BELOW_GREATEST = 6
"""A row's power of two is the row's greatest scale times 2^-6. 6 is half of MAX_BINADES."""
MAGNITUDES = 0x77
"""Mask of a byte's two elements: all bits except the signs."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RebasedWeight(Stored):
    """Expert weights in MXFP4 for the FP8 GEMMs of recipe "mxfp4"; made by `prepare_mxfp4_weight`.

    Attributes:
        data: [E, N, K/8] int32, contiguous: a checkpoint's bytes, four a word.
        scale: [E, N, K/32] float8_e8m0fnu, contiguous, unchanged from the checkpoint; uint8 is accepted.
        row_scale: [E, N] float8_e8m0fnu, contiguous: for each row, 2^-6 times its greatest scale; uint8 is accepted.

    Raises:
        ValueError, TypeError: data, scale and row_scale do not fit together.
    """

    data: Tensor
    scale: Tensor
    row_scale: Tensor

    format = "MXFP4"
    recipe = "mxfp4"
    weight_only = "mxfp4_weight_only"
    data_dtypes = (WORD_DTYPE,)

    def __post_init__(self) -> None:
        for name in ("scale", "row_scale"):
            part = getattr(self, name)
            if isinstance(part, Tensor) and part.dtype == torch.uint8:
                object.__setattr__(self, name, part.view(SCALE_DTYPE))
        self.check_parts()
        shape = tuple(self.shape)
        wanted = (*shape[:2], shape[-1] // BLOCK), shape[:2]
        if len(shape) != 3 or (tuple(self.scale.shape), tuple(self.row_scale.shape)) != wanted:
            shapes = ", ".join(shape_text(getattr(self, name).shape) for name in self.names)
            raise ValueError(
                f"RebasedWeight: data, scale and row_scale have shapes {shapes}; they must be [E, N, K/8], "
                "[E, N, K/32] and [E, N]"
            )

    @property
    def shape(self) -> torch.Size:
        """The shape of the elements, [E, N, K]."""
        *lead, columns = self.data.shape
        return torch.Size((*lead, columns * elements_of(self.data.dtype)))

    def form_name(self) -> str:
        return REBASED

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight's values [E, N, K] in `dtype`; magnitudes from 2^128 on become infinite.

        All other values are exact in float32 and bfloat16; float16 rounds them and has a smaller range.
        """
        return values_of(self.data.view(torch.uint8), self.scale.view(torch.uint8)).to(dtype)


@torch.no_grad()
def prepare_mxfp4_weight(w: MXFP4Tensor | Tensor) -> RebasedWeight:
    """Prepare MXFP4 expert weights for the FP8 GEMMs of recipe "mxfp4": find a power of two for each weight row.

    With these the GEMMs multiply the weights exactly (`formats.mxfp4.rebase` explains how). Call this once, at load.
    The result shares w's data and scales if w is not prepared and its parts are contiguous; else they are copied. One
    value is read back from the device.

    Args:
        w: an MXFP4Tensor [E, N, K], or bfloat16, float16 or float32 [E, N, K], which is quantised first; K is a
            multiple of 32.

    Returns:
        RebasedWeight [E, N, K] on w's device.

    Raises:
        FoldError (a ValueError): a row has blocks, not counting blocks of zeros, whose scales are more than 2^12 apart,
            or a scale that is NaN. Recipe "mxfp4_weight_only" takes such weights.
        ValueError, TypeError: w is of another type, dtype or shape.
    """
    if isinstance(w, Tensor):
        w = quantize_mxfp4(w)
    if not isinstance(w, MXFP4Tensor):
        raise TypeError(f"{OP}: w is {type(w).__name__}; give an MXFP4Tensor [E, N, K] or a weight in 16 bits")
    if len(w.shape) != 3 or not all(w.shape):
        raise ValueError(f"{OP}: w has shape {shape_text(w.shape)}; give the experts' weights together, [E, N, K]")
    for part in (w.data, w.scale):
        check_plain(OP, "w", part)
    data, scale = words_of_bytes(w.data), w.scale.contiguous()
    return RebasedWeight(data, scale, row_scales(data, scale, OP).view(SCALE_DTYPE))


def words_of_bytes(data: Tensor) -> Tensor:
    """Return an MXFP4Tensor's data as int32 [..., K/8] with a checkpoint's bytes in their order, four in a word.

    These are not the reordered words of `formats/words.py`. The result is a view if data are bytes, contiguous and
    aligned; else a copy.
    """
    made = bytes_of(data) if data.dtype == WORD_DTYPE else data.contiguous()
    if made.storage_offset() % WORD_BYTES:
        made = made.clone()
    return made.view(WORD_DTYPE)


def row_scales(data: Tensor, scale: Tensor, op: str) -> Tensor:
    """Return, for each weight row, the power of two 2^-6 * (the row's greatest scale) as an E8M0 byte, uint8 [E, N].

    Args:
        data, scale: as in a RebasedWeight.
        op: the caller's name, for messages.

    Raises:
        FoldError: a row's scales are too far apart, or NaN.
    """
    exponents = scale.view(torch.uint8)
    rows = torch.empty(exponents.shape[:2], dtype=torch.uint8, device=scale.device)
    spans = torch.zeros(exponents.shape[:2], dtype=torch.int16, device=scale.device)
    for expert, (words, blocks) in enumerate(zip(data, exponents.to(torch.int16), strict=True)):
        elements = words.view(torch.uint8).unflatten(-1, (-1, BLOCK_BYTES)) & MAGNITUDES
        is_zero = (elements == 0).all(dim=-1) & (blocks != E8M0_NAN)
        greatest = blocks.masked_fill(is_zero, 0).amax(dim=-1)
        least = torch.minimum(blocks.masked_fill(is_zero, E8M0_NAN).amin(dim=-1), greatest)
        rows[expert] = (greatest - BELOW_GREATEST).clamp(min=0)
        spans[expert] = (greatest - least).masked_fill(greatest == E8M0_NAN, E8M0_NAN)
    if spans.numel() and not spans.is_meta and (widest := int(spans.max())) > MAX_BINADES:
        expert, row = divmod(int(spans.argmax()), spans.shape[1])
        found = "NaN among its scales" if widest == E8M0_NAN else f"scales 2^{widest} apart"
        raise FoldError(
            f"{op}: row {row} of expert {expert} has {found}; FP8 holds its blocks exactly up to 2^{MAX_BINADES}, so "
            "choose recipe 'mxfp4_weight_only'"
        )
    return rows
