"""Try one function in a separate process, so that a crash, a GPU fault or a hang ends only this process."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import ffi_bridge
from cute_kernels.specs import Spec, from_dict

from ..choose import known
from ..choose.shipped import TILED
from ..formats.scaled import Scaled
from . import judge
from .catalogue import trials_of
from .guards import Guards, untouched
from .trial import Given, Trial

Tell = Callable[[str], Any]
"""Function called with a description of the next step, so that a report can say where a process ended."""


class Wrong(Exception):
    """Raised if a trial gives a wrong result; the message says which result, and why."""


def prefer(spec: Spec) -> None:
    """Let a spec's function serve every call of its kind in this process, with any number of rows."""
    if spec.op in TILED:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning that it is preferred only in this process
            known.prefer(spec, keep=False)


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to a tensor, to each tensor of a list, or to each part of a quantised tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list):
        return [change(one) for one in value]
    parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **{name: change(part) for name, part in parts.items() if torch.is_tensor(part)})


def _all(given: Given, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {name: _each(value, change) for name, value in given.items()}


def _in_float64(given: Given) -> dict[str, Any]:
    """Return the arguments in float64. Integers stay as they are; so do quantised tensors, whose values are exact."""

    def wide(one: Tensor) -> Tensor:
        return one.double() if one.is_floating_point() else one

    return {name: value if isinstance(value, Scaled) else _each(value, wide) for name, value in given.items()}


def try_out(trial: Trial, device: torch.device) -> None:
    """Run a trial: compare the GPU's results with the CPU's, and check that no bytes beside them were written.

    A second call, and a replay from a CUDA graph if the trial has one, must give the same bits.

    Raises:
        Wrong: a check failed.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the groups end at row")
        given = _all(trial.given, lambda one: one.to(device))
        with Guards() as guards:
            made = trial.call(given)
        check_results(trial, made)
        if beside := guards.complaint():
            raise Wrong(beside)
        _check_same(trial, made, trial.call(given), "a second call")
        if trial.replayed and device.type == "cuda":
            _check_graph(trial, given)


def check_results(trial: Trial, made: Sequence[Tensor]) -> None:
    """Raise Wrong if a result differs from the CPU reference's for the same arguments.

    Args:
        trial: the trial.
        made: the results on the GPU.
    """
    rounded = trial.call(trial.given)
    exact = rounded if trial.is_bits else trial.call(_in_float64(trial.given))
    for place, (one, wanted, in_its_dtype) in enumerate(zip(made, exact, rounded, strict=True)):
        got, tail = trial.parts(one)
        exactly, roughly = trial.parts(wanted)[0], trial.parts(in_its_dtype)[0]
        if wrong := judge.complaint(got.cpu(), exactly, roughly, trial.tolerance):
            raise Wrong(f"result {place} ({one.dtype} {list(one.shape)}): {wrong}")
        if trial.leaves_tail and not untouched(tail):
            raise Wrong(f"result {place}: rows after the groups were written")


def _check_same(trial: Trial, made: Sequence[Tensor], again: Sequence[Tensor], what: str) -> None:
    for place, (one, other) in enumerate(zip(made, again, strict=True)):
        first, second = (trial.parts(each)[0].contiguous().view(torch.uint8) for each in (one, other))
        if not torch.equal(first, second):
            raise Wrong(f"result {place} has other bits in {what}")


def _check_graph(trial: Trial, given: dict[str, Any]) -> None:
    """Check that a graph of the call, replayed with other group sizes, gives the results of a call with these sizes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = trial.call(given)
    for name, value in trial.replayed.items():
        given[name].copy_(value)
    graph.replay()
    _check_same(trial, made, trial.call(given), "a graph that was captured with other groups")


def run(spec: Spec, device: torch.device, tell: Tell) -> int:
    """Run all trials of a function and return their number.

    Args:
        spec: the function's spec.
        device: the GPU.
        tell: called with a description of each trial before it runs.

    Raises:
        Wrong: a trial failed; the rest of the trials do not run.
    """
    prefer(spec)
    trials = list(trials_of(spec))
    with torch.no_grad(), torch.autograd.set_multithreading_enabled(False):  # guards see their own thread alone
        for trial in trials:
            tell(trial.what)
            try_out(trial, device)
    return len(trials)


def main(described: dict[str, Any], index: int, connection: Any) -> None:
    """Try one function, in the child process: send each step through `connection`, and finally the result.

    Args:
        described: the function's spec as in a manifest.
        index: index of the GPU.
        connection: the sending end of a pipe; gets ("at", step), and last ("passed", number of trials, names of the
            functions called) or ("failed", reason).
    """
    spec = from_dict(described)
    torch.set_num_threads(1)  # references are small: with two threads their products take longer
    try:
        torch.cuda.set_device(index)
        count = run(spec, torch.device("cuda", index), lambda what: connection.send(("at", what)))
        called = frozenset(ffi_bridge.load(spec.arch).given_out)
        if spec.name not in called:
            raise Wrong("other functions served its calls")
    except Wrong as wrong:
        connection.send(("failed", str(wrong)))
    except Exception as error:  # any error that torch raises after a kernel's fault counts for this function
        connection.send(("failed", " ".join(f"{type(error).__name__}: {error}".split())))
    else:
        connection.send(("passed", count, called))
