"""quantize_mxfp4: quantise weights to MXFP4 along their rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cute_kernels.chains import signature_of
from cute_kernels.specs import QuantizeMxfp4Spec

from ...calls.checks import check_alignment, check_no_overlap, check_plain, runs_kernels, shape_text
from ...calls.memory import readable
from ...choose import kernels
from ...choose.problem import dtype_name
from ...host import device as gpus
from ..scaled import BLOCK, SCALE_DTYPE
from ..sources import CHUNK_ROWS, check_source
from .codec import encoded
from .tensor import MXFP4Tensor


def quantize_mxfp4(w: Tensor, *, out: MXFP4Tensor | None = None) -> MXFP4Tensor:
    """Quantise weights to MXFP4: E2M1 elements, and a power of two for each 32 elements of a row.

    A block's scale is 2^(floor(log2 amax) - 2), at least 2^-127. Elements are rounded to nearest even, and saturate at
    6. A NaN makes its block's scale NaN. The scale of a block of zeros is the least scale, byte 0.

    On a GPU a kernel quantises; a tensor that is not contiguous is copied one matrix at a time. On other devices, and
    while torch.compile traces, torch's operators quantise.

    Args:
        w: [..., N, K], bfloat16, float16 or float32; K a multiple of 32.
        out: the result's buffers, of w's shape and on w's device; None: allocate new ones.

    Returns:
        MXFP4Tensor [..., N, K]; `out` itself if it is not None.

    Raises:
        ValueError, TypeError: an argument is invalid.
        GradientNotSupported: grad mode is on and w requires a gradient.
        UnsupportedDevice, BundleError (RuntimeErrors): w is on a GPU, but there is no kernel for it.
    """
    _check(w, out)
    if out is None:
        *lead, k = w.shape
        data = torch.empty(*lead, k // 2, dtype=torch.uint8, device=w.device)
        out = MXFP4Tensor(data, torch.empty(*lead, k // BLOCK, dtype=SCALE_DTYPE, device=w.device))
    with torch.no_grad():
        (_by_kernel if runs_kernels(w) and not is_compiling() else _by_torch)(w, out)
    return out


def _experts(w: Tensor, out: MXFP4Tensor) -> list[Tensor]:
    """Return [w, out's data, out's scales as bytes], each viewed as [matrices, rows, columns]."""
    parts = w, out.data, out.scale.view(torch.uint8)
    return [part[None] if part.dim() == 2 else part.flatten(0, -3) for part in parts]


def _by_torch(w: Tensor, out: MXFP4Tensor) -> None:
    for matrix, data, scale in zip(*_experts(w, out), strict=True):
        for first in range(0, len(matrix), CHUNK_ROWS):
            rows = slice(first, first + CHUNK_ROWS)
            data[rows], scale[rows] = encoded(matrix[rows])


def _by_kernel(w: Tensor, out: MXFP4Tensor) -> None:
    """Quantise by the kernel; the result equals `_by_torch`'s bit for bit."""
    index, first = w.get_device(), 0
    spec = QuantizeMxfp4Spec(dtype_name(w.dtype), gpus.gpu(index).arch)
    quantize, pack = kernels.find(spec).function, signature_of(spec).pack
    experts, data, scale = _experts(w, out)
    with gpus.on(index):
        for piece in readable([experts]):
            those = slice(first, first + len(piece))
            first = those.stop
            quantize(*pack(w=piece.flatten(0, 1), data=data[those].flatten(0, 1), scale=scale[those].data_ptr()))


def _check(w: Any, out: Any) -> None:
    op = "quantize_mxfp4"
    check_source(op, w, BLOCK, any_batch=True)
    if out is None:
        return
    if not isinstance(out, MXFP4Tensor):
        raise TypeError(f"{op}: out is {type(out).__name__}; give an MXFP4Tensor")
    if out.shape != w.shape or out.device != w.device:
        raise ValueError(
            f"{op}: out is {out!r}; it must have w's shape {shape_text(w.shape)} and lie on {w.device}, as w does"
        )
    if out.is_prepared:
        raise ValueError(f"{op}: out is prepared, and results are not; give another, or quantise and call prepare_()")
    if not (out.data.is_contiguous() and out.scale.is_contiguous()):
        raise ValueError(f"{op}: out's data and scale must be contiguous")
    for part in (out.data, out.scale):
        check_plain(op, "out", part)
        if not is_compiling() and not part.is_meta:
            check_no_overlap(op, "out", part, "w", w)
    if runs_kernels(w) and not is_compiling():
        check_alignment(op, "out", out.data)
