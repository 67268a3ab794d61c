"""What plans for differentiable calls share: which calls they serve, where they are kept, what backward relies on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from .. import device as gpus
from .. import kernels
from ..call import Call
from ..plan import Launch, checking
from ..plans import Plans
from ..problem import Problem
from ..signature import ALIGNMENT_BYTES, LOWEST_ADDRESS
from .parts import ORDINARY, Targets, key_of

has_functorch_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
hooks_of_saved_tensors: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks

PLANS: Plans[Any] = Plans()
"""Of calls with targets, which come from modules and not through an operator."""


@dataclasses.dataclass(frozen=True)
class TrainingLaunch(Launch):
    """What every plan of a differentiable call holds.

    Attributes:
        needs: for each tensor that its autograd function may take, whether it requires a gradient.
        grouped_by: "offs" or "splits".
        parts: by field, what serves the parts of backward.
    """

    needs: Any
    grouped_by: str
    parts: Mapping[str, kernels.Serving]


class Maker(NamedTuple):
    """How calls of an operator get a plan.

    Attributes:
        check: the problem of a call, which is checked; None of one that takes the general path.
        make: the plan of a call and its problem.
        resize: the same, like a plan for another number of rows.
    """

    check: Callable[[Any], Problem | None]
    make: Callable[[Any, Problem], Any]
    resize: Callable[[Any, Problem, Any], Any]


def run(call: Call, key: Hashable, targets: Targets, maker: Maker) -> Any:
    """The result of a call that has no plan yet, or that has targets; NotImplemented where it is not a common one. Then
    its tensors were found plain.

    Args:
        key: where to keep the plan; None where the call did not come through its operator.
    """
    plans: Plans[Any] = call.plans
    if targets is not ORDINARY:
        plans, key = PLANS, _key_of(call)
    common = key is not None and not has_functorch_transforms()
    plan = plans.find(key) if common else None
    if plan is None:
        if common and (settled := call.settled(key, plans)):
            plan = maker.resize(call, *settled)
        else:
            call.check_plain()
            problem = maker.check(call) if common else None
            if problem is None:
                return NotImplemented
            plan = maker.make(call, problem)
            # `free` tells places in the operator's own key, which is in another order than that of a call with targets.
            if plans is call.plans or not call.of_tokens:
                call.settle_rows(key, plans, problem, plan)
        plans.keep(key, plan)
    return plan.run_into(targets, *plan.inputs_of(call))


def _key_of(call: Call) -> Hashable:
    """None where there are lists, which are not common."""
    return None if any(isinstance(value, (list, tuple)) for value in vars(call).values()) else key_of(call)


def is_common(call: Call, problem: Problem, names: tuple[str, ...]) -> bool:
    """Tensors in GPU memory, no list; and more than one row or token, whose stride torch leaves arbitrary."""
    if checking():
        return False
    lead = call.lead
    given = [value for name in names if (value := getattr(call, name, None)) is not None]
    in_memory = all(value.__class__ in gpus.PLAIN_TENSORS and value.device == lead.device for value in given)
    return lead.device.type == gpus.KERNEL_DEVICE and in_memory and len(lead) > 1


def requires(call: Call, name: str) -> bool:
    return bool(getattr(getattr(call, name, None), "requires_grad", False))


def serving(index: int, **parts: Problem) -> dict[str, kernels.Serving]:
    """What serves the parts of a backward on a device."""
    return {name: kernels.serving(problem, gpus.gpu(index)) for name, problem in parts.items()}


def functions(parts: Mapping[str, kernels.Serving], rows: int) -> dict[str, Any]:
    """Those of parts for a number of rows."""
    return {name: part.at(rows).function for name, part in parts.items()}


def is_usual(dy: Tensor) -> bool:
    """Whether kernels take an incoming gradient as it is, in a backward of which nobody makes a graph."""
    return (
        dy.__class__ in gpus.PLAIN_TENSORS
        and not is_grad_enabled()
        and dy.is_contiguous()
        and not dy.is_neg()
        and not dy.data_ptr() % ALIGNMENT_BYTES
    )


def are_in_memory(*tensors: Tensor | None) -> bool:
    """Whether no storage was freed since it was saved, as FSDP does with parameters that it gathers again."""
    return min([t.data_ptr() for t in tensors if t is not None]) >= LOWEST_ADDRESS


def save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.layouts = None if hooks_of_saved_tensors(False) is None else _layouts(tensors)
    ctx.save_for_backward(*tensors)


def as_saved(ctx: Any, tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether tensors lie as they did: hooks of saved tensors need not give back what they were given."""
    return ctx.layouts is None or ctx.layouts == _layouts(tensors)


def _layouts(tensors: tuple[Tensor | None, ...]) -> list[Any]:
    return [
        None if t is None else (t.__class__ in gpus.PLAIN_TENSORS, t.shape, t.dtype, t.device, t.stride())
        for t in tensors
    ]
