"""Destinations of a module's result and gradients other than autograd: given buffers, and the weights' `main_grad`.

Weight gradients are computed in backward, or later by `backward_dw`.

The main_grad protocol of Megatron-style trainers works with attributes of the weight:
  * `main_grad`, a tensor of the weight's dtype or float32: the kernel itself adds the gradient to it, and autograd gets
    no gradient. If the attribute `overwrite_main_grad` is true, the kernel overwrites `main_grad` instead.
  * `grad_added_to_main_grad`, if the trainer has set it: autograd gets a dummy gradient, so that hooks on `grad` run.
    The dummy is zeros if the attribute `zero_out_wgrad` is true, else uninitialised.
Individually frozen experts get no gradient, and need no main_grad. A backward that is asked for other gradients alone,
as torch.autograd.grad(y, x) is, writes nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import get_gradient_edge
from torch.compiler import is_exporting

from ..backward import Targets, differentiate
from ..backward.parts import backward_of
from ..calls.checks import any_requires_grad, gradient_dtypes, shape_text
from ..calls.memory import is_in_storage
from ..errors import CaptureError, GradientNotSupported
from ..host import device as gpus
from ..ops.grouped_wgrad import grouped_wgrad

Job = Callable[[], None]
"""A function that computes one weight's gradient, and writes it."""
Put = Callable[[Job], None]
"""A function that stores a job for `backward_dw`."""


class DelaysWeightGradients(nn.Module):
    """Base of modules that, with delay_wgrad=True, compute weight gradients in `backward_dw` instead of in backward."""

    op: ClassVar[str]
    """Name of the operator that the module calls, for errors."""

    def __init__(self, delay_wgrad: bool) -> None:
        super().__init__()
        self.delay_wgrad = delay_wgrad
        self._pending: deque[list[Job]] = deque()  # for each forward, a list for each backward that left jobs, in order

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without pending jobs, since jobs write the gradients of the original module."""
        return {**self.__dict__, "_pending": deque()}

    def new_pass(self) -> Put:
        """Return a function, for one forward, with which the backward of this forward stores jobs for `backward_dw`."""
        jobs: list[Job] = []
        backward = None

        def put(job: Job) -> None:
            nonlocal jobs, backward
            running = torch._C._current_graph_task_id()
            if not jobs or running != backward:
                jobs, backward = [], running
                self._pending.append(jobs)
            jobs.append(job)

        return put

    def has_delayed(self) -> bool:
        """Return True if weight gradients of a backward pass are pending."""
        return len(self._pending) > 0

    def backward_dw(self) -> None:
        """Compute the weight gradients that the oldest pending backward of a forward left out, into main_grad or grad.

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
        jobs.clear()  # a backward that is still running then makes a new entry
        with backward_of(self.op), torch.no_grad():
            for job in pending:
                job()


def run(
    operator: Callable[..., Any], call: Callable[..., Any], given: dict[str, Any], writers: dict[str, Any],
    out: Tensor | None = None, grad_input: Tensor | None = None,
) -> Any:  # fmt: skip
    """Run an operator, and return its result; write result and gradients to buffers if the caller gave any.

    Without `writers` and `grad_input`, this calls the public operator (with `out`, if no gradient is recorded).
    Otherwise a `Call` is made, whose backward writes the gradients itself.

    Args:
        operator: the public operator.
        call: makes the operator's `Call` (`calls.call`, an object of one call's arguments) from keyword arguments.
        given: the operator's arguments.
        writers: functions that backward calls to write weights' gradients (see `grad_writer`), by the operator's
            argument names. A weight without such a function gets its gradient from autograd. {}: all do.
        out, grad_input: buffers for the result and for x's gradient; None: not given.

    Raises:
        CaptureError: torch.export is tracing, and a buffer would have to be written, which an exported program cannot.
        GradientNotSupported: there are LoRA adapters, and a buffer would have to be written.
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
    if given.get("lora") is not None:
        raise GradientNotSupported(
            f"{operator.__name__} of a module with adapters: main_grad and delay_wgrad of trained weights, grad_input, "
            "and out where a gradient is recorded do not go with them; freeze the experts' weights, and leave out the "
            "buffers"
        )
    return outside_traces(call(**given), Targets(out, grad_input, writers))


@_disable_dynamo  # like torch.compiler.disable, which would import the compiler and take a second
def outside_traces(call: Any, targets: Targets) -> Any:
    """Run a differentiable call untraced, since a trace of torch.compile would lose the writes to `targets`."""
    return differentiate(call, targets=targets)


class Experts(NamedTuple):
    """The expert weights of one linear layer in one forward, and which of them were trained.

    Attributes:
        name: the weights' name in errors.
        weights: one packed weight, or one for each expert.
        trained: for each weight, True if it required a gradient in forward. At least one did.
        packed: True: one weight [E, ...] holds all experts.
    """

    name: str
    weights: list[Any]
    trained: tuple[bool, ...]
    packed: bool

    def trained_weights(self) -> list[Any]:
        return list(itertools.compress(self.weights, self.trained))


def grad_writer(name: str, weights: list[Any], packed: bool, x: Tensor, put: Put | None) -> Callable[..., Any] | None:
    """Return a function for backward that computes weight gradients and writes them, or stores the computation.

    The gradients go to the weights' main_grad if they have one, else (with `put`) to their grad. None: the weights have
    no main_grad and nothing is delayed, so autograd gets the gradients.

    Args:
        name: the weights' name in errors.
        weights: one packed weight [E, ...], or one weight for each expert.
        packed: True: one weight holds all experts.
        x: the layer's input.
        put: stores the computation for `backward_dw`; None: backward computes at once.

    Raises:
        RuntimeError: a delayed gradient would be lost, since a weight is computed (parametrization, FSDP1).
        ValueError, TypeError: raised by `has_main_grads`.
    """
    experts = Experts(name, weights, tuple([weight.requires_grad for weight in weights]), packed)
    into_main = has_main_grads(experts, x)
    if not into_main and put is None:
        return None
    if not into_main and any(weight.grad_fn is not None for weight in experts.trained_weights()):
        raise RuntimeError(_lost(name, "computed, as by parametrizations and FSDP1"))
    write = _write_main_grads if into_main else _write_grads

    def make(dy: Tensor, x: Tensor, groups: dict[str, Any]) -> Any:
        if not any(map(_is_asked_for, experts.trained_weights())):
            return None
        job = functools.partial(write, experts, dy, x, groups)
        if put is None:
            job()
        else:
            put(job)
        return _dummies(experts) if into_main else None

    return make


def _is_asked_for(weight: Tensor) -> bool:
    """Return True if the backward that is running shall compute this weight's gradient."""
    try:
        asked: bool = torch._C._will_engine_execute_node(get_gradient_edge(weight).node)
    except RuntimeError:  # the gradient is asked for by name
        return True
    return asked


def has_main_grads(experts: Experts, x: Tensor) -> bool:
    """Return True if all trained weights have a main_grad that fits; False: no trained weight has a main_grad.

    Raises:
        ValueError, TypeError: only some trained weights have a main_grad, or a main_grad does not fit.
    """
    name, trained = experts.name, experts.trained_weights()
    buffers: list[Any] = [getattr(weight, "main_grad", None) for weight in trained]
    missing = [weight for weight, buffer in zip(trained, buffers, strict=True) if buffer is None]
    if len(missing) == len(trained):
        return False
    if missing:
        index = next(index for index, weight in enumerate(experts.weights) if weight is missing[0])
        raise ValueError(
            f"{name}{index} has no main_grad but others have; give one to every expert that requires a gradient, or to "
            "none"
        )
    valid = gradient_dtypes(x)
    for weight, buffer in zip(trained, buffers, strict=True):
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


def _write_main_grads(experts: Experts, dy: Tensor, x: Tensor, groups: dict[str, Any]) -> None:
    name, trained = experts.name, experts.trained_weights()
    try:
        buffers = [weight.main_grad for weight in trained]
        adds = [not getattr(weight, "overwrite_main_grad", False) for weight in trained]
        _write(experts, buffers, adds, dy, x, groups)
    except (
        ValueError,
        TypeError,
        AttributeError,
    ) as error:  # main_grad may have changed since forward
        if not has_main_grads(experts, x):
            raise ValueError(
                f"{name}.main_grad was there in forward and is gone in backward; keep it until then"
            ) from error
        if ": out" in str(error):
            raise type(error)(f"{name}.main_grad does not serve as the out of grouped_wgrad: {error}") from error
        raise


def _write_grads(experts: Experts, dy: Tensor, x: Tensor, groups: dict[str, Any]) -> None:
    trained = experts.trained_weights()
    if not all(map(is_in_storage, trained)):
        raise RuntimeError(_lost(experts.name, "gathered by FSDP, which has reduced its gradients and freed it"))
    grads = [weight.grad for weight in trained]
    if all(grad is not None and grad.is_contiguous() and grad.dtype in gradient_dtypes(x) for grad in grads):
        _write(experts, grads, [True] * len(grads), dy, x, groups)
        return
    groups, is_trained = _groups_of(experts.trained, groups)
    dw = grouped_wgrad(dy, x, **groups)
    made = [dw] if experts.packed else itertools.compress(dw, is_trained)
    for weight, grad in zip(trained, made, strict=True):
        grad = grad.to(getattr(weight, "grad_dtype", None) or grad.dtype)
        weight.grad = grad if weight.grad is None else weight.grad + grad


def _lost(name: str, how: str) -> str:
    """Return the error text for a weight that is no parameter of the optimizer: its delayed gradient would be lost."""
    return f"delay_wgrad: {name} was {how}, so that its delayed gradient would be lost; leave out delay_wgrad=True"


def _write(
    experts: Experts, buffers: list[Tensor], adds: list[bool], dy: Tensor, x: Tensor, groups: dict[str, Any]
) -> None:  # fmt: skip
    """Compute the gradients of trained weights, and write them to `buffers`.

    Args:
        buffers: one packed buffer, or one for each trained weight.
        adds: for each buffer, True: add the gradient to it; False: overwrite it.
        dy, x, groups: the operands of `grouped_wgrad`.
    """
    groups, is_trained = _groups_of(experts.trained, groups)
    out: Any = buffers[0] if experts.packed else buffers
    if frozen := is_trained.count(False):
        given, dropped = iter(zip(buffers, adds, strict=True)), iter(buffers[0].new_empty(frozen, *buffers[0].shape))
        # Dropped gradients use the first buffer's mode (add or write): if all modes are equal, no mask is needed.
        pairs = [next(given) if one else (next(dropped), adds[0]) for one in is_trained]
        out, adds = [list(values) for values in zip(*pairs, strict=True)]
    how: dict[str, Any] = {"accumulate": adds[0]}
    if len(set(adds)) > 1:
        how = {"mask": _on_device(tuple(adds), torch.bool, x.device)}
    grouped_wgrad(dy, x, **groups, out=out, **how)


def _groups_of(trained: tuple[bool, ...], groups: dict[str, Any]) -> tuple[dict[str, Any], list[bool]]:
    """Merge adjacent frozen experts; return the groups of rows for grouped_wgrad, and for each True if it is trained.

    grouped_wgrad cannot leave out rows of frozen experts that come before a trained expert. So adjacent frozen experts
    form one group: its gradient is computed and dropped, and takes as much memory as one weight. Rows after the last
    trained expert are in no group.

    Args:
        trained: for each expert, True if its weight is trained.
        groups: the layer's groups, as `offs` or `splits`.
    """
    if all(trained):
        return groups, list(trained)
    ends = [e for e, (one, after) in enumerate(zip(trained, (*trained[1:], False), strict=True)) if one or after]
    offs = groups["offs"] if "offs" in groups else groups["splits"].cumsum(0)
    offs = offs.index_select(0, _on_device(tuple(ends), torch.int64, offs.device)).to(torch.int32)
    return {**groups, "offs": offs, "splits": None}, [trained[end] for end in ends]


_kept_for_graphs: dict[Any, Tensor] = {}


def _on_device(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `values` as a tensor on `device`, cached, so that CUDA graph capture after a first call copies nothing."""
    made = _made(values, dtype, device)
    if made.is_cuda and gpus.is_capturing():  # replays read it, even after it leaves the cache
        _kept_for_graphs[values, dtype, device] = made
    return made


@functools.lru_cache(1024)  # each layer may train different experts
def _made(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return gpus.on_own_thread(lambda: torch.tensor(values, dtype=dtype, device=device), device)


def _dummies(experts: Experts) -> Any:
    """Return what autograd gets for weights whose gradient is in main_grad: a dummy tensor or None for each weight.

    See the module's text for the attributes that decide. The attribute `grad_added_to_main_grad` is set to True.
    """
    dummies: list[Tensor | None] = []
    for weight, is_trained in zip(experts.weights, experts.trained, strict=True):
        has_flag = is_trained and hasattr(weight, "grad_added_to_main_grad")
        if has_flag:
            weight.grad_added_to_main_grad = True
        make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        dummies.append(make(weight, requires_grad=False) if has_flag else None)
    return dummies[0] if experts.packed else dummies
