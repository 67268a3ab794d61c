"""Recipes: in which formats an MLP's operands are multiplied, and by which kernels.

Wherever an operator or a module takes `recipe=`, it takes a row of `RECIPES`, or its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MULTIPLE = 32
"""What H, I and the result's columns are multiples of, where something is quantised: a scale's elements."""


@dataclass(frozen=True)
class Format:
    """How a matrix is quantised, along the contraction, with powers of two for scales.

    Attributes:
        element: of torch's dtypes, the elements'.
        block: elements that share a scale: "1x32" or "1x128"; or "folded": quantised in blocks of 32, whose scales are
            then folded to one a row (`prepare_mxfp8_weight`).
    """

    element: str
    block: str


@dataclass(frozen=True)
class Recipe:
    """How a grouped_mlp computes.

    Attributes:
        name: what `recipe=` takes.
        operands: what FC1 multiplies, as of `cute_kernels.specs.OPERANDS`; fc2_operands: FC2.
        x, activation, weights: the format of each; None: 16-bit, as it is. x is quantised at each call, unless it is
            given so, the activation by the kernel that makes it, from float32, and weights once for each version.
        dtypes: of x, biases and the result, on a GPU; the CPU reference takes float32 and float64 as well.
        trains: whether it has a gradient.
    """

    name: str
    operands: str
    fc2_operands: str
    x: Format | None = None
    activation: Format | None = None
    weights: Format | None = None
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    trains: bool = False

    @property
    def has_4_bits(self) -> bool:
        """Whether weights are in MXFP4."""
        return self.weights == IN_4_BITS

    @property
    def folds(self) -> bool:
        """Whether weights are folded, to one scale a row."""
        return self.weights == FOLDED

    def __str__(self) -> str:
        return self.name


BY_32, BY_128, FOLDED = (Format("float8_e4m3fn", block) for block in ("1x32", "1x128", "folded"))
IN_4_BITS = Format("float4_e2m1fn", "1x32")

BF16 = Recipe("bf16", "16bit", "16bit", trains=True)
MXFP8 = Recipe("mxfp8", "mxfp8", "mxfp8", BY_128, BY_128, FOLDED, trains=True)
# 2^e beyond float16's range would have to saturate, so that weights are decoded to bfloat16 alone.
MXFP8_EXACT = Recipe("mxfp8_exact", "mxfp8_exact", "mxfp8_weight_only", BY_32, BY_32, BY_32, ("bfloat16",))
MXFP8_WEIGHT_ONLY = Recipe(
    "mxfp8_weight_only", "mxfp8_weight_only", "mxfp8_weight_only", weights=BY_32, dtypes=("bfloat16",)
)

MXFP4_WEIGHT_ONLY = Recipe(
    "mxfp4_weight_only", "mxfp4_weight_only", "mxfp4_weight_only", weights=IN_4_BITS, dtypes=("bfloat16",)
)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for recipe in (BF16, MXFP8, MXFP8_EXACT, MXFP8_WEIGHT_ONLY, MXFP4_WEIGHT_ONLY)
}
"""By name. "bf16": 16-bit operands of x's dtype, which may be float16 as well."""


def find(op: str, recipe: Any) -> Recipe:
    """The row that a name stands for, or an equal object.

    Raises:
        ValueError: there is none; other objects are refused, since no kernel serves them.
    """
    if isinstance(recipe, str) and recipe in RECIPES:
        return RECIPES[recipe]
    if isinstance(recipe, Recipe) and recipe == RECIPES.get(recipe.name):
        return RECIPES[recipe.name]
    raise ValueError(f"{op}: recipe is {recipe!r}; choose one of {', '.join(RECIPES)}")


def check_fits(op: str, recipe: Recipe, dtype: str, on_gpu: bool, **widths: int) -> None:
    """The dtype of x, biases and the result, and the widths of an MLP by the names that a message gives them.

    Raises:
        TypeError, ValueError: the recipe cannot serve them.
    """
    if dtype not in recipe.dtypes and (on_gpu or dtype == "float16"):
        raise TypeError(
            f"{op}: recipe {recipe.name!r} takes {' or '.join(recipe.dtypes)}, but the dtype is {dtype}; cast to "
            f"{recipe.dtypes[0]}" + (", or use recipe 'mxfp8'" if dtype in MXFP8.dtypes else "")
        )
    for name, width in widths.items():
        if recipe.weights is not None and width % MULTIPLE:
            raise ValueError(
                f"{op}: {name} is {width}; recipe {recipe.name!r} takes multiples of {MULTIPLE}, the elements of a "
                "scale, so pad it with zeros, or use recipe 'bf16'"
            )
