"""Gradients through frozen quantised weights: calls in every recipe, and the expected gradients by float64 and torch.

`device`: the CPU, which may be a fake GPU (`support.fake_gpu`), or a real GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import glulam
from glulam import recipes
from glulam.formats.nvfp4 import NVFP4Tensor

from . import oracle
from .criterion import assert_close
from .inputs import Case, gradient

LIMIT = 1e4
"""Clamp limit of activations, too large to be reached. Rounding could move a value across a limit within its range."""
RECIPES = tuple(name for name, recipe in recipes.RECIPES.items() if recipe.freezes_weights)
BF16 = torch.bfloat16
ADDENDS = ("b1", "b2", "row_scale")


def quantised(w: Tensor, recipe: str) -> Any:
    """Return a weight quantised to the recipe's format; scales differ by expert, row and block."""
    e, n, k = w.shape
    powers = torch.exp2(((torch.arange(e * n * (k // 16)) * 7) % 5 - 2).float()).view(e, n, k // 16)
    spread = w.float() * powers.repeat_interleave(16, dim=2).to(w.device)
    return recipes.RECIPES[recipe].weights.quantized_tensor(spread.to(w.dtype))  # type: ignore[union-attr]


def in_halves(w1: NVFP4Tensor) -> NVFP4Tensor:
    """Return an NVFP4 w1 with different global scales of its two halves."""
    experts = w1.shape[0]
    each = w1.global_scale.expand(experts) if w1.global_scale.dim() < 2 else w1.global_scale[:, 0]
    return NVFP4Tensor(w1.data, w1.scale, torch.stack([each, 1.5 * each], dim=1).contiguous())


def exact_values(w: Any) -> Tensor:
    """Return a quantised weight's values in float64, as kernels multiply them.

    The values of FP8 blocks are rounded to bfloat16, since kernels round them, too.
    """
    if isinstance(w, glulam.FP8BlockTensor):
        return w.dequantize(BF16).double()
    return w.dequantize(torch.float32).double()


Leaves = dict[str, Tensor]


def leaves(c: Case, addends: tuple[str, ...] = ADDENDS) -> Leaves:
    """Return the trained tensors of a case: x and the addends."""
    return {name: getattr(c, name).detach().clone().requires_grad_() for name in ("x", *addends)}


def check_gradients(c: Case, got: Leaves, weights: tuple[Any, Any], form: tuple[str, str], dy: Tensor) -> None:
    """Check gradients of grouped_mlp against float64 with dequantised weights, within torch's own error in bfloat16."""
    exact, same = (_expected(c, got, weights, form, dy, dtype) for dtype in (torch.float64, c.x.dtype))
    filled = [expert for expert, size in enumerate(c.sizes) if size]
    for name, leaf in got.items():
        grad = leaf.grad
        assert grad is not None and bool(grad.isfinite().all()), name
        if name in ("x", "row_scale"):
            assert not bool(grad[c.rows :].any()), f"the tail of {name}"
            columns = (lambda t: t[None, : c.rows]) if name == "row_scale" else (lambda t: t[: c.rows])
        else:
            columns = lambda t: t[filled]  # noqa: E731
        parts = [columns(one) for one in (grad, exact[name], same[name])]
        assert_close(parts[0], parts[1].to(grad.device), parts[2].to(grad.device), len(parts[0]))


def _expected(
    c: Case, got: Leaves, weights: tuple[Any, Any], form: tuple[str, str], dy: Tensor, dtype: torch.dtype
) -> Leaves:  # fmt: skip
    by_row = "x", "row_scale"
    values = {name: leaf.detach()[: c.rows] if name in by_row else leaf.detach() for name, leaf in got.items()}
    given = {name: one.to(dtype).requires_grad_() for name, one in values.items()}
    w1, w2 = (exact_values(w).to(dtype) for w in weights)
    with torch.enable_grad():
        y = oracle.grouped_mlp(w1=w1, w2=w2, ends=c.ends, form=form, params={"limit": LIMIT}, dtype=dtype, **given)
        made = torch.autograd.grad(y, list(given.values()), dy[: c.rows].to(dtype), allow_unused=True)
    found = dict(zip(given, made, strict=True))
    for name in by_row:
        if name in found:
            whole = torch.zeros_like(got[name], dtype=dtype)
            whole[: c.rows] = found[name]
            found[name] = whole
    return found


def run_mlp(
    c: Case, weights: tuple[Any, Any], recipe: str, form: tuple[str, str], **options: Any
) -> tuple[Leaves, Tensor]:
    """Run forward and backward of grouped_mlp.

    Returns:
        The leaves, which have their gradients; the incoming gradient, whose rows after the last group are NaN.
    """
    given, dy = leaves(c), gradient(c)
    with torch.enable_grad():
        y = glulam.grouped_mlp(
            w1=weights[0], w2=weights[1], offs=c.offs, activation=form[0], glu_layout=form[1], limit=LIMIT,
            recipe=recipe, **given, **options,
        )  # fmt: skip
        y.backward(dy)
    return given, dy


def saved_bytes(call: Callable[[], Any]) -> int:
    """Return the bytes of the distinct storages that a call saves for backward."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(storages.values())
