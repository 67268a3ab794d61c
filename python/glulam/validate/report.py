"""The report of a validation, a text that can be posted: the machine, the number of functions, and the failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .run import FAILED, PASSED, Outcome

MOST_LINES = 200
"""Largest number of failed or unreached functions that the report lists: an issue takes at most 65536 characters."""


class Machine(NamedTuple):
    """The machine and the bundle of a validation.

    Attributes:
        gpu: the GPU's name.
        capability: its compute capability.
        arch: the architecture of the kernels.
        library: sha256 of the bundle's library.
        versions: versions of software, by name.
    """

    gpu: str
    capability: str
    arch: str
    library: str
    versions: Mapping[str, str | None]


def passes(outcomes: Sequence[Outcome]) -> bool:
    """Return True if a bundle may be used: some function passed and none failed.

    Unreached functions do not count against it, since they serve no call.
    """
    states = {outcome.state for outcome in outcomes}
    return PASSED in states and FAILED not in states


def report(machine: Machine, outcomes: Sequence[Outcome]) -> str:
    """Return the report in Markdown. It contains no times."""
    counts = Counter(outcome.state for outcome in outcomes)
    bad = [outcome for outcome in outcomes if outcome.state != PASSED]
    summary = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    versions = ", ".join(f"{name} {version or '?'}" for name, version in machine.versions.items())
    lines = [
        f"### `glulam validate`: {'passed' if passes(outcomes) else 'failed'}",
        "",
        f"- GPU: {machine.gpu}, compute capability {machine.capability}, kernels of {machine.arch}",
        f"- library: {machine.library}",
        f"- versions: {versions}",
        f"- functions: {summary}",
    ]
    if bad:
        lines += ["", "| function | | |", "| --- | --- | --- |"]
        lines += [f"| {one.name} | {one.state} | {_in_a_cell(one.detail)} |" for one in bad[:MOST_LINES]]
        if len(bad) > MOST_LINES:
            lines.append(f"| and {len(bad) - MOST_LINES} more | | |")
    return "\n".join(lines) + "\n"


def _in_a_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:200]
