"""Recipes: the formats in which an MLP's operands are multiplied, and the kernels that multiply them.

The argument `recipe=` of operators and modules is an entry of `RECIPES` or its name.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cute_kernels.architectures import ARCHS, Architecture
from cute_kernels.formats import OPERANDS

from .calls.checks import PLAIN_RECIPE, runs_kernels
from .formats.form import Form
from .formats.fp8_block.form import FP8_BLOCK, FP8_BLOCK_IN_BF16, FP8_ROWS, Fp8Rows
from .formats.mxfp4.form import MXFP4, MXFP4_REBASED
from .formats.mxfp8.forms import (
    BLOCKS,
    BY_32,
    BY_128,
    COLUMN_BLOCKS,
    COLUMNS_BY_32,
    FOLDED_COLUMNS,
    FOLDED_ROWS,
    Columns,
    Rows,
)
from .formats.nvfp4.form import NVFP4
from .host import device as gpus


@dataclass(frozen=True)
class Recipe:
    """The formats and kernels of a grouped_mlp.

    Attributes:
        name: the text that `recipe=` takes.
        operands, fc2_operands: kinds of operands of FC1's and FC2's GEMM, keys of `cute_kernels.specs.OPERANDS`.
        x, activation, weights: the format in which each is multiplied; None: 16-bit, unchanged. x is quantised at each
            call, unless it is passed quantised. The activation is quantised by the kernel that computes it, from
            float32. Weights are quantised once, and again after each change (`formats.prepared`).
        gradient_weights: the format of weights for data gradients; None: the format that forward reads.
        wgrad_operands: kind of operands of the weight gradients' GEMM, a key like `operands`.
        wgrad: the format of incoming gradients and activations in that GEMM, quantised at each call; None: 16-bit,
            unchanged.
        dtypes: dtypes of x, biases and the result on a GPU; the CPU reference also takes float32 and float64.
        trains: True: weights in 16 bits get gradients.
    """

    name: str
    operands: str
    fc2_operands: str
    x: Rows | Fp8Rows | None = None
    activation: Rows | Fp8Rows | None = None
    weights: Form | None = None
    gradient_weights: Form | None = None
    wgrad_operands: str = "16bit"
    wgrad: Columns | None = None
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    trains: bool = False

    @property
    def freezes_weights(self) -> bool:
        """True if backward computes data gradients through quantised weights, which are not trained."""
        return OPERANDS[self.operands].has_data_gradients

    def __str__(self) -> str:
        return self.name


BF16 = Recipe(PLAIN_RECIPE, "16bit", "16bit", trains=True)
MXFP8 = Recipe("mxfp8", "mxfp8", "mxfp8", BY_128, BY_128, FOLDED_ROWS, FOLDED_COLUMNS, trains=True)
# Blackwell's tensor cores apply the block scales of both operands.
MXFP8_BLOCKS = Recipe("mxfp8_blocks", "mxfp8_blocks", "mxfp8_blocks", BY_32, BY_32, BLOCKS, COLUMN_BLOCKS, trains=True)
MXFP8_WGRAD = dataclasses.replace(
    MXFP8_BLOCKS, name="mxfp8_wgrad", wgrad_operands="mxfp8_blocks", wgrad=COLUMNS_BY_32
)  # fmt: skip
# Weights are decoded only to bfloat16: scales 2^e beyond float16's range would saturate.
MXFP8_EXACT = Recipe(
    "mxfp8_exact", "mxfp8_exact", "mxfp8_weight_only", BY_32, BY_32, BLOCKS, dtypes=("bfloat16",)
)  # fmt: skip
MXFP4_IN_FP8 = Recipe("mxfp4", "mxfp4", "mxfp4", BY_128, BY_128, MXFP4_REBASED)
FP8_BLOCKS = Recipe("fp8_block", "fp8_block", "fp8_block", FP8_ROWS, FP8_ROWS, FP8_BLOCK)


def weight_only(name: str, weights: Form) -> Recipe:
    """Return a recipe whose x and activation are 16-bit, and whose weights are quantised; the kernels decode them.

    The recipe's kinds of operands have the recipe's name.
    """
    return Recipe(name, name, name, weights=weights, dtypes=("bfloat16",))


MXFP8_WEIGHT_ONLY = weight_only("mxfp8_weight_only", BLOCKS)
MXFP4_WEIGHT_ONLY = weight_only("mxfp4_weight_only", MXFP4)
NVFP4_WEIGHT_ONLY = weight_only("nvfp4_weight_only", NVFP4)
FP8_BLOCK_WEIGHT_ONLY = weight_only("fp8_block_weight_only", FP8_BLOCK_IN_BF16)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        BF16,
        MXFP8,
        MXFP8_BLOCKS,
        MXFP8_WGRAD,
        MXFP8_EXACT,
        MXFP8_WEIGHT_ONLY,
        MXFP4_IN_FP8,
        MXFP4_WEIGHT_ONLY,
        NVFP4_WEIGHT_ONLY,
        FP8_BLOCKS,
        FP8_BLOCK_WEIGHT_ONLY,
    )
}
"""All recipes by name. "bf16": 16-bit operands of x's dtype, bfloat16 or float16."""


def of_weight_gradients(operands: str) -> str:
    """Return the name of the first recipe whose weight gradients multiply this kind of operands (`wgrad_operands`)."""
    return next(name for name, recipe in RECIPES.items() if recipe.wgrad_operands == operands)


def find(op: str, recipe: Any) -> Recipe:
    """Return the entry of RECIPES with this name, or equal to this Recipe. op: the operator's name in errors.

    Raises:
        ValueError: there is no such entry. Other Recipe objects are refused, since no kernel exists for them.
    """
    if isinstance(recipe, str) and recipe in RECIPES:
        return RECIPES[recipe]
    if isinstance(recipe, Recipe) and recipe == RECIPES.get(recipe.name):
        return RECIPES[recipe.name]
    raise ValueError(f"{op}: recipe is {recipe!r}; choose one of {', '.join(RECIPES)}")


_VARYING = {name for arch in ARCHS.values() for name in arch.recipes}


def on_device(recipe: Recipe, x: Any) -> Recipe:
    """Return the recipe that x's GPU uses when `recipe` is requested (`Architecture.recipes`); on the CPU, `recipe`."""
    if recipe.name not in _VARYING:
        return recipe
    arch = _architecture(x if isinstance(x, Tensor) else getattr(x, "data", None))
    return recipe if arch is None else RECIPES[arch.recipes.get(recipe.name, recipe.name)]


def has_kernels(recipe: Recipe, x: Tensor) -> bool:
    """Return True if x's GPU has kernels for a recipe's operands; always True on the CPU."""
    arch = _architecture(x)
    return arch is None or on_device(recipe, x).operands not in arch.lacks


def _architecture(x: Any) -> Architecture | None:
    """Return the architecture of a tensor's GPU; None: the CPU."""
    return ARCHS[gpus.gpu(x.get_device()).arch] if isinstance(x, Tensor) and runs_kernels(x) else None


def check_fits(op: str, recipe: Recipe, dtype: str, on_gpu: bool, **widths: int) -> None:
    """Check that a recipe supports the dtype of x, biases and the result, and the widths of an MLP.

    Args:
        op: the operator's name in errors.
        on_gpu: True: kernels compute. False: the CPU reference, which supports more dtypes.
        widths: numbers of columns, by their names in errors.

    Raises:
        TypeError, ValueError: the recipe does not support the dtype or a width.
    """
    if dtype not in recipe.dtypes and (on_gpu or dtype == "float16"):
        raise TypeError(
            f"{op}: recipe {recipe.name!r} takes {' or '.join(recipe.dtypes)}, but the dtype is {dtype}; cast to "
            f"{recipe.dtypes[0]}" + (", or use recipe 'mxfp8'" if dtype in MXFP8.dtypes else "")
        )
    for name, width in widths.items():
        if recipe.weights is not None and width % (multiple := recipe.weights.multiple):
            raise ValueError(
                f"{op}: {name} is {width}; recipe {recipe.name!r} takes multiples of {multiple}, so pad it with "
                "zeros, or use recipe 'bf16'"
            )
