"""Class `Quantized`: calls with arguments that are quantised, or that the call quantises.

Each such argument of the public function is split into its tensors. An argument `w` becomes `w` (its elements, or a
16-bit weight that is not yet in the layout that kernels read), `w_scale` (its scales) and, if its format has a third
tensor, `w_global_scale`.
Why: plans are then found by the metadata of tensors alone, and a call consists of arguments that torch's operators
accept. The public operator's generated function (`front`) splits the arguments.
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
from .checks import any_requires_grad, refuse_rows
from .group_checks import check_indices
from .roles import SUFFIXES


class Quantized(Call):
    """A call with split arguments: elements, scales and global scales of quantised tensors are separate arguments.

    Attributes:
        in_parts: {public argument that is split: the number of its parts}: 2 for elements and scales, 3 with a global
            scale (`roles.SUFFIXES`).
        unwraps: names of the call's arguments that `unwrap` returns, in their order.
        unwrap_takes: names of the public arguments that `unwrap` takes, besides the recipe.
        uses_up: names of public arguments that only `unwrap` uses; the split call does not have them.
        recipes: recipes by name.
        classes: classes of arguments by which the public operator recognises such a call. Empty: it goes by the recipe.
    """

    in_parts: ClassVar[dict[str, int]]
    unwraps: ClassVar[tuple[str, ...]]
    unwrap_takes: ClassVar[tuple[str, ...]]
    uses_up: ClassVar[tuple[str, ...]] = ("transpose_w",)
    classes: ClassVar[frozenset[type]] = frozenset()

    @classmethod
    def unwrap(cls, recipe: Any, *public: Any) -> tuple[Any, ...]:
        """Split each quantised argument of the public function into its elements, scales and global scale.

        Args:
            recipe: the call's recipe.
            public: the public arguments `unwrap_takes`.

        Returns:
            The call's arguments `unwraps`, in their order: parts, and arguments that depend on them.

        Raises:
            ValueError, TypeError: the recipe does not take such an argument.
        """
        raise NotImplementedError

    recipes: ClassVar[Mapping[str, Any]]

    @staticmethod
    def recipe_of(op: str, recipe: Any) -> Any:
        """Return the known recipe for a name or a Recipe. Raises ValueError if there is none."""
        raise NotImplementedError

    @staticmethod
    def on_device(recipe: Any, x: Any) -> Any:
        """Return the recipe that runs on x's GPU when the caller requests `recipe`; here `recipe` itself."""
        return recipe

    @property
    def is_frozen(self) -> bool:
        """True if the recipe's weights are never trained, but gradients of x pass through them."""
        frozen: bool = self.recipe_of(self.op, self.recipe).freezes_weights
        return frozen

    @classmethod
    def rows_in_order(cls, x: Tensor, rows: Tensor) -> Tensor:
        """Return x[rows], with indices clamped to the valid range.

        Raises:
            GradientNotSupported: grad mode is on, and x requires a gradient.
        """
        check_indices(cls.op, rows, x)
        if torch.is_grad_enabled() and any_requires_grad(x):
            refuse_rows(cls.op)
        return take_rows(x, rows)

    def refuse_trained_weights(self) -> None:
        """Raise GradientNotSupported if a weight requires a gradient: weights of this recipe are frozen."""
        for name in self.weights:
            if any_requires_grad(*[getattr(self, part, None) for part in self.parts_of(name)]):
                raise GradientNotSupported(
                    f"{self.op}: {name} requires a gradient, and weights of recipe {self.recipe!r} are frozen: x, "
                    f"scales and biases are trained through them; give {name}.detach() (of a module's: call "
                    "requires_grad_(False)), or choose recipe 'bf16'"
                )

    @classmethod
    def declare_public(cls, parameters: Iterable[str]) -> None:
        """Set the class's lists of argument names from the names of the operator's public parameters.

        The name of a quantised argument becomes the names of its elements, scales and global scale.
        """
        names: list[str] = []
        for name in parameters:
            names += [f"{name}{part}" for part in SUFFIXES[: cls.in_parts.get(name, 1)]]
        others = [name for name in (*cls.unwraps, "recipe") if name not in names]
        cls.beside_weights = tuple(f"{n}{part}" for n, count in cls.in_parts.items() for part in SUFFIXES[1:count])
        cls.unwrap_takes = tuple(inspect.signature(cls.unwrap).parameters)[1:]
        cls.declare([name for name in (*names, *others) if name not in cls.uses_up])

    @classmethod
    def unwrapped(cls, recipe: Any, public: Mapping[str, Any]) -> dict[str, Any]:
        """Split the public operator's arguments; return the arguments of a call of this class by name.

        Args:
            recipe: the recipe.
            public: the public operator's arguments by name. Absent arguments become None.
        """
        recipe = cls.on_device(recipe, public.get("x"))
        parts = cls.unwrap(recipe, *[public.get(name) for name in cls.unwrap_takes])
        known = {**packed(public), **dict(zip(cls.unwraps, parts, strict=True)), "recipe": recipe.name}
        return {name: known.get(name) for name in cls.names}
