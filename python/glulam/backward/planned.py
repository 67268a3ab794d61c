"""Plans of common differentiable calls: packed weights and group sizes on a GPU.

A plan settles once for a signature which kernels run, what is saved and what is computed: it holds the launches of both
directions. What is done here less often than a plan is kept for takes the general path, in either direction.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from ..calls.autograd import once_differentiable, taken
from ..calls.call import Call, checking
from ..calls.checks import ALIGNMENT_BYTES, LOWEST_ADDRESS
from ..calls.launch import Plan
from ..calls.memory import check_apart
from ..choose.problem import Problem, changed
from ..host import device as gpus
from ..host.plans import Plans
from .function import Formula, apply, apply_untransformed
from .parts import ORDINARY, Targets, key_of

has_functorch_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
_picker = functools.cache(itemgetter)  # equal plans have the same
hooks_of_saved_tensors: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks

PLANS: Plans[Any] = Plans()
"""Of calls with targets, which come from modules and not through an operator."""


class Part(NamedTuple):
    """A launch of a step: what makes a call of its arguments, or of others that lie as they do, and its problem."""

    call: Callable[[], Call]
    problem: Problem


class Maker(NamedTuple):
    """How calls of an operator are differentiated by a plan.

    Attributes:
        formula: the general way, which serves what a plan does not.
        check: the problem of a call, which is checked; None of one that takes the general way.
        parts: the launches of a step, by name, of a call, its problem, which tensors are trained, and the options.
        options: of a call, what else a plan needs.
        takes: names of tensors that forward asks for; saved: of what it saves.
        forward: of a plan, autograd's context, targets and the plan's tensors: the result. It saves.
        backward: of a plan, targets, what was saved, which may be emptied, and the result's gradient: those by name.
    """

    formula: Formula
    check: Callable[[Any], Problem | None]
    parts: Callable[[Any, Problem, Mapping[str, bool], Any], dict[str, Part]]
    options: Callable[[Any], Any]
    takes: tuple[str, ...]
    saved: tuple[str, ...]
    forward: Callable[..., Tensor]
    backward: Callable[..., dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """The constants of a differentiable call.

    Attributes:
        kind: of the call; `names`: its tensors, which `run` takes in this order; `present`: those that are there, and
            `there` picks them.
        pick: what the maker's forward asks for, of the tensors and a None.
        maker: see above. parts: the launches of a step.
        general: the formula's options; `options`: the maker's.
        needs: by name, whether a tensor requires a gradient. grouped_by: "offs" or "splits".
        arguments: those of the call that are no tensors.
        index, only: the device, and whether the process sees no other.
        rows, extents, out_extents, apart: see `memory.check_apart`.
    """

    kind: type[Call]
    names: tuple[str, ...]
    present: tuple[str, ...]
    there: Callable[[Any], tuple[Tensor, ...]]
    pick: Callable[[Any], tuple[Any, ...]]
    maker: Maker
    parts: Mapping[str, Plan]
    general: Any
    options: Any
    needs: Mapping[str, bool]
    grouped_by: str
    arguments: dict[str, Any]
    index: int
    only: bool
    rows: int
    extents: tuple[int, ...]
    out_extents: tuple[int, ...] = ()
    apart: set[tuple[int, ...]] = dataclasses.field(default_factory=set)

    @property
    def op(self) -> str:
        return self.kind.op

    def run(self, *given: Any) -> Tensor:
        """`given`: the call's tensors and `out`, which is None."""
        return self.run_into(ORDINARY, given[:-1])

    def run_into(self, targets: Targets, given: tuple[Any, ...]) -> Tensor:
        """The same, with the result and gradients where `targets` says."""
        if not self.only and gpus.current() != self.index:
            with torch.cuda.device(self.index):
                return self.run_into(targets, given)
        there = self.there(given)
        at = tuple([one.data_ptr() for one in there])
        if at not in self.apart:
            read = dict(zip(self.present, there, strict=True))
            self.kind.look(self.op, [], **read)
            check_apart(self, at, [], read)
        if has_functorch_transforms():
            named = self.by_argument(dict(zip(self.names, given, strict=True)))
            call = self.kind(**{**self.arguments, "offs": None, "splits": None, "out": None, **named})
            return apply(call, self.maker.formula, targets)
        return apply_untransformed(self, targets, *given)

    def forward(self, ctx: Any, targets: Targets, inputs: tuple[Any, ...]) -> Tensor:
        return self.maker.forward(self, ctx, targets, inputs)

    def backward(self, ctx: Any, targets: Targets, dy: Tensor) -> Any:
        """By launches; or by public operators, which look at everything anew: with a graph of the backward, from a dy
        that is traced, a view or misaligned, or after hooks gave back tensors that lie otherwise."""
        maker, kept = self.maker, list(taken(ctx))
        if is_usual(dy) and as_saved(ctx, kept) and are_in_memory(dy, *kept):
            gradients = maker.backward(self, targets, kept, dy)
            return [gradients.get(name) for name in self.names]
        wanted = frozenset(name for name, need in self.needs.items() if need)
        saved = self.by_argument(dict(zip(maker.saved, kept, strict=True)))
        gradients = maker.formula.backward(self.op, saved, self.general, targets, wanted, dy)
        return once_differentiable(self.op, [gradients.get(name) for name in self.names])

    def by_argument(self, named: dict[str, Any]) -> dict[str, Any]:
        """The same with group sizes under the operator's own name for them."""
        return {self.grouped_by if name == "groups" else name: value for name, value in named.items()}

    def grouped(self, groups: Tensor, **rows: Tensor | None) -> dict[str, Any]:
        """The groups, and the indices of rows, where there are some, as keywords of an operator."""
        return {self.grouped_by: groups, **{name: indices for name, indices in rows.items() if indices is not None}}


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
            plan = _plan(call, settled[0], maker, settled[1])
        else:
            call.check_plain()
            problem = maker.check(call) if common else None
            if problem is None:
                return NotImplemented
            plan = _plan(call, problem, maker)
            # `free` tells places in the operator's own key, which is in another order than that of a call with targets.
            if plans is call.plans or not call.of_tokens:
                call.settle_rows(key, plans, problem, plan)
        plans.keep(key, plan)
    return plan.run_into(targets, tuple([getattr(call, name) for name in call.reads]))


def _plan(call: Call, problem: Problem, maker: Maker, like: TrainingPlan | None = None) -> TrainingPlan:
    """`like`: of a call that differs in its rows alone."""
    options = maker.options(call)
    if like is not None and like.options != options:
        like = None
    need = {name: requires(call, name) for name in call.reads} if like is None else like.needs
    parts = maker.parts(call, problem, need, options)
    if like is not None:
        plans = {
            name: old if old.serves(problem.rows) else parts[name].call().resized_plan(old, parts[name].problem)
            for name, old in like.parts.items()
        }
        return changed(like, parts=plans, rows=problem.rows, extents=call.extents(like.present), apart=set())
    present = tuple(name for name in call.reads if getattr(call, name) is not None)
    return TrainingPlan(
        kind=type(call),
        names=call.reads,
        present=present,
        there=_picker(*[call.reads.index(name) for name in present]),
        pick=_picker(*[call.reads.index(name) if name in call.reads else -1 for name in maker.takes]),
        maker=maker,
        parts={name: part.call().plan(part.problem, checked=False) for name, part in parts.items()},
        general=maker.formula.options(call),
        options=options,
        needs=need,
        grouped_by="offs" if call.splits is None else "splits",
        arguments={name: getattr(call, name) for name in call.options},
        index=call.lead.get_device(),
        only=gpus.is_only_one(),
        rows=problem.rows,
        extents=call.extents(present),
    )


def _key_of(call: Call) -> Hashable:
    """None where there are lists, which are not common."""
    return None if any(isinstance(value, (list, tuple)) for value in vars(call).values()) else key_of(call)


def is_common(call: Call) -> bool:
    """Tensors in GPU memory, no list; and more than one row or token, whose stride torch leaves arbitrary."""
    if checking():
        return False
    lead = call.lead
    given = [value for name in call.reads if (value := getattr(call, name)) is not None]
    in_memory = all(value.__class__ in gpus.PLAIN_TENSORS and value.device == lead.device for value in given)
    return lead.device.type == gpus.KERNEL_DEVICE and in_memory and len(lead) > 1


def requires(call: Call, name: str) -> bool:
    return bool(getattr(getattr(call, name, None), "requires_grad", False))


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


def as_saved(ctx: Any, tensors: Sequence[Tensor | None]) -> bool:
    """Whether tensors lie as they did: hooks of saved tensors need not give back what they were given."""
    return ctx.layouts is None or ctx.layouts == _layouts(tensors)


def _layouts(tensors: Sequence[Tensor | None]) -> list[Any]:
    return [
        None if t is None else (t.__class__ in gpus.PLAIN_TENSORS, t.shape, t.dtype, t.device, t.stride())
        for t in tensors
    ]
