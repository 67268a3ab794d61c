"""Helpers for the backward of any operator: saved tensors, incoming gradients, and refusal of second derivatives."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import GradientNotSupported
from ..host import device as gpus
from .checks import ALIGNMENT_BYTES, LOWEST_ADDRESS, check_plain, tensors_of


def as_result(buffer: Tensor) -> Tensor:
    """Return a tensor that autograd can track as a result, with the memory of `buffer`, which a kernel has written.

    Both share a version counter, in which this function records the kernel's write.
    """
    torch.autograd.graph.increment_version(buffer)
    return buffer.detach()


def taken(ctx: Any) -> tuple[Any, ...]:
    """Return the tensors that forward saved, and drop autograd's references to them unless the graph is kept."""
    saved: tuple[Any, ...] = ctx.saved_tensors
    if clear := getattr(ctx, "maybe_clear_saved_tensors", None):  # not every kind of context has it
        clear()
    return saved


def check_saved(op: str, saved: Mapping[str, Any], labels: Mapping[str, str]) -> None:
    """Raise ValueError if the storage of a saved tensor was freed after forward. `labels`: names used in errors."""
    for name, value in saved.items():
        for label, tensor in tensors_of(labels.get(name, name), value):
            if not gpus.is_traced(tensor) and tensor.numel() and tensor.data_ptr() < LOWEST_ADDRESS:
                check_plain(f"{op}'s backward", label, tensor)


def usable(dy: Tensor) -> Tensor:
    """Return an incoming gradient that kernels can read: `dy`, or a copy if it is expanded, lazy or misaligned."""
    if not gpus.is_traced(dy):
        dy = dy.clone() if dy._is_zerotensor() else dy.resolve_neg()
    if dy.stride(-1) != 1 or not dy.is_contiguous():  # an expanded tensor of no rows counts as contiguous
        return dy.clone(memory_format=torch.contiguous_format)
    if not gpus.is_traced(dy) and dy.data_ptr() % ALIGNMENT_BYTES:
        return dy.clone()
    return dy


def without_graph() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which grad mode is off; in a backward it is off already unless create_graph=True."""
    return torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()


class _Once(torch.autograd.Function):
    """Identity of gradients; differentiating through it raises GradientNotSupported."""

    @staticmethod
    def forward(ctx: Any, op: str, anchor: Tensor, *gradients: Tensor | None) -> Any:
        ctx.op = op
        return tuple(None if g is None else g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise GradientNotSupported(
            f"{ctx.op} is differentiable once, and its gradient was differentiated; leave out create_graph=True, or "
            "detach() the gradient"
        )


def once_differentiable(op: str, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return gradients with the same values; under create_graph=True, differentiating them raises
    GradientNotSupported.
    """
    if not torch.is_grad_enabled():
        return tuple(gradients)
    return tuple(_Once.apply(op, torch.ones((), device="cpu", requires_grad=True), *gradients))  # type: ignore[no-untyped-call]
