"""Functions that list the specs of one kind of kernel each, such as 16-bit forward GEMMs or quantisers.

The `shipped_specs` of each architecture's module `configs` joins such lists to the list of all functions that its
bundle (compiled library) ships. A list has the same order at every call. Plain Python, which imports no compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product

from .architectures import ARCHS
from .formats import DECODED, OPERANDS, next_operands
from .layer import kernels as layer
from .mhc import kernels as mhc
from .specs import (
    BLOCK_ROWS,
    DTYPES,
    FOLD_AXES,
    GATED,
    GLU_LAYOUTS,
    QUANTIZE_AXES,
    UNGATED,
    WIDE_DTYPES,
    FoldMxfp8Spec,
    GroupedDgluSpec,
    GroupedGluSpec,
    GroupedMlpSpec,
    GroupedMmSpec,
    GroupedWgradSpec,
    LayerSpec,
    MhcSpec,
    QuantizeMxfp4Spec,
    QuantizeMxfp8Spec,
    Spec,
)
from .tiles import TileConfig

PROFILES = ("demo", "bf16", "full")
"""Profiles of bundles, the smallest first: the demo's functions, everything except float16, everything."""


def ships_adapted(dtype: str, arch: str) -> bool:
    """Return True if GEMMs of a dtype also ship with a fused LoRA adapter; if not, adapters take separate GEMMs.

    Portable GEMMs have no adapters: a second mainloop after the first spilled up to 440 bytes on sm_100 and sm_120.
    """
    return dtype == "bfloat16" and ARCHS[arch].adapts


def activation_forms() -> list[tuple[str, str]]:
    """Return every pair (activation, glu_layout)."""
    return [*product(GATED, GLU_LAYOUTS), *((a, "concat") for a in UNGATED)]


def glu_forms(
    glu_form: Callable[..., tuple[str, str]], operands: str, tile: TileConfig, save_preact: bool = False,
    transpose_w: bool = False,
) -> list[tuple[str, str]]:  # fmt: skip
    """Return every pair of forms (activations, gate layouts) that FC1 kernels of these operands and tile are compiled
    for. A form is a set of activations, or of gate layouts, that one kernel serves; a call chooses one at run time.

    Args:
        glu_form: the function of the architecture's policy that returns the forms for an activation and a gate layout.
        operands: a key of OPERANDS.
        save_preact: True: FC1 stores the preactivation.
        transpose_w: True: w1 is transposed.
    """
    widths = (BLOCK_ROWS, BLOCK_ROWS + 1) if operands == "16bit" else (BLOCK_ROWS,)
    pairs = product(activation_forms(), widths)
    forms = (glu_form(*form, width, operands, tile, save_preact, transpose_w) for form, width in pairs)
    return list(dict.fromkeys(forms))


def demo_specs(arch: str, tile: TileConfig, glu_form: Callable[..., tuple[str, str]]) -> list[Spec]:
    """Return the functions of the profile "demo": a bfloat16 SwiGLU grouped_mlp, and routing."""
    form = glu_form("swiglu", "concat", BLOCK_ROWS, "16bit", tile, False)
    fc1, fc2 = GroupedGluSpec("bfloat16", *form, False, tile, arch), GroupedMmSpec(tile=tile, arch=arch)
    return [GroupedMlpSpec(fc1, fc2), LayerSpec("route", experts=layer.CAPACITIES[0], arch=arch)]


def adapted(spec: GroupedMmSpec | GroupedGluSpec | GroupedDgluSpec) -> list[Spec]:
    """Return a list with the spec of the same GEMM with a fused LoRA adapter; an empty list if that does not ship."""
    return [replace(spec, adapted=True)] if ships_adapted(spec.dtype, spec.arch) else []


def forward_specs(arch: str, tiles: Sequence[TileConfig], glu_form: Callable[..., tuple[str, str]]) -> list[Spec]:
    """Return every 16-bit forward GEMM and grouped_mlp, with and without a stored preactivation, with plain and with
    transposed weights.

    Args:
        arch: a key of ARCHS.
        tiles: the tiles of these GEMMs.
        glu_form: the function of the architecture's policy that returns the forms for an activation and a gate layout.
    """
    specs: list[Spec] = []
    for tile, dtype, transpose_w in product(tiles, DTYPES, (False, True)):
        fc2 = GroupedMmSpec(dtype, transpose_w, tile, arch)
        specs += [fc2, *adapted(fc2)]
        specs += [replace(fc2, in_halves=True)] if transpose_w else []
        for save_preact in (False, True):
            for form in glu_forms(glu_form, "16bit", tile, save_preact, transpose_w):
                fc1 = GroupedGluSpec(dtype, *form, save_preact, tile, arch, transpose_w=transpose_w)
                specs += [fc1, *adapted(fc1)] if save_preact else [fc1]
                if not (save_preact and transpose_w):  # training of transposed weights calls FC1 and FC2 one by one
                    specs.append(GroupedMlpSpec(fc1, fc2))
    return specs


def backward_specs(arch: str, tile: TileConfig, wgrad_tiles: Sequence[TileConfig]) -> list[Spec]:
    """Return the specs of all 16-bit backward kernels: weight gradients and grouped_dglu.

    Each tile of `wgrad_tiles` has four weight gradients: for each of the two 16-bit dtypes, one with results of this
    dtype and one with float32 results. A grouped_dglu is the backward of FC2 and of the activation. Each dtype,
    activation and gate layout has three on `tile`: one alone, one with the GEMM of x's gradient after it, and one with
    a transposed weight; the first and the third also with a LoRA adapter, if adapters ship.
    """
    specs: list[Spec] = []
    for dtype in DTYPES:
        outs = product(wgrad_tiles, (dtype, "float32"))
        specs += [GroupedWgradSpec(dtype, out, each, arch) for each, out in outs]
        for activation, layout in activation_forms():
            forms = GroupedDgluSpec(dtype, activation, layout, tile, arch=arch)
            transposed = replace(forms, transpose_w=True)
            specs += [forms, replace(forms, dgrad=tile), transposed, *adapted(forms), *adapted(transposed)]
    return specs


def fp8_specs(
    arch: str, operands: str, tiles: Sequence[TileConfig], second_tile: Callable[[TileConfig], TileConfig],
    glu_form: Callable[..., tuple[str, str]], quantized: Sequence[bool],
) -> list[Spec]:  # fmt: skip
    """Return every forward GEMM and grouped_mlp that multiplies FP8 rows of x by FP8 weights, for each dtype of the
    16-bit tensors.

    Args:
        arch: a key of ARCHS.
        operands: a key of OPERANDS, in FP8.
        tiles: FC1's tiles.
        second_tile: returns FC2's tile for FC1's.
        glu_form: returns the forms (sets of activations and of gate layouts, one kernel for each set) that an FC1
            kernel serves; a function of the architecture's policy.
        quantized: the values of `GroupedMlpSpec.quantized` to ship.
    """
    specs: list[Spec] = []
    for tile, dtype in product(tiles, DTYPES):
        fc2 = GroupedMmSpec(dtype, False, second_tile(tile), arch, operands)
        specs.append(fc2)
        for form in glu_forms(glu_form, operands, tile):
            fc1 = GroupedGluSpec(dtype, *form, False, tile, arch, operands)
            specs += [GroupedMlpSpec(fc1, fc2, one) for one in quantized]
    return specs


def fp8_training_specs(
    arch: str, operands: str, tile: TileConfig, dglu: TileConfig, glu_form: Callable[..., tuple[str, str]]
) -> list[Spec]:
    """Return every grouped_mlp that saves its preactivation, on `tile`, and every grouped_dglu, on the tile `dglu`, for
    FP8 rows of x and FP8 weights."""
    specs: list[Spec] = []
    for dtype, form in product(DTYPES, glu_forms(glu_form, operands, tile, save_preact=True)):
        fc1 = GroupedGluSpec(dtype, *form, True, tile, arch, operands)
        specs.append(GroupedMlpSpec(fc1, GroupedMmSpec(dtype, False, tile, arch, operands)))
    for dtype, (activation, layout) in product(DTYPES, activation_forms()):
        for dgrad in (None, tile):
            specs.append(GroupedDgluSpec(dtype, activation, layout, dglu, dgrad, arch, operands))
    return specs


def fp8_wgrad_specs(arch: str, operands: str, tile: TileConfig) -> list[Spec]:
    """Return the specs of the weight gradient kernels (grouped_wgrad) of FP8 dy and x: for each 16-bit dtype, one with
    dw in this dtype and one with dw in float32.

    Args:
        arch: a key of ARCHS.
        operands: the operand format, a key of OPERANDS.
        tile: the tile of all these kernels.
    """
    outs = ((dtype, out) for dtype in DTYPES for out in (dtype, "float32"))
    return [GroupedWgradSpec(dtype, out, tile, arch, operands) for dtype, out in outs]


def decoded_specs(
    arch: str,
    tiles: Mapping[str, Sequence[TileConfig]],
    glu_form: Callable[..., tuple[str, str]],
    dgrad: TileConfig,
) -> list[Spec]:
    """Return every GEMM and grouped_mlp of 16-bit x whose weights have 8 or 4 bits and are decoded in the kernel, and
    the data gradients of the formats that have them.

    FC2s are listed once each: operands that differ only in FC1's result have the same FC2.

    Args:
        arch: a key of ARCHS.
        tiles: the tiles for each key of OPERANDS.
        glu_form: returns the forms (sets of activations and of gate layouts, one kernel for each set) that an FC1
            kernel serves; a function of the architecture's policy.
        dgrad: the tile of data gradients.
    """
    specs: dict[Spec, None] = {}
    for operands, tile in ((one, tile) for one in DECODED for tile in tiles[one]):
        fc2 = GroupedMmSpec("bfloat16", False, tile, arch, next_operands(operands))
        specs[fc2] = None
        for form in glu_forms(glu_form, operands, tile):
            fc1 = GroupedGluSpec("bfloat16", *form, False, tile, arch, operands)
            specs[GroupedMlpSpec(fc1, fc2)] = None
    gradients = [name for name in DECODED if OPERANDS[name].has_data_gradients]
    return [*specs, *(GroupedMmSpec("bfloat16", True, dgrad, arch, operands) for operands in gradients)]


def quantizing_specs(arch: str) -> list[Spec]:
    """Return every quantiser to MXFP8 and to MXFP4."""
    specs: list[Spec] = [QuantizeMxfp8Spec(dtype, axis, arch) for dtype, axis in product(WIDE_DTYPES, QUANTIZE_AXES)]
    specs += [
        QuantizeMxfp8Spec(dtype, arch=arch, rounded=True) for dtype in ("bfloat16", "float32")
    ]  # dtypes that can hold MXFP8 values
    return specs + [QuantizeMxfp4Spec(dtype, arch) for dtype in WIDE_DTYPES]


def folding_specs(arch: str) -> list[Spec]:
    """Return the specs of the kernels that fold a weight: quantise it to MXFP8 and rescale its blocks so that each row
    has one scale (`FoldMxfp8Spec`). Only FP8 MMAs need folded weights."""
    return [FoldMxfp8Spec(dtype, axis, arch) for dtype, axis in product(WIDE_DTYPES, FOLD_AXES)]


def mhc_specs(arch: str) -> list[Spec]:
    """Return a spec of every exported hyper-connection kernel, for each dtype and each number of streams that it ships
    for."""
    return [
        MhcSpec(name, dtype, n, arch)
        for name, kernel in mhc.KERNELS.items()
        for dtype, n in product(kernel.ships, kernel.counts or mhc.COUNTS)
    ]


def layer_specs(arch: str) -> list[Spec]:
    """Return a spec of every exported kernel around the experts: routing, permute, combine and others of
    `layer.kernels`."""
    return [
        LayerSpec(name, dtype, experts, arch)
        for name, kernel in layer.KERNELS.items()
        for dtype in kernel.ships
        for experts in (layer.CAPACITIES if kernel.is_sized else (0,))
    ]
