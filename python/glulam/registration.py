"""Addressed operators as `torch.ops.glulam.mhc_*` and `layer_*`, so that traces see each as one. See `glulam.library`.

Each returns a list of the outputs that are wanted, all of them new.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .addressed import Operator
from .device import PLAIN_TENSORS

_library = torch.library.Library("glulam", "FRAGMENT")


def _split(operator: Operator, values: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    """Tensors and options."""
    values = (*values, *named.values())
    count = len(operator.inputs)
    return values[:count], values[count:]


def _present(results: tuple[Any, ...]) -> list[Tensor]:
    return [result for result in results if result is not None]


def _kernel(operator: Operator) -> Callable[..., list[Tensor]]:
    def run(*values: Any, **named: Any) -> list[Tensor]:
        tensors, options = _split(operator, values, named)
        plain = all(t is None or type(t) in PLAIN_TENSORS for t in tensors)
        return _present(operator(tensors, options) if plain else operator.compute(tensors, options, None))

    return run


def _autograd(name: str, operator: Operator) -> Callable[..., Any]:
    def run(*values: Any, **named: Any) -> Any:
        tensors, options = _split(operator, values, named)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            results = operator.differentiable(tensors, options)
            if results is not None:
                return _present(results)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.glulam, name).default(*values, **named)

    return run


def _fake(operator: Operator) -> Callable[..., list[Tensor]]:
    def run(*values: Any, **named: Any) -> list[Tensor]:
        tensors, options = _split(operator, values, named)
        operator.check(tensors, options)
        return _present(operator.results(tensors, options))

    return run


def register(*operators: Operator) -> None:
    """Define each as an operator of torch's."""
    for operator in operators:
        name = f"{operator.family}_{operator.kernel}"
        _library.define(f"{name}{operator.schema}", tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            _library.impl(name, _kernel(operator), key)
        _library.impl(name, _autograd(name, operator), "Autograd")
        torch.library.register_fake(f"glulam::{name}", _fake(operator), lib=_library)
