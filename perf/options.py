"""What a user may choose about a run, and the flag of each choice."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

QUACK_MODES = ("off", "default", "tuned", "retuned")


def _choice(flag: str, default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"flag": flag})


@dataclasses.dataclass(frozen=True)
class Options:
    """Not every suite reads every choice.

    budget_s: seconds of sampling for the whole suite (set-up comes on top). case: keep the cases whose name, sizes or
    routing contain this text, or the case of exactly this name. ops: keep these operations; all where empty. quack: how
    to run it where it is installed. specs: shell patterns of exported functions; bundles: folders to take them from;
    routings and rows_per_expert: of every case; where empty the suite's routings, and the case's own rows. published:
    only layers that others publish times of. batch_invariant: measure with `glulam.batch_invariant(True)`.
    """

    budget_s: float = _choice("--budget", 40.0)
    case: str | None = _choice("--case", None)
    ops: tuple[str, ...] = _choice("--op", ())
    quack: str = _choice("--quack", "tuned")
    specs: tuple[str, ...] = _choice("--specs", ())
    bundles: tuple[str, ...] = _choice("--bundle", ())
    routings: tuple[str, ...] = _choice("--routing", ())
    rows_per_expert: tuple[int, ...] = _choice("--rows-per-expert", ())
    published: bool = _choice("--published", False)
    batch_invariant: bool = _choice("--batch-invariant", False)


def command_line(suite: str, options: Options) -> str:
    """The command that measures this again, less what says only where the result goes."""
    words = ["python", "-m", "perf", suite]
    for field in dataclasses.fields(Options):
        value = getattr(options, field.name)
        if value is True:
            words.append(field.metadata["flag"])
        elif value != field.default:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [field.metadata["flag"], text]
    return shlex.join(words)


def select_ops(known: Sequence[str], wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The operations wanted, in their known order; all where none is named. Raises ValueError on an unknown one."""
    if unknown := [op for op in wanted if op not in known]:
        raise ValueError(f"--op {unknown[0]!r} is not known here; choose among: {', '.join(known)}")
    return tuple(op for op in known if op in wanted or not wanted)
