"""What every GPU test starts from: no gradients, and memory that is full of NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.inputs import poison_allocator

from glulam import workspace


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Uninitialised results and a workspace that was used before hold NaN, which must reach no result."""
    if request.node.get_closest_marker("gpu") and torch.cuda.is_available():
        poison_allocator("cuda")
        for buffer in workspace._kept.buffers.values():
            buffer.fill_(0xFF)  # NaN in both 16-bit types
    with torch.no_grad():
        yield
