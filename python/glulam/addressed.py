"""Operators whose kernels take nothing but addresses and numbers, as those of hyper-connections and of the layer: a
plan found by the arguments' metadata, a launch, or the CPU reference.

Every tensor's metadata decides, and alignment is asked for at each call. `plans` says how a call finds its plan. Each
operator, forward or backward, is one exported function and one operator of torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from cute_kernels.chains import signature_of
from cute_kernels.signatures import ADDRESS, FLOAT32, INT32, Signature
from cute_kernels.specs import PARAM_FORMS, Spec

from . import device as gpus
from . import kernels, workspace
from .changed import changed
from .plan import check_apart, check_overlaps, launch_nothing
from .plans import Plans, unplanned
from .signature import (
    ALIGNMENT_BYTES,
    check_plain,
    check_written,
    extent,
    is_transformed,
    refuse_out,
    runs_kernels,
    tensors_of,
)

MAX_TOKENS = 2**27


@cache  # equal plans have the same
def _picked(*places: int) -> Callable[[list[int]], tuple[int, ...]]:
    """Of a list, what stands at these places."""
    if len(places) < 2:
        return lambda values: tuple([values[place] for place in places])
    return itemgetter(*places)


Tensors = Sequence[Tensor | None]


class Layout(NamedTuple):
    """What a launch takes besides addresses: the spec's fields, and the numbers behind the addresses.

    Attributes:
        lead: the input that gives dtype and device.
        kernel, n: of the spec; its dtype is the lead's, or float32 for Sinkhorn's.
        numbers: by the names of the kernel's signature, num_sms left out.
        work: whether there is any; without, nothing is launched.
        workspace: float32 elements of it; 0 where the kernel takes none.
    """

    lead: Tensor
    kernel: str
    n: int
    numbers: dict[str, float]
    work: bool = True
    workspace: int = 0


@dataclass(frozen=True)
class Plan:
    """The constants of a call.

    `tail`: its numbers, and `numbers`: their names. `extents`, `out_extents`: bytes of each input and given output.
    `in_order`: see `Operator.in_order`.
    """

    op: str
    function: Callable[..., Any]
    index: int
    only: bool
    numbers: tuple[str, ...]
    tail: tuple[float, ...]
    extents: tuple[int, ...]
    out_extents: tuple[int, ...]
    apart: set[tuple[int, ...]] = field(default_factory=set, kw_only=True)
    in_order: Callable[[list[int]], Any] | None
    takes_scratch: bool
    scratch: workspace.Layout | None


class Operator:
    """One kernel and its reference. A subclass says what its tensors and options mean.

    `op`: what errors call it. `kernel`: of the spec. `inputs`, `outputs`: names in the order of the kernel's addresses.
    `loose`: of these, those that need no alignment. `schema`: of the operator of torch's, whose name begins with
    `family`. `streams`: the input whose dimensions before the last `trailing` all of a token's tensors have, which are
    all but `shared`.
    """

    op: str
    kernel: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    loose: tuple[str, ...] = ()
    family: str
    streams: str = "x"
    trailing: int
    shared: frozenset[str] = frozenset()
    schema: str

    def __init__(self) -> None:
        self.plans: Plans[Plan] = Plans()
        self.count = len(self.outputs)
        aligned = [i for i, name in enumerate((*self.inputs, *self.outputs)) if name not in self.loose]
        self.only_aligned = _picked(*aligned) if self.loose else None
        self._streams_at = self.inputs.index(self.streams)
        self.has_optional = "Tensor?" in getattr(self, "schema", "")

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> None:
        """Raises ValueError or TypeError. Backward operators have none: their callers are the autograd functions."""

    def results(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        """New tensors for the outputs, uninitialised; None for what is not wanted."""
        raise NotImplementedError

    def reference(self, tensors: Any, options: Any) -> tuple[Tensor | None, ...]:
        raise NotImplementedError

    def layout(self, tensors: Any, options: Any, sm_count: int) -> Layout:
        raise NotImplementedError

    def spec(self, layout: Layout, arch: str) -> Spec:
        """The kernel, or the chain of them."""
        raise NotImplementedError

    def __call__(
        self, tensors: Tensors, options: tuple[Any, ...] = (), out: tuple[Tensor, ...] | None = None
    ) -> tuple[Any, ...]:
        """The outputs; `out` itself where it is given."""
        key = None
        if not unplanned():
            try:
                given = tensors if out is None else (*tensors, *out)
                lacks: Any = out is None
                if self.has_optional:
                    lacks = (lacks, *[t is None for t in tensors])
                    given = [t for t in given if t is not None]
                key, plan = self.plans.look_up(given, (options, lacks))
                if plan is not None:
                    return self.launch(plan, tensors, options, out)
            except Exception:  # the checks say of which argument; what is no argument's fault comes again behind them
                key = None
        return self.settle(key, tensors, options, out)

    def settle(self, key: Any, tensors: Tensors, options: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        """A call that no plan serves yet."""
        if key is not None and (like := self._settled(key, tensors, out)):
            try:
                plan = self.resized(like, tensors, options, out)
                self.plans.keep(key, plan)
                return self.launch(plan, tensors, options, out)
            except Exception:  # as above
                key = None
        if is_dynamo_compiling() or any(map(gpus.is_traced, (*tensors, *(out or ())))):
            return self.dispatch(tensors, options, out)
        named = (*zip(self.inputs, tensors, strict=True), *zip(self.out_names(out or ()), out or (), strict=True))
        for name, value in named:
            for label, tensor in tensors_of(name, value):
                check_plain(self.op, label, tensor)
        for name, value in named[len(tensors) :]:
            for label, tensor in tensors_of(name, value):
                check_written(self.op, label, tensor)
        self.check(tensors, options)
        if out is not None:
            self.check_out(tensors, options, out)
        lead = next(t for t in tensors if t is not None)
        if not runs_kernels(lead):
            with torch.autocast(lead.device.type, enabled=False):
                return self.compute(tensors, options, out)
        plan = self.plan(tensors, options, out)
        if key is not None:
            self.plans.keep(key, plan)
            with_tokens = [t for name, t in zip(self.inputs, tensors, strict=True) if name not in self.shared]
            count = sum(t is not None for t in (*with_tokens, *(out or ())))
            if plan.function is not launch_nothing:
                self.plans.settle(key, self._lead(tensors), count, plan)
        return self.launch(plan, tensors, options, out)

    def _lead(self, tensors: Tensors) -> tuple[int, ...]:
        """The dimensions of tokens."""
        streams: Any = tensors[self._streams_at]
        lead: tuple[int, ...] = streams.shape[: -self.trailing]
        return lead

    def _settled(self, key: Any, tensors: Tensors, out: Any) -> Plan | None:
        """The plan of a call that was checked and differs in its tokens alone, of which both have some."""
        if out is not None and is_grad_enabled():  # which no key tells, and `check_written` asks
            return None
        lead = self._lead(tensors)
        known: Plan | None = self.plans.settled(key, lead) if 0 < math.prod(lead) < MAX_TOKENS else None
        return known

    def check_out(self, tensors: Tensors, options: tuple[Any, ...], out: Any) -> None:
        """Buffers of the results' shapes and dtypes that share no memory with an input."""
        with torch.device("meta"):
            wanted = self.results([None if t is None else t.to("meta") for t in tensors], options)
        wanted = tuple(t for t in wanted if t is not None)[: len(out)]
        lead = next(t for t in tensors if t is not None)
        for name, given, like in zip(self.out_names(out), out, wanted, strict=True):
            if not isinstance(given, Tensor):
                raise TypeError(f"{self.op}: {name} is a {type(given).__name__}; give a tensor {list(like.shape)}")
            if given.shape != like.shape or given.dtype != like.dtype:
                raise ValueError(
                    f"{self.op}: {name} is {given.dtype} {list(given.shape)}; it must be {like.dtype} "
                    f"{list(like.shape)}, as the result is"
                )
            if given.device != lead.device or not given.is_contiguous():
                raise ValueError(f"{self.op}: {name} must be contiguous and on {lead.device}; give a fresh buffer")
            check_overlaps(self.op, name, given, dict(zip(self.inputs, tensors, strict=True)))

    def out_names(self, out: Any) -> list[str]:
        return ["out"] if len(out) == 1 else [f"out[{i}]" for i in range(len(out))]

    def compute(self, tensors: Tensors, options: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        results = self.reference(tensors, options)
        return results if out is None else self.copied(results, out)

    @staticmethod
    def copied(results: Any, out: Any) -> tuple[Any, ...]:
        """`out`, holding the first results, and those that it has no buffer for."""
        for target, result in zip(out, results, strict=False):
            target.copy_(result)
        return (*out, *results[len(out) :])

    def plan(self, tensors: Tensors, options: tuple[Any, ...], out: Any) -> Plan:
        lead = next(t for t in tensors if t is not None)
        index = lead.get_device()
        gpu = gpus.gpu(index)
        layout = self.layout(tensors, options, gpu.sm_count)
        spec = self.spec(layout, gpu.arch)
        signature = signature_of(spec)
        numbers = tuple(argument.name for argument in signature.arguments if argument.kind in (INT32, FLOAT32))
        return Plan(
            op=self.op,
            function=kernels.find(spec).function if layout.work else launch_nothing,
            index=index,
            only=gpus.is_only_one(),
            numbers=numbers,
            in_order=self.in_order(signature),
            takes_scratch="workspace" in signature.names,
            **self._sizes(layout, numbers, gpu.sm_count, tensors, out),
        )

    def resized(self, like: Plan, tensors: Tensors, options: tuple[Any, ...], out: Any) -> Plan:
        """A plan like another one, for other tokens, of which both have some."""
        sm_count = gpus.gpu(like.index).sm_count
        layout = self.layout(tensors, options, sm_count)
        return changed(like, apart=set(), **self._sizes(layout, like.numbers, sm_count, tensors, out))

    def _sizes(
        self, layout: Layout, numbers: tuple[str, ...], sm_count: int, tensors: Tensors, out: Any
    ) -> dict[str, Any]:
        """The fields of a plan that depend on the number of tokens."""
        size, lead = layout.workspace, layout.lead
        given = {**layout.numbers, "num_sms": sm_count}
        return {
            "tail": tuple([given[name] for name in numbers]),
            "extents": tuple([0 if t is None else extent(t) for t in tensors]),
            "out_extents": tuple(map(extent, out or ())),
            "scratch": workspace.Layout((1, size), torch.float32, lead.device, lead.get_device()) if size else None,
        }

    def in_order(self, signature: Signature) -> Callable[[list[int]], Any] | None:
        """Puts the addresses of inputs, outputs and workspace in the order of the kernel; None where it is that."""
        ours = [*self.inputs, *self.outputs, "workspace"]
        wanted = [ours.index(argument.name) for argument in signature.arguments if argument.kind == ADDRESS]
        return None if wanted == sorted(wanted) else _picked(*wanted)

    def launch(self, plan: Plan, tensors: Tensors, options: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        if not plan.only and gpus.current() != plan.index:
            with torch.cuda.device(plan.index):
                return self.launch(plan, tensors, options, out)
        if plan.function is launch_nothing:  # sums over no tokens are zero
            return tuple(r if r is None else r.zero_() for r in out or self.results(tensors, options))
        if out is None:
            results = self.results(tensors, options)
        else:
            results = out if len(out) == self.count else self.completed(out, tensors, options)
        addresses = [0 if t is None else t.data_ptr() for t in (*tensors, *results)]
        if reduce(or_, addresses if self.only_aligned is None else self.only_aligned(addresses), 0) % ALIGNMENT_BYTES:
            self.refuse_alignment(addresses)
        at = tuple(addresses[: len(tensors) + len(plan.out_extents)])
        if at not in plan.apart:
            check_apart(plan, at, out or (), dict(zip(self.inputs, tensors, strict=True)))
        if plan.takes_scratch:
            scratch = None if plan.scratch is None else workspace.take(plan.scratch)
            addresses.append(0 if scratch is None else scratch.data_ptr())
        ordered = addresses if plan.in_order is None else plan.in_order(addresses)
        plan.function(*ordered, *plan.tail, gpus.raw_stream(plan.index))
        return results

    def completed(self, given: Any, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
        """All outputs, where only the first are given."""
        return (*given, *self.results(tensors, options)[len(given) :])

    def refuse_alignment(self, addresses: list[int]) -> None:
        for name, address in zip((*self.inputs, *self.outputs), addresses, strict=False):
            over = address % ALIGNMENT_BYTES
            if over and name not in self.loose:
                raise ValueError(
                    f"{self.op}: {name} starts {over} bytes after a multiple of {ALIGNMENT_BYTES}; it must start at "
                    "one, so clone() it, or cut the view elsewhere"
                )

    def dispatch(self, tensors: Tensors, options: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        """Through torch's dispatcher, as an operator that traces see as one."""
        if out is not None and not is_dynamo_compiling():
            self.check_out(tensors, options, out)
        returned = iter(getattr(torch.ops.glulam, f"{self.family}_{self.kernel}")(*tensors, *options))
        results = tuple(next(returned) if wanted else None for wanted in self.wanted(tensors, options))
        return results if out is None else self.copied(results, out)

    def wanted(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[bool, ...]:
        """Which outputs there are."""
        return (True,) * len(self.outputs)

    def differentiable(self, tensors: Any, options: Any) -> tuple[Any, ...] | None:
        """The results with a backward; None of an operator that has none."""
        return None


def forms(*params: Tensor | None) -> int:
    """The dtypes of parameters as kernels take them: two bits each, the first lowest."""
    codes = (0 if p is None else PARAM_FORMS[str(p.dtype).removeprefix("torch.")] for p in params)
    return sum(code << 2 * place for place, code in enumerate(codes))


def recorded(op: str, out: Any, *tensors: Any) -> bool:
    """Whether a gradient is to be recorded; then `out` must be absent. Traces decide in torch's dispatcher."""
    if is_grad_enabled():
        for tensor in tensors:
            if getattr(tensor, "requires_grad", False):
                refuse_out(op, out)
                return not (is_dynamo_compiling() or is_transformed(*tensors))
    return False


def empty_like_param(tensor: Tensor, wanted: bool) -> Tensor | None:
    return torch.empty_like(tensor) if wanted else None
