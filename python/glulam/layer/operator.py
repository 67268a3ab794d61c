"""What the layer's operators have in common; see `glulam.addressed`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cute_kernels.specs import LayerSpec

from ..addressed import Layout, Operator
from ..signature import check_tensor, mismatch, shape_text

MAX_ROWS = 2**31 - 1


class LayerOperator(Operator):
    """One kernel, or chain of them, around the experts. Tokens are the first dimension of what has any.

    The `n` of a Layout is the most experts of a kernel that routes, 0 of others.
    """

    family = "layer"
    trailing = 1

    def spec(self, layout: Layout, arch: str) -> LayerSpec:
        return LayerSpec(self.kernel, experts=layout.n, arch=arch)


def check_matrix(op: str, name: str, value: Any, letters: str, like: Tensor | None = None) -> tuple[int, int]:
    """A contiguous tensor of two dimensions, on the device of `like`; its sizes."""
    tensor = check_tensor(op, name, value, f"a tensor [{letters}]", like)
    if tensor.dim() != 2:
        raise ValueError(f"{op}: {name} has shape {shape_text(tensor.shape)}; give [{letters}]")
    rows, columns = tensor.shape
    return rows, columns


def check_shape(op: str, name: str, tensor: Tensor, shape: tuple[int, ...], why: str) -> None:
    if tuple(tensor.shape) != shape:
        mismatch(op, name, tensor.shape, shape, why)
