"""Conversion of serving engines' expert weights to quantised tensors that `glulam.moe` takes without further work.

E experts, H hidden size, I intermediate size of a rank. w13 is [E, 2I, H], gate and up-projection, or [E, I, H] without
a gate; w2 is [E, H, I]. In this file "rows" are rows of x, the tokens; rows of weights are called weight rows.

Weights stay in the engine's memory. 16-bit and FP8-block weights are unchanged. 4-bit elements may be reordered, and
MXFP8 elements rescaled, in place. An engine that loads weights again must convert them again.
"""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import recipes
from ...activations import Activation, is_in_halves
from ...calls.checks import runs_kernels, shape_text
from ...formats.fp8_block import FP8BlockTensor
from ...formats.mxfp4 import MXFP4Tensor, prepare_mxfp4_weight
from ...formats.mxfp8 import FoldedWeight, FoldError, MXFP8Tensor, prepare_mxfp8_weight
from ...formats.nvfp4 import NVFP4Tensor
from ...formats.scaled import F32_MANTISSA_BITS, SCALE_DTYPE, SOURCE_DTYPES, scales_of
from ...recipes import Recipe
from .gates import NotServed

MULTIPLE = 8
"""H and I must be multiples of this for weights in 16 bits."""
RECIPES: dict[str, tuple[Recipe, Recipe]] = {
    "bf16": (recipes.BF16, recipes.BF16),
    "fp8_block": (recipes.FP8_BLOCKS, recipes.FP8_BLOCK_WEIGHT_ONLY),
    "mxfp8": (recipes.MXFP8, recipes.MXFP8_WEIGHT_ONLY),
    "mxfp4": (recipes.MXFP4_WEIGHT_ONLY, recipes.MXFP4_WEIGHT_ONLY),
    "mxfp4_fp8": (recipes.MXFP4_IN_FP8, recipes.MXFP4_WEIGHT_ONLY),
    "nvfp4": (recipes.NVFP4_WEIGHT_ONLY, recipes.NVFP4_WEIGHT_ONLY),
}
"""{constructor of ServedExperts: (recipe on GPUs that have its kernels, recipe on other GPUs)}."""
MXFP4_ROWS = "GLULAM_MXFP4_ROWS"
"""Environment variable for plugins: the dtype in which rows are multiplied with MXFP4 weights, a key of MXFP4_KINDS."""
MXFP4_KINDS = {"bf16": "mxfp4", "fp8": "mxfp4_fp8"}
"""{dtype of rows: constructor of ServedExperts for MXFP4 weights}."""
_log = logging.getLogger(__name__)


class Weights(NamedTuple):
    """Weights w1 and w2 as `glulam.moe` takes them, and the recipe for them."""

    w1: Any
    w2: Any
    recipe: Recipe


class Checkpoint(NamedTuple):
    """An engine's tensors for quantised weights: the elements and the scales of w13 and w2."""

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor

    def detached(self) -> Checkpoint:
        return Checkpoint(*(tensor.detach() for tensor in self))


def served_recipe(kind: str, hidden: int, width: int, dtype: torch.dtype, weight: Tensor) -> Recipe:
    """Return the recipe for a layer with weights of one format, on the weights' device.

    Args:
        kind: the format, a key of RECIPES.
        hidden, width: H and I.
        dtype: dtype of the rows x.
        weight: any tensor of the layer.

    Raises:
        NotServed: there are no kernels for rows of this dtype, or for experts of this width.
    """
    recipe, weight_only = RECIPES[kind]
    recipe = recipe if recipes.has_kernels(recipe, weight) else weight_only
    if recipe is not recipes.BF16:
        _check_fits(recipe, dtype, hidden, width)
    elif dtype not in SOURCE_DTYPES or (runs_kernels(weight) and dtype == torch.float32):
        raise NotServed(f"expert weights are {dtype}; served are torch.bfloat16 and torch.float16")
    elif runs_kernels(weight) and (hidden % MULTIPLE or width % MULTIPLE):
        raise NotServed(f"expert weights have H = {hidden} and I = {width}; kernels read multiples of {MULTIPLE}")
    return recipe


def mxfp4_kind(default: str = "bf16") -> str:
    """Return the constructor that the environment variable GLULAM_MXFP4_ROWS selects: "mxfp4" or "mxfp4_fp8".

    Args:
        default: the value to use if the variable is not set.

    Raises:
        ValueError: the variable's value is not a key of MXFP4_KINDS.
    """
    rows = os.environ.get(MXFP4_ROWS, "").strip().lower() or default
    if rows not in MXFP4_KINDS:
        raise ValueError(f"{MXFP4_ROWS} is {rows!r}; give {' or '.join(MXFP4_KINDS)}")
    return MXFP4_KINDS[rows]


def in_16_bits(w13: Tensor, w2: Tensor) -> Weights:
    """Return 16-bit weights, without copies, and their recipe."""
    w13, w2 = w13.detach(), w2.detach()
    return Weights(w13, w2, served_recipe("bf16", w2.shape[1], w2.shape[2], w2.dtype, w2))


def fp8_blocks(given: Checkpoint, gate: Activation, dtype: torch.dtype) -> Weights:
    """Return weights in FP8 with a float32 scale for each 128 x 128 elements, and their recipe.

    The E4M3 elements are not copied. E8M0 scales are converted to float32 here, once.

    Args:
        given: the engine's tensors.
        gate: the activation.
        dtype: dtype of the rows x.
    """
    w13, w13_scale, w2, w2_scale = given.detached()
    recipe = served_recipe("fp8_block", w2.shape[1], w2.shape[2], dtype, w2)
    first = _float_scales(w13_scale)
    if is_in_halves(gate.name, gate.glu_layout):
        first = first.unflatten(1, (2, -1))  # a grid for each half; FP8BlockTensor joins them if I % 128 == 0
    return Weights(FP8BlockTensor(w13, first), FP8BlockTensor(w2, _float_scales(w2_scale)), recipe)


def mxfp8(given: Checkpoint, dtype: torch.dtype) -> Weights:
    """Return MXFP8 weights, E4M3 elements with an E8M0 scale for each 32 elements of a weight row, and their recipe.

    If the GPU has FP8 MMAs without block scales, and folding (`formats.mxfp8.fold`) is accurate, elements are folded in
    place: rescaled so that one power of two for each weight row replaces the block scales. Otherwise the weights are
    the engine's tensors, unchanged.

    Args:
        given: the engine's tensors.
        dtype: dtype of the rows x.
    """
    w13, w13_scale, w2, w2_scale = given.detached()
    exact = [MXFP8Tensor(w, scale.view(SCALE_DTYPE)) for w, scale in ((w13, w13_scale), (w2, w2_scale))]
    recipe = served_recipe("mxfp8", w2.shape[1], w2.shape[2], dtype, w2)
    if recipe is recipes.MXFP8 and recipes.on_device(recipe, w2) is recipe:
        try:
            first, second = (prepare_mxfp8_weight(w) for w in exact)
        except FoldError as error:
            _log.info("MXFP8 experts keep 16-bit rows: %s", error)
            recipe = recipes.MXFP8_WEIGHT_ONLY
            _check_fits(recipe, dtype, *w2.shape[1:])
        else:
            return Weights(_in_place(first, w13), _in_place(second, w2), recipe)
    return Weights(exact[0], exact[1], recipe)


def mxfp4(given: Checkpoint, dtype: torch.dtype, kind: str) -> Weights:
    """Return MXFP4 weights, E2M1 elements with a scale for each 32 elements of a weight row, and their recipe.

    Args:
        given: the engine's tensors. Elements are two in a byte. Scales are E8M0, or float32 powers of two, which are
            copied to E8M0.
        dtype: dtype of the rows x.
        kind: "mxfp4": kernels decode the weights to 16 bits; elements are reordered in place for this.
            "mxfp4_fp8": rows are quantised to FP8; elements are unchanged, and each weight row gets a power of two, by
            which kernels make exact FP8 operands (`formats.mxfp4.rebase`). If the GPU has no such kernels, or scales of
            a weight row are too far apart, this is the same as "mxfp4".
    """
    w13, w13_scale, w2, w2_scale = given.detached()
    hidden, width = w2.shape[1], 2 * w2.shape[2]
    recipe = served_recipe(kind, hidden, width, dtype, w2)
    first, second = (
        MXFP4Tensor(w.view(torch.uint8), _power_scales(name, scale))
        for name, w, scale in (("w13", w13, w13_scale), ("w2", w2, w2_scale))
    )
    if recipe is recipes.MXFP4_IN_FP8:
        try:
            return Weights(prepare_mxfp4_weight(first), prepare_mxfp4_weight(second), recipe)
        except FoldError as error:
            _log.info("MXFP4 experts keep 16-bit rows: %s", error)
            recipe = recipes.MXFP4_WEIGHT_ONLY
            _check_fits(recipe, dtype, hidden, width)
    return Weights(first.prepare_(), second.prepare_(), recipe)


def nvfp4(given: Checkpoint, w13_scale_2: Tensor, w2_scale_2: Tensor, gate: Activation, dtype: torch.dtype) -> Weights:
    """Return NVFP4 weights, whose elements are reordered in place for kernels, and their recipe.

    Args:
        given: the engine's tensors. Elements are E2M1, two in a byte. Scales are E4M3, one for each 16 elements of a
            weight row, in plain (not swizzled) order.
        w13_scale_2, w2_scale_2: float32 global scales: [], one for all experts; [E]; or [E, 2], for the halves of w13.
        gate: the activation.
        dtype: dtype of the rows x.
    """
    w13, w13_scale, w2, w2_scale = given.detached()
    recipe = served_recipe("nvfp4", w2.shape[1], 2 * w2.shape[2], dtype, w2)
    factors = _factors(w13_scale_2.detach(), is_in_halves(gate.name, gate.glu_layout)), _factors(w2_scale_2.detach())
    first, second = (
        NVFP4Tensor(w.view(torch.uint8), scale, factor)
        for w, scale, factor in zip((w13, w2), (w13_scale, w2_scale), factors, strict=True)
    )
    return Weights(first.prepare_(), second.prepare_(), recipe)


def _check_fits(recipe: Recipe, dtype: torch.dtype, hidden: int, width: int) -> None:
    """Raise NotServed if a recipe has no kernels for rows of this dtype, or for H = hidden and I = width."""
    try:
        recipes.check_fits("moe", recipe, str(dtype).removeprefix("torch."), True, H=hidden, I=width)
    except (TypeError, ValueError) as error:
        raise NotServed(str(error)) from error


def _float_scales(scale: Tensor) -> Tensor:
    """Convert block scales (E8M0 or floats) to float32; return float32 scales unchanged."""
    if scale.dtype in (torch.uint8, SCALE_DTYPE):
        return scales_of(scale.view(torch.uint8))
    return scale.float()


def _in_place(folded: FoldedWeight, data: Tensor) -> FoldedWeight:
    """Copy folded elements into the engine's memory `data`; return the folded weight with its elements in `data`."""
    data.copy_(folded.data)
    return FoldedWeight(data, folded.scale, folded.axis, folded.report)


def _power_scales(name: str, scale: Tensor) -> Tensor:
    """Convert scales to E8M0.

    Args:
        name: the weight's name in the error.
        scale: E8M0 scales, or powers of two in floats.

    Raises:
        NotServed: scales are not powers of two.
    """
    if scale.dtype in (torch.uint8, SCALE_DTYPE):
        return scale.view(SCALE_DTYPE)
    bits = scale.float().view(torch.int32)
    exponents = bits >> F32_MANTISSA_BITS
    if bool((bits != exponents << F32_MANTISSA_BITS).any()) or bool((exponents < 0).any()):
        raise NotServed(f"{name}'s MXFP4 scales are {scale.dtype} numbers that are no powers of two")
    return exponents.to(torch.uint8).view(SCALE_DTYPE)


def _factors(factor: Tensor, may_differ: bool = False) -> Tensor:
    """Convert global scales to the shape that NVFP4Tensor takes: [], [E], or [E, 2] if a weight's two halves differ.

    Args:
        factor: the global scales.
        may_differ: True: the halves of a weight may have different global scales.

    Raises:
        NotServed: the halves differ, but may not; or the shape is another.
    """
    factor = factor.float()
    if factor.dim() < 2:
        return factor.contiguous() if factor.dim() else factor
    if factor.dim() > 2:
        raise NotServed(f"NVFP4 global scales have shape {shape_text(factor.shape)}; served are [], [E] and [E, 2]")
    if bool((factor == factor[:, :1]).all()):
        return factor[:, 0].contiguous()
    if not may_differ:
        raise NotServed("NVFP4 global scales differ for halves of rows that are no gate before an up-projection")
    return factor.contiguous()
