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
    """Return a new tensor with the memory of `buffer`, which autograd can track as the result of a function.

    A kernel has written the buffer. Both tensors share a version counter, and this function records the write there.
    """
    torch.autograd.graph.increment_version(buffer)
    return buffer.detach()


def taken(ctx: Any) -> tuple[Any, ...]:
    """Return the tensors that forward saved; unless the graph is retained, drop autograd's references to them."""
    saved: tuple[Any, ...] = ctx.saved_tensors
    if clear := getattr(ctx, "maybe_clear_saved_tensors", None):  # not every kind of context has it
        clear()
    return saved


def check_saved(op: str, saved: Mapping[str, Any], labels: Mapping[str, str]) -> None:
    """Raise ValueError if the storage of a saved tensor was freed after forward, as FSDP does.

    Args:
        saved: saved tensors, or lists of tensors, by name.
        labels: names in errors, where they differ.
    """
    for name, value in saved.items():
        for label, tensor in tensors_of(labels.get(name, name), value):
            if not gpus.is_traced(tensor) and tensor.numel() and tensor.data_ptr() < LOWEST_ADDRESS:
                check_plain(f"{op}'s backward", label, tensor)


def usable(dy: Tensor) -> Tensor:
    """Return the incoming gradient `dy`, or a copy that kernels can read if `dy` is expanded, lazy or misaligned."""
    if not gpus.is_traced(dy):
        dy = dy.clone() if dy._is_zerotensor() else dy.resolve_neg()
    if dy.stride(-1) != 1 or not dy.is_contiguous():  # an expanded tensor of no rows counts as contiguous
        return dy.clone(memory_format=torch.contiguous_format)
    if not gpus.is_traced(dy) and dy.data_ptr() % ALIGNMENT_BYTES:
        return dy.clone()
    return dy


def without_graph() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which grad mode is off. In a backward only create_graph=True leaves it on."""
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
    """Make gradients raise GradientNotSupported if they are differentiated again; return them.

    This matters only under create_graph=True. Values do not change.
    """
    if not torch.is_grad_enabled():
        return tuple(gradients)
    return tuple(_Once.apply(op, torch.ones((), device="cpu", requires_grad=True), *gradients))  # type: ignore[no-untyped-call]
