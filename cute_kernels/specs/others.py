"""Specs of kernels that are not GEMMs: quantisers, the last kernel of a backward, hyper-connections, and the layer
around the experts."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ..architectures import ARCHS
from ..dtypes import DTYPES, WIDE_DTYPES
from ..kernels import Kernel
from ..layer import kernels as layer
from ..mhc import kernels as mhc
from ..tiles import require

QUANTIZE_AXES = ("row", "col", "both")
BY_GROUP = "group"
"""The axis of quantisation for weight gradients, which contract over a group's rows. Blocks lie along columns, and a
block begins at each group's first row."""
FOLD_AXES = ("row", "col")


@dataclasses.dataclass(frozen=True)
class BackwardCleanupSpec:
    """The last kernel of a backward. It adds the tiles' partial sums of d_row_scale, and zeroes the rows of dx after
    the last group."""

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
class QuantizeMxfp8Spec:
    """Quantisation of x [T, K] to MXFP8. Block size and scale layout are run-time values.

    Attributes:
        axis: "row": blocks lie along rows; "col": along columns; "both": both results are made from one read of x.
            "group": blocks lie along the columns of each group, and a block begins at the group's first row.
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
    """A fold: turns a weight into MXFP8 with one scale for each row of the result.

    axis: "row": w is [R, C], and each of its rows gets a scale. "col": w [E, N, K] is transposed to [E, K, N], and each
    row of the transposed weight gets a scale.
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
    """Quantisation of w [T, K] to MXFP4, with blocks along rows. w's rows follow each other without padding."""

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
        dtype: the dtype of the residual streams. Sinkhorn kernels take any dtype; their spec has "float32".
        n: the number of residual streams.
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
    """A kernel of the layer around the experts, for example routing, permute or combine.

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
