"""Planned steps: forward and backward of common differentiable calls on a GPU, with launches that are kept.

A planned step serves all calls of one signature (metadata of all arguments). It decides once which tensors are saved
and which gradients are computed, and holds the kernel launches of both directions. In rare cases (`is_common`,
`are_usual`) public operators compute instead, in forward, backward or both.
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
from ..calls.memory import check_unseen
from ..calls.quantized import Quantized
from ..choose.problem import Problem
from ..host import device as gpus
from ..host.experts import GateUp
from ..host.plans import Plans
from ..ops.quantized_weights import with_parts_as_read
from .function import SINGLE, FlatLayout, Step, apply, apply_untransformed, flatten, layout_of, picker
from .parts import ORDINARY, Targets, key_of
from .path import LISTS, Path, with_table

has_functorch_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
hooks_of_saved_tensors: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks

PLANS: Plans[Any] = Plans()
"""The kept steps of calls with targets (buffers for the result or gradients). Such calls come from nn modules, not from
an operator's public function.
"""


class PlannedStep(Step):
    """A step (forward and backward of a call) with its kernel launches, for all calls of one signature.

    Attributes:
        general: the same step, computed by public operators, for rare cases.
        kind: class of the call.
        names: the call's tensor arguments, in the order in which `run` takes them.
        present: the arguments in `names` that are not None.
        absent: the arguments in `names` that are None.
        there: function that picks the present arguments from a tuple of all.
        listed: names of arguments that are lists of experts' tensors.
        wanted: names of arguments that require a gradient.
        saved: names of arguments that are saved, since backward reads them.
        read: function that picks the tensors of the saved arguments from the flat inputs (see `FlatLayout`).
        saved_layout: layout of all saved tensors. None: forward has not run yet.
        arguments: the call's options by name.
        is_frozen: True: weights are quantised and not trained.
        index: the device's index.
        only: True: the process sees only one GPU.
        rows: T of the call.
        extents: the bytes that each present argument spans, for `memory.check_unseen`.
        out_extents: the bytes of given outputs, of which there are none.
        seen: the tuples of addresses that passed `memory.check_unseen`.
    """

    out_extents: tuple[int, ...] = ()
    saved_layout: FlatLayout | None = None

    def __init__(self, call: Call, problem: Problem, path: Path, like: PlannedStep | None = None) -> None:
        """Make the step of a checked call.

        Args:
            call: the call, with weights as kernels read them.
            problem: the call's problem.
            path: the call's path, without launches.
            like: the step of a call that differs only in its number of rows; its plans are copied and resized. None:
                there is no such step.
        """
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
        self.index, self.only = call.lead.get_device(), gpus.has_single_gpu()
        self.rows, self.extents = problem.rows, call.extents(self.present)
        self.seen: set[tuple[Any, ...]] = set()

    @property
    def parts(self) -> dict[str, Plan]:
        """{name of a part: its plan}, for the parts that ran already."""
        assert self.path.launches is not None
        return {name: plan for name, (plan, _) in self.path.launches.plans.items()}

    def run(self, *given: Any) -> Tensor:
        """Compute the call; return the differentiable result. `given`: the tensors of `names`, then `out`, None."""
        return self.run_into(ORDINARY, self._as_read(given[:-1]) if self.is_frozen else given[:-1])

    def _as_read(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the call's tensors, with quantised weights prepared as kernels read them.

        given: the tensors of `names`.
        """
        call = with_parts_as_read(self.call_of(dict(zip(self.names, given, strict=True))))
        return tuple([getattr(call, name) for name in self.names])

    def call_of(self, named: dict[str, Any]) -> Call:
        """Make the call with these tensors.

        Args:
            named: tensors by name, group sizes as "groups"; this method changes the dict.
        """
        groups = {"offs": None, "splits": None, self.path.grouped_by: named.pop("groups")}
        return self.kind(**{**self.arguments, **groups, "out": None, **named})

    def run_into(self, targets: Targets, given: tuple[Any, ...]) -> Tensor:
        """Compute the call; return the differentiable result.

        Args:
            targets: buffers for the result, and for gradients in backward.
            given: the tensors of `names`.
        """
        if not self.only and gpus.current() != self.index:
            with torch.cuda.device(self.index):
                return self.run_into(targets, given)
        there = self.there(given)
        if self.listed:
            there = tuple(self._with_tables(dict(zip(self.present, there, strict=True))).values())
        at = tuple([one.data_ptr() for one in there])
        if at not in self.seen:
            read = dict(zip(self.present, there, strict=True))
            self.kind.check_new_addresses(self.op, [], **read)
            check_unseen(self, at, [], read)
        flat = self.layout.flat(there) if self.layout.several else there
        if has_functorch_transforms():
            return apply(self.call_of(self.layout.named(flat)), self.general.path, targets)
        return apply_untransformed(self, targets, *flat)

    def _with_tables(self, named: dict[str, Any]) -> dict[str, Any]:
        """Replace lists of experts' tensors by `ExpertList`s in `named`, a dict of arguments; return the dict."""
        for name in self.listed:
            if named.get(name).__class__ in LISTS:
                named[name] = with_table(self.op, name, named[name])
        return named

    def forward(self, ctx: Any, targets: Targets, flat: tuple[Any, ...]) -> Any:
        """Compute and return the result, and save tensors for backward.

        Args:
            ctx: autograd's context.
            targets: buffers for the result and gradients.
            flat: the inputs, one for each tensor of the arguments (`FlatLayout`).
        """
        named = self.layout.named(flat)
        result, made = self.path.forward(self._with_tables(named) if self.listed else named, self.wanted, targets.out)
        tensors = (*self.read(flat), *made.values())
        if self.saved_layout is None:
            self.saved_layout = self._layout_saved(made)
        ctx.layouts = None if hooks_of_saved_tensors(False) is None else _layouts(tensors)
        ctx.save_for_backward(*tensors)
        return result

    def _layout_saved(self, made: dict[str, Tensor]) -> FlatLayout:
        """Return the layout of all saved tensors. `made`: the tensors that forward made for backward, by name."""
        sizes = {name: size for name, size, _ in self.layout.slices if name in self.saved}
        return layout_of((*sizes, *made), (*sizes.values(), *[SINGLE] * len(made)), self.absent)

    def backward(self, ctx: Any, targets: Targets, *dy: Tensor) -> Any:
        """Compute the gradients of the inputs that `forward` got as `flat` (one for each tensor of the arguments): by
        launches if possible, else by public operators.

        Public operators, which check all tensors again, compute in these cases: autograd records a graph of the
        backward; dy is traced, not contiguous or misaligned; the storage of a tensor was freed; hooks of saved tensors
        returned tensors with another layout.

        Args:
            ctx: autograd's context of the forward.
            targets: buffers that the caller gave for the result and gradients.
            dy: the gradients of the results.
        """
        kept = taken(ctx)
        assert self.saved_layout is not None  # forward ran
        saved = self.saved_layout.named(kept)
        lie_the_same = ctx.layouts is None or ctx.layouts == _layouts(kept)  # hooks may give back something else
        is_common = lie_the_same and are_usual(dy) and are_in_memory(*dy, *kept)
        del kept  # so that a tensor removed from `saved` is freed
        if not is_common:
            return self.general.differentiate(ctx, targets, saved, dy)
        if self.listed:
            self._with_tables(saved)
        gradients = self.path.gradients(saved, targets, self.wanted, *dy)
        return self.layout.flat_gradients(gradients, lambda: ctx.needs_input_grad[2:])


def run(call: Call, key: Hashable, targets: Targets, path: Path, as_called: Call) -> Any:
    """Compute a call by a planned step: a kept one, or a new one, which is kept; return the result.

    This is called for calls whose operator found no step, and for calls with targets.

    Args:
        call: the call, with weights as kernels read them.
        key: the key for keeping the step. None: the call did not come through its operator.
        targets: buffers for the result and gradients.
        path: the call's path, without launches.
        as_called: the call to which the key belongs; its weights may not be prepared yet.

    Returns:
        The result; NotImplemented if the call is not common (`is_common`), after its tensors passed `check_plain`.
    """
    steps: Plans[Any] = call.plans
    if targets is not ORDINARY:
        steps, key = PLANS, key_of(call)
    may_keep = key is not None and not has_functorch_transforms()
    step = steps.find(key) if may_keep else None
    if step is None:
        if may_keep and (found := call.find_resizable(key, steps)):
            problem, like = found
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
            # `gathered_places` tells places in the operator's own key, which is in another order than the key of a call
            # with targets.
            if steps is call.plans or not call.of_tokens:
                as_called.keep_resizable(key, steps, problem, step)
        steps.keep(key, step)
    return step.run_into(targets, tuple([getattr(call, name) for name in call.reads]))


def is_common(call: Call) -> bool:
    """Return True if a planned step can serve the call. All of these must hold:

    * Tensors are plain (no subclasses) and on the same GPU.
    * Weights have x's dtype, or are quantised and frozen.
    * Lists of experts belong to a 16-bit operator.
    * There is more than one row or token, since torch leaves the stride of a single row arbitrary.
    * $GLULAM_CHECK is not set.
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
    """Return True if a planned backward can use the incoming gradients.

    Kernels must be able to read the gradients as they are, autograd must not record a graph of the backward, and no
    dispatch mode or trace may be active (`device.is_watched`).
    """
    if is_grad_enabled() or gpus.is_watched():
        return False
    for dy in gradients:
        if dy.__class__ not in gpus.PLAIN_TENSORS or not dy.is_contiguous() or dy.is_neg():
            return False
        if dy.data_ptr() % ALIGNMENT_BYTES:
            return False
    return True


def are_in_memory(*tensors: Tensor) -> bool:
    """Return True if no storage was freed since its tensor was saved (FSDP frees parameters that it gathers again)."""
    return min(map(Tensor.data_ptr, tensors)) >= LOWEST_ADDRESS


def _layouts(tensors: Collection[Tensor]) -> list[Any]:
    """Return the metadata of tensors that hooks of saved tensors might change: class, shape, dtype, device, strides."""
    return [(t.__class__ in gpus.PLAIN_TENSORS, t.shape, t.dtype, t.device, t.stride()) for t in tensors]
