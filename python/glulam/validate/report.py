"""What a validation found, as a text that can be posted: which machine, how many functions, and what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .run import FAILED, PASSED, Outcome

MOST_LINES = 200
"""Of functions that did not pass; an issue takes 65536 characters."""


class Machine(NamedTuple):
    """gpu: its name. library: sha256. versions: by what they are of."""

    gpu: str
    capability: str
    arch: str
    library: str
    versions: Mapping[str, str | None]


def passes(outcomes: Sequence[Outcome]) -> bool:
    """Whether a bundle is fit to serve: no function failed. What no call reaches serves none."""
    states = {outcome.state for outcome in outcomes}
    return PASSED in states and FAILED not in states


def report(machine: Machine, outcomes: Sequence[Outcome]) -> str:
    """In Markdown. No figure of speed is in it."""
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
