"""Kernel specs: everything that changes generated code, and nothing else.

A spec is a frozen dataclass with a stable, readable `name`; that name is the exported symbol, the
manifest key and the cache key's readable half. A spec never holds a token count, an expert count, N, K
or a device: those are run-time values of every kernel.

Fields of several specs: dtype, of 16-bit tensors, a key of DTYPES; tile, `tiles.TileConfig`; arch, a key of ARCHS;
operands, a key of OPERANDS, the formats in which a GEMM's rows and weights are stored; activation and glu_layout, keys
of ACTIVATION_FORMS and LAYOUT_FORMS; save_preact, the preactivation is stored, too. Letters: T rows, H hidden,
I intermediate, r rank of an adapter; a subscript e is the row's expert.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from .architectures import ARCHS
from .dtypes import DTYPES as DTYPES
from .dtypes import PARAM_FORMS as PARAM_FORMS
from .dtypes import WIDE_DTYPES as WIDE_DTYPES
from .formats import DECODED as DECODED
from .formats import OPERANDS as OPERANDS
from .formats import next_operands
from .formulas import FORMULAS
from .kernels import Kernel
from .layer import kernels as layer
from .mhc import kernels as mhc
from .tiles import TILE_K, SpecError, TileConfig, check_accumulators, require

QUANTIZE_AXES = ("row", "col", "both")
BY_GROUP = "group"
"""The axis of quantisation for weight gradients, which contract over a group's rows: blocks lie along columns, and each
group's first row begins a block."""
FOLD_AXES = ("row", "col")
ACTIVATIONS = tuple(FORMULAS)
GATED = tuple(name for name, formula in FORMULAS.items() if formula.is_gated)
UNGATED = tuple(name for name in ACTIVATIONS if name not in GATED)
GLU_LAYOUTS = ("concat", "interleaved", "interleaved32")
KINDS = {name: number for number, name in enumerate(ACTIVATIONS)}
LAYOUTS = {name: number for number, name in enumerate(GLU_LAYOUTS)}
"""Numbers by which a call names its activation (KINDS) and its gate layout (LAYOUTS). They are passed to all kernels,
also to those that are compiled for a single activation and layout."""
_MERGED = {
    kind: tuple(name for name in names if FORMULAS[name].is_merged)
    for kind, names in (("gated", GATED), ("ungated", UNGATED))
}
ACTIVATION_FORMS = _MERGED | {name: (name,) for name in ACTIVATIONS}
LAYOUT_FORMS = {"blocked": GLU_LAYOUTS, "strided": ("concat", "interleaved")} | {name: (name,) for name in GLU_LAYOUTS}
"""Forms: names of the sets of activations, and of gate layouts, for which a kernel can be compiled, with their members.
If a form has several members, a call chooses one at run time.

    blocked   all layouts, if I is a multiple of BLOCK_ROWS
    strided   two layouts, for any I

The branch at run time can double a backward's time and costs decoding up to 7 %: `sm90.configs.glu_form` decides which
forms ship.
"""
BLOCK_ROWS = 32
"""Rows of a gate's half that form a block, if I is a multiple of them. In interleaved32, such a block of one half is
followed by a block of the other half."""
WGRAD_OPERANDS = ("16bit", *(name for name, operands in OPERANDS.items() if operands.multiplies_blocks))
"""Operands that weight gradients can multiply: 16 bits, or formats whose block scales the MMA applies."""
SWIZZLED = 64
"""Columns of 16-bit transposed weights that one TMA load brings; its box is as wide as a swizzle atom, 128 bytes."""


def check_served(operands: str, arch: str) -> None:
    """Raise SpecError if no GEMM of an architecture multiplies these operands."""
    if operands in ARCHS[arch].lacks:
        having = [name for name, one in ARCHS.items() if operands not in one.lacks]
        served = [name for name in OPERANDS if name not in ARCHS[arch].lacks]
        raise SpecError(
            f"operands={operands!r} are multiplied on {', '.join(having)} alone, not on {arch}; choose one of: "
            f"{', '.join(served)}"
        )


def _check_operands(operands: str, tile: TileConfig, arch: str, transpose_w: bool = False) -> None:
    require("arch", arch, ARCHS)
    require("operands", operands, OPERANDS)
    check_served(operands, arch)
    if tile.schedule not in ARCHS[arch].schedules:
        raise SpecError(
            f"schedule={tile.schedule!r} is of another architecture than {arch}; choose one of: "
            f"{', '.join(ARCHS[arch].schedules)}"
        )
    formats = OPERANDS[operands]
    if transpose_w and formats.decodes:
        _check_decoded_lines(operands, tile)
        return
    # Elements narrower than 8 bits have the same depth: their rows of shared memory are half as long.
    depth = TILE_K[16 if tile.by_warps else max(formats.w.bits, 8)]
    if tile.k != depth:
        raise SpecError(f"tile k={tile.k} does not fit operands={operands!r}; choose k={depth}")
    if tile.swapped != formats.decodes and not tile.by_warps:
        needs = "schedule='swapped'" if formats.decodes else "another schedule"
        raise SpecError(f"schedule={tile.schedule!r} does not fit operands={operands!r}; choose {needs}")
    if formats.has_scaled_rows and tile.takes_turns and not tile.in_tensor_memory:
        raise SpecError(
            f"schedule={tile.schedule!r} does not fit operands={operands!r}: a promotion hides behind the MMAs of "
            "another warpgroup of the tile; choose schedule='cooperative'"
        )
    if formats.w.scale and not tile.by_warps:  # promotion and decoding also need registers
        check_accumulators(tile, tile.max_accumulators)


def _check_decoded(operands: str, dtype: str) -> None:
    if OPERANDS[operands].decodes and dtype != "bfloat16":
        raise SpecError(
            f"dtype={dtype!r} has not the range of weights with scales, which operands={operands!r} decodes to it; "
            "choose dtype='bfloat16'"
        )


def _check_decoded_lines(operands: str, tile: TileConfig) -> None:
    """Raise SpecError for operands or tiles without a kernel for the data gradient's GEMM (dy W) of decoded weights.

    This GEMM contracts over the rows of W. Its MMAs read 16-bit numbers, which the kernel decodes to shared memory.
    """
    if not OPERANDS[operands].has_data_gradients:
        raise SpecError(f"operands={operands!r} is of a forward, whose rows are rounded; choose 'mxfp8_weight_only'")
    if not (tile.by_warps or tile.takes_turns) or (tile.m, tile.n, tile.cluster_size) != (128, 128, 1):
        raise SpecError(
            f"tile {tile.name} does not fit transpose_w with operands={operands!r}; choose 128 x 128, without a cluster"
            ", and schedule='pingpong' or, of warps, 'warps'"
        )


def _check_wgrad(operands: str, tile: TileConfig, arch: str) -> None:
    """Raise SpecError for operands or tiles for which no weight gradient kernel exists."""
    require("operands", operands, WGRAD_OPERANDS)
    _check_operands(operands, tile, arch)
    if tile.adaptive:
        raise SpecError("a weight gradient has no ragged row tiles to adapt to; choose adaptive=False")
    if tile.m < SWIZZLED:
        raise SpecError(f"tile m={tile.m} is less than the {SWIZZLED} columns of dy that one load brings")


def _check_transposed(transpose_w: bool, operands: str) -> None:
    if transpose_w and OPERANDS[operands].w.element:
        raise SpecError("transpose_w reads 16-bit weights alone: FP8 wgmma wants them along the contraction")


def _check_adapted(spec: Any) -> None:
    """Raise SpecError if a spec is adapted, but its architecture or operands have no kernel with adapters."""
    if spec.adapted and not (ARCHS[spec.arch].adapts and OPERANDS[spec.operands].w.bits == 16):
        raise SpecError("adapted is of weights of 16 bits on Hopper's own kernels; leave adapted out")


def is_gated(activation: str) -> bool:
    """Return True if an activation, or the activations of a form such as "gated", have a gate."""
    return ACTIVATION_FORMS[activation][0] in GATED


def form_of_several(activation: str) -> str:
    """Return the form of several activations, "gated" or "ungated", that contains an activation; the activation itself
    if neither does."""
    return next((form for form, names in _MERGED.items() if activation in names), activation)


def _check_activation(activation: str, glu_layout: str) -> None:
    require("activation", activation, ACTIVATION_FORMS)
    require("glu_layout", glu_layout, LAYOUT_FORMS)
    if not is_gated(activation) and glu_layout != "concat":
        raise SpecError(
            f"glu_layout={glu_layout!r} has no meaning for activation={activation!r}, which has no gate; "
            "leave glu_layout at 'concat'"
        )


@dataclasses.dataclass(frozen=True)
class GroupedMmSpec:
    """A grouped GEMM: y [T, N] = x w_e^T (+ bias_e * bias_scale), with x [T, K] and w [E, N, K].

    Attributes:
        transpose_w: y [T, K] = x w_e with x [T, N].
        in_halves: x is [T, 2N], each half of its columns has its own weights, and the two products are added.
        adapted: a LoRA adapter's low b_e^T is added to y, with low [T, r] and b [E, N, r]; with transpose_w low b_e,
            with b [E, r, K].
    """

    op: ClassVar[str] = "grouped_mm"
    dtype: str = "bfloat16"
    transpose_w: bool = False
    tile: TileConfig = TileConfig()
    arch: str = "sm_90a"
    operands: str = "16bit"
    in_halves: bool = False
    adapted: bool = False

    def __post_init__(self) -> None:
        require("dtype", self.dtype, DTYPES)
        _check_operands(self.operands, self.tile, self.arch, self.transpose_w)
        _check_decoded(self.operands, self.dtype)
        if not OPERANDS[self.operands].decodes:
            _check_transposed(self.transpose_w, self.operands)
        if self.in_halves and OPERANDS[self.operands].w.element:
            raise SpecError(f"in_halves is of weights of 16 bits, and operands={self.operands!r}; leave it out")
        if self.in_halves and not self.transpose_w:
            raise SpecError("in_halves is of a contraction over weights' rows; choose transpose_w=True")
        if self.adapted and self.in_halves:
            raise SpecError("adapted is of one weight; leave out in_halves")
        _check_adapted(self)

    @property
    def stem(self) -> str:
        form = "nn" if self.transpose_w else "nt"
        more = "_halves" if self.in_halves else "_adapted" if self.adapted else ""
        return f"{form}{more}_{self.tile.name}"

    @property
    def name(self) -> str:
        return f"grouped_mm_{OPERANDS[self.operands].prefix}{DTYPES[self.dtype]}_{self.stem}_{self.arch}"


@dataclasses.dataclass(frozen=True)
class GroupedGluSpec:
    """FC1 with its activation: act [T, I] = activation(x w1_e^T + b1_e) * row_scale. The preactivation has 2I columns
    with a gate, I without, and so has w1 rows.

    Attributes:
        save_preact: the preactivation [T, 2I or I] is stored, too.
        transpose_w: w1 is [E, H, 2I or I], and the preactivation x w1_e + b1_e.
        adapted: a LoRA adapter's low b_e^T is added to the preactivation, with low [T, r] and b [E, 2I or I, r]; with
            transpose_w low b_e, with b [E, r, 2I or I].
    """

    op: ClassVar[str] = "grouped_glu"
    dtype: str = "bfloat16"
    activation: str = "swiglu"
    glu_layout: str = "concat"
    save_preact: bool = False
    tile: TileConfig = TileConfig()
    arch: str = "sm_90a"
    operands: str = "16bit"
    transpose_w: bool = False
    adapted: bool = False

    def __post_init__(self) -> None:
        require("dtype", self.dtype, DTYPES)
        _check_operands(self.operands, self.tile, self.arch)
        _check_decoded(self.operands, self.dtype)
        _check_activation(self.activation, self.glu_layout)
        formats = OPERANDS[self.operands]
        block = formats.act.block * (1 + self.gated)
        if formats.act.scale and self.tile.n % block:
            raise SpecError(f"tile n={self.tile.n}: a scale of an activation in FP8 is of {block} weight rows")
        if self.save_preact and not formats.trains:
            raise SpecError(f"save_preact is for training, which operands={self.operands!r} does not serve")
        _check_transposed(self.transpose_w, self.operands)
        if self.adapted and not self.save_preact:
            raise SpecError("an adapted grouped_glu stores the preactivation; choose save_preact=True")
        _check_adapted(self)
        if self.transpose_w and self.gated:
            require("glu_layout of transposed weights", self.glu_layout, GLU_LAYOUTS)
            if self.glu_layout == "concat" and self.tile.n % (2 * SWIZZLED):
                raise SpecError(
                    f"tile n={self.tile.n}: either half of its columns of transposed weights in layout 'concat' must be"
                    f" whole {SWIZZLED}; choose tile n=128 or 256"
                )

    @property
    def gated(self) -> bool:
        return is_gated(self.activation)

    @property
    def stem(self) -> str:
        layout = f"_{self.glu_layout}" if self.gated else ""
        preact = "_preact" if self.save_preact else ""
        form = "_nn" if self.transpose_w else ""
        adapted = "_adapted" if self.adapted else ""
        return f"{self.activation}{layout}{preact}{form}{adapted}_{self.tile.name}"

    @property
    def name(self) -> str:
        return f"grouped_glu_{OPERANDS[self.operands].prefix}{DTYPES[self.dtype]}_{self.stem}_{self.arch}"


@dataclasses.dataclass(frozen=True)
class GroupedDgluSpec:
    """The backward of FC2 and of the activation: makes dpreact, act and d_row_scale of a grouped_glu from dy, w2 and
    the preactivation. dm = dy w2_e is the gradient of act. It runs the kernel of `DgluSpec` and the kernels after it.

    Attributes:
        dgrad: the tile of dx = dpreact w1_e, which makes this the data path of a grouped_mlp's backward; None: no dx.
        transpose_w: w2 is [E, I, H] and dm = dy w2_e^T; dgrad must be None.
        adapted: a LoRA adapter's low b_e is added to dm, with low [T, r] and b [E, r, I]; with transpose_w low b_e^T,
            with b [E, I, r]. dgrad must be None.
    """

    op: ClassVar[str] = "grouped_dglu"
    dtype: str = "bfloat16"
    activation: str = "swiglu"
    glu_layout: str = "concat"
    tile: TileConfig = TileConfig()
    dgrad: TileConfig | None = None
    arch: str = "sm_90a"
    operands: str = "16bit"
    transpose_w: bool = False
    adapted: bool = False

    def __post_init__(self) -> None:
        require("dtype", self.dtype, DTYPES)
        require("operands", self.operands, [name for name, formats in OPERANDS.items() if formats.trains])
        for tile in (self.tile, self.dgrad) if self.dgrad else (self.tile,):
            _check_operands(self.operands, tile, self.arch)
        check_accumulators(self.tile, self.tile.max_accumulators)
        require("activation", self.activation, ACTIVATIONS)
        require("glu_layout", self.glu_layout, GLU_LAYOUTS)
        _check_activation(self.activation, self.glu_layout)
        _check_transposed(self.transpose_w, self.operands)
        if self.transpose_w and self.dgrad:
            raise SpecError("dgrad reads w1 [E,2I or I,H]; with transpose_w leave it out and call grouped_mm")
        if self.adapted and self.dgrad:
            raise SpecError("no dgrad follows an adapted grouped_dglu; leave dgrad out")
        _check_adapted(self)

    @property
    def gated(self) -> bool:
        return is_gated(self.activation)

    @property
    def stem(self) -> str:
        layout = f"_{self.glu_layout}" if self.gated else ""
        form = ("_nt" if self.transpose_w else "") + ("_adapted" if self.adapted else "")
        return f"{OPERANDS[self.operands].prefix}{DTYPES[self.dtype]}_{self.activation}{layout}{form}_{self.tile.name}"

    @property
    def name(self) -> str:
        dgrad = f"__nn_{self.dgrad.name}" if self.dgrad else ""
        return f"grouped_dglu_{self.stem}{dgrad}_{self.arch}"


@dataclasses.dataclass(frozen=True)
class DgluSpec(GroupedDgluSpec):
    """The GEMM kernel of a grouped_dglu: makes dpreact, act, and each tile's parts of d_row_scale."""

    op: ClassVar[str] = "dglu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dgrad:
            raise SpecError("dglu is one kernel, without dgrad; choose grouped_dglu")

    @property
    def name(self) -> str:
        return f"dglu_{self.stem}_{self.arch}"


@dataclasses.dataclass(frozen=True)
class BackwardCleanupSpec:
    """The last kernel of a backward: adds the tiles' parts of d_row_scale, and zeroes rows of dx after the last
    group."""

    op: ClassVar[str] = "tail"
    dtype: str = "bfloat16"
    arch: str = "sm_90a"

    def __post_init__(self) -> None:
        require("dtype", self.dtype, DTYPES)
        require("arch", self.arch, ARCHS)

    @property
    def name(self) -> str:
        return f"tail_{DTYPES[self.dtype]}_{self.arch}"


@dataclasses.dataclass(frozen=True)
class GroupedMlpSpec:
    """A grouped_glu, then a grouped_mm in one call, with programmatic dependent launch between them. If fc1 saves its
    preactivation, this is the forward of training.

    Attributes:
        fc1, fc2: the specs of the two GEMMs.
        quantized: with operands "mxfp8" or "fp8_block", x is already in that format; if False, the call first quantises
            its rows.
    """

    op: ClassVar[str] = "grouped_mlp"
    fc1: GroupedGluSpec = GroupedGluSpec()
    fc2: GroupedMmSpec = GroupedMmSpec()
    quantized: bool = False

    def __post_init__(self) -> None:
        if (self.fc1.dtype, self.fc1.arch) != (self.fc2.dtype, self.fc2.arch):
            raise SpecError("fc1 and fc2 of a grouped_mlp must agree in dtype and arch")
        if self.fc1.transpose_w != self.fc2.transpose_w:
            raise SpecError("fc1 and fc2 of a grouped_mlp are both transposed or neither; give both one transpose_w")
        if self.quantized and (not OPERANDS[self.fc1.operands].has_scaled_rows or self.fc1.save_preact):
            raise SpecError(
                "quantized is of a grouped_mlp with operands='mxfp8' or 'fp8_block' and without save_preact"
            )
        reads = next_operands(self.fc1.operands)
        if self.fc2.operands != reads:
            raise SpecError(
                f"fc1 with operands={self.fc1.operands!r} makes what fc2 with operands={reads!r} reads, "
                f"not {self.fc2.operands!r}"
            )

    @property
    def dtype(self) -> str:
        return self.fc1.dtype

    @property
    def arch(self) -> str:
        return self.fc1.arch

    @property
    def name(self) -> str:
        kind = f"{OPERANDS[self.fc1.operands].prefix}{DTYPES[self.dtype]}"
        quantized = "_quantized" if self.quantized else ""
        return f"grouped_mlp_{kind}_{self.fc1.stem}__{self.fc2.stem}{quantized}_{self.arch}"


@dataclasses.dataclass(frozen=True)
class GroupedWgradSpec:
    """A weight gradient dw [E, N, K]: dw_e = dy_e^T x_e, contracted over the rows of group e, written or added to dw.

    Attributes:
        dtype: the dtype of dy [T, N] and x [T, K].
        out_dtype: the dtype of dw.
        operands: the formats in which dy and x are multiplied. "16bit": one kernel reads them. In MXFP8 they are first
            quantised in blocks of a group's rows (`BY_GROUP`).
    """

    op: ClassVar[str] = "grouped_wgrad"
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    tile: TileConfig = TileConfig()
    arch: str = "sm_90a"
    operands: str = "16bit"

    def __post_init__(self) -> None:
        require("dtype", self.dtype, DTYPES)
        require("out_dtype", self.out_dtype, (self.dtype, "float32"))
        _check_wgrad(self.operands, self.tile, self.arch)

    @property
    def name(self) -> str:
        kind = f"{OPERANDS[self.operands].prefix}{DTYPES[self.dtype]}"
        return f"grouped_wgrad_{kind}_{WIDE_DTYPES[self.out_dtype]}_{self.tile.name}_{self.arch}"


@dataclasses.dataclass(frozen=True)
class WgradSpec:
    """The kernel of a grouped_wgrad whose operands were quantised by groups: `QuantizeMxfp8Spec` with axis "group"."""

    op: ClassVar[str] = "wgrad"
    out_dtype: str = "bfloat16"
    tile: TileConfig = TileConfig()
    arch: str = "sm_100a"
    operands: str = "mxfp8_blocks"

    def __post_init__(self) -> None:
        require("out_dtype", self.out_dtype, WIDE_DTYPES)
        require("operands", self.operands, WGRAD_OPERANDS[1:])
        _check_wgrad(self.operands, self.tile, self.arch)

    @property
    def dtype(self) -> str:
        return self.out_dtype

    @property
    def name(self) -> str:
        prefix, out = OPERANDS[self.operands].prefix, WIDE_DTYPES[self.out_dtype]
        return f"wgrad_{prefix}{out}_{self.tile.name}_{self.arch}"


@dataclasses.dataclass(frozen=True)
class QuantizeMxfp8Spec:
    """Quantisation of x [T, K] to MXFP8. Block size and scale layout are run-time values.

    Attributes:
        axis: blocks lie along "row", along "col", or "both" copies are made in one read of x. "group": along the
            columns of each group, whose first row begins a block.
        rounded: only with axis "row": the result is the rounded values in x's dtype, instead of elements and scales.
    """

    op: ClassVar[str] = "quantize_mxfp8"
    dtype: str = "bfloat16"
    axis: str = "row"
    arch: str = "sm_90a"
    rounded: bool = False

    def __post_init__(self) -> None:
        require("dtype", self.dtype, WIDE_DTYPES)
        require("axis", self.axis, ("row",) if self.rounded else (*QUANTIZE_AXES, BY_GROUP))
        require("arch", self.arch, ARCHS)

    @property
    def name(self) -> str:
        rounded = "_rounded" if self.rounded else ""
        return f"quantize_mxfp8_{WIDE_DTYPES[self.dtype]}_{self.axis}{rounded}_{self.arch}"


@dataclasses.dataclass(frozen=True)
class FoldMxfp8Spec:
    """A fold: a weight to MXFP8 with one scale for each row of the result.

    axis: "row": the rows of w [R, C]; "col": w [E, N, K] is transposed to [E, K, N], with a scale for each of its rows.
    """

    op: ClassVar[str] = "fold_mxfp8"
    dtype: str = "bfloat16"
    axis: str = "row"
    arch: str = "sm_90a"

    def __post_init__(self) -> None:
        require("dtype", self.dtype, WIDE_DTYPES)
        require("axis", self.axis, FOLD_AXES)
        require("arch", self.arch, ARCHS)

    @property
    def name(self) -> str:
        return f"fold_mxfp8_{WIDE_DTYPES[self.dtype]}_{self.axis}_{self.arch}"


@dataclasses.dataclass(frozen=True)
class QuantizeMxfp4Spec:
    """Quantisation of w [T, K], whose rows follow each other without padding, to MXFP4 with blocks along rows."""

    op: ClassVar[str] = "quantize_mxfp4"
    dtype: str = "bfloat16"
    arch: str = "sm_90a"

    def __post_init__(self) -> None:
        require("dtype", self.dtype, WIDE_DTYPES)
        require("arch", self.arch, ARCHS)

    @property
    def name(self) -> str:
        return f"quantize_mxfp4_{WIDE_DTYPES[self.dtype]}_{self.arch}"


@dataclasses.dataclass(frozen=True)
class QuantizeFp8BlockSpec:
    """Quantisation of x [T, K] to E4M3 with a float32 scale for each 128 elements of a row."""

    op: ClassVar[str] = "quantize_fp8_block"
    dtype: str = "bfloat16"
    arch: str = "sm_90a"

    def __post_init__(self) -> None:
        require("dtype", self.dtype, WIDE_DTYPES)
        require("arch", self.arch, ARCHS)

    @property
    def name(self) -> str:
        return f"quantize_fp8block_{WIDE_DTYPES[self.dtype]}_row_{self.arch}"


@dataclasses.dataclass(frozen=True)
class MhcSpec:
    """A hyper-connection kernel.

    Attributes:
        kernel: a key of `mhc.kernels.KERNELS`.
        dtype: the dtype of the streams. Sinkhorn kernels take any dtype; their spec has "float32".
        n: the number of streams.
    """

    op: ClassVar[str] = "mhc"
    kernel: str = "aggregate"
    dtype: str = "bfloat16"
    n: int = 4
    arch: str = "sm_90a"

    def __post_init__(self) -> None:
        require("kernel", self.kernel, mhc.KERNELS)
        require("dtype", self.dtype, self.of_kernel.dtypes)
        require("n", self.n, self.of_kernel.counts or mhc.COUNTS)
        require("arch", self.arch, ARCHS)

    @property
    def of_kernel(self) -> Kernel:
        return mhc.KERNELS[self.kernel]

    @property
    def name(self) -> str:
        dtype = f"_{WIDE_DTYPES[self.dtype]}" if self.of_kernel.has_dtype else ""
        return f"mhc_{self.kernel}{dtype}_n{self.n}_{self.arch}"


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """A kernel of the layer around the experts: routing, permute, combine and others.

    Attributes:
        kernel: a key of `layer.kernels.KERNELS`.
        dtype: the dtype of tokens or rows; "float32" for kernels that read none.
        experts: the most experts that a routing kernel can serve; 0 for other kernels.
    """

    op: ClassVar[str] = "layer"
    kernel: str = "route"
    dtype: str = "float32"
    experts: int = 0
    arch: str = "sm_90a"

    def __post_init__(self) -> None:
        require("kernel", self.kernel, layer.KERNELS)
        require("dtype", self.dtype, self.of_kernel.dtypes)
        require("experts", self.experts, layer.CAPACITIES if self.of_kernel.is_sized else (0,))
        require("arch", self.arch, ARCHS)

    @property
    def of_kernel(self) -> Kernel:
        return layer.KERNELS[self.kernel]

    @property
    def name(self) -> str:
        dtype = f"_{WIDE_DTYPES[self.dtype]}" if self.of_kernel.has_dtype else ""
        experts = f"_e{self.experts}" if self.experts else ""
        return f"layer_{self.kernel}{dtype}{experts}_{self.arch}"


_SPECS = (
    GroupedMmSpec,
    GroupedGluSpec,
    GroupedMlpSpec,
    GroupedDgluSpec,
    DgluSpec,
    BackwardCleanupSpec,
    GroupedWgradSpec,
    WgradSpec,
    QuantizeMxfp8Spec,
    FoldMxfp8Spec,
    QuantizeMxfp4Spec,
    QuantizeFp8BlockSpec,
    MhcSpec,
    LayerSpec,
)
Spec = (
    GroupedMmSpec
    | GroupedGluSpec
    | GroupedMlpSpec
    | GroupedDgluSpec
    | DgluSpec
    | BackwardCleanupSpec
    | GroupedWgradSpec
    | WgradSpec
    | QuantizeMxfp8Spec
    | FoldMxfp8Spec
    | QuantizeMxfp4Spec
    | QuantizeFp8BlockSpec
    | MhcSpec
    | LayerSpec
)
RaggedSpec = GroupedMmSpec | GroupedGluSpec | DgluSpec
"""Specs of a single GEMM whose rows belong to groups of varying size (not a weight gradient)."""
GemmSpec = RaggedSpec | GroupedWgradSpec | WgradSpec
"""Specs of a single GEMM kernel."""
_SPEC_TYPES: dict[str, type] = {spec.op: spec for spec in _SPECS}
_NESTED: dict[str, type] = {"tile": TileConfig, "dgrad": TileConfig, "fc1": GroupedGluSpec, "fc2": GroupedMmSpec}


def operands_of(spec: Spec) -> str:
    """Return the operands of a spec's (first) GEMM, a key of OPERANDS; "16bit" for kernels that are not GEMMs."""
    first = spec.fc1 if isinstance(spec, GroupedMlpSpec) else spec
    return str(getattr(first, "operands", "16bit"))


def to_dict(spec: Spec) -> dict[str, Any]:
    """Return a JSON-ready dict that `from_dict` turns back into an equal spec."""
    return {"op": spec.op, **dataclasses.asdict(spec)}


def _build(cls: type, fields: dict[str, Any]) -> Any:
    known = {f.name for f in dataclasses.fields(cls)}
    unknown = set(fields) - known
    if unknown:
        raise SpecError(f"{cls.__name__} has no field {sorted(unknown)[0]!r}; it has: {', '.join(sorted(known))}")
    return cls(**{k: _build(_NESTED[k], v) if k in _NESTED and isinstance(v, dict) else v for k, v in fields.items()})


def from_dict(data: dict[str, Any]) -> Spec:
    """Return the spec from which `to_dict` made `data`. Raises SpecError for an unknown operator or field."""
    fields = dict(data)
    op = fields.pop("op", None)
    require("op", op, _SPEC_TYPES)
    return _build(_SPEC_TYPES[op], fields)
