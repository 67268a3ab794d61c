"""What every exported function takes, by name. No other place knows an order.

An exported function is positional: TVM-FFI passes tensors, numbers and addresses. Its signature is plain data here,
and who calls it (the front, the tuner, perf, chains, tests) packs arguments by name; the compiler's stand-ins and those
of a call that only loads kernels are made from the same data.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .formats import BYTE, E4M3, FP8_ROWS, MXFP4, MXFP8, OPERANDS, WORD_ELEMENTS, Operands
from .specs import (
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
)

TENSOR, ADDRESS, INT32, INT64, FLOAT32, STREAM = "tensor", "address", "int32", "int64", "float32", "stream"
KINDS = (TENSOR, ADDRESS, INT32, INT64, FLOAT32, STREAM)
_Value = TypeVar("_Value")

DIVISOR = 8
"""Of a size in elements, unless its signature says otherwise: TMA wants rows of whole 16 bytes."""


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of an exported function.

    Attributes:
        name, kind: a kind is one of the constants above.
        optional: a call may leave it out and then passes 0, which means no address, or a number's usual value.
        dtype, shape: of a tensor. `shape` names each dimension; those of one name must have one size, which every call
            checks. T is the number of rows, R that of an operand whose rows may come by index. Three dimensions are
            experts' weights, [E or 1, rows, columns], rows unpadded.
        packed: a matrix's rows follow each other without padding; else their stride is any multiple of 16 bytes.
    """

    name: str
    kind: str
    optional: bool = False
    dtype: str = ""
    shape: tuple[str, ...] = ()
    packed: bool = False

    @property
    def absent(self) -> int | float:
        return 0.0 if self.kind == FLOAT32 else 0


@dataclasses.dataclass(frozen=True)
class Signature:
    """The arguments of an exported function in their order. `divisors`: of sizes, by letter; else DIVISOR."""

    arguments: tuple[Argument, ...]
    divisors: tuple[tuple[str, int], ...] = ()

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.arguments)

    @functools.cached_property
    def optional(self) -> frozenset[str]:
        return frozenset(argument.name for argument in self.arguments if argument.optional)

    def __getitem__(self, name: str) -> Argument:
        return self.arguments[self.names.index(name)]

    def ordered(self, values: Mapping[str, _Value], absent: Callable[[int | float], _Value]) -> tuple[_Value, ...]:
        """The values by name in the order of the arguments, `absent` of 0 for optional ones that are not given.

        Raises TypeError, naming it, for a name that is missing or unknown.
        """
        if unknown := values.keys() - set(self.names):
            raise TypeError(f"no argument {min(unknown)!r}; there are: {', '.join(self.names)}")
        if missing := [name for name in self.names if name not in values and name not in self.optional]:
            raise TypeError(f"argument {missing[0]!r} is missing; there are: {', '.join(self.names)}")
        return tuple(values[a.name] if a.name in values else absent(a.absent) for a in self.arguments)

    def pack(self, **values: Any) -> tuple[Any, ...]:
        """The positional arguments of a call. Raises TypeError as `ordered` does."""
        return self.ordered(values, lambda zero: zero)


def _tensor(name: str, shape: str, dtype: str, packed: bool = False) -> Argument:
    return Argument(name, TENSOR, dtype=dtype, shape=tuple(shape.split()), packed=packed)


def _each(kind: str, names: str, optional: bool = False) -> tuple[Argument, ...]:
    return tuple(Argument(name, kind, optional) for name in names.split())


ROWS = _each(ADDRESS, "rows", optional=True)
"""int32 [T], which of x's R rows each is; 0: they are x's rows."""
GROUPS = (
    *_each(ADDRESS, "groups"),
    *_each(INT32, "group_form num_groups"),
    *_each(ADDRESS, "tickets", optional=True),
)
"""Group sizes, how to read them (`schedule.groups`), how many; counters to draw tiles by, 0 to deal them."""
NAMES_OF_PARAMS = "limit alpha offset"
PARAMS = _each(FLOAT32, NAMES_OF_PARAMS, optional=True)
"""An activation's numbers in their order, whichever activation that is; what follows them is ignored. The names are
clamped_swiglu's because a function's argument names are part of its object.
"""
ACTIVATION = (*_each(INT32, "kind glu_layout", optional=True), *PARAMS)
"""Which of its activations (`specs.KINDS`) and gate layouts (`specs.LAYOUTS`) a kernel of several computes."""
LAUNCH = (*_each(INT32, "num_sms"), *_each(INT32, "position", optional=True))
"""SMs of the GPU; how many kernels of the same call come before: with any, the launch is programmatic."""


def _scales_of(formats: Operands) -> tuple[Argument, ...]:
    """Scales of a GEMM's x and w, or a table of experts' weights without scales.

    `w_scale`: [E, N, K / block] scales; an even address where they are E4M3 numbers, of which a negative one is as bad
    as NaN. `w_global_scale`: float32 numbers, all other scales' factor, `w_global_count` for each expert: 0: one for
    all experts; 1: [E]; 2: [E, 2], of a gated w, whose first is that of the activated half.
    """
    names = f"{'x_scale' if formats.x.scale else ''} {'w_scale' if formats.w.scale else ''}"
    table = () if formats.w.scale else _each(ADDRESS, "w_table", optional=True)
    more = (*_each(ADDRESS, "w_global_scale"), *_each(INT32, "w_global_count")) if formats.w.has_global else ()
    return (*_each(ADDRESS, names), *more, *table)


_OPTIONAL_INPUTS = _each(ADDRESS, "bias bias_table scale", optional=True)


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
        return Signature((*tensors, *GROUPS, *_each(ADDRESS, "w_up"), *LAUNCH), (("P", 2 * DIVISOR),))
    k, n = ("N", "K") if spec.transpose_w else ("K", "N")
    x, rows = _x(spec, k)
    tensors = x, _tensor("w", f"E N {formats.w.columns('K')}", w), _tensor("y", f"T {n}", spec.dtype)
    numbers = (*rows, *GROUPS, *_scales_of(formats), *_OPTIONAL_INPUTS, *LAUNCH)
    return Signature((*tensors, *numbers), _blocks(formats, "K"))


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
    act_scale = _each(ADDRESS, "act_scale") if formats.act.scale else ()
    up = _each(ADDRESS, "w_up", optional=True) if may_part else ()
    numbers = (*GROUPS, *_scales_of(formats), *up, *act_scale, *_OPTIONAL_INPUTS, *ACTIVATION, *LAUNCH)
    return Signature((*tensors, *preact, *rows, *numbers), _blocks(formats, "H I"))


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
    optional = _each(ADDRESS, "scale partials", optional=True)
    numbers = (*rows, *GROUPS, *_scales_of(formats), *optional, *PARAMS, *LAUNCH)
    return Signature((*tensors, *numbers), _blocks(formats, "H I P"))


def _tail(spec: TailSpec) -> Signature:
    """dx: the address of 16-bit rows `dx_pitch` elements apart, to be zeroed behind the last group; 0: none. None are
    zeroed where there are `dx_tokens`, sums of the rows of groups, which are all that is read of dx.

    `partials`: float32 [ceil(I / part_columns), T], whose sums d_scale, float32 [T], takes; 0: none. act is not read.
    """
    rows = _each(ADDRESS, "dx dx_tokens", True)
    matrix = (*rows, *_each(INT32, "dx_columns", True), *_each(INT64, "dx_pitch", True))
    sums = (*_each(ADDRESS, "d_scale partials", optional=True), *_each(INT32, "part_columns"))
    return Signature((_tensor("act", "T I", spec.dtype), *matrix, *sums, *GROUPS, *_each(INT32, "num_sms")))


def _wgrad(spec: GroupedWgradSpec) -> Signature:
    """`dy_rows`, `x_rows`: as `rows` elsewhere, of at most one of them. `mask`: bool [E], which groups add to dw; 0:
    all or none, as `accumulate` says."""
    operands = _tensor("dy", "T N", spec.dtype), _tensor("x", "R K", spec.dtype)
    tensors = *operands, _tensor("dw", "E N K", spec.out_dtype)
    rows = _each(ADDRESS, "dy_rows x_rows", optional=True)
    places = (*_each(ADDRESS, "dw_table mask", optional=True), *_each(INT32, "accumulate", optional=True))
    return Signature((*tensors, *rows, *GROUPS, *places, *_each(INT32, "num_sms")))


def _quantize(spec: QuantizeMxfp8Spec) -> Signature:
    """Addresses of E4M3 data [T,K] and E8M0 scales by rows and by columns, 0 where not asked for; or `out`, the values.

    `offs`: int32 [num_groups] or 0. `wide`: blocks of 128 elements instead of 32. `swizzled`: scales in 128 x 4 atoms.
    """
    x, until = _tensor("x", "T K", spec.dtype), (*_each(ADDRESS, "offs", True), *_each(INT32, "num_groups", True))
    if spec.rounded:
        return Signature((x, _tensor("out", "T K", spec.dtype, packed=True), *until), (("K", MXFP8.block),))
    outputs = _each(ADDRESS, "row_data row_scale col_data col_scale", optional=True)
    return Signature((x, *outputs, *until, *_each(INT32, "wide swizzled", optional=True)), (("K", MXFP8.block),))


def _fold(spec: FoldMxfp8Spec) -> Signature:
    """`scale`: the address of a byte for each row of the result, which is transposed where it is folded by columns."""
    if spec.axis == "row":
        tensors = _tensor("w", "T K", spec.dtype), _tensor("data", "T K", E4M3, packed=True)
    else:
        tensors = _tensor("w", "T N K", spec.dtype), _tensor("data", "T K N", E4M3)
    return Signature((*tensors, *_each(ADDRESS, "scale")), (("N", MXFP8.block), ("K", MXFP8.block)))


def _quantize4(spec: QuantizeMxfp4Spec) -> Signature:
    """`data`: two elements a byte; `scale`: the address of a byte for each block."""
    tensors = _tensor("w", "T K", spec.dtype, packed=True), _tensor("data", "T K/2", BYTE, packed=True)
    return Signature((*tensors, *_each(ADDRESS, "scale")), (("K", MXFP4.block), ("K/2", MXFP4.block // 2)))


def _quantize8_block(spec: QuantizeFp8BlockSpec) -> Signature:
    """Addresses of E4M3 `data` [T,K] and of float32 `scale` [T, ceil(K / 128)], both packed. `offs`: int32 [num_groups]
    or 0."""
    addresses = (*_each(ADDRESS, "data scale"), *_each(ADDRESS, "offs", True), *_each(INT32, "num_groups", True))
    return Signature((_tensor("x", "T K", spec.dtype), *addresses), (("K", FP8_ROWS.multiple),))


def _numbers(addresses: str, integers: str, floats: str = "", optional: bool = False) -> Signature:
    """Of a kernel that takes no tensor; so the stream is an argument. `optional`: so are its integers."""
    kinds = (*_each(ADDRESS, addresses, optional=True), *_each(INT32, integers, optional), *_each(FLOAT32, floats))
    return Signature((*kinds, *_each(STREAM, "stream")))


_PROJECT_BACKWARD = _numbers(
    "d_pre d_post d_res x weight alpha_pre alpha_post alpha_res bias stats d_aggregate h_pre d_residual "
    "d_x d_weight d_sums workspace",
    "forms tokens width ctas parts",
    "eps",
)
MHC: dict[str, Signature] = {
    "sinkhorn": _numbers("logits out", "forms matrices iters", "eps"),
    "sinkhorn_backward": _numbers("d_out logits d_logits", "forms matrices iters", "eps"),
    "aggregate": _numbers("x h_pre out", "forms tokens width"),
    "aggregate_backward": _numbers("d_out x h_pre d_x d_h_pre", "forms tokens width num_sms"),
    "post_mix": _numbers("residual h_res h_post x bias out", "forms transpose tokens width"),
    "post_mix_backward": _numbers(
        "d_out residual h_res h_post x bias d_residual d_h_res d_h_post d_x d_bias workspace",
        "forms transpose tokens width num_sms",
    ),
    "project": _numbers(
        "x weight alpha_pre alpha_post alpha_res bias h_pre h_post h_res stats workspace",
        "forms tokens width slices slice_columns groups num_sms",
        "eps",
    ),
    "project_backward": _PROJECT_BACKWARD,
    "pre_backward": _PROJECT_BACKWARD,
}
"""Hyper-connections. `forms`: the dtypes of parameters, two bits each (`specs.PARAM_FORMS`), in the order of the
addresses that a kernel lists in front of them."""

_ROWS_OF = "offs token_of_row row_of weight_of_row"
_BACK = "sum_rows weight_places handle regions state"
LAYER: dict[str, Signature] = {
    "choose": _numbers(
        f"logits bias num_tokens ids weights {_ROWS_OF} workspace",
        "forms tokens experts k score normalize num_groups top_groups chunk position",
        "scale",
    ),
    "logits": _numbers("x weight weight_bias logits", "forms weight_form bias_form tokens width experts"),
    "count": _numbers("ids num_tokens workspace", "wide first tokens experts k chunk"),
    "place": _numbers(
        f"ids weights num_tokens {_ROWS_OF} workspace", "wide weight_form first tokens experts k chunk position"
    ),
    "route_backward": _numbers("d_weights logits ids d_logits", "forms tokens experts k score normalize", "scale"),
    "permute": _numbers("x row_of out", "tokens k width position"),
    "combine": _numbers("y row_of residual out", "tokens k width bound position", optional=True),
    "row_weights_backward": _numbers("d_rows row_of d_weights", "tokens k bound"),
    "gate": _numbers("preact row_scale out", "tokens width kind glu_layout", NAMES_OF_PARAMS),
    "gate_backward": _numbers(
        "d_act preact row_scale d_preact d_row_scale", "tokens width kind glu_layout", NAMES_OF_PARAMS
    ),
    "send_tokens": _numbers(f"x x_scale ids weights {_BACK}", "tokens k width experts most rank world status num_sms"),
    "send_sums": _numbers(f"y row_of d_weights {_BACK}", "tokens k width most is_summed rank world num_sms"),
}
"""What lies around a layer's experts. `forms`: the dtype of logits (`specs.PARAM_FORMS`), as `weight_form` and
`bias_form` are those of a router's parameters, or of choices' weights; `wide`: whether ids have 64 bits; `chunk`:
tokens of a CTA; `workspace`: int32 [chunks, experts], 0 where there is one chunk; `position`: how many kernels of the
same call come before; `bound`: how many rows y or d_rows has, so that no row number leads out of it. Of send_tokens and
send_sums: `most`: tokens of a rank; `regions`, `state`: as of `windows`; `handle`: int64 [1 + world], the dispatch's
number and how many tokens came from each rank; `sum_rows`, `weight_places`: tables of the way back
(`ranks.send.Table`); `status`: what x is, of `windows.STATUSES`, and of rows in MXFP8 `x_scale`, a byte for 32
elements; `is_summed`: y has a token's sum in its own place."""

_STAGES: dict[type, Callable[[Any], Signature]] = {
    GroupedMmSpec: _mm,
    GroupedGluSpec: _glu,
    DgluSpec: _dglu,
    TailSpec: _tail,
    GroupedWgradSpec: _wgrad,
    QuantizeMxfp8Spec: _quantize,
    FoldMxfp8Spec: _fold,
    QuantizeMxfp4Spec: _quantize4,
    QuantizeFp8BlockSpec: _quantize8_block,
}


@functools.lru_cache(maxsize=4096)
def stage_signature(spec: Spec) -> Signature:
    """What the function of a stage takes; of any spec `chains.signature_of` says it."""
    if isinstance(spec, (MhcSpec, LayerSpec)):
        return (MHC if isinstance(spec, MhcSpec) else LAYER)[spec.kernel]
    return _STAGES[type(spec)](spec)
