"""Named arguments, some of them lists of tensors, as the flat inputs that a torch.autograd.Function knows.

Every differentiable call comes through here, so a layout is made once for each way that arguments lie, and the common
way, without lists, takes the short path.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..experts import GateUp

SINGLE, PAIR = -1, -2
MAX_LAYOUTS = 1024


class Layout:
    """Which arguments lie where among flat inputs. `sizes`: tensors of a list, SINGLE for a tensor or None, PAIR for a
    GateUp.
    """

    __slots__ = ("all_single", "names", "slices")

    def __init__(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        self.names = names
        self.all_single = all(size == SINGLE for size in sizes)
        begins = itertools.accumulate(map(abs, sizes), initial=0)
        self.slices = tuple(zip(names, sizes, begins, strict=False))

    def named(self, flat: Sequence[Any]) -> dict[str, Any]:
        """The arguments by name, lists as lists."""
        if self.all_single:
            return dict(zip(self.names, flat, strict=True))
        return {name: _taken(flat, size, begin) for name, size, begin in self.slices}

    def wanted(self, needs_grad: Sequence[bool]) -> frozenset[str]:
        """Names of the arguments of which a tensor needs a gradient."""
        if self.all_single:
            return frozenset(itertools.compress(self.names, needs_grad))
        return frozenset(name for name, size, begin in self.slices if any(needs_grad[begin : begin + abs(size)]))

    def flat_gradients(self, gradients: dict[str, Any], needs_grad: Sequence[bool]) -> list[Tensor | None]:
        """Gradients by name, those of lists and GateUps packed or as lists, one for each flat input that needs one."""
        flat: list[Tensor | None] = []
        for name, size, _ in self.slices:
            value = gradients.get(name)
            if size == SINGLE:
                flat.append(value)
            else:
                flat.extend([None] * abs(size) if value is None else value)
        return [value if needed else None for value, needed in zip(flat, needs_grad, strict=True)]


def _taken(flat: Sequence[Any], size: int, begin: int) -> Any:
    if size == SINGLE:
        return flat[begin]
    values = flat[begin : begin + abs(size)]
    return GateUp(*values) if size == PAIR else list(values)


_layout = functools.lru_cache(MAX_LAYOUTS)(Layout)


def flatten(arguments: dict[str, Any]) -> tuple[Layout, list[Any]]:
    """The layout of arguments, and the flat inputs."""
    sizes: list[int] = []
    flat: list[Any] = []
    for value in arguments.values():
        if isinstance(value, (list, tuple)):
            sizes.append(PAIR if isinstance(value, GateUp) else len(value))
            flat.extend(value)
        else:
            sizes.append(SINGLE)
            flat.append(value)
    return _layout(tuple(arguments), tuple(sizes)), flat
