"""A boundary whose x, the next sublayer's input, is returned in MXFP8. The kernel that computes x also quantises it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..calls.addressed import Like
from ..calls.checks import any_requires_grad, check_choice, check_flag, shape_text
from ..errors import GradientNotSupported
from ..formats.mxfp8 import MXFP8Tensor
from ..formats.mxfp8.layout import BLOCK_SIZES, DATA_DTYPE
from ..formats.mxfp8.reference import quantize_rows
from ..formats.scaled import BLOCK, SCALE_DTYPE, SOURCE_DTYPES


class QuantizedBoundaryResults(NamedTuple):
    """Results of `boundary` with x in MXFP8; for the attributes that are not listed, see `BoundaryResults`.

    Attributes:
        x: [..., D] in the streams' dtype, the next sublayer's input; None without `return_x`.
        x_mxfp8: [..., D], x quantised along its rows, with plain scales.
    """

    streams: Tensor
    x: Tensor | None
    pre: Tensor
    post: Tensor
    comb: Tensor
    x_mxfp8: MXFP8Tensor


def columns_of(op: str, x_block: Any, return_x: Any) -> int:
    """Return the columns of x that share a scale; 0: x is not quantised. Raises ValueError or TypeError."""
    check_flag(op, "return_x", return_x)
    if x_block is None:
        return 0
    check_choice(op, "x_block", x_block, tuple(BLOCK_SIZES))
    return BLOCK_SIZES[x_block]


def check_quantised(op: str, streams: Tensor) -> None:
    """Raise ValueError or TypeError if x, the mix of streams [..., n, D], cannot be quantised to MXFP8."""
    if streams.dim() < 3:
        raise ValueError(
            f"{op}: streams has shape {shape_text(streams.shape)}; x_block makes x a matrix, so give [..., T, n, D], "
            "as streams[None] is, or leave x_block out"
        )
    if streams.dtype not in SOURCE_DTYPES:
        raise TypeError(
            f"{op}: streams is {streams.dtype}; x_block quantises {', '.join(map(str, SOURCE_DTYPES))}, so cast it, or "
            "leave x_block out"
        )
    if streams.shape[-1] % BLOCK:
        raise ValueError(
            f"{op}: streams has D = {streams.shape[-1]}; x_block quantises x in blocks of {BLOCK} columns, which must "
            "divide D; leave x_block out, pad x with zeros and give it to quantize_mxfp8"
        )


def refuse_gradients(call: Any) -> None:
    """Raise GradientNotSupported if a tensor of a call with x in MXFP8 requires a gradient."""
    name = next((name for name in call.reads if any_requires_grad(getattr(call, name))), None)
    if name is not None:
        raise GradientNotSupported(
            f"{call.op}: x_block makes x in MXFP8, which has no gradient, and {name} requires one; leave x_block out "
            "and quantise x, or call it under torch.no_grad() or torch.inference_mode()"
        )


def likes(lead: Sequence[int], width: int) -> list[Like]:
    """Return (shape, dtype) of x's elements in MXFP8, and of its scales. lead: the dimensions of tokens; width: D."""
    return [((*lead, width), DATA_DTYPE), ((*lead, -(-width // BLOCK)), SCALE_DTYPE)]


def quantised(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Quantise x [..., D] to MXFP8 in blocks of `columns` columns, 32 or 128.

    Returns (the elements, of x's shape; the scales [..., D / 32], each repeated if a block has 128 columns).
    """
    data, exponents = quantize_rows(x.reshape(-1, x.shape[-1]), columns)
    scale = exponents.contiguous().view(SCALE_DTYPE)
    return data.contiguous().view(x.shape), scale.view(*x.shape[:-1], scale.shape[-1])


def in_mxfp8(data: Tensor, scale: Tensor, x_block: Any) -> MXFP8Tensor:
    """Return x as an MXFP8Tensor, from its elements and scales. x_block: "1x32" or "1x128", the block of a scale."""
    make = MXFP8Tensor if is_dynamo_compiling() else MXFP8Tensor.unchecked
    made: MXFP8Tensor = make(data, scale, "row", x_block, "plain")
    return made
