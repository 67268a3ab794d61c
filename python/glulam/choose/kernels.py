"""Find the compiled function of a spec in the bundle or the cache on disk; `compile` makes kernels that both lack."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import ffi_bridge
from cute_kernels.arguments import TENSOR, Argument, Signature
from cute_kernels.chains import signature_of
from cute_kernels.specs import Spec, from_dict
from cute_kernels.stages import draws_tickets
from ffi_bridge import BundleError

from ..host import device as gpus
from ..host import tickets
from ..host.plans import Kept, forget_plans
from . import Chooser, known, loadable, specs
from .loadable import Function
from .problem import Problem, dtype_name


class Kernel(NamedTuple):
    """A function that launches a kernel, and where it comes from: "shipped": the bundle; "jit": `compile` made it."""

    function: Function
    source: str


_compiled: dict[Spec, Function] = {}


def find(spec: Spec) -> Kernel:
    """Find the function that launches a spec. Nothing is compiled.

    Raises:
        BundleError: there is no usable bundle, or the bundle lacks this spec and `compile` has not made it.
    """
    if function := _compiled.get(spec):
        return Kernel(function, "jit")
    try:
        return Kernel(ffi_bridge.load(spec.arch).function(spec.name), "shipped")
    except BundleError:
        if function := loadable.cached(spec):
            return Kernel(function, "jit")
        raise


class ServingFunction(NamedTuple):
    """The function that computes a problem.

    Attributes:
        function: the function, which launches one kernel or several.
        draws_tickets: True: the kernels assign tiles to CTAs by counters, which `host.tickets` provides.
        signature: the function's arguments.
    """

    function: Function
    draws_tickets: bool
    signature: Signature


class FunctionChooser:
    """The functions for problems that differ only in their number of rows. `at(rows)` returns a `ServingFunction`."""

    def __init__(self, problem: Problem, gpu: gpus.Gpu) -> None:
        self._chooser = Chooser(problem, gpu.arch, gpu.name)
        self._found: dict[int, tuple[Spec, ServingFunction]] = {}  # key: id(spec), since hashing a spec takes 1 us

    def at(self, rows: int) -> ServingFunction:
        spec = self._chooser.spec(rows)
        found = self._found.get(id(spec))
        if found is None:
            served = ServingFunction(find(spec).function, draws_tickets(spec), signature_of(spec))
            found = self._found[id(spec)] = spec, served
        return found[1]


class Fixed:
    """Replaces a `FunctionChooser` where one particular function must serve any number of rows.

    Args:
        spec: the function's spec.
        function: the function. None: the one that `find` returns for the spec.
    """

    def __init__(self, spec: Spec, function: Function | None = None) -> None:
        self._served = ServingFunction(function or find(spec).function, draws_tickets(spec), signature_of(spec))

    def at(self, rows: int) -> ServingFunction:
        return self._served


_serving: Kept[FunctionChooser] = Kept()


def serving(problem: Problem, gpu: gpus.Gpu) -> FunctionChooser:
    """Return the `FunctionChooser` of a problem on a GPU, which gives the function for any number of rows.

    It is made once for all problems that differ only in their number of rows.
    The functions for different numbers of rows may differ only in their tiles.

    Raises:
        BundleError: there is no usable bundle, or it lacks a chosen kernel that `compile` has not made either.
    """
    key = gpu, problem.key_without_rows
    found = _serving.find(key)
    if found is None:
        found = FunctionChooser(problem, gpu)
        _serving.keep(key, found)
    return found


def compile(spec: Spec | None = None, /, *, prefer: bool = True, **fields: Any) -> Spec:
    """Compile a kernel that the bundle lacks, and prefer it from now on for every call of its form.

    The form is everything except the tile: operator, dtype, activation, glu_layout, preactivation, transposition.

    The request is checked first. Then the kernel is compiled in a helper process and kept in the cache on disk, where
    later processes find both the kernel and the preference. Nothing is compiled if the bundle or the cache has the
    kernel. A kernel that cannot be kept on disk is preferred in this process only; later processes keep their earlier
    preference. `glulam cache forget NAME` drops the preference, and so does preferring a spec that ships.

    Args:
        spec: a spec of `cute_kernels.specs`. None: the keywords below describe the spec:
        op: "grouped_mm", "grouped_glu", "grouped_mlp", "grouped_dglu", "grouped_wgrad", "quantize_mxfp8" or
            "fold_mxfp8";
        dtype: "bfloat16" (default) or "float16", or the torch dtype;
        tile: (rows, weight rows, depth) of a CTA's tile, or a TileConfig;
        cluster: CTAs along rows and weight rows, default (1, 1), or "adaptive";
        schedule: "cooperative" (default) or "pingpong";
        activation, glu_layout, save_preact, transpose_w, out_dtype, axis, arch: the spec's fields of these names;
        dgrad: for a grouped_dglu, the TileConfig of the data gradient that follows it in a backward.
        prefer: True: prefer the kernel. False: compile it, but leave preferences as they are.

    Returns:
        The spec of the kernel.

    Raises:
        SpecError (a ValueError): an unknown field or value, or a tile that breaks a limit of the hardware, which the
            message names together with the nearest valid choice.
        TypeError: both a spec and keywords, something else as the spec, a tile that is no tuple of integers, or a
            TileConfig together with a cluster or schedule.
        CompileError, ToolchainError (RuntimeErrors): the kernel does not compile, or a tool is missing.
    """
    if not isinstance(prefer, bool):
        raise TypeError(f"compile: prefer is {prefer!r}; give True or False")
    chosen = _asked_for(spec, fields)
    specs.check(chosen)
    if not loadable.in_bundle(chosen):
        from ffi_bridge import jit

        _compiled[chosen] = jit.get(chosen)
    if prefer:
        known.prefer(chosen, keep=loadable.is_loadable(chosen))
        forget_plans()
    return chosen


def _asked_for(spec: Spec | None, fields: dict[str, Any]) -> Spec:
    if spec is None:
        for name in fields.keys() & {"dtype", "out_dtype"}:
            if isinstance(fields[name], torch.dtype):
                fields[name] = dtype_name(fields[name])
        return specs.spec_of(fields.pop("op", None), fields)
    if type(spec) not in specs.SPECS.values():
        raise TypeError(
            f"compile: spec is {spec!r}; give a spec of cute_kernels.specs, or keywords, as op='grouped_mm'"
        )
    if fields:
        raise TypeError(f"compile: give a spec or keywords, not both (got {', '.join(fields)} besides the spec)")
    return spec


def forget_choices() -> None:
    """Drop all choices of kernels, and all plans (launches that are kept for later calls).

    Preferences and tuned tables are read again when the next kernel is chosen.
    """
    known.forget()
    forget_plans()


DUMMY_SIZE = 64
"""Size of every dimension in `_dummy_arguments` except rows (0): a multiple of all block sizes and alignments."""


def _dummy_arguments(spec: Spec, device: torch.device) -> tuple[Any, ...]:
    """Return arguments to call a spec's function with 0 rows, which loads the kernels but launches none."""

    def dummy(argument: Argument) -> Any:
        if argument.kind != TENSOR:
            return argument.absent
        sizes = [0 if size in ("T", "R") else DUMMY_SIZE for size in argument.shape]
        return torch.empty(sizes, dtype=getattr(torch, argument.dtype), device=device)

    return tuple(map(dummy, signature_of(spec).arguments))


def preload(device: torch.device | str | int | None = None) -> int:
    """Load all kernels that calls may use onto a GPU, so that first calls do not pay for loading.

    These are all kernels of the bundle, and the kernels compiled on this machine that calls may get. Loading takes
    about 0.4 ms a kernel. After preloading, even a first call that is captured into a CUDA graph gets ticket counters
    (docs/design.md), by which its kernels balance tiles among CTAs.

    Args:
        device: a CUDA device. None: the current one.

    Returns:
        The number of functions loaded.

    Raises:
        TypeError, ValueError: `device` is not a device, or not a GPU that torch sees.
        UnsupportedDevice: no kernel runs on that GPU, or there is no GPU.
        BundleError: there is no usable bundle.
    """
    index = gpus.cuda_index("preload", device)
    gpu = gpus.gpu(index)
    bundle = ffi_bridge.load(gpu.arch)
    shipped = {from_dict(entry.spec): bundle.function(name) for name, entry in bundle.manifest.functions.items()}
    functions = {**{spec: find(spec).function for spec in known.all_loadable(gpu.name)}, **_compiled, **shipped}
    with torch.cuda.device(index):
        tickets.prepare(torch.device("cuda", index), index)
        for spec, function in functions.items():
            function(*_dummy_arguments(spec, torch.device("cuda", index)))
    return len(functions)
