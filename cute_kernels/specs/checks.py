"""Checks of a GEMM's spec, which raise SpecError if no kernel exists for its operands, tile, transposition or
activation."""

from __future__ import annotations

from typing import Any

from ..architectures import ARCHS
from ..formats import OPERANDS
from ..tiles import TILE_K, SpecError, TileConfig, check_accumulators, require
from .activations import ACTIVATION_FORMS, LAYOUT_FORMS, is_gated

WGRAD_OPERANDS = ("16bit", *(name for name, operands in OPERANDS.items() if operands.multiplies_blocks))
"""Operands that weight gradients can multiply: 16 bits, and formats whose block scales the MMA itself applies."""
SWIZZLED = 64
"""Columns of 16-bit transposed weights that one TMA load brings. Its box is as wide as a swizzle atom, 128 bytes."""


def check_served(operands: str, arch: str) -> None:
    """Raise SpecError if no GEMM of an architecture multiplies these operands."""
    if operands in ARCHS[arch].lacks:
        having = [name for name, one in ARCHS.items() if operands not in one.lacks]
        served = [name for name in OPERANDS if name not in ARCHS[arch].lacks]
        raise SpecError(
            f"operands={operands!r} are multiplied on {', '.join(having)} alone, not on {arch}; choose one of: "
            f"{', '.join(served)}"
        )


def check_operands(operands: str, tile: TileConfig, arch: str, transpose_w: bool = False) -> None:
    """Raise SpecError if no GEMM of an architecture multiplies these operands on this tile.

    transpose_w: True: the weights are transposed; kernels that decode weights then have other tiles.
    """
    require("arch", arch, ARCHS)
    require("operands", operands, OPERANDS)
    check_served(operands, arch)
    if tile.schedule not in ARCHS[arch].schedules:
        raise SpecError(
            f"schedule={tile.schedule!r} belongs to another architecture than {arch}; choose one of: "
            f"{', '.join(ARCHS[arch].schedules)}"
        )
    formats = OPERANDS[operands]
    if transpose_w and formats.decodes:
        check_decoded_lines(operands, tile)
        return
    # Elements narrower than 8 bits have the same depth: their rows of shared memory are half as long.
    depth = TILE_K[16 if tile.by_warps else max(formats.w.bits, 8)]
    if tile.k != depth:
        raise SpecError(f"tile k={tile.k} does not fit operands={operands!r}; choose k={depth}")
    fits = formats.decodes_to_fp8 if tile.rules.reads_decoded else tile.swapped == formats.decodes or tile.by_warps
    if not fits:
        needs = "schedule='swapped'" if formats.decodes else "another schedule"
        raise SpecError(f"schedule={tile.schedule!r} does not fit operands={operands!r}; choose {needs}")
    if formats.has_scaled_rows and tile.takes_turns and not tile.in_tensor_memory:
        raise SpecError(
            f"schedule={tile.schedule!r} does not fit operands={operands!r}: a promotion hides behind the MMAs of "
            "another warpgroup of the tile; choose schedule='cooperative'"
        )
    if formats.w.scale and not tile.by_warps:  # promotion and decoding also need registers
        check_accumulators(tile, tile.max_accumulators)


def check_decoded(operands: str, dtype: str) -> None:
    """Raise SpecError if these operands decode weights to 16 bits and the dtype is not bfloat16."""
    if OPERANDS[operands].decodes and dtype != "bfloat16":
        raise SpecError(
            f"dtype={dtype!r}: operands={operands!r} decodes weights with scales, whose range bfloat16 alone has; "
            "choose dtype='bfloat16'"
        )


def check_decoded_lines(operands: str, tile: TileConfig) -> None:
    """Raise SpecError if no kernel computes the data gradient's GEMM (dy W) with these operands on this tile.

    The GEMM contracts over the rows (lines) of W, which is quantised. The kernel decodes lines to 16-bit numbers in
    shared memory, from which the MMAs read.

    operands: a key of OPERANDS whose weights are decoded.
    """
    if not OPERANDS[operands].has_data_gradients:
        raise SpecError(f"operands={operands!r} has no data gradient, since it rounds rows; choose 'mxfp8_weight_only'")
    if not (tile.by_warps or tile.takes_turns) or (tile.m, tile.n, tile.cluster_size) != (128, 128, 1):
        raise SpecError(
            f"tile {tile.name} does not fit transpose_w with operands={operands!r}; choose 128 x 128, without a cluster"
            ", and schedule='pingpong' or, of warps, 'warps'"
        )


def check_wgrad(operands: str, tile: TileConfig, arch: str) -> None:
    """Raise SpecError if no weight gradient kernel exists for these operands or this tile."""
    require("operands", operands, WGRAD_OPERANDS)
    check_operands(operands, tile, arch)
    if tile.adaptive:
        raise SpecError("a weight gradient has no ragged row tiles to adapt to; choose adaptive=False")
    if tile.m < SWIZZLED:
        raise SpecError(f"tile m={tile.m} is less than the {SWIZZLED} columns of dy that one load brings")


def check_transposed(transpose_w: bool, operands: str) -> None:
    """Raise SpecError if transposed weights are asked for that do not have 16 bits."""
    if transpose_w and OPERANDS[operands].w.element:
        raise SpecError(
            "transpose_w needs 16-bit weights, since FP8 wgmma reads weights along the contraction; choose "
            "transpose_w=False"
        )


def check_adapted(spec: Any) -> None:
    """Raise SpecError if a spec is adapted (adds LoRA adapters), but its architecture or operands have no kernel for
    that."""
    if spec.adapted and not (ARCHS[spec.arch].adapts and OPERANDS[spec.operands].w.bits == 16):
        raise SpecError("only Hopper's own kernels of 16-bit weights have adapters; choose adapted=False")


def check_activation(activation: str, glu_layout: str) -> None:
    """Raise SpecError if the activation or the gate layout is unknown, or if an activation without a gate has a layout
    other than "concat"."""
    require("activation", activation, ACTIVATION_FORMS)
    require("glu_layout", glu_layout, LAYOUT_FORMS)
    if not is_gated(activation) and glu_layout != "concat":
        raise SpecError(
            f"glu_layout={glu_layout!r} has no meaning for activation={activation!r}, which has no gate; "
            "leave glu_layout at 'concat'"
        )
