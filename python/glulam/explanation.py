"""explain: which kernel a call would get, and why. It asks the dispatcher, and launches nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cute_kernels.specs import Spec
from ffi_bridge import BundleError
from ffi_bridge.profiles import DEFAULT

from . import recipes
from .activations import packed
from .calls import front
from .calls.call import Call
from .calls.checks import any_requires_grad, runs_kernels
from .calls.roles import ROLES
from .choose import choose, invariance, kernels, known
from .choose.problem import Problem, changed
from .choose.shipped import TILED, Choice
from .host import device as gpus
from .host.experts import GateUp

ON_CPU = "not promised: torch multiplies on the CPU, in an order of its own for each shape"
CALLS: dict[str, type[Call]] = {kind.op: kind for kind in front.OPERATORS if kind.explains}


@dataclass(frozen=True, repr=False)
class Explanation:
    """The kernel that a call would get, and the reasons.

    Attributes:
        op: the operator's name.
        device: the call's device, such as "cuda:0".
        spec: the kernel's spec; None: the CPU reference.
        source: "shipped" (in the bundle), "jit" (made by glulam.compile), "tuned" (chosen by a table of glulam.tune,
            and in the bundle or compiled before), "reference", or "missing": the call would raise, and `why` says what
            to do.
        why: the reason for this choice.
        why_not: reasons against kernels that might be faster, and against kernels that were never run.
        state: state of the kernels for this architecture on this GPU: "tested", "validated here" or "built, never run".
        invariant: True: the call is batch-invariant: a row's bits depend neither on the other rows nor on the GPU's
            number of SMs.
        batch: the reason for `invariant`, and what `glulam.batch_invariant(True)` would change.
        invariant_spec: spec of the kernel that the call gets under `glulam.batch_invariant(True)`; None: the CPU
            reference.
    """

    op: str
    device: str
    spec: Spec | None
    source: str
    why: str
    why_not: tuple[str, ...] = ()
    state: str = ""
    invariant: bool = False
    batch: str = ""
    invariant_spec: Spec | None = None

    def __repr__(self) -> str:
        kernel = "CPU reference" if self.spec is None else self.spec.name
        lines = [f"{self.op} on {self.device}: {kernel} ({self.source})", f"  why      {self.why}"]
        if self.spec is not None and self.state not in ("", gpus.TESTED):
            lines.append(f"  kernels  {self.spec.arch}: {self.state}")
        if self.batch:
            lines.append(f"  batch    {self.batch}")
        return "\n".join([*lines, *(f"  why not  {reason}" for reason in self.why_not)])


def explain(
    op: str | Callable[..., Any], /, *args: Any, dtype: str | torch.dtype | None = None,
    device: torch.device | str | int | None = None, **kwargs: Any,
) -> Explanation:  # fmt: skip
    """Return which kernel a call of an operator would get, and why.

    Args:
        op: the operator or its name, such as "grouped_mlp".
        *args, **kwargs: the operator's arguments. If x is a shape, such as (T, H), other tensors may be shapes too, and
            offs and splits may be left out, except for grouped_wgrad, which needs them to know the number of experts.
        dtype: only with shapes: the tensors' dtype; None: bfloat16.
        device: only with shapes: the tensors' device; None: the current GPU, or without a GPU a Hopper.

    Raises:
        ValueError, TypeError: the call itself would raise the same error.
        UnsupportedDevice: no kernel runs on that GPU.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in CALLS:
        raise ValueError(f"explain: op is {name!r}; choose one of {', '.join(CALLS)}")
    call_type = CALLS[name]
    parameters = inspect.signature(call_type.public or call_type.operator)
    bound = parameters.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = call_type.arguments_of(packed(bound.arguments))
    recipe, quantized = recipes.find(name, arguments.get("recipe", recipes.BF16)), call_type.quantized
    if quantized is not None and arguments.get("w").__class__ in quantized.classes:
        recipe = recipes.find(name, arguments["w"].weight_only)
    if quantized is not None and recipe is not recipes.BF16:
        call_type, arguments = quantized, quantized.unwrapped(recipe, arguments)
    elif "recipe" in arguments:
        arguments["recipe"] = recipe.name
    lead = arguments[call_type.leads]
    if isinstance(lead, Tensor):
        if dtype is not None or device is not None:
            raise TypeError("explain: dtype and device go with shapes; the tensors given have their own")
        where = lead.device
        gpu = gpus.gpu(lead.get_device()) if runs_kernels(lead) else None
    else:
        where, gpu = _target(device)
        arguments = _shapes_as_tensors(call_type, arguments, _dtype(dtype))
    call = call_type(**{name: arguments.get(name) for name in call_type.names})
    problem = call.check()
    if gpu is None:
        why_not = ("kernels run on tensors on a GPU",)
        return Explanation(name, str(where), None, "reference", "the tensors are on the CPU", why_not, batch=ON_CPU)
    explained = _in_words(name, call.choice(problem, gpu.arch, gpu.name), str(where), gpu)
    return replace(explained, **_batch_in_words(call, problem, gpu))


def _batch_in_words(call: Call, problem: Problem, gpu: gpus.Gpu) -> dict[str, Any]:
    """Return the fields invariant, batch and invariant_spec of a call's Explanation."""
    spec = call.choice(changed(problem, invariant=True), gpu.arch, gpu.name).spec
    if call.invariant:
        return {"invariant": True, "batch": f"invariant: {invariance.SWITCH} is set", "invariant_spec": spec}
    if cut := call.definition.cuts:
        batch = f"not invariant: it cuts {cut}; {invariance.SWITCH} cuts alike for all"
        return {"batch": batch, "invariant_spec": spec}
    rounds = getattr(call, "is_frozen", False) and not getattr(call, "recompute", True)
    if rounds and torch.is_grad_enabled() and any_requires_grad(*(one for _, one in call.tensors())):
        return {"batch": f"not invariant: {invariance.ROUNDED}; {invariance.SWITCH} does not", "invariant_spec": spec}
    served = problem.expected if problem.op in TILED else None
    if served is None or _serves_in_one_order(served, gpu):
        batch = "invariant: whatever the number of rows, they are added in one order"
        return {"invariant": True, "batch": batch, "invariant_spec": spec}
    others = ", ".join(str(order) for order in invariance.order_of(served, gpu.arch)[:1])
    batch = f"not invariant: another number of rows may be added in another order; {invariance.SWITCH} keeps {others}"
    return {"batch": f"{batch}, and takes {spec.name}", "invariant_spec": spec}


def _serves_in_one_order(problem: Problem, gpu: gpus.Gpu) -> bool:
    """Return True if all kernels that may be chosen for a problem, for any number of rows, add in the same order."""
    tuned = known.tuned(problem, gpu.name)
    chosen = [choose(problem, gpu.arch, gpu.name).spec, *(tuned[0].kernels.values() if tuned else ())]
    wanted = changed(problem, invariant=True)
    return invariance.is_invariant(problem, gpu.arch) and all(
        invariance.keeps_order(spec, wanted, gpu.arch) for spec in chosen
    )


def of_problem(problem: Problem, device: str, gpu: gpus.Gpu) -> Explanation:
    """Return the Explanation of a problem (a call's sizes and options) on a GPU.

    If `gpu` has no name, tuned tables are not used.
    """
    return _in_words(problem.op, choose(problem, gpu.arch, gpu.name), device, gpu)


def _in_words(op: str, choice: Choice, device: str, gpu: gpus.Gpu) -> Explanation:
    try:
        source, why = kernels.find(choice.spec).source, choice.why
        source = "tuned" if choice.is_tuned else source
    except BundleError as error:
        source, why = "missing", str(error)
    why_not = choice.why_not
    if gpu.passed_over:
        why_not = (*why_not, ": ".join(gpus.why_passed_over(gpu.passed_over, gpu.arch)))
    return Explanation(op, device, choice.spec, source, why, why_not, gpus.state_of(gpu.arch, gpu.name))


def _target(device: Any) -> tuple[torch.device, gpus.Gpu | None]:
    """Return the device that a call with shapes is explained for, and its GPU; for the CPU the GPU is None.

    If `device` is None and torch sees no GPU, the GPU is a Hopper without a name.
    """
    if device is None and not torch.cuda.is_available():
        return torch.device(gpus.KERNEL_DEVICE), gpus.Gpu("", DEFAULT, 0)
    where = gpus.parsed("explain", "cuda" if device is None else device)
    if where.type != "cuda":
        return where, None
    index = gpus.cuda_index("explain", where)
    return torch.device("cuda", index), gpus.gpu(index)


def _dtype(dtype: Any) -> torch.dtype:
    """Return the torch dtype for a dtype, its name, or None (bfloat16). Raises TypeError for anything else."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else torch.bfloat16 if dtype is None else dtype
    if not isinstance(found, torch.dtype):
        raise TypeError(f"explain: dtype is {dtype!r}; give a torch dtype, as torch.bfloat16, or its name")
    return found


def _shapes_as_tensors(call_type: type[Call], arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments with each shape replaced by a meta tensor; arguments that are not shapes stay unchanged."""

    def tensor(name: str, shape: Sequence[int], of: torch.dtype = dtype) -> Tensor:
        try:
            return torch.empty(tuple(shape), dtype=of, device="meta")
        except (RuntimeError, TypeError):
            raise ValueError(f"explain: {name} is {shape!r}; give the sizes of a tensor") from None

    result = dict(arguments)
    for name in (*call_type.matrices, *call_type.outputs, *call_type.weights, *call_type.biases, *call_type.scales):
        value = arguments.get(name)
        if isinstance(value, (tuple, list)) and all(type(size) is int for size in value):
            of = ROLES[name].dtype if name in ROLES else None
            result[name] = tensor(name, value, of or dtype)
        elif isinstance(value, GateUp):
            result[name] = GateUp(*(tensor(f"{name}.{part}", one) for part, one in value._asdict().items()))
    weights = result[call_type.weights[0]] if call_type.weights else None
    weights = weights.gate if isinstance(weights, GateUp) else weights
    if (isinstance(weights, Tensor) and weights.dim()) or isinstance(weights, (list, tuple)):
        result["offs"], result["splits"] = tensor("offs", (len(weights),), torch.int32), None
    return result
