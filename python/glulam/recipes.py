"""Recipes: what of an MLP is quantised, when, along which axis and in which blocks, and which kernels multiply it.

A recipe is an object, and code asks the object. Wherever an operator or a module takes `recipe=`, the name of a recipe
does as well: `RECIPES` lists them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cute_kernels.specs import OPERANDS

BLOCKS = ("1x32", "1x128")
FOLDED = "folded"
SIXTEEN_BIT = "16bit"
MULTIPLE = 32
"""What H, I and the result's columns are multiples of, where something is quantised: a scale's elements."""


@dataclass(frozen=True)
class Quantised:
    """How a matrix is brought to MXFP8.

    Attributes:
        block: elements that share a scale: "1x32" or "1x128"; or "folded": quantised in blocks of 32, whose scales are
            then folded to one a row (`prepare_mxfp8_weight`).
        when: "call" (each call, by a kernel that reads the matrix), "epilogue" (by the kernel that makes it, from
            float32) or "weight" (once for each version of a weight).
        axis: along which a block lies; "row" is the contraction of the forward.
    """

    block: str
    when: str
    axis: str = "row"


@dataclass(frozen=True)
class Recipe:
    """How a grouped_mlp computes.

    Attributes:
        name: what `recipe=` takes.
        operands: what FC1 multiplies, as of `cute_kernels.specs.OPERANDS`; fc2_operands: FC2.
        x, activation, weights: how each is quantised; None: 16-bit, as it is.
        dtypes: of x, biases and the result, on a GPU; the CPU reference takes float32 and float64 as well.
        trains: whether it has a gradient.

    Raises:
        ValueError: at construction: a combination that no kernel serves; the message says which would be.
    """

    name: str
    operands: str
    fc2_operands: str
    x: Quantised | None
    activation: Quantised | None
    weights: Quantised | None
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    trains: bool = False

    def __post_init__(self) -> None:
        if self.operands not in _SERVED:
            raise ValueError(
                f"Recipe {self.name!r}: operands is {self.operands!r}; choose one of {', '.join(OPERANDS)}"
            )
        served = _SERVED[self.operands]
        for what in ("fc2_operands", "x", "activation", "weights"):
            got, wanted = getattr(self, what), served[what]
            if got != wanted:
                raise ValueError(
                    f"Recipe {self.name!r}: {what} is {got!r}, but with operands {self.operands!r} kernels want "
                    f"{wanted!r}"
                )
        if other := [dtype for dtype in self.dtypes if dtype not in served["dtypes"]]:
            raise ValueError(
                f"Recipe {self.name!r}: dtypes holds {other[0]!r}; kernels of operands {self.operands!r} have "
                f"{', '.join(served['dtypes'])}"
            )
        if self.trains and not served["trains"]:
            raise ValueError(
                f"Recipe {self.name!r}: trains is True, but kernels of operands {self.operands!r} have no data "
                f"gradient; choose operands among {', '.join(name for name, s in _SERVED.items() if s['trains'])}"
            )

    @property
    def folds(self) -> bool:
        """Whether weights are folded, to one scale a row."""
        return self.weights is not None and self.weights.block == FOLDED

    @property
    def takes_mxfp8_rows(self) -> bool:
        """Whether x may be an MXFP8Tensor."""
        return self.x is not None

    def __str__(self) -> str:
        return self.name


_BOTH_DTYPES = ("bfloat16", "float16")
_ONCE = Quantised("1x32", "weight")
_SERVED: dict[str, dict[str, Any]] = {
    SIXTEEN_BIT: {
        "fc2_operands": SIXTEEN_BIT, "x": None, "activation": None, "weights": None, "dtypes": _BOTH_DTYPES,
        "trains": True,
    },
    "mxfp8": {
        "fc2_operands": "mxfp8", "x": Quantised("1x128", "call"), "activation": Quantised("1x128", "epilogue"),
        "weights": Quantised(FOLDED, "weight"), "dtypes": _BOTH_DTYPES, "trains": True,
    },
    # 2^e beyond float16's range would have to saturate, so that these decode to bfloat16 alone.
    "mxfp8_exact": {
        "fc2_operands": "mxfp8_weight_only", "x": Quantised("1x32", "call"),
        "activation": Quantised("1x32", "epilogue"), "weights": _ONCE, "dtypes": ("bfloat16",), "trains": False,
    },
    "mxfp8_weight_only": {
        "fc2_operands": "mxfp8_weight_only", "x": None, "activation": None, "weights": _ONCE, "dtypes": ("bfloat16",),
        "trains": False,
    },
}  # fmt: skip
"""What the kernels of each kind of operands do."""


def _recipe(name: str, operands: str) -> Recipe:
    return Recipe(name, operands, **_SERVED[operands])


BF16 = _recipe("bf16", SIXTEEN_BIT)
MXFP8 = _recipe("mxfp8", "mxfp8")
MXFP8_EXACT = _recipe("mxfp8_exact", "mxfp8_exact")
MXFP8_WEIGHT_ONLY = _recipe("mxfp8_weight_only", "mxfp8_weight_only")

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (BF16, MXFP8, MXFP8_EXACT, MXFP8_WEIGHT_ONLY)}
"""By name. "bf16": 16-bit operands of x's dtype, which may be float16 as well."""


def find(op: str, recipe: Any) -> Recipe:
    """The recipe that a name or an object stands for.

    Raises:
        ValueError: there is none, or the object is not what its name stands for.
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
