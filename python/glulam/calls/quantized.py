"""Calls whose arguments are quantised, or become so: what a user gives as one argument is its parts from here on.

An argument `w` is then `w`, its elements (or a weight in 16 bits, which is yet to be prepared), `w_scale`, its scales,
and `w_global_scale`, where its format has a third part. So plans are found by tensors alone, and a call is made of what
torch's operators take. The front of the public operator (`front`) takes the parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..activations import packed
from ..errors import GradientNotSupported
from ..reference import take_rows
from .call import Call
from .checks import any_requires_grad, check_indices, refuse_rows
from .roles import SUFFIXES


class Quantized(Call):
    """Attributes:
    in_parts: arguments that come in parts, with how many of SUFFIXES each has.
    unwraps: what `unwrap` gives, in order; `unwrap_takes`: what it takes besides the recipe, of the public arguments.
    settles: public arguments that it settles.
    recipes: recipes by name.
    classes: of arguments that the public operator leaves to this, where these tell.
    """

    in_parts: ClassVar[dict[str, int]]
    unwraps: ClassVar[tuple[str, ...]]
    unwrap_takes: ClassVar[tuple[str, ...]]
    settles: ClassVar[tuple[str, ...]] = ("transpose_w",)
    classes: ClassVar[frozenset[type]] = frozenset()

    @classmethod
    def unwrap(cls, recipe: Any, *public: Any) -> tuple[Any, ...]:
        """The parts, and other arguments that they change. Raises ValueError, TypeError: the recipe takes no such."""
        raise NotImplementedError

    recipes: ClassVar[Mapping[str, Any]]

    @staticmethod
    def recipe_of(op: str, recipe: Any) -> Any:
        """The recipe that a name stands for. Raises ValueError."""
        raise NotImplementedError

    @staticmethod
    def on_device(recipe: Any, x: Any) -> Any:
        """The recipe by which the device of x multiplies what a recipe says."""
        return recipe

    @property
    def is_frozen(self) -> bool:
        """Whether arguments other than weights are trained through weights that never are."""
        frozen: bool = self.recipe_of(self.op, self.recipe).freezes_weights
        return frozen

    @classmethod
    def rows_in_order(cls, x: Tensor, rows: Tensor) -> Tensor:
        """x[rows], an index out of range clamped. Raises GradientNotSupported where x requires a gradient."""
        check_indices(cls.op, rows, x)
        if torch.is_grad_enabled() and any_requires_grad(x):
            refuse_rows(cls.op)
        return take_rows(x, rows)

    def refuse_trained_weights(self) -> None:
        """Raises GradientNotSupported where a weight, which is frozen, requires a gradient."""
        for name in self.weights:
            if any_requires_grad(*[getattr(self, part, None) for part in self.parts_of(name)]):
                raise GradientNotSupported(
                    f"{self.op}: {name} requires a gradient, and weights of recipe {self.recipe!r} are frozen: x, "
                    f"scales and biases are trained through them; give {name}.detach() (of a module's: call "
                    "requires_grad_(False)), or choose recipe 'bf16'"
                )

    @classmethod
    def declare_public(cls, parameters: Iterable[str]) -> None:
        """Let the operator have these parameters in their parts."""
        names: list[str] = []
        for name in parameters:
            names += [f"{name}{part}" for part in SUFFIXES[: cls.in_parts.get(name, 1)]]
        others = [name for name in (*cls.unwraps, "recipe") if name not in names]
        cls.beside_weights = tuple(f"{n}{part}" for n, count in cls.in_parts.items() for part in SUFFIXES[1:count])
        cls.unwrap_takes = tuple(inspect.signature(cls.unwrap).parameters)[1:]
        cls.declare([name for name in (*names, *others) if name not in cls.settles])

    @classmethod
    def unwrapped(cls, recipe: Any, public: Mapping[str, Any]) -> dict[str, Any]:
        """A call's arguments by name, of the public ones by name; those that are not given are None."""
        recipe = cls.on_device(recipe, public.get("x"))
        parts = cls.unwrap(recipe, *[public.get(name) for name in cls.unwrap_takes])
        known = {**packed(public), **dict(zip(cls.unwraps, parts, strict=True)), "recipe": recipe.name}
        return {name: known.get(name) for name in cls.names}
