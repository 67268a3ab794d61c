"""Where a module's result and gradients are written: to autograd, to given buffers, or to the weights' `main_grad`.

Weight gradients are computed in backward, or later by `backward_dw`.

The main_grad protocol of Megatron-style trainers: if a weight has a `main_grad` (of its dtype or float32), the kernel
itself adds the gradient to `main_grad`, or overwrites it if `overwrite_main_grad` is true; autograd gets no gradient.
If the trainer has set `grad_added_to_main_grad` on the weight, autograd gets a dummy, so that hooks on `grad` run:
zeros if `zero_out_wgrad` is true, else uninitialised. Individually frozen experts get no gradient, and need no
main_grad.
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
from torch.compiler import is_exporting

from ..backward import Targets, differentiate
from ..backward.parts import backward_of
from ..calls.checks import any_requires_grad, gradient_dtypes, shape_text
from ..calls.memory import is_in_storage
from ..errors import CaptureError, GradientNotSupported
from ..host import device as gpus
from ..ops.grouped_wgrad import grouped_wgrad

Job = Callable[[], None]
Put = Callable[[Job], None]
"""A function that stores a job, the computation of a weight gradient, for later."""


class DelaysWeightGradients(nn.Module):
    """Base of modules that can leave weight gradients out of backward, for `backward_dw` to compute later.

    They do so if they were made with delay_wgrad=True. `op`: name of the operator that the module calls.
    """

    op: ClassVar[str]

    def __init__(self, delay_wgrad: bool) -> None:
        super().__init__()
        self.delay_wgrad = delay_wgrad
        self._pending: deque[list[Job]] = deque()  # a list for each backward pass that left jobs, in order

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without pending jobs, since jobs write the gradients of the original module."""
        return {**self.__dict__, "_pending": deque()}

    def new_pass(self) -> Put:
        """Return the function with which the backward of one forward stores jobs for `backward_dw`.

        A job computes and writes one weight's gradient.
        """
        jobs: list[Job] = []

        def put(job: Job) -> None:
            if not jobs:
                self._pending.append(jobs)
            jobs.append(job)

        return put

    def has_delayed(self) -> bool:
        """Return True if weight gradients of a backward pass are pending."""
        return len(self._pending) > 0

    def backward_dw(self) -> None:
        """Compute the weight gradients that the oldest pending backward pass left out, into main_grad or grad.

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
    """Run an operator, with its result and gradients written to the given destinations.

    Args:
        operator: the public operator, used if there is no destination other than autograd.
        call: makes the operator's Call (an object of one call's arguments) from keyword arguments; used if there is
            another destination.
        given: the operator's arguments.
        writers: functions that write weights' gradients instead of autograd, by the operator's argument names.
        out, grad_input: buffers for the result and for x's gradient; None: not given.

    Raises:
        CaptureError: torch.export is tracing, and a destination is one that an exported program cannot write.
        GradientNotSupported: there are adapters, and a destination other than autograd.
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
    """Run a differentiable call outside of torch.compile's traces, which would lose the writes to its `targets`."""
    return differentiate(call, targets=targets)


class Experts(NamedTuple):
    """The expert weights of one linear layer, and which of them were trained, in one forward.

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
    """Return the function that backward calls to write weight gradients instead of autograd; None: autograd does it.

    Args:
        name, weights, packed: see `Experts`.
        x: the layer's input.
        put: stores the computation for later; None: backward computes at once.
    """
    experts = Experts(name, weights, tuple([weight.requires_grad for weight in weights]), packed)
    into_main = has_main_grads(experts, x)
    if not into_main and put is None:
        return None
    if not into_main and any(weight.grad_fn is not None for weight in experts.trained_weights()):
        raise RuntimeError(_lost(name, "computed, as by parametrizations and FSDP1"))
    write = _write_main_grads if into_main else _write_grads

    def make(dy: Tensor, x: Tensor, groups: dict[str, Any]) -> Any:
        job = functools.partial(write, experts, dy, x, groups)
        if put is None:
            job()
        else:
            put(job)
        return _dummies(experts) if into_main else None

    return make


def has_main_grads(experts: Experts, x: Tensor) -> bool:
    """Check the main_grad buffers of trained weights against x; return False if no weight has one.

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
        weight.grad = grad if weight.grad is None else weight.grad + grad


def _lost(name: str, how: str) -> str:
    """Return the error text for a delayed gradient that would be lost, since the tensor is not the optimizer's
    parameter.
    """
    return f"delay_wgrad: {name} was {how}, so that its delayed gradient would be lost; leave out delay_wgrad=True"


def _write(
    experts: Experts, buffers: list[Tensor], adds: list[bool], dy: Tensor, x: Tensor, groups: dict[str, Any]
) -> None:  # fmt: skip
    """Write the gradients of trained weights to `buffers`.

    Args:
        adds: for each buffer, True: the gradient is added to it; False: the gradient overwrites it.
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
    """Return the groups of rows for grouped_wgrad, and for each group True if it belongs to a trained expert.

    grouped_wgrad cannot leave out rows of frozen experts that come before a trained expert. So adjacent frozen experts
    form one group, whose gradient is dropped and takes as much memory as one weight. Rows after the last trained expert
    are in no group.

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
    """Return `values` as a cached tensor, so that a CUDA graph captured after a first call copies nothing from the
    host.
    """
    made = _made(values, dtype, device)
    if made.is_cuda and gpus.is_capturing():  # replays read it, even after it leaves the cache
        _kept_for_graphs[values, dtype, device] = made
    return made


@functools.lru_cache(1024)  # each layer may train different experts
def _made(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return gpus.on_own_thread(lambda: torch.tensor(values, dtype=dtype, device=device))


def _dummies(experts: Experts) -> Any:
    """Return the dummy gradients that autograd gets for weights whose gradient is in main_grad; None: no dummy."""
    dummies: list[Tensor | None] = []
    for weight, is_trained in zip(experts.weights, experts.trained, strict=True):
        has_flag = is_trained and hasattr(weight, "grad_added_to_main_grad")
        if has_flag:
            weight.grad_added_to_main_grad = True
        make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        dummies.append(make(weight, requires_grad=False) if has_flag else None)
    return dummies[0] if experts.packed else dummies
