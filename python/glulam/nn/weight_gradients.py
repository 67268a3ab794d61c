"""Where the gradients of a module's weights go: to autograd, into `main_grad` buffers, now or later.

The main_grad protocol of Megatron-style trainers: a weight that has a `main_grad` (of its dtype or float32) gets its
gradient added to that by the kernel itself, or written where `overwrite_main_grad` is true; autograd gets none. Where
the trainer has put `grad_added_to_main_grad` on the weight, autograd gets a dummy, so that hooks on `grad` run: of
zeros where `zero_out_wgrad` is true, else uninitialised.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..backward.parts import backward_of
from ..ops.grouped_wgrad import grouped_wgrad
from ..signature import gradient_dtypes, shape_text

Job = Callable[[], None]
Put = Callable[[Job], None]
"""Where a job goes that is left for later."""


class Delayed:
    """Weight gradients that backward passes left for later, one entry for each pass, in order."""

    def __init__(self) -> None:
        self._passes: deque[list[Job]] = deque()

    def __len__(self) -> int:
        return len(self._passes)

    def __getstate__(self) -> dict[str, Any]:
        """Copies have nothing pending: jobs write the gradients of the module that made them."""
        return {"_passes": deque()}

    def new_pass(self) -> Put:
        """Where a forward's backward puts its work."""
        jobs: list[Job] = []

        def put(job: Job) -> None:
            if not jobs:
                self._passes.append(jobs)
            jobs.append(job)

        return put

    def run_oldest(self, op: str) -> None:
        """`op`: the operator whose backward left them, for messages."""
        if not self._passes:
            raise RuntimeError("backward_dw: no weight gradient is pending; call it once after each backward")
        jobs = self._passes.popleft()
        pending = list(jobs)
        jobs.clear()
        with backward_of(op), torch.no_grad():
            for job in pending:
                job()


class DelaysWeightGradients:
    """Part of a module that can leave weight gradients out of backward: made with delay_wgrad=True, or not.

    `op`: the operator that the module calls.
    """

    op: ClassVar[str]
    delay_wgrad: bool
    _delayed: Delayed

    def has_delayed(self) -> bool:
        """Whether a backward pass left weight gradients."""
        return len(self._delayed) > 0

    def backward_dw(self) -> None:
        """Compute the weights' gradients that the oldest backward pass left, into main_grad or grad.

        Raises:
            RuntimeError: nothing is pending, or the module was made without delay_wgrad.
        """
        if not self.delay_wgrad:
            raise RuntimeError(
                "backward_dw: made without delay_wgrad=True, so backward computes weight gradients itself"
            )
        self._delayed.run_oldest(self.op)


def has_main_grads(name: str, weights: list[Tensor], x: Tensor) -> bool:
    """Whether gradients go into main_grad buffers; these are checked.

    Raises:
        ValueError, TypeError: only some weights have one, or one does not fit.
    """
    buffers: list[Any] = [getattr(weight, "main_grad", None) for weight in weights]
    missing = [index for index, buffer in enumerate(buffers) if buffer is None]
    if len(missing) == len(weights):
        return False
    if missing:
        raise ValueError(f"{name}{missing[0]} has no main_grad but others have; give one to every expert or to none")
    for weight, buffer in zip(weights, buffers, strict=True):
        if not isinstance(buffer, Tensor):
            raise TypeError(f"{name}.main_grad is a {type(buffer).__name__}; give a tensor like the weight")
        if buffer.shape != weight.shape or not buffer.is_contiguous():
            raise ValueError(
                f"{name}.main_grad has shape {shape_text(buffer.shape)} and strides {shape_text(buffer.stride())}; it "
                f"must be contiguous and of the weight's shape, {shape_text(weight.shape)}"
            )
        if buffer.dtype not in gradient_dtypes(x):
            valid = " or ".join(map(str, gradient_dtypes(x)))
            raise TypeError(f"{name}.main_grad is {buffer.dtype}; with x of {x.dtype} it must be {valid}")
        if buffer.device != x.device:
            raise ValueError(f"{name}.main_grad is on {buffer.device} but x is on {x.device}; move it to {x.device}")
    return True


def main_grad_writer(name: str, weights: list[Tensor], packed: bool, put: Put | None) -> Callable[..., Any]:
    """The gradient of weights, as the autograd functions ask for it, into main_grad. `name`: theirs, for errors."""

    def make(dy: Tensor, x: Tensor, groups: dict[str, Any]) -> Any:
        def write() -> None:
            try:
                _write_main_grads(weights, packed, dy, x, groups)
            except (ValueError, TypeError, AttributeError) as error:
                _explain(name, weights, x, error)
                raise

        if put is None:
            write()
        else:
            put(write)
        for weight in weights:
            if hasattr(weight, "grad_added_to_main_grad"):
                weight.grad_added_to_main_grad = True
        dummies = [_dummy(weight) for weight in weights]
        return dummies[0] if packed else dummies

    return make


def grad_writer(weights: list[Tensor], packed: bool, put: Put) -> Callable[..., Any]:
    """The gradient of weights, later, into grad."""

    def make(dy: Tensor, x: Tensor, groups: dict[str, Any]) -> None:
        put(lambda: _write_grads(weights, packed, dy, x, groups))

    return make


def _write_main_grads(weights: list[Tensor], packed: bool, dy: Tensor, x: Tensor, groups: dict[str, Any]) -> None:
    buffers = [weight.main_grad for weight in weights]  # type: ignore[attr-defined]
    adds = [not getattr(weight, "overwrite_main_grad", False) for weight in weights]
    how: dict[str, Any] = {"accumulate": adds[0]}
    if len(set(adds)) > 1:
        how = {"mask": _mask(tuple(adds), x.device)}
    grouped_wgrad(dy, x, **groups, out=buffers[0] if packed else buffers, **how)


def _explain(name: str, weights: list[Tensor], x: Tensor, error: Exception) -> None:
    """Raises in words of main_grad, where an error of grouped_wgrad is about what lies there since forward."""
    if not has_main_grads(name, weights, x):
        raise ValueError(
            f"{name}.main_grad was there in forward and is gone in backward; keep it until then"
        ) from error
    if ": out" in str(error):
        raise type(error)(f"{name}.main_grad does not serve as the out of grouped_wgrad: {error}") from error


@functools.lru_cache(64)
def _mask(adds: tuple[bool, ...], device: torch.device) -> Tensor:
    """Kept, so that a graph that is captured after a first call copies nothing from the host."""
    return torch.tensor(adds, device=device)


def _write_grads(weights: list[Tensor], packed: bool, dy: Tensor, x: Tensor, groups: dict[str, Any]) -> None:
    grads: list[Any] = [weight.grad for weight in weights]
    if all(grad is not None and grad.is_contiguous() and grad.dtype in gradient_dtypes(x) for grad in grads):
        grouped_wgrad(dy, x, **groups, out=grads[0] if packed else grads, accumulate=True)
        return
    dw = grouped_wgrad(dy, x, **groups)
    for weight, grad in zip(weights, [dw] if packed else dw, strict=True):
        if weight.requires_grad:
            weight.grad = grad if weight.grad is None else weight.grad + grad


def _dummy(weight: Tensor) -> Tensor | None:
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight, requires_grad=False)
