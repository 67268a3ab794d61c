"""Run the trials of `glulam validate` on the fake GPU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from glulam.validate import child
from glulam.validate.child import Wrong
from glulam.validate.guards import Guards
from glulam.validate.trial import Trial

from .fake_gpu import reference


def try_out(trial: Trial) -> Sequence[Tensor]:
    """Run a trial between canaries, and compare its results with the CPU reference.

    Returns:
        The results; rows after the last group hold canaries.

    Raises:
        Wrong: a result is wrong; the message names the trial.
    """
    try:
        with Guards() as guards:
            made = trial.call(trial.given)
        if beside := guards.complaint():
            raise Wrong(beside)
        with reference():
            child.check_results(trial, made)
    except Wrong as wrong:
        raise Wrong(f"{trial.what}: {wrong}") from None
    return made
