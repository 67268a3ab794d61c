"""Trials of `glulam validate` on an emulated GPU: float64 references, NaN tails and canaries, in a few seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from support.fake_gpu import reference
from support.trials import try_out
from torch import Tensor

from cute_kernels.specs import Spec
from glulam.choose import known
from glulam.host import workspace
from glulam.host.plans import forget_plans
from glulam.validate import child
from glulam.validate.catalogue import trials_of
from glulam.validate.child import Wrong
from glulam.validate.inputs import Size
from glulam.validate.trial import Trial

from .emulated_gpu import EmulatedGpu
from .unwritten import Unwritten

SMALL = Size(
    rows=40,
    experts=4,
    kinds=("Zipf", "uniform", "first empty", "no rows"),
    hidden=72,
    inter=96,
    in_blocks=96,
    has_odd=False,
    has_every_pair=False,
    tokens=(3, 65),
    row_width=72,
    matrices=((5, 32), (34, 96)),
    streams=(((1, 1), 8), ((3, 5), 72)),
)
"""Small sizes.

Operands have several k-tiles or an odd rest. Groups have no rows, one row, or more than a tile of 16.
"""


class Tried(NamedTuple):
    """Results of each trial that a function passed, and the functions that the trials called or launched."""

    results: list[Sequence[Tensor]]
    called: frozenset[str]

    @property
    def trials(self) -> int:
        """The number of trials."""
        return len(self.results)


def called_by(gpu: EmulatedGpu, spec: Spec, size: Size) -> frozenset[str]:
    """Return the functions that the first trial of a function calls or launches, whatever its results are."""
    with torch.no_grad():
        for trial in _begun(gpu, spec, size, most=1):
            trial.call(trial.given)
    return frozenset(gpu.called)


def _begun(gpu: EmulatedGpu, spec: Spec, size: Size, most: int | None) -> list[Trial]:
    """Prefer a function for all calls of its kind, and return its trials."""
    known.forget()
    forget_plans()
    child.prefer(spec)
    with reference():  # which quantises inputs
        trials = list(islice(trials_of(spec, size), most))
    del gpu.fake.specs[:]
    return trials


def unwritten_by(gpu: EmulatedGpu, spec: Spec, size: Size, most: int | None = None) -> Counter[tuple[str, str]]:
    """Return the bytes that the trials of a function read before anybody wrote them, see `Unwritten.found`."""
    trials = _begun(gpu, spec, size, most)
    workspace.forget()
    gpu.emulator.races = seen = Unwritten()
    try:
        with torch.no_grad(), seen.watching():
            for trial in trials:
                trial.call(trial.given)
    finally:
        gpu.emulator.races = None
        workspace.forget()
    return seen.found


def try_function(gpu: EmulatedGpu, spec: Spec, size: Size = SMALL, most: int | None = None) -> Tried:
    """Run the trials of a function.

    Args:
        most: maximum number of trials. None: all.

    Raises:
        Wrong: a result is wrong, or other functions served the calls; the message names the function.
        Fault: device code made a mistake.
    """
    trials = _begun(gpu, spec, size, most)
    try:
        with torch.no_grad():
            results = [try_out(trial) for trial in trials]
        if trials and spec not in gpu.fake.specs:
            raise Wrong("other functions served its calls")
    except Wrong as wrong:
        raise Wrong(f"{spec.name}: {wrong}") from None
    return Tried(results, frozenset(gpu.called))
