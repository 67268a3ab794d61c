"""What the layer's operators have in common; see `glulam.addressed`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cute_kernels.specs import LayerSpec

from ..addressed import Layout, Operator
from ..signature import mismatch, shape_text

MAX_ROWS = 2**31 - 1


class LayerOperator(Operator):
    """One kernel, or chain of them, around the experts. Tokens are the first dimension of what has any."""

    family = "layer"
    trailing = 1

    def spec(self, layout: Layout, arch: str) -> LayerSpec:
        return LayerSpec(self.kernel, arch=arch)


def check_matrix(op: str, name: str, value: Any, letters: str, like: Tensor | None = None) -> tuple[int, int]:
    """A contiguous tensor of two dimensions, on the device of `like`; its sizes."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; give a tensor [{letters}]")
    if value.dim() != 2:
        raise ValueError(f"{op}: {name} has shape {shape_text(value.shape)}; give [{letters}]")
    if like is not None and value.device != like.device:
        raise ValueError(f"{op}: {name} is on {value.device}, others on {like.device}; move it to {like.device}")
    if not value.is_contiguous():
        raise ValueError(f"{op}: {name} is not contiguous (strides {shape_text(value.stride())}); call .contiguous()")
    rows, columns = value.shape
    return rows, columns


def check_shape(op: str, name: str, tensor: Tensor, shape: tuple[int, ...], why: str) -> None:
    if tuple(tensor.shape) != shape:
        mismatch(op, name, tensor.shape, shape, why)
