"""Signatures of all exported functions. This is the only place that knows the order of arguments.

An exported function is positional: TVM-FFI passes tensors, numbers and addresses. Its signature is plain data. Callers
(the front, the tuner, perf, chains, tests) pack arguments by name; stand-ins for the compiler, and for calls that only
load kernels, are made from the same data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .arguments import (
    ADDRESS,
    DIVISOR,
    FLOAT32,
    INT32,
    INT64,
    NAMES_OF_PARAMS,
    TENSOR,
    Argument,
    Signature,
    each,
)
from .formats import BYTE, E4M3, FP8_ROWS, MXFP4, MXFP8, OPERANDS, WORD_ELEMENTS, Operands
from .specs import (
    BY_GROUP,
    DgluSpec,
    FoldMxfp8Spec,
    GroupedGluSpec,
    GroupedMmSpec,
    GroupedWgradSpec,
    LayerSpec,
    MhcSpec,
    QuantizeFp8BlockSpec,
    QuantizeMxfp4Spec,
    QuantizeMxfp8Spec,
    Spec,
    TailSpec,
    WgradSpec,
)


def _tensor(name: str, shape: str, dtype: str, packed: bool = False) -> Argument:
    return Argument(name, TENSOR, dtype=dtype, shape=tuple(shape.split()), packed=packed)


ROWS = each(ADDRESS, "rows", optional=True)
"""Address of int32 [T], the row of x (of R rows) that each row reads; 0: the rows are x's rows, in order."""
GROUPS = (
    *each(ADDRESS, "groups"),
    *each(INT32, "group_form num_groups"),
    *each(ADDRESS, "tickets", optional=True),
)
"""Group sizes, their encoding (`schedule.groups`), their count; counters for tickets (0: each CTA's tiles are
fixed)."""
PARAMS = each(FLOAT32, NAMES_OF_PARAMS, optional=True)
ACTIVATION = (*each(INT32, "kind glu_layout", optional=True), *PARAMS)
"""The activation (`specs.KINDS`) and gate layout (`specs.LAYOUTS`) that a kernel of several computes."""
LAUNCH = (*each(INT32, "num_sms"), *each(INT32, "position", optional=True))
"""SMs of the GPU; the number of kernels that come before in the same call. If it is not 0, the launch is
programmatic."""


def _scales_of(formats: Operands) -> tuple[Argument, ...]:
    """Return the arguments for scales of a GEMM's x and w, or for a table of experts' weights without scales.

    w_scale: scales [E, N, K / block]. For E4M3 scales the address is even, and a negative scale counts as NaN.
    w_global_scale: float32 factors of all other scales, `w_global_count` for each expert: 0: one for all experts; 1:
    [E]; 2: [E, 2] for a gated w, the activated half's first. For MXFP4 in FP8 MMAs: bytes [E, N], a power of two for
    each row (`Format.row_binades`).
    """
    names = f"{'x_scale' if formats.x.scale else ''} {'w_scale' if formats.w.scale else ''}"
    table = () if formats.w.scale else each(ADDRESS, "w_table", optional=True)
    more = each(ADDRESS, "w_global_scale") if formats.w.has_global or formats.w.row_binades else ()
    more += each(INT32, "w_global_count") if formats.w.has_global else ()
    return (*each(ADDRESS, names), *more, *table)


def _low_of(spec: GroupedMmSpec | GroupedGluSpec | DgluSpec) -> tuple[tuple[Argument, ...], tuple[Argument, ...]]:
    """Return the arguments of an adapted GEMM: the tensor low, and the address of the matrices by which low is
    multiplied, which are packed and laid out like w."""
    return ((_tensor("low", "T Q", spec.dtype),), each(ADDRESS, "low_w")) if spec.adapted else ((), ())


_OPTIONAL_INPUTS = each(ADDRESS, "bias bias_table scale", optional=True)


def _blocks(formats: Operands, letters: str) -> tuple[tuple[str, int], ...]:
    """Return the divisors of the widths of scaled matrices, and of weights' columns if weights lie in words."""
    widths = tuple((letter, formats.multiple) for letter in letters.split()) if formats.w.scale else ()
    words = ((formats.w.columns(letter), multiple // WORD_ELEMENTS) for letter, multiple in widths)
    return widths + (tuple(words) if formats.w.bits < 8 else ())


def _x(spec: GroupedMmSpec | GroupedGluSpec | DgluSpec, columns: str) -> tuple[Argument, tuple[Argument, ...]]:
    """Return the arguments for x, and for the indices of its rows if the kernel takes indices."""
    formats = OPERANDS[spec.operands]
    dtype, letter = formats.x.dtype(spec.dtype), "T" if formats.decodes else "R"
    return _tensor("x", f"{letter} {columns}", dtype), () if formats.decodes else ROWS


def _mm(spec: GroupedMmSpec) -> Signature:
    """Return the signature of a grouped_mm.

    w_up: with x in halves, the address of the second half's weights, laid out like w; such x has no row indices.
    """
    formats = OPERANDS[spec.operands]
    w = formats.w.dtype(spec.dtype)
    if spec.in_halves:
        tensors = _tensor("x", "T P", spec.dtype), _tensor("w", "E N K", w), _tensor("y", "T K", spec.dtype)
        return Signature((*tensors, *GROUPS, *each(ADDRESS, "w_up"), *LAUNCH), (("P", 2 * DIVISOR),))
    k, n = ("N", "K") if spec.transpose_w else ("K", "N")
    x, rows = _x(spec, k)
    tensors = x, _tensor("w", f"E N {formats.w.columns('K')}", w), _tensor("y", f"T {n}", spec.dtype)
    low, low_w = _low_of(spec)
    numbers = (*rows, *GROUPS, *_scales_of(formats), *low_w, *_OPTIONAL_INPUTS, *LAUNCH)
    return Signature((*tensors, *low, *numbers), _blocks(formats, "K"))


def _glu(spec: GroupedGluSpec) -> Signature:
    """Return the signature of a grouped_glu.

    act_scale: the address to which the scales of an FP8 activation are written.
    w_up: the address of the linear half's weights, laid out like w; w then has W = I rows, the activated half. 0: w has
    both halves.
    """
    formats = OPERANDS[spec.operands]
    w, act = formats.w.dtype(spec.dtype), formats.act.dtype(spec.dtype)
    x, rows = _x(spec, "H")
    both = "P" if spec.gated else "I"
    may_part = not formats.w.scale
    w_rows = "W" if spec.gated and may_part else both
    weight = _tensor("w", f"E H {both}" if spec.transpose_w else f"E {w_rows} {formats.w.columns('H')}", w)
    tensors = x, weight, _tensor("act", "T I", act)
    preact = (_tensor("preact", f"T {both}", spec.dtype),) if spec.save_preact else ()
    act_scale = each(ADDRESS, "act_scale") if formats.act.scale else ()
    up = each(ADDRESS, "w_up", optional=True) if may_part else ()
    low, low_w = _low_of(spec)
    numbers = (*GROUPS, *_scales_of(formats), *up, *low_w, *act_scale, *_OPTIONAL_INPUTS, *ACTIVATION, *LAUNCH)
    return Signature((*tensors, *preact, *low, *rows, *numbers), _blocks(formats, "H I"))


def _dglu(spec: DgluSpec) -> Signature:
    """Return the signature of a dglu.

    x: the gradient of FC2's result. partials: the address of float32 [ceil(I / tile.n), T]; 0: no gradient of the row
    scale is wanted.

    Weights in MXFP8 are transposed, with scales along this GEMM's contraction.
    """
    formats = OPERANDS[spec.operands]
    w = formats.w.dtype(spec.dtype)
    x, rows = _x(spec, "H")
    both = "P" if spec.gated else "I"
    weight = "E I H" if spec.transpose_w or formats.w.scale else "E H I"
    tensors = (
        x, _tensor("w", weight, w), _tensor("preact", f"T {both}", spec.dtype),
        _tensor("dpreact", f"T {both}", spec.dtype), _tensor("act", "T I", spec.dtype),
    )  # fmt: skip
    low, low_w = _low_of(spec)
    optional = each(ADDRESS, "scale partials", optional=True)
    numbers = (*rows, *GROUPS, *_scales_of(formats), *low_w, *optional, *PARAMS, *LAUNCH)
    return Signature((*tensors, *low, *numbers), _blocks(formats, "H I P"))


def _tail(spec: TailSpec) -> Signature:
    """Return the signature of a backward's last kernel.

    dx: the address of 16-bit rows, `dx_pitch` elements apart, which are zeroed after the last group; 0: not given.
    If `dx_tokens` are given, nothing is zeroed, since they are sums of the groups' rows and no other row of dx is read.

    partials: the address of float32 [ceil(I / part_columns), T], whose sums are written to d_scale, float32 [T]; 0: not
    given. act is not read.
    """
    rows = each(ADDRESS, "dx dx_tokens", True)
    matrix = (*rows, *each(INT32, "dx_columns", True), *each(INT64, "dx_pitch", True))
    sums = (*each(ADDRESS, "d_scale partials", optional=True), *each(INT32, "part_columns"))
    return Signature((_tensor("act", "T I", spec.dtype), *matrix, *sums, *GROUPS, *each(INT32, "num_sms")))


_PLACES = (
    *each(ADDRESS, "dw_table mask", optional=True), *each(INT32, "accumulate", optional=True),
    *each(INT32, "num_sms"),
)  # fmt: skip
"""Arguments of a weight gradient. mask: the address of bool [E], the groups that add to dw; 0: all groups add or none,
as `accumulate` says."""


def _wgrad(spec: GroupedWgradSpec) -> Signature:
    """Return the signature of a weight gradient in 16 bits.

    dy_rows, x_rows: indices of rows of dy or of x, like `ROWS`; at most one of them is given.
    """
    operands = _tensor("dy", "T N", spec.dtype), _tensor("x", "R K", spec.dtype)
    tensors = *operands, _tensor("dw", "E N K", spec.out_dtype)
    rows = each(ADDRESS, "dy_rows x_rows", optional=True)
    return Signature((*tensors, *rows, *GROUPS, *_PLACES))


def _scaled_wgrad(spec: WgradSpec) -> Signature:
    """Return the signature of a weight gradient in MXFP8.

    dy, x: as a quantiser by groups writes them. dy_scale, x_scale: the addresses of their scales.
    """
    operands = _tensor("dy", "T N", E4M3), _tensor("x", "T K", E4M3)
    tensors = *operands, _tensor("dw", "E N K", spec.out_dtype)
    divisors = ("N", MXFP8.block), ("K", MXFP8.block)
    return Signature((*tensors, *each(ADDRESS, "dy_scale x_scale"), *GROUPS, *_PLACES), divisors)


def _quantize(spec: QuantizeMxfp8Spec) -> Signature:
    """Return the signature of a quantiser to MXFP8.

    Outputs: addresses of E4M3 data [T, K] and E8M0 scales by rows and by columns, 0 if not wanted; or `out`, the
    rounded values.

    offs: the address of int32 [num_groups], or 0. wide: blocks of 128 elements instead of 32. swizzled: scales lie in
    atoms of 128 x 4.
    """
    if spec.axis == BY_GROUP:
        return _quantize_groups(spec)
    x, until = _tensor("x", "T K", spec.dtype), (*each(ADDRESS, "offs", True), *each(INT32, "num_groups", True))
    if spec.rounded:
        return Signature((x, _tensor("out", "T K", spec.dtype, packed=True), *until), (("K", MXFP8.block),))
    outputs = each(ADDRESS, "row_data row_scale col_data col_scale", optional=True)
    return Signature((x, *outputs, *until, *each(INT32, "wide swizzled", optional=True)), (("K", MXFP8.block),))


def _quantize_groups(spec: QuantizeMxfp8Spec) -> Signature:
    """Return the signature of a quantiser by groups.

    data: E4M3 rows, from x's rows in order or by index. scale: the address of scales in bands of 128 rows
    (`memory.scale_bands`).
    """
    tensors = _tensor("x", "R K", spec.dtype), _tensor("data", "T K", E4M3, packed=True)
    groups = (*each(ADDRESS, "groups"), *each(INT32, "group_form num_groups"))
    return Signature((*tensors, *each(ADDRESS, "scale"), *ROWS, *groups), (("K", MXFP8.block),))


def _fold(spec: FoldMxfp8Spec) -> Signature:
    """Return the signature of a fold.

    scale: the address of a byte for each row of the result. Folded by columns, the result is transposed.
    """
    if spec.axis == "row":
        tensors = _tensor("w", "T K", spec.dtype), _tensor("data", "T K", E4M3, packed=True)
    else:
        tensors = _tensor("w", "T N K", spec.dtype), _tensor("data", "T K N", E4M3)
    return Signature((*tensors, *each(ADDRESS, "scale")), (("N", MXFP8.block), ("K", MXFP8.block)))


def _quantize4(spec: QuantizeMxfp4Spec) -> Signature:
    """Return the signature of a quantiser to MXFP4. data: two elements a byte. scale: the address of a byte for each
    block."""
    tensors = _tensor("w", "T K", spec.dtype, packed=True), _tensor("data", "T K/2", BYTE, packed=True)
    return Signature((*tensors, *each(ADDRESS, "scale")), (("K", MXFP4.block), ("K/2", MXFP4.block // 2)))


def _quantize8_block(spec: QuantizeFp8BlockSpec) -> Signature:
    """Return the signature of a quantiser to FP8 with block scales.

    data: the address of E4M3 [T, K]. scale: the address of float32 [T, ceil(K / 128)]. Both are packed. offs: the
    address of int32 [num_groups], or 0.
    """
    addresses = (*each(ADDRESS, "data scale"), *each(ADDRESS, "offs", True), *each(INT32, "num_groups", True))
    return Signature((_tensor("x", "T K", spec.dtype), *addresses), (("K", FP8_ROWS.multiple),))


_STAGES: dict[type, Callable[[Any], Signature]] = {
    GroupedMmSpec: _mm,
    GroupedGluSpec: _glu,
    DgluSpec: _dglu,
    TailSpec: _tail,
    GroupedWgradSpec: _wgrad,
    WgradSpec: _scaled_wgrad,
    QuantizeMxfp8Spec: _quantize,
    FoldMxfp8Spec: _fold,
    QuantizeMxfp4Spec: _quantize4,
    QuantizeFp8BlockSpec: _quantize8_block,
}


@functools.lru_cache(maxsize=4096)
def stage_signature(spec: Spec) -> Signature:
    """Return the signature of a stage's function; `chains.signature_of` returns that of any spec."""
    if isinstance(spec, (MhcSpec, LayerSpec)):
        arguments = spec.of_kernel.arguments
        assert arguments is not None, f"{spec.name} is a chain of several kernels, no stage"
        return arguments
    return _STAGES[type(spec)](spec)
