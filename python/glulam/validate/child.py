"""One function, tried in a process of its own: a crash, a fault of the GPU or a hang ends this process alone."""

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
"""Takes what is about to happen, for whoever has to say where a process ended."""


class Wrong(Exception):
    """A result that is not as it should be; the message says which, and why."""


def prefer(spec: Spec) -> None:
    """Let the function serve every call of its kind, whatever the number of rows."""
    if spec.op in TILED:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is preferred in this process alone
            known.prefer(spec, keep=False)


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A tensor, a list or a format made of tensors, with each of them changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list):
        return [change(one) for one in value]
    parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **{name: change(part) for name, part in parts.items() if torch.is_tensor(part)})


def _all(given: Given, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {name: _each(value, change) for name, value in given.items()}


def _in_float64(given: Given) -> dict[str, Any]:
    """Return the arguments in float64, except quantised tensors, which are exact."""

    def wide(one: Tensor) -> Tensor:
        return one.double() if one.is_floating_point() else one

    return {name: value if isinstance(value, Scaled) else _each(value, wide) for name, value in given.items()}


def try_out(trial: Trial, device: torch.device) -> None:
    """Compare the GPU's results with the CPU's, look for bytes written beside them, and do it all again.

    Raises:
        Wrong: what is not as it should be.
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
    """Raises Wrong where a result is not what the CPU reference computes of the same."""
    rounded = trial.call(trial.given)
    exact = rounded if trial.is_bits else trial.call(_in_float64(trial.given))
    for place, (one, wanted, in_its_dtype) in enumerate(zip(made, exact, rounded, strict=True)):
        got, tail = trial.parts(one)
        exactly, roughly = trial.parts(wanted)[0], trial.parts(in_its_dtype)[0]
        if wrong := judge.complaint(got.cpu(), exactly, roughly, trial.tolerance):
            raise Wrong(f"result {place} ({one.dtype} {list(one.shape)}): {wrong}")
        if trial.leaves_tail and not untouched(tail):
            raise Wrong(f"result {place}: rows behind the groups were written")


def _check_same(trial: Trial, made: Sequence[Tensor], again: Sequence[Tensor], what: str) -> None:
    for place, (one, other) in enumerate(zip(made, again, strict=True)):
        first, second = (trial.parts(each)[0].contiguous().view(torch.uint8) for each in (one, other))
        if not torch.equal(first, second):
            raise Wrong(f"result {place} has other bits in {what}")


def _check_graph(trial: Trial, given: dict[str, Any]) -> None:
    """Captured with what is given, replayed with other sizes of groups."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = trial.call(given)
    for name, value in trial.replayed.items():
        given[name].copy_(value)
    graph.replay()
    _check_same(trial, made, trial.call(given), "a graph that was captured with other groups")


def run(spec: Spec, device: torch.device, tell: Tell) -> int:
    """All trials of a function. Returns their number.

    Raises:
        Wrong: the first that is not as it should be.
    """
    prefer(spec)
    trials = list(trials_of(spec))
    with torch.no_grad(), torch.autograd.set_multithreading_enabled(False):  # guards see what their own thread makes
        for trial in trials:
            tell(trial.what)
            try_out(trial, device)
    return len(trials)


def main(described: dict[str, Any], index: int, connection: Any) -> None:
    """What runs in the process: sends where it is, and at last its result.

    Args:
        described: a spec as a manifest has it. index: of the GPU.
    """
    spec = from_dict(described)
    torch.set_num_threads(1)  # references are small: of two threads the products of a function take longer
    try:
        torch.cuda.set_device(index)
        count = run(spec, torch.device("cuda", index), lambda what: connection.send(("at", what)))
        called = frozenset(ffi_bridge.load(spec.arch).given_out)
        if spec.name not in called:
            raise Wrong("other functions served its calls")
    except Wrong as wrong:
        connection.send(("failed", str(wrong)))
    except Exception as error:  # whatever a kernel's fault makes torch raise belongs to this function
        connection.send(("failed", " ".join(f"{type(error).__name__}: {error}".split())))
    else:
        connection.send(("passed", count, called))
