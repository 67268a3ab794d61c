"""Wrong calls on a GPU: none crashes, and none passes in silence; see `support.wrong_calls`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.wrong_calls import OPERATIONS, Operation, complaints

pytestmark = pytest.mark.gpu


def by_reference(call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return call(**arguments)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_wrong_calls(operation: Operation, warm: bool) -> None:
    lines = complaints(operation, "cuda", by_reference, warm)
    assert not lines, "\n".join(lines)
    torch.cuda.synchronize()
