"""Steps that are kept: common differentiable calls, whose tensors are in GPU memory.

A planned step settles once for a signature what is saved and what is computed, and holds the launches of both
directions. What is done here less often than a step is kept for takes the public operators, in either direction.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from ..calls.autograd import taken
from ..calls.call import Call, checking
from ..calls.checks import ALIGNMENT_BYTES, LOWEST_ADDRESS
from ..calls.launch import Plan
from ..calls.memory import check_apart
from ..calls.quantized import Quantized
from ..choose.problem import Problem
from ..host import device as gpus
from ..host.experts import GateUp
from ..host.plans import Plans
from ..ops.quantized_weights import with_parts_as_read
from .function import SINGLE, Layout, Step, apply, apply_untransformed, flatten, layout_of, picker
from .parts import ORDINARY, Targets, key_of
from .path import LISTS, Path, with_table

has_functorch_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
hooks_of_saved_tensors: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks

PLANS: Plans[Any] = Plans()
"""Of calls with targets, which come from modules and not through an operator."""


class PlannedStep(Step):
    """A step of launches.

    Attributes:
        general: the same step of public operators.
        kind: of the call; `names`: its tensors, which `run` takes in this order; `present`: those that are there, and
            `there` picks them. absent: the others, which are None.
        listed: names of those that are lists of experts.
        saved: names of arguments that backward reads; saved_layout: of what is saved, once forward ran.
        wanted: names of tensors that require a gradient.
        arguments: those of the call that are no tensors. is_frozen: whether weights are quantised.
        index, only: the device, and whether the process sees no other.
        rows, extents, out_extents, apart: see `memory.check_apart`.
    """

    out_extents: tuple[int, ...] = ()
    saved_layout: Layout | None = None

    def __init__(self, call: Call, problem: Problem, path: Path, like: PlannedStep | None = None) -> None:
        """`like`: of a call that differs in its rows alone."""
        names = call.reads
        given = {name: value for name in names if (value := getattr(call, name)) is not None}
        self.absent = tuple(name for name in names if name not in given)
        layout, flat = flatten(given, self.absent)
        planned = path.planned(call, problem, None if like is None else like.path)
        super().__init__(call.op, planned, layout)
        self.general = Step(call.op, path, layout)
        self.invariant = self.general.invariant = call.invariant
        self.kind, self.names = type(call), names
        self.present = tuple(given)
        self.there = picker(*map(names.index, self.present))
        self.listed = frozenset(name for name, value in given.items() if value.__class__ in LISTS)
        self.wanted = layout.wanted([getattr(value, "requires_grad", False) for value in flat])
        reads = planned.reads(self.wanted)
        self.saved = frozenset(name for name in self.present if reads.get(name, True))
        spans = [range(begin, begin + abs(size)) for name, size, begin in layout.slices if name in self.saved]
        self.read = picker(*itertools.chain.from_iterable(spans))
        self.is_frozen = isinstance(call, Quantized) and call.is_frozen
        self.arguments = {name: getattr(call, name) for name in call.options}
        self.index, self.only = call.lead.get_device(), gpus.is_only_one()
        self.rows, self.extents = problem.rows, call.extents(self.present)
        self.apart: set[tuple[Any, ...]] = set()

    @property
    def parts(self) -> dict[str, Plan]:
        """The launches that were planned so far."""
        assert self.path.launches is not None
        return {name: plan for name, (plan, _) in self.path.launches.plans.items()}

    def run(self, *given: Any) -> Tensor:
        """`given`: the call's tensors and `out`, which is None."""
        return self.run_into(ORDINARY, self._as_read(given[:-1]) if self.is_frozen else given[:-1])

    def _as_read(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Tensors with quantised weights as kernels read them."""
        call = with_parts_as_read(self.call_of(dict(zip(self.names, given, strict=True))))
        return tuple([getattr(call, name) for name in self.names])

    def call_of(self, named: dict[str, Any]) -> Call:
        """`named`: the call's tensors, which it takes over."""
        groups = {"offs": None, "splits": None, self.path.grouped_by: named.pop("groups")}
        return self.kind(**{**self.arguments, **groups, "out": None, **named})

    def run_into(self, targets: Targets, given: tuple[Any, ...]) -> Tensor:
        """The same, with the result and gradients where `targets` says."""
        if not self.only and gpus.current() != self.index:
            with torch.cuda.device(self.index):
                return self.run_into(targets, given)
        there = self.there(given)
        if self.listed:
            there = tuple(self._with_tables(dict(zip(self.present, there, strict=True))).values())
        at = tuple([one.data_ptr() for one in there])
        if at not in self.apart:
            read = dict(zip(self.present, there, strict=True))
            self.kind.look(self.op, [], **read)
            check_apart(self, at, [], read)
        flat = self.layout.flat(there) if self.layout.several else there
        if has_functorch_transforms():
            return apply(self.call_of(self.layout.named(flat)), self.general.path, targets)
        return apply_untransformed(self, targets, *flat)

    def _with_tables(self, named: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, lists of experts' tensors on tables of addresses, in place."""
        for name in self.listed:
            if named.get(name).__class__ in LISTS:
                named[name] = with_table(self.op, name, named[name])
        return named

    def forward(self, ctx: Any, targets: Targets, flat: tuple[Any, ...]) -> Any:
        named = self.layout.named(flat)
        result, made = self.path.forward(self._with_tables(named) if self.listed else named, self.wanted, targets.out)
        tensors = (*self.read(flat), *made.values())
        if self.saved_layout is None:
            self.saved_layout = self._layout_saved(made)
        ctx.layouts = None if hooks_of_saved_tensors(False) is None else _layouts(tensors)
        ctx.save_for_backward(*tensors)
        return result

    def _layout_saved(self, made: dict[str, Tensor]) -> Layout:
        sizes = {name: size for name, size, _ in self.layout.slices if name in self.saved}
        return layout_of((*sizes, *made), (*sizes.values(), *[SINGLE] * len(made)), self.absent)

    def backward(self, ctx: Any, targets: Targets, *dy: Tensor) -> Any:
        """By launches; or by public operators, which look at everything anew: with a graph of the backward, from a dy
        that is traced, a view or misaligned, or after hooks gave back tensors that lie otherwise."""
        kept = taken(ctx)
        assert self.saved_layout is not None  # forward ran
        saved = self.saved_layout.named(kept)
        lie_the_same = ctx.layouts is None or ctx.layouts == _layouts(kept)  # hooks may give back something else
        is_common = lie_the_same and are_usual(dy) and are_in_memory(*dy, *kept)
        del kept  # what leaves `saved` is free then
        if not is_common:
            return self.general.differentiate(ctx, targets, saved, dy)
        if self.listed:
            self._with_tables(saved)
        gradients = self.path.gradients(saved, targets, self.wanted, *dy)
        return self.layout.flat_gradients(gradients, lambda: ctx.needs_input_grad[2:])


def run(call: Call, key: Hashable, targets: Targets, path: Path, asked: Call) -> Any:
    """The result of a call for which no step is kept yet, or that has targets; NotImplemented where it is not a common
    one. Then its tensors were found plain.

    Args:
        key: where to keep the step; None where the call did not come through its operator.
        asked: the call that the key is of: its weights may have other parts than those that kernels read.
    """
    steps: Plans[Any] = call.plans
    if targets is not ORDINARY:
        steps, key = PLANS, key_of(call)
    may_keep = key is not None and not has_functorch_transforms()
    step = steps.find(key) if may_keep else None
    if step is None:
        if may_keep and (settled := call.settled(key, steps)):
            problem, like = settled
            step = PlannedStep(call, problem, path, like)
        else:
            call.check_plain()
            if not may_keep:
                return NotImplemented
            problem = call.check()
            if not is_common(call):
                return NotImplemented
            call.check_addresses()
            step = PlannedStep(call, problem, path)
            # `free` tells places in the operator's own key, which is in another order than that of a call with targets.
            if steps is call.plans or not call.of_tokens:
                asked.settle_rows(key, steps, problem, step)
        steps.keep(key, step)
    return step.run_into(targets, tuple([getattr(call, name) for name in call.reads]))


def is_common(call: Call) -> bool:
    """Return True if tensors are plain and in GPU memory, weights of x's dtype or quantised, lists of experts of a
    16-bit operator, and rows or tokens more than one: torch leaves the stride of a single row arbitrary.
    """
    lead, takes_lists = call.lead, not isinstance(call, Quantized)
    is_frozen = isinstance(call, Quantized) and call.is_frozen
    if checking() or lead.device.type != gpus.KERNEL_DEVICE or len(lead) <= 1:
        return False
    for name in call.reads:
        value = getattr(call, name)
        several = isinstance(value, GateUp) or (takes_lists and value.__class__ in LISTS)
        for one in value if several else () if value is None else (value,):
            if one.__class__ not in gpus.PLAIN_TENSORS or one.device != lead.device:
                return False
            if name in call.weights and one.dtype != lead.dtype and not is_frozen:
                return False
    return True


def are_usual(gradients: tuple[Tensor, ...]) -> bool:
    """Return True if kernels take incoming gradients as they are, and nobody makes a graph of this backward or watches
    its operators."""
    if is_grad_enabled() or gpus.is_watched():
        return False
    for dy in gradients:
        if dy.__class__ not in gpus.PLAIN_TENSORS or not dy.is_contiguous() or dy.is_neg():
            return False
        if dy.data_ptr() % ALIGNMENT_BYTES:
            return False
    return True


def are_in_memory(*tensors: Tensor) -> bool:
    """Whether no storage was freed since it was saved, as FSDP does with parameters that it gathers again."""
    return min(map(Tensor.data_ptr, tensors)) >= LOWEST_ADDRESS


def _layouts(tensors: Collection[Tensor]) -> list[Any]:
    return [(t.__class__ in gpus.PLAIN_TENSORS, t.shape, t.dtype, t.device, t.stride()) for t in tensors]
