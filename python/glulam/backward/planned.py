"""Plans of common differentiable calls: packed weights and group sizes on a GPU.

A plan settles once for a signature which kernels run, what is saved and what is computed: it holds the launches of both
directions. What is done here less often than a plan is kept for takes the general path, in either direction.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Mapping
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

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
from ..ops.mlp_training import WeightGradientCall
from .function import Formula, apply, apply_untransformed
from .parts import ORDINARY, Targets, key_of

has_functorch_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
hooks_of_saved_tensors: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks

PLANS: Plans[Any] = Plans()
"""Of calls with targets, which come from modules and not through an operator."""


@functools.cache  # equal plans have the same
def _picker(*places: int) -> Callable[[Any], tuple[Any, ...]]:
    """What takes these places of a sequence, as a tuple: of a single one, itemgetter would give that itself."""
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))


class Part(NamedTuple):
    """A launch of a step: what makes a call of its arguments, or of others that lie as they do, and its problem."""

    call: Callable[[], Call]
    problem: Problem


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """The constants of a differentiable call. A subclass says what they are of an operator, and makes what its formula
    asks for (see `parts.Operators`) by launches.

    Attributes:
        formula: of the operator, which serves what a plan does not.
        makes: names of what forward makes besides the result.
        kind: of the call; `names`: its tensors, which `run` takes in this order; `present`: those that are there, and
            `there` picks them.
        saved: names of what backward reads, which `read` picks, and of what forward makes.
        parts: the launches of a step.
        general: the formula's operators; `options`: what else launches depend on.
        wanted: names of tensors that require a gradient. grouped_by: "offs" or "splits".
        arguments: those of the call that are no tensors.
        index, only: the device, and whether the process sees no other.
        rows, extents, out_extents, apart: see `memory.check_apart`.
    """

    formula: ClassVar[Formula]
    makes: ClassVar[tuple[str, ...]] = ()
    kind: type[Call]
    names: tuple[str, ...]
    present: tuple[str, ...]
    there: Callable[[Any], tuple[Tensor, ...]]
    saved: tuple[str, ...]
    read: Callable[[Any], tuple[Tensor, ...]]
    parts: Mapping[str, Plan]
    general: Any
    options: Any
    wanted: frozenset[str]
    grouped_by: str
    arguments: dict[str, Any]
    index: int
    only: bool
    rows: int
    extents: tuple[int, ...]
    out_extents: tuple[int, ...] = ()
    apart: set[tuple[int, ...]] = dataclasses.field(default_factory=set)

    @classmethod
    def check(cls, call: Call) -> Problem | None:
        """The problem of a call, which is checked; None of one that takes the general way.

        Raises ValueError or TypeError where an argument does not fit.
        """
        raise NotImplementedError

    @classmethod
    def options_of(cls, call: Call) -> Any:
        """What else the launches of a call depend on."""
        return None

    @classmethod
    def parts_of(cls, call: Call, problem: Problem, need: Collection[str], options: Any) -> dict[str, Part]:
        """The launches of a step. What is not there yet is stood for by tensors of the same dtype and device."""
        raise NotImplementedError

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
            named = dict(zip(self.names, given, strict=True))
            call = self.kind(**{**self.arguments, "offs": None, "splits": None, "out": None, **named})
            return apply(call, self.formula, targets)
        return apply_untransformed(self, targets, *given)

    def forward(self, ctx: Any, targets: Targets, inputs: tuple[Any, ...]) -> Tensor:
        launch, x = self.parts["forward"], inputs[0]
        y = x.new_empty(x.shape[0], launch.constants["out_features"]) if targets.out is None else targets.out
        made = launch.run(*self.as_read(inputs), y)
        tensors = (*self.read(inputs), *made[1:]) if self.makes else self.read(inputs)
        ctx.layouts = None if hooks_of_saved_tensors(False) is None else _layouts(tensors)
        ctx.save_for_backward(*tensors)
        return y

    def as_read(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The plan's tensors as forward's launch reads them."""
        return inputs

    def backward(self, ctx: Any, targets: Targets, dy: Tensor) -> Any:
        """By launches; or by public operators, which look at everything anew: with a graph of the backward, from a dy
        that is traced, a view or misaligned, or after hooks gave back tensors that lie otherwise."""
        saved = dict(zip(self.saved, taken(ctx), strict=True))
        kept = saved.values()
        lie_the_same = ctx.layouts is None or ctx.layouts == _layouts(kept)  # hooks may give back something else
        if lie_the_same and is_usual(dy) and are_in_memory(dy, *kept):
            gradients = self.formula.gradients(saved, self, targets, self.wanted, dy)
            return [gradients.get(name) for name in self.names]
        gradients = self.formula.backward(self.op, saved, self.general, targets, self.wanted, dy)
        return once_differentiable(self.op, [gradients.get(name) for name in self.names])

    def weight_gradient(
        self, targets: Targets, name: str, dy: Tensor, x: Tensor, groups: dict[str, Any], dy_rows: Any = None,
        x_rows: Any = None,
    ) -> Any:  # fmt: skip
        if self.general.transpose_w:
            dy, x = x, dy
        if name in targets.weights:
            return targets.weights[name](dy, x, {**groups, "dy_rows": dy_rows, "x_rows": x_rows})
        return self.parts[name].run(dy=dy, x=x, dy_rows=dy_rows, x_rows=x_rows, groups=groups[self.grouped_by])


def run(call: Call, key: Hashable, targets: Targets, kind: type[TrainingPlan]) -> Any:
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
            plan = _plan(call, settled[0], kind, settled[1])
        else:
            call.check_plain()
            problem = kind.check(call) if common else None
            if problem is None:
                return NotImplemented
            plan = _plan(call, problem, kind)
            # `free` tells places in the operator's own key, which is in another order than that of a call with targets.
            if plans is call.plans or not call.of_tokens:
                call.settle_rows(key, plans, problem, plan)
        plans.keep(key, plan)
    return plan.run_into(targets, tuple([getattr(call, name) for name in call.reads]))


def _plan(
    call: Call, problem: Problem, kind: type[TrainingPlan], like: TrainingPlan | None = None
) -> TrainingPlan:  # fmt: skip
    """`like`: of a call that differs in its rows alone."""
    options = kind.options_of(call)
    if like is not None and like.options != options:
        like = None
    wanted = frozenset(name for name in call.reads if requires(call, name)) if like is None else like.wanted
    parts = kind.parts_of(call, problem, wanted, options)
    if like is not None:
        plans = {
            name: old if old.serves(problem.rows) else parts[name].call().resized_plan(old, parts[name].problem)
            for name, old in like.parts.items()
        }
        return changed(like, parts=plans, rows=problem.rows, extents=call.extents(like.present), apart=set())
    grouped_by = "offs" if call.splits is None else "splits"
    names = tuple(grouped_by if name == "groups" else name for name in call.reads)
    present = tuple(name for name in names if getattr(call, name) is not None)
    general = kind.formula.operators(call)
    reads = general.reads(wanted)
    read = tuple(name for name in present if reads.get(name, True))
    return kind(
        kind=type(call),
        names=names,
        present=present,
        there=_picker(*map(names.index, present)),
        saved=(*read, *kind.makes),
        read=_picker(*map(names.index, read)),
        parts={name: part.call().plan(part.problem, checked=False) for name, part in parts.items()},
        general=general,
        options=options,
        wanted=wanted,
        grouped_by=grouped_by,
        arguments={name: getattr(call, name) for name in call.options},
        index=call.lead.get_device(),
        only=gpus.is_only_one(),
        rows=problem.rows,
        extents=call.extents(present),
    )


def weight_part(call: Call, problem: Problem, shape: tuple[int, int], **rows: Tensor | None) -> Part:
    """A weight's gradient, of `shape`. `rows`: the indices of dy's or x's. Both are stood for by x."""
    absent = dict.fromkeys(("dy_rows", "x_rows", "mask", "out", "out_dtype"))
    lead = {"dy": call.x, "x": call.x, "offs": call.offs, "splits": call.splits}
    n, k = shape
    given = {**absent, **rows, **lead, "n": n, "k": k, "accumulate": False}
    return Part(functools.partial(WeightGradientCall, **given), problem)


def _key_of(call: Call) -> Hashable:
    """None where there are lists, which are not common."""
    return None if any(isinstance(getattr(call, name), (list, tuple)) for name in call.given) else key_of(call)


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


def are_in_memory(*tensors: Tensor) -> bool:
    """Whether no storage was freed since it was saved, as FSDP does with parameters that it gathers again."""
    return min([t.data_ptr() for t in tensors]) >= LOWEST_ADDRESS


def _layouts(tensors: Collection[Tensor]) -> list[Any]:
    return [(t.__class__ in gpus.PLAIN_TENSORS, t.shape, t.dtype, t.device, t.stride()) for t in tensors]
