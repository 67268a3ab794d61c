"""Torch transforms that kernels do not support, forward-mode AD and torch.func, are refused, on CPU and GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.wrong_calls import OPERATIONS, Operation
from torch import Tensor
from torch.autograd import forward_ad

from glulam import GradientNotSupported

pytest_plugins = ["support.fixtures"]

CASES = [
    pytest.param(operation, name, id=f"{operation.name}, {name}")
    for operation in OPERATIONS
    for name, value in operation.good("cpu").items()
    if isinstance(value, Tensor) and value.is_floating_point() and name not in operation.outputs
]
each_argument = pytest.mark.parametrize("operation, name", CASES)


@pytest.fixture(params=["on the CPU", "on a GPU"], autouse=True)
def place(request: pytest.FixtureRequest) -> None:
    if request.param == "on a GPU":
        request.getfixturevalue("fake_gpu")


def _good(operation: Operation) -> dict[str, Any]:
    """Return a valid call's arguments without output buffers, which cannot be combined with gradients."""
    return {name: value for name, value in operation.good("cpu").items() if name not in (*operation.outputs, "mask")}


OTHERWISE = {
    "by index": "rows= has none",
    "folded": "needed in 16 bits",
    "moe": "transform of torch.func",
    "combine": "transform of torch.func",
}
"""Error text of calls that are refused for an option or an inner step instead of an argument, by part of their name."""


def _refused(name: str, call: Callable[[], Any], of: str = "") -> None:
    ways = [
        rf"\b{name}\b.*use torch\.autograd",
        f"has no gradient, and {name}",
        f"{name} requires a gradient, and weights",
    ]
    ways += [words for part, words in OTHERWISE.items() if part in of]
    with pytest.raises(GradientNotSupported, match="|".join(ways)):
        call()


@each_argument
@pytest.mark.parametrize("grad_mode", [False, True], ids=["no grad", "grad"])
def test_a_tangent(operation: Operation, name: str, grad_mode: bool) -> None:
    good = _good(operation)
    operation.call(**good)  # a plan that does not see tangents
    with torch.set_grad_enabled(grad_mode), forward_ad.dual_level():
        dual = forward_ad.make_dual(good[name], torch.ones_like(good[name]))
        _refused(name, lambda: operation.call(**{**good, name: dual}))


def test_a_dual_level_without_tangents() -> None:
    operation = OPERATIONS[0]
    good = _good(operation)
    wanted = operation.call(**good)
    with forward_ad.dual_level():
        assert torch.equal(operation.call(**good), wanted)


@each_argument
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev], ids=lambda t: t.__name__)
def test_a_transform(operation: Operation, name: str, transform: Callable[..., Any]) -> None:
    good = _good(operation)
    operation.call(**good)

    def of_one(value: Tensor) -> Tensor:
        result = operation.call(**{**good, name: value})
        first: Tensor = result if isinstance(result, Tensor) else result[0]
        return first.float().sum()

    value = good[name][None] if transform is torch.func.vmap else good[name]
    _refused(name, lambda: transform(of_one)(value), operation.name)


@pytest.mark.parametrize(
    "operation",
    [operation for operation in OPERATIONS if isinstance(operation.good("cpu").get("out"), Tensor)],
    ids=lambda operation: operation.name,
)
def test_a_trained_output(operation: Operation) -> None:
    """Grad mode decides, as it does for torch's own functions with `out`."""
    good = operation.good("cpu")
    operation.call(**good)
    (name,) = operation.outputs
    good[name] = good[name].clone().requires_grad_()
    words = rf"\b{name}\b" + "|rows= has none" * ("by index" in operation.name)
    with pytest.raises(GradientNotSupported, match=words):
        operation.call(**good)
    with torch.no_grad():
        operation.call(**good)
