"""torch.set_default_device: Glulam's own tensors are on the right device, whatever the caller's default is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.fake_gpu import FakeGpu
from support.wrong_calls import OPERATIONS, Operation, _flat
from torch import Tensor

import glulam

pytest_plugins = ["support.fixtures"]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_every_public_function(operation: Operation, anywhere: Any) -> None:
    """Tensors made on "meta", which stands for any device that is not the arguments', would hold nothing."""
    with torch.no_grad():
        wanted = _flat(operation.call(**operation.good("cpu")))
        good = operation.good("cpu")
        with torch.device("meta"):
            got = _flat(operation.call(**good))
    assert len(got) == len(wanted)
    assert all(torch.equal(one.float(), other.float()) for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_training_with_host_splits(recipe: str, anywhere: Any) -> None:
    splits = torch.tensor([5, 0, 11], dtype=torch.int32) if isinstance(anywhere, FakeGpu) else [5, 0, 11]
    x, w1, w2 = torch.randn(16, 64), torch.randn(3, 64, 64), torch.randn(3, 64, 32)
    given = [one.bfloat16().requires_grad_() for one in (x, w1, w2)]

    def gradients() -> tuple[Tensor, ...]:
        y = glulam.grouped_mlp(*given, splits=splits, recipe=recipe)
        return torch.autograd.grad(y, given, y.detach())

    wanted = gradients()
    with torch.device("meta"):
        got = gradients()
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
