"""What every exported function takes, by name. No other place knows an order.

An exported function is positional: TVM-FFI passes tensors, numbers and addresses. Its signature is plain data here,
and who calls it (the front, the tuner, perf, chains, tests) packs arguments by name; the compiler's stand-ins and those
of a call that only loads kernels are made from the same data.
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
"""int32 [T], which of x's R rows each is; 0: they are x's rows."""
GROUPS = (
    *each(ADDRESS, "groups"),
    *each(INT32, "group_form num_groups"),
    *each(ADDRESS, "tickets", optional=True),
)
"""Group sizes, how to read them (`schedule.groups`), how many; counters to draw tiles by, 0 to deal them."""
PARAMS = each(FLOAT32, NAMES_OF_PARAMS, optional=True)
ACTIVATION = (*each(INT32, "kind glu_layout", optional=True), *PARAMS)
"""Which of its activations (`specs.KINDS`) and gate layouts (`specs.LAYOUTS`) a kernel of several computes."""
LAUNCH = (*each(INT32, "num_sms"), *each(INT32, "position", optional=True))
"""SMs of the GPU; how many kernels of the same call come before: with any, the launch is programmatic."""


def _scales_of(formats: Operands) -> tuple[Argument, ...]:
    """Scales of a GEMM's x and w, or a table of experts' weights without scales.

    `w_scale`: [E, N, K / block] scales; an even address where they are E4M3 numbers, of which a negative one is as bad
    as NaN. `w_global_scale`: float32 numbers, all other scales' factor, `w_global_count` for each expert: 0: one for
    all experts; 1: [E]; 2: [E, 2], of a gated w, whose first is that of the activated half. Of MXFP4 for FP8 MMAs it is
    bytes [E, N], a power of two for each row (`Format.row_binades`).
    """
    names = f"{'x_scale' if formats.x.scale else ''} {'w_scale' if formats.w.scale else ''}"
    table = () if formats.w.scale else each(ADDRESS, "w_table", optional=True)
    more = each(ADDRESS, "w_global_scale") if formats.w.has_global or formats.w.row_binades else ()
    more += each(INT32, "w_global_count") if formats.w.has_global else ()
    return (*each(ADDRESS, names), *more, *table)


def _low_of(spec: GroupedMmSpec | GroupedGluSpec | DgluSpec) -> tuple[tuple[Argument, ...], tuple[Argument, ...]]:
    """The tensor low of an adapted GEMM, and the address of the matrices that low is multiplied by: packed, laid out
    as w."""
    return ((_tensor("low", "T Q", spec.dtype),), each(ADDRESS, "low_w")) if spec.adapted else ((), ())


_OPTIONAL_INPUTS = each(ADDRESS, "bias bias_table scale", optional=True)


def _blocks(formats: Operands, letters: str) -> tuple[tuple[str, int], ...]:
    """Divisors of the widths of scaled matrices, and of weights' columns where these are words."""
    widths = tuple((letter, formats.multiple) for letter in letters.split()) if formats.w.scale else ()
    words = ((formats.w.columns(letter), multiple // WORD_ELEMENTS) for letter, multiple in widths)
    return widths + (tuple(words) if formats.w.bits < 8 else ())


def _x(spec: GroupedMmSpec | GroupedGluSpec | DgluSpec, columns: str) -> tuple[Argument, tuple[Argument, ...]]:
    """The left operand, and the indices of its rows where the kernel takes them so."""
    formats = OPERANDS[spec.operands]
    dtype, letter = formats.x.dtype(spec.dtype), "T" if formats.decodes else "R"
    return _tensor("x", f"{letter} {columns}", dtype), () if formats.decodes else ROWS


def _mm(spec: GroupedMmSpec) -> Signature:
    """`w_up`: of x in halves the address of the second half's weights, laid out as w; its rows are no indices."""
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
    """`act_scale`: where the scales of an activation in MXFP8 go.

    `w_up`: the address of the linear half's weights, laid out as w, which then has W = I rows, those of the activated
    half; 0: w has both.
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
    """x: the gradient of FC2's result. `partials`: float32 [ceil(I / tile.n), T], 0: no gradient of the row scale.

    Weights in MXFP8 are folded along their rows, and transposed.
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
    """dx: the address of 16-bit rows `dx_pitch` elements apart, to be zeroed behind the last group; 0: none. None are
    zeroed where there are `dx_tokens`, sums of the rows of groups, which are all that is read of dx.

    `partials`: float32 [ceil(I / part_columns), T], whose sums d_scale, float32 [T], takes; 0: none. act is not read.
    """
    rows = each(ADDRESS, "dx dx_tokens", True)
    matrix = (*rows, *each(INT32, "dx_columns", True), *each(INT64, "dx_pitch", True))
    sums = (*each(ADDRESS, "d_scale partials", optional=True), *each(INT32, "part_columns"))
    return Signature((_tensor("act", "T I", spec.dtype), *matrix, *sums, *GROUPS, *each(INT32, "num_sms")))


_PLACES = (
    *each(ADDRESS, "dw_table mask", optional=True), *each(INT32, "accumulate", optional=True),
    *each(INT32, "num_sms"),
)  # fmt: skip
"""Of a weight gradient. `mask`: bool [E], which groups add to dw; 0: all or none, as `accumulate` says."""


def _wgrad(spec: GroupedWgradSpec) -> Signature:
    """`dy_rows`, `x_rows`: as `rows` elsewhere, of at most one of them."""
    operands = _tensor("dy", "T N", spec.dtype), _tensor("x", "R K", spec.dtype)
    tensors = *operands, _tensor("dw", "E N K", spec.out_dtype)
    rows = each(ADDRESS, "dy_rows x_rows", optional=True)
    return Signature((*tensors, *rows, *GROUPS, *_PLACES))


def _scaled_wgrad(spec: WgradSpec) -> Signature:
    """dy and x as a quantiser by groups leaves them, `dy_scale` and `x_scale` the addresses of their scales."""
    operands = _tensor("dy", "T N", E4M3), _tensor("x", "T K", E4M3)
    tensors = *operands, _tensor("dw", "E N K", spec.out_dtype)
    divisors = ("N", MXFP8.block), ("K", MXFP8.block)
    return Signature((*tensors, *each(ADDRESS, "dy_scale x_scale"), *GROUPS, *_PLACES), divisors)


def _quantize(spec: QuantizeMxfp8Spec) -> Signature:
    """Addresses of E4M3 data [T,K] and E8M0 scales by rows and by columns, 0 where not asked for; or `out`, the values.

    `offs`: int32 [num_groups] or 0. `wide`: blocks of 128 elements instead of 32. `swizzled`: scales in 128 x 4 atoms.
    """
    if spec.axis == BY_GROUP:
        return _quantize_groups(spec)
    x, until = _tensor("x", "T K", spec.dtype), (*each(ADDRESS, "offs", True), *each(INT32, "num_groups", True))
    if spec.rounded:
        return Signature((x, _tensor("out", "T K", spec.dtype, packed=True), *until), (("K", MXFP8.block),))
    outputs = each(ADDRESS, "row_data row_scale col_data col_scale", optional=True)
    return Signature((x, *outputs, *until, *each(INT32, "wide swizzled", optional=True)), (("K", MXFP8.block),))


def _quantize_groups(spec: QuantizeMxfp8Spec) -> Signature:
    """`data`: E4M3 rows, which are x's, or x's by index; `scale`: the address of scales in bands of 128 rows
    (`memory.scale_bands`)."""
    tensors = _tensor("x", "R K", spec.dtype), _tensor("data", "T K", E4M3, packed=True)
    groups = (*each(ADDRESS, "groups"), *each(INT32, "group_form num_groups"))
    return Signature((*tensors, *each(ADDRESS, "scale"), *ROWS, *groups), (("K", MXFP8.block),))


def _fold(spec: FoldMxfp8Spec) -> Signature:
    """`scale`: the address of a byte for each row of the result, which is transposed where it is folded by columns."""
    if spec.axis == "row":
        tensors = _tensor("w", "T K", spec.dtype), _tensor("data", "T K", E4M3, packed=True)
    else:
        tensors = _tensor("w", "T N K", spec.dtype), _tensor("data", "T K N", E4M3)
    return Signature((*tensors, *each(ADDRESS, "scale")), (("N", MXFP8.block), ("K", MXFP8.block)))


def _quantize4(spec: QuantizeMxfp4Spec) -> Signature:
    """`data`: two elements a byte; `scale`: the address of a byte for each block."""
    tensors = _tensor("w", "T K", spec.dtype, packed=True), _tensor("data", "T K/2", BYTE, packed=True)
    return Signature((*tensors, *each(ADDRESS, "scale")), (("K", MXFP4.block), ("K/2", MXFP4.block // 2)))


def _quantize8_block(spec: QuantizeFp8BlockSpec) -> Signature:
    """Addresses of E4M3 `data` [T,K] and of float32 `scale` [T, ceil(K / 128)], both packed. `offs`: int32 [num_groups]
    or 0."""
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
    """What the function of a stage takes; of any spec `chains.signature_of` says it."""
    if isinstance(spec, (MhcSpec, LayerSpec)):
        arguments = spec.of_kernel.arguments
        assert arguments is not None, f"{spec.name} is a chain of several kernels, no stage"
        return arguments
    return _STAGES[type(spec)](spec)
