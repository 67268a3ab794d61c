"""Specs of GEMMs, and of calls whose kernels are mainly GEMMs."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ..dtypes import DTYPES, WIDE_DTYPES
from ..formats import OPERANDS, next_operands
from ..tiles import SpecError, TileConfig, check_accumulators, require
from .activations import ACTIVATIONS, GLU_LAYOUTS, is_gated
from .checks import (
    SWIZZLED,
    WGRAD_OPERANDS,
    check_activation,
    check_adapted,
    check_decoded,
    check_operands,
    check_transposed,
    check_wgrad,
)


@dataclasses.dataclass(frozen=True)
class GroupedMmSpec:
    """A grouped GEMM: y [T, N] = x w_e^T (+ bias_e * bias_scale), with x [T, K] and w [E, N, K].

    Attributes:
        transpose_w: y [T, K] = x w_e with x [T, N].
        in_halves: x is [T, 2N]. Each half of its columns has its own weights, and the two products are added.
        adapted: a LoRA adapter's product is added to y: low b_e^T, with low [T, r] and b [E, N, r]; with transpose_w
            low b_e, with b [E, r, K].
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
        check_operands(self.operands, self.tile, self.arch, self.transpose_w)
        check_decoded(self.operands, self.dtype)
        if not OPERANDS[self.operands].decodes:
            check_transposed(self.transpose_w, self.operands)
        if self.in_halves and OPERANDS[self.operands].w.element:
            raise SpecError(f"in_halves needs 16-bit weights, not operands={self.operands!r}; choose in_halves=False")
        if self.in_halves and not self.transpose_w:
            raise SpecError("in_halves splits a contraction over the weights' rows; choose transpose_w=True")
        if self.adapted and self.in_halves:
            raise SpecError("an adapted kernel reads one weight, not two halves; choose in_halves=False")
        check_adapted(self)

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
    with a gate, I without; w1 has as many rows.

    Attributes:
        save_preact: the preactivation [T, 2I or I] is also stored.
        transpose_w: w1 is [E, H, 2I or I], and the preactivation is x w1_e + b1_e.
        adapted: a LoRA adapter's product is added to the preactivation: low b_e^T, with low [T, r] and b [E, 2I or I,
            r]; with transpose_w low b_e, with b [E, r, 2I or I].
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
        check_operands(self.operands, self.tile, self.arch)
        check_decoded(self.operands, self.dtype)
        check_activation(self.activation, self.glu_layout)
        formats = OPERANDS[self.operands]
        block = formats.act.block * (1 + self.gated)
        if formats.act.scale and self.tile.n % block:
            raise SpecError(f"tile n={self.tile.n}: {block} weight rows make the FP8 activations that share a scale")
        if self.save_preact and not formats.trains:
            raise SpecError(f"save_preact is for training, which operands={self.operands!r} does not serve")
        check_transposed(self.transpose_w, self.operands)
        if self.adapted and not self.save_preact:
            raise SpecError("an adapted grouped_glu stores the preactivation; choose save_preact=True")
        check_adapted(self)
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
    """The backward of FC2 and of the activation. From dy, w2 and the preactivation, it makes dpreact, act and
    d_row_scale of a grouped_glu. dm = dy w2_e is the gradient of act.

    The call runs the kernel of `DgluSpec`, and other kernels after it.

    Attributes:
        dgrad: the tile of dx = dpreact w1_e, which is then also computed, so that the call is the data path of a
            grouped_mlp's backward; None: no dx.
        transpose_w: w2 is [E, I, H] and dm = dy w2_e^T; dgrad must be None.
        adapted: a LoRA adapter's product is added to dm: low b_e, with low [T, r] and b [E, r, I]; with transpose_w low
            b_e^T, with b [E, I, r]. dgrad must be None.
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
            check_operands(self.operands, tile, self.arch)
        check_accumulators(self.tile, self.tile.max_accumulators)
        require("activation", self.activation, ACTIVATIONS)
        require("glu_layout", self.glu_layout, GLU_LAYOUTS)
        check_activation(self.activation, self.glu_layout)
        check_transposed(self.transpose_w, self.operands)
        if self.transpose_w and self.dgrad:
            raise SpecError("dgrad reads w1 [E,2I or I,H]; with transpose_w leave it out and call grouped_mm")
        if self.adapted and self.dgrad:
            raise SpecError("no dgrad follows an adapted grouped_dglu; leave dgrad out")
        check_adapted(self)

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
    """The GEMM kernel of a grouped_dglu. It makes dpreact, act, and the partial sums of d_row_scale, one for each
    tile."""

    op: ClassVar[str] = "dglu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dgrad:
            raise SpecError("dglu is one kernel, without dgrad; choose grouped_dglu")

    @property
    def name(self) -> str:
        return f"dglu_{self.stem}_{self.arch}"


@dataclasses.dataclass(frozen=True)
class GroupedMlpSpec:
    """A grouped_glu and a grouped_mm in one call, with programmatic dependent launch between them. If fc1 saves its
    preactivation, this is the forward of training.

    Attributes:
        fc1, fc2: the specs of the two GEMMs.
        quantized: only with operands "mxfp8" or "fp8_block". True: x is already in this format; False: the call first
            quantises x's rows.
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
            raise SpecError("quantized needs a grouped_mlp with operands='mxfp8' or 'fp8_block', and save_preact=False")
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
    """A weight gradient dw [E, N, K]: dw_e = dy_e^T x_e, contracted over the rows of group e. It is written to dw or
    added to it.

    Attributes:
        dtype: the dtype of dy [T, N] and x [T, K].
        out_dtype: the dtype of dw.
        operands: the formats in which dy and x are multiplied. "16bit": one kernel does all. In MXFP8, dy and x are
            first quantised in blocks of a group's rows (`BY_GROUP`).
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
        check_wgrad(self.operands, self.tile, self.arch)

    @property
    def name(self) -> str:
        kind = f"{OPERANDS[self.operands].prefix}{DTYPES[self.dtype]}"
        return f"grouped_wgrad_{kind}_{WIDE_DTYPES[self.out_dtype]}_{self.tile.name}_{self.arch}"


@dataclasses.dataclass(frozen=True)
class WgradSpec:
    """The kernel of a grouped_wgrad with operands that were quantised by groups before (`QuantizeMxfp8Spec` with axis
    "group")."""

    op: ClassVar[str] = "wgrad"
    out_dtype: str = "bfloat16"
    tile: TileConfig = TileConfig()
    arch: str = "sm_100a"
    operands: str = "mxfp8_blocks"

    def __post_init__(self) -> None:
        require("out_dtype", self.out_dtype, WIDE_DTYPES)
        require("operands", self.operands, WGRAD_OPERANDS[1:])
        check_wgrad(self.operands, self.tile, self.arch)

    @property
    def dtype(self) -> str:
        return self.out_dtype

    @property
    def name(self) -> str:
        prefix, out = OPERANDS[self.operands].prefix, WIDE_DTYPES[self.out_dtype]
        return f"wgrad_{prefix}{out}_{self.tile.name}_{self.arch}"
