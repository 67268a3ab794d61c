"""What a user may choose about a run."""

from __future__ import annotations

import dataclasses

QUACK_MODES = ("off", "default", "tuned")


@dataclasses.dataclass(frozen=True)
class Options:
    """budget_s: seconds of sampling for the whole suite (set-up comes on top); case: keep the cases whose name,
    sizes or routing contain this text; quack: how to run it where it is installed.
    """

    budget_s: float = 40.0
    case: str | None = None
    quack: str = "default"
