"""Wrong calls on a GPU: none crashes, and none passes silently; see `support.wrong_calls`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.wrong_calls import (
    BEFORE,
    OPERATIONS,
    STEPS,
    TRAINED,
    Operation,
    complaint_of_a_step,
    complaints,
    gradients_of,
    named,
)

pytestmark = pytest.mark.gpu


def by_reference(call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return call(**arguments)


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_wrong_calls(operation: Operation, before: str) -> None:
    lines = complaints(operation, "cuda", by_reference, before)
    assert not lines, "\n".join(lines)
    torch.cuda.synchronize()


@pytest.mark.parametrize("operation, name", STEPS, ids=lambda value: getattr(value, "name", value))
def test_memory_that_is_gone_before_backward(operation: Operation, name: str) -> None:
    with torch.enable_grad():
        assert not (line := complaint_of_a_step(operation, name, "cuda")), line


@pytest.mark.parametrize("name", TRAINED)
def test_lazily_negated_gradients(name: str) -> None:
    """Near, not equal: what is negated lazily has no planned step, and the data gradient of few rows another tile."""
    with torch.enable_grad():
        lazy = gradients_of(named(name), "cuda", lambda dy: torch._neg_view(dy))
        eager = gradients_of(named(name), "cuda", lambda dy: -dy)
    assert lazy and all(gradient.any() for gradient in lazy.values())
    torch.testing.assert_close(lazy, eager)
