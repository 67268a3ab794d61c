"""Wrong calls raise an error that names the argument, or give the right result; see `support.wrong_calls`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fake_gpu import FakeGpu
from support.wrong_calls import (
    BEFORE,
    COLD,
    OPERATIONS,
    STEPS,
    TRAINED,
    Operation,
    complaint_of_a_step,
    complaints,
    complaints_of_cuts,
    gradients_of,
    named,
    unswept,
)

from glulam.host import device

pytest_plugins = ["support.fixtures"]

each_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)


def by_reference(call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Run a call on the CPU reference, even while a fake GPU is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "KERNEL_DEVICE", "cuda")
        return call(**arguments)


def test_every_parameter_of_every_public_function_is_swept() -> None:
    assert not unswept()


@each_operation
def test_on_the_cpu(operation: Operation) -> None:
    lines = complaints(operation, "cpu", by_reference, COLD)
    assert not lines, "\n".join(lines)


@each_operation
@pytest.mark.parametrize("before", BEFORE)
def test_on_the_host_path(operation: Operation, before: str, fake_gpu: FakeGpu) -> None:
    lines = complaints(operation, "cpu", by_reference, before)
    assert not lines, "\n".join(lines)


@each_operation
def test_storages_that_are_cut_short_between_calls(operation: Operation, fake_gpu: FakeGpu) -> None:
    lines = complaints_of_cuts(operation, "cpu")
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("operation, name", STEPS, ids=lambda value: getattr(value, "name", value))
def test_memory_that_is_gone_before_backward(operation: Operation, name: str, fake_gpu: FakeGpu) -> None:
    assert not (line := complaint_of_a_step(operation, name, "cpu")), line


@pytest.mark.parametrize("name", TRAINED)
def test_lazily_negated_gradients(name: str, fake_gpu: FakeGpu) -> None:
    lazy = gradients_of(named(name), "cpu", lambda dy: torch._neg_view(dy))
    eager = gradients_of(named(name), "cpu", lambda dy: -dy)
    assert lazy and all(torch.equal(gradient, eager[one]) for one, gradient in lazy.items())
