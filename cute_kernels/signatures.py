"""Signatures of all exported functions. This is the only place that knows the order of arguments.

An exported function is positional: TVM-FFI passes tensors, numbers and addresses. Its signature is plain data with two
uses. Callers (python/glulam, the tuner, perf, chains, tests) pack arguments by name. Stand-ins for the arguments are
made from it, for the compiler (`tracing`) and for calls that only load kernels.

Letters in shapes: T rows that a GEMM multiplies, R rows of a matrix from which indices may select these T, E experts, H
hidden, I intermediate, P the columns of the preactivation (2I with a gate, else I), N and K rows and columns of a
weight. "Address" is a device address (int64).
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
    BackwardCleanupSpec,
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
    WgradSpec,
)


def _tensor(name: str, shape: str, dtype: str, packed: bool = False) -> Argument:
    """Make a tensor argument; `shape` names the dimensions, separated by spaces."""
    return Argument(name, TENSOR, dtype=dtype, shape=tuple(shape.split()), packed=packed)


ROWS = each(ADDRESS, "rows", optional=True)
"""rows: the address of int32 [T], row indices: row t of the GEMM's operand is row rows[t] of x [R, .]. 0: it is row t
of x."""
GROUPS = (
    *each(ADDRESS, "groups"),
    *each(INT32, "group_form num_groups"),
    *each(ADDRESS, "tickets", optional=True),
)
"""The arguments that describe groups of rows:

    groups        the address of the group sizes or ends
    group_form    the encoding of the numbers at `groups` (`schedule.groups`)
    num_groups    the number of groups
    tickets       the address of the counter from which clusters take tiles; 0: each CTA's tiles are fixed
"""
PARAMS = each(FLOAT32, NAMES_OF_PARAMS, optional=True)
ACTIVATION = (*each(INT32, "kind glu_layout", optional=True), *PARAMS)
"""kind, glu_layout: the number of the activation (`specs.KINDS`) and of the gate layout (`specs.LAYOUTS`). Only kernels
that are compiled for several read them. The activation's constants follow."""
LAUNCH = (*each(INT32, "num_sms"), *each(INT32, "position", optional=True))
"""num_sms: number of SMs of the GPU.
position: number of kernels that the same call launches before this kernel. If it is not 0, this is a programmatic
dependent launch: the kernel may start before the previous kernel ends.
"""


def _scales_of(formats: Operands) -> tuple[Argument, ...]:
    """Return the arguments for the scales of a GEMM's x and w. For weights without scales, return the argument w_table
    instead, the address of a table of the experts' weights.

    w_scale: scales [E, N, K / block]. For E4M3 scales the address is even, and a negative scale counts as NaN.
    w_global_scale: float32 factors by which the scales of an expert's weight are multiplied.
    w_global_count: number of these factors for each expert. 0: one factor for all experts; 1: [E]; 2: [E, 2] for a
    gated w, with the activated half's factor first.

    MXFP4 in FP8 MMAs is an exception: w_global_scale is the address of bytes [E, N], a power of two for each row
    (`Format.row_binades`), and there is no w_global_count.
    """
    names = f"{'x_scale' if formats.x.scale else ''} {'w_scale' if formats.w.scale else ''}"
    table = () if formats.w.scale else each(ADDRESS, "w_table", optional=True)
    more = each(ADDRESS, "w_global_scale") if formats.w.has_global or formats.w.row_binades else ()
    more += each(INT32, "w_global_count") if formats.w.has_global else ()
    return (*each(ADDRESS, names), *more, *table)


def _low_of(spec: GroupedMmSpec | GroupedGluSpec | DgluSpec) -> tuple[tuple[Argument, ...], tuple[Argument, ...]]:
    """Return the arguments that LoRA adapters of rank Q add to a GEMM: (tensors: low), (addresses: low_w); two empty
    tuples if the spec is not adapted.

    An adapter has two matrices.

    low: [T, Q], rows of x (in backward, rows of a gradient) times the adapter's first matrix.
    low_w: the address of the second matrices, by which low is multiplied. They are packed and laid out like w.
    """
    return ((_tensor("low", "T Q", spec.dtype),), each(ADDRESS, "low_w")) if spec.adapted else ((), ())


_OPTIONAL_INPUTS = each(ADDRESS, "bias bias_table scale", optional=True)


def _blocks(formats: Operands, letters: str) -> tuple[tuple[str, int], ...]:
    """Return the `Signature.divisors` of a GEMM: the sizes of some dimensions must be whole blocks of scales. For
    weights of 4 bits, there is also a divisor for their columns in memory, which are 32-bit words of eight elements.

    letters: the names of the dimensions along which operands have scales, separated by spaces.
    """
    widths = tuple((letter, formats.multiple) for letter in letters.split()) if formats.w.scale else ()
    words = ((formats.w.columns(letter), multiple // WORD_ELEMENTS) for letter, multiple in widths)
    return widths + (tuple(words) if formats.w.bits < 8 else ())


def _x(spec: GroupedMmSpec | GroupedGluSpec | DgluSpec, columns: str) -> tuple[Argument, tuple[Argument, ...]]:
    """Return the argument for x, and the arguments (`ROWS`) for row indices. Kernels that decode weights do not take
    row indices.

    columns: the name of the dimension that is x's width.
    """
    formats = OPERANDS[spec.operands]
    dtype, letter = formats.x.dtype(spec.dtype), "T" if formats.decodes else "R"
    return _tensor("x", f"{letter} {columns}", dtype), () if formats.decodes else ROWS


def _mm(spec: GroupedMmSpec) -> Signature:
    """Return the signature of a grouped_mm.

    w_up: only with `in_halves`: the address of the weights for the second half of x's columns, laid out like w. The
    rows of such an x are not read by index.
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

    act_scale: only if the activation is stored in FP8: the address to which its scales are written.
    w_up: the address of the linear half's weights, laid out like w. Then w has only the activated half, W = I rows. 0:
    w has both halves, W = P rows.
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
    """Return the signature of a dglu (`DgluSpec`).

    x: the gradient of FC2's result.
    w: w2. Weights in MXFP8 come transposed, [E, I, H], so that their scales lie along this GEMM's contraction H.
    partials: the address of float32 [ceil(I / tile.n), T], to which each tile writes its partial sums of the row
    scale's gradient; 0: this gradient is not wanted.
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


def _tail(spec: BackwardCleanupSpec) -> Signature:
    """Return the signature of a backward's last kernel.

    act: gives T; its elements are not read.
    dx: the address of 16-bit rows of dx_columns elements, dx_pitch elements apart. Rows after the last group are
    zeroed. 0: not given.
    dx_tokens: the address of the tokens' sums of rows of dx. If it is given, nothing is zeroed, since these sums read
    only rows of groups. 0: not given.
    partials: the address of float32 [ceil(I / part_columns), T], whose column sums are written to d_scale, float32 [T];
    0: not given.
    """
    rows = each(ADDRESS, "dx dx_tokens", True)
    matrix = (*rows, *each(INT32, "dx_columns", True), *each(INT64, "dx_pitch", True))
    sums = (*each(ADDRESS, "d_scale partials", optional=True), *each(INT32, "part_columns"))
    return Signature((_tensor("act", "T I", spec.dtype), *matrix, *sums, *GROUPS, *each(INT32, "num_sms")))


_PLACES = (
    *each(ADDRESS, "dw_table mask", optional=True), *each(INT32, "accumulate", optional=True),
    *each(INT32, "num_sms"),
)  # fmt: skip
"""Arguments that say where and how a weight gradient is written:

    dw_table      the address of a table of the experts' dw
    mask          the address of bool [E]: True for experts whose gradient is added to dw instead of overwriting it;
                  0: all are added or none, as `accumulate` says
    num_sms       number of SMs of the GPU
"""


def _wgrad(spec: GroupedWgradSpec) -> Signature:
    """Return the signature of a weight gradient in 16 bits.

    dy_rows, x_rows: addresses of row indices (like `ROWS`), of dy and of x. At most one of the two is not 0.
    """
    operands = _tensor("dy", "T N", spec.dtype), _tensor("x", "R K", spec.dtype)
    tensors = *operands, _tensor("dw", "E N K", spec.out_dtype)
    rows = each(ADDRESS, "dy_rows x_rows", optional=True)
    return Signature((*tensors, *rows, *GROUPS, *_PLACES))


def _scaled_wgrad(spec: WgradSpec) -> Signature:
    """Return the signature of a weight gradient in MXFP8.

    dy, x: E4M3, quantised along the columns of each group (`BY_GROUP`).
    dy_scale, x_scale: the addresses of the scales of dy and x, in bands of 128 rows (`memory.scale_bands`).
    """
    operands = _tensor("dy", "T N", E4M3), _tensor("x", "T K", E4M3)
    tensors = *operands, _tensor("dw", "E N K", spec.out_dtype)
    divisors = ("N", MXFP8.block), ("K", MXFP8.block)
    return Signature((*tensors, *each(ADDRESS, "dy_scale x_scale"), *GROUPS, *_PLACES), divisors)


def _quantize(spec: QuantizeMxfp8Spec) -> Signature:
    """Return the signature of a quantiser to MXFP8.

    row_data, row_scale: addresses of the result with blocks along rows, E4M3 data [T, K] and E8M0 scales; 0: not
    wanted.
    col_data, col_scale: the same for the result with blocks along columns.
    out: only with `rounded`, and instead of the four: the tensor of rounded values.
    offs: the address of int32 [num_groups], the ends of groups; rows after the last end are not quantised. With blocks
    along columns, groups begin at multiples of 128 rows, and rows between a group's end and the next group count as
    zeros. 0: all rows are one group.
    wide: 1: blocks of 128 elements instead of 32.
    swizzled: 1: scales lie in atoms of 128 x 4.
    """
    if spec.axis == BY_GROUP:
        return _quantize_groups(spec)
    x, until = _tensor("x", "T K", spec.dtype), (*each(ADDRESS, "offs", True), *each(INT32, "num_groups", True))
    if spec.rounded:
        return Signature((x, _tensor("out", "T K", spec.dtype, packed=True), *until), (("K", MXFP8.block),))
    outputs = each(ADDRESS, "row_data row_scale col_data col_scale", optional=True)
    return Signature((x, *outputs, *until, *each(INT32, "wide swizzled", optional=True)), (("K", MXFP8.block),))


def _quantize_groups(spec: QuantizeMxfp8Spec) -> Signature:
    """Return the signature of a quantiser by groups. It quantises along the columns of each group (`BY_GROUP`).

    data: E4M3 [T, K]. Its rows are x's rows in order, or by index (`ROWS`).
    scale: the address of the scales, in bands of 128 rows (`memory.scale_bands`).
    """
    tensors = _tensor("x", "R K", spec.dtype), _tensor("data", "T K", E4M3, packed=True)
    groups = (*each(ADDRESS, "groups"), *each(INT32, "group_form num_groups"))
    return Signature((*tensors, *each(ADDRESS, "scale"), *ROWS, *groups), (("K", MXFP8.block),))


def _fold(spec: FoldMxfp8Spec) -> Signature:
    """Return the signature of the fold of a weight w to MXFP8 with one scale a row (`FoldMxfp8Spec`).

    data: the result, E4M3. With axis "col" it is w transposed.
    scale: the address of one byte for each row of data.
    """
    if spec.axis == "row":
        tensors = _tensor("w", "T K", spec.dtype), _tensor("data", "T K", E4M3, packed=True)
    else:
        tensors = _tensor("w", "T N K", spec.dtype), _tensor("data", "T K N", E4M3)
    return Signature((*tensors, *each(ADDRESS, "scale")), (("N", MXFP8.block), ("K", MXFP8.block)))


def _quantize4(spec: QuantizeMxfp4Spec) -> Signature:
    """Return the signature of a quantiser to MXFP4.

    data: the result, two elements a byte.
    scale: the address of one byte for each block of 32 elements.
    """
    tensors = _tensor("w", "T K", spec.dtype, packed=True), _tensor("data", "T K/2", BYTE, packed=True)
    return Signature((*tensors, *each(ADDRESS, "scale")), (("K", MXFP4.block), ("K/2", MXFP4.block // 2)))


def _quantize8_block(spec: QuantizeFp8BlockSpec) -> Signature:
    """Return the signature of a quantiser to FP8 with block scales.

    data: the address of E4M3 [T, K], packed.
    scale: the address of float32 [T, ceil(K / 128)], packed.
    offs: the address of int32 [num_groups], the ends of groups; rows after the last end are not quantised. 0: all rows
    are quantised.
    """
    addresses = (*each(ADDRESS, "data scale"), *each(ADDRESS, "offs", True), *each(INT32, "num_groups", True))
    return Signature((_tensor("x", "T K", spec.dtype), *addresses), (("K", FP8_ROWS.multiple),))


_STAGES: dict[type, Callable[[Any], Signature]] = {
    GroupedMmSpec: _mm,
    GroupedGluSpec: _glu,
    DgluSpec: _dglu,
    BackwardCleanupSpec: _tail,
    GroupedWgradSpec: _wgrad,
    WgradSpec: _scaled_wgrad,
    QuantizeMxfp8Spec: _quantize,
    FoldMxfp8Spec: _fold,
    QuantizeMxfp4Spec: _quantize4,
    QuantizeFp8BlockSpec: _quantize8_block,
}


@functools.lru_cache(maxsize=4096)
def stage_signature(spec: Spec) -> Signature:
    """Return the signature of a stage's function; a stage is one kernel with its host launch. If the spec may be a
    chain of kernels, call `chains.signature_of` instead."""
    if isinstance(spec, (MhcSpec, LayerSpec)):
        arguments = spec.of_kernel.arguments
        assert arguments is not None, f"{spec.name} is a chain of several kernels, no stage"
        return arguments
    return _STAGES[type(spec)](spec)
