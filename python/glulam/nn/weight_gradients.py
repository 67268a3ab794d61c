"""Where a module's results and gradients go: to autograd, into buffers, into the `main_grad` of weights, now or later.

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
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.compiler import is_exporting

from ..backward import Targets, differentiate
from ..backward.parts import backward_of
from ..calls.checks import any_requires_grad, gradient_dtypes, shape_text
from ..errors import CaptureError
from ..ops.grouped_wgrad import grouped_wgrad

Job = Callable[[], None]
Put = Callable[[Job], None]
"""Where a job goes that is left for later."""


class DelaysWeightGradients(nn.Module):
    """A module that can leave weight gradients out of backward: made with delay_wgrad=True, or not.

    `op`: the operator that the module calls.
    """

    op: ClassVar[str]

    def __init__(self, delay_wgrad: bool) -> None:
        super().__init__()
        self.delay_wgrad = delay_wgrad
        self._pending: deque[list[Job]] = deque()  # a list for each backward pass that left some, in order

    def __getstate__(self) -> dict[str, Any]:
        """Copies have nothing pending: jobs write the gradients of the module that made them."""
        return {**self.__dict__, "_pending": deque()}

    def new_pass(self) -> Put:
        """Where a forward's backward leaves its work."""
        jobs: list[Job] = []

        def put(job: Job) -> None:
            if not jobs:
                self._pending.append(jobs)
            jobs.append(job)

        return put

    def has_delayed(self) -> bool:
        """Whether a backward pass left weight gradients."""
        return len(self._pending) > 0

    def backward_dw(self) -> None:
        """Compute the weights' gradients that the oldest backward pass left, into main_grad or grad.

        Raises:
            RuntimeError: nothing is pending, or the module was made without delay_wgrad.
        """
        if not self.delay_wgrad:
            raise RuntimeError(
                "backward_dw: made without delay_wgrad=True, so backward computes weight gradients itself"
            )
        if not self._pending:
            raise RuntimeError("backward_dw: no weight gradient is pending; call it once after each backward")
        jobs = self._pending.popleft()
        pending = list(jobs)
        jobs.clear()  # so that a backward that runs on makes an entry of its own
        with backward_of(self.op), torch.no_grad():
            for job in pending:
                job()


def run(
    operator: Callable[..., Any], call: Callable[..., Any], given: dict[str, Any], writers: dict[str, Any],
    out: Tensor | None = None, grad_input: Tensor | None = None,
) -> Any:  # fmt: skip
    """What an operator makes of what is given, where its result and gradients are to go.

    Args:
        call: gives a call of the operator, as arguments.
        writers: of weights' gradients, by the operator's names. out, grad_input: buffers.

    Raises:
        CaptureError: torch.export is tracing, and something goes where an exported program cannot write.
    """
    elsewhere = writers or grad_input is not None
    if not elsewhere and (out is None or not (torch.is_grad_enabled() and any_requires_grad(*given.values()))):
        return operator(**given) if out is None else operator(**given, out=out)
    if is_exporting():
        raise CaptureError(
            f"{operator.__name__} of a module: torch.export traces no main_grad, delay_wgrad or grad_input, nor out "
            "where a gradient is recorded, since they write outside of a graph; export under torch.no_grad(), or leave "
            "them out"
        )
    return outside_traces(call(**given), Targets(out, grad_input, writers))


@_disable_dynamo  # torch.compiler.disable, but for importing the compiler: that would take a second at import
def outside_traces(call: Any, targets: Targets) -> Any:
    """To write elsewhere is a side effect that no trace has."""
    return differentiate(call, targets=targets)


def grad_writer(name: str, weights: list[Any], packed: bool, x: Tensor, put: Put | None) -> Callable[..., Any] | None:
    """Another way than autograd's for the gradient of weights, as its functions ask for it; None where there is none.

    `name`: theirs, for errors. `put`: None: at once.
    """
    into_main = has_main_grads(name, weights, x)
    if not into_main and put is None:
        return None
    write = _write_main_grads if into_main else _write_grads

    def make(dy: Tensor, x: Tensor, groups: dict[str, Any]) -> Any:
        job = functools.partial(write, name, weights, packed, dy, x, groups)
        if put is None:
            job()
        else:
            put(job)
        return _dummies(weights, packed) if into_main else None

    return make


def has_main_grads(name: str, weights: list[Any], x: Tensor) -> bool:
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
    valid = gradient_dtypes(x)
    for weight, buffer in zip(weights, buffers, strict=True):
        if not isinstance(buffer, Tensor):
            raise TypeError(f"{name}.main_grad is a {type(buffer).__name__}; give a tensor like the weight")
        if buffer.shape != weight.shape or not buffer.is_contiguous():
            raise ValueError(
                f"{name}.main_grad has shape {shape_text(buffer.shape)} and strides {shape_text(buffer.stride())}; it "
                f"must be contiguous and of the weight's shape, {shape_text(weight.shape)}"
            )
        if buffer.dtype not in valid:
            choices = " or ".join(map(str, valid))
            raise TypeError(f"{name}.main_grad is {buffer.dtype}; with x of {x.dtype} it must be {choices}")
        if buffer.device != x.device:
            raise ValueError(f"{name}.main_grad is on {buffer.device} but x is on {x.device}; move it to {x.device}")
    return True


def _write_main_grads(
    name: str, weights: list[Any], packed: bool, dy: Tensor, x: Tensor, groups: dict[str, Any]
) -> None:
    try:
        buffers = [weight.main_grad for weight in weights]
        adds = tuple(not getattr(weight, "overwrite_main_grad", False) for weight in weights)
        how = {"mask": _mask(adds, x.device)} if len(set(adds)) > 1 else {"accumulate": adds[0]}
        grouped_wgrad(dy, x, **groups, out=buffers[0] if packed else buffers, **how)
    except (
        ValueError,
        TypeError,
        AttributeError,
    ) as error:  # where main_grad has changed since forward
        if not has_main_grads(name, weights, x):
            raise ValueError(
                f"{name}.main_grad was there in forward and is gone in backward; keep it until then"
            ) from error
        if ": out" in str(error):
            raise type(error)(f"{name}.main_grad does not serve as the out of grouped_wgrad: {error}") from error
        raise


@functools.lru_cache(64)
def _mask(adds: tuple[bool, ...], device: torch.device) -> Tensor:
    """Kept, so that a graph that is captured after a first call copies nothing from the host."""
    return torch.tensor(adds, device=device)


def _write_grads(name: str, weights: list[Any], packed: bool, dy: Tensor, x: Tensor, groups: dict[str, Any]) -> None:
    grads = [weight.grad for weight in weights]
    if all(grad is not None and grad.is_contiguous() and grad.dtype in gradient_dtypes(x) for grad in grads):
        grouped_wgrad(dy, x, **groups, out=grads[0] if packed else grads, accumulate=True)
        return
    dw = grouped_wgrad(dy, x, **groups)
    for weight, grad in zip(weights, [dw] if packed else dw, strict=True):
        if weight.requires_grad:
            weight.grad = grad if weight.grad is None else weight.grad + grad


def _dummies(weights: list[Any], packed: bool) -> Any:
    """What autograd gets where main_grad has the gradient."""
    dummies: list[Tensor | None] = []
    for weight in weights:
        has_flag = hasattr(weight, "grad_added_to_main_grad")
        if has_flag:
            weight.grad_added_to_main_grad = True
        make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        dummies.append(make(weight, requires_grad=False) if has_flag else None)
    return dummies[0] if packed else dummies
