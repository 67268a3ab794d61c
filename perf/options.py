"""The user's choices for a run, each with its flag and the suites that read it."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

QUACK_MODES = ("off", "default", "tuned", "retuned")
BUNDLES = ("compare", "tiles")
QUACK = ("forward", "decode", "rows", "skew", "backward", "power", "host")
OPS = (*QUACK[:-1], "layer", "fp8", "serving", *BUNDLES)


def _choice(default: Any, flag: str, about: str, suites: Sequence[str] = (), **more: Any) -> Any:
    """Return the dataclass field of an option that `suites` read (empty: all suites).

    more: further arguments of `add_argument`.
    """
    return dataclasses.field(default=default, metadata={"flag": flag, "help": about, "suites": suites, **more})


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, _words(text)))


@dataclasses.dataclass(frozen=True)
class Options:
    """The user's choices for a run.

    Empty values mean: all operations, the suite's own routings, the cases' own numbers of rows, the usual bundle.
    """

    budget_s: float = _choice(40.0, "--budget", "seconds of sampling for the whole suite (40.0)", type=float)
    case: str | None = _choice(None, "--case", "the case of this name, or whose name, sizes or routing contain it")
    ops: tuple[str, ...] = _choice((), "--op", "only these operations, separated by commas", OPS, type=_words)
    quack: str = _choice("tuned", "--quack", "where it is installed (tuned)", QUACK, choices=QUACK_MODES)
    specs: tuple[str, ...] = _choice((), "--specs", "functions: names or shell patterns", BUNDLES, type=_words)
    bundles: tuple[str, ...] = _choice(
        (), "--bundle", "folders to take functions from ($GLULAM_BUNDLE)", BUNDLES, type=_words
    )
    routings: tuple[str, ...] = _choice((), "--routing", "of every case", ("layer", *BUNDLES), type=_words)
    rows_per_expert: tuple[int, ...] = _choice((), "--rows-per-expert", "of every case", BUNDLES, type=_numbers)
    published: bool = _choice(False, "--published", "only layers that others publish times of", ("layer",))
    batch_invariant: bool = _choice(False, "--batch-invariant", "with glulam.batch_invariant(True)")


def add_flags(parser: argparse.ArgumentParser, suite: str) -> None:
    """Add a suite's flags to a parser. A flag that is not on the command line makes no attribute when it is parsed."""
    for field in dataclasses.fields(Options):
        more = dict(field.metadata)
        flag, suites = more.pop("flag"), more.pop("suites")
        if field.default is False:
            more["action"] = "store_true"
        if suite in (suites or (suite,)) and (suite, flag) != ("host", "--case"):  # it has one case
            parser.add_argument(flag, dest=field.name, default=argparse.SUPPRESS, **more)


def chosen(arguments: argparse.Namespace) -> Options:
    """Return the choices on the command line, with defaults for the others."""
    names = {field.name for field in dataclasses.fields(Options)}
    return Options(**{name: value for name, value in vars(arguments).items() if name in names})


def command_line(suite: str, options: Options) -> str:
    """Return the command that repeats this measurement, without flags that only say where the result goes."""
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
    """Return the wanted operations in the order of `known`; all, if none is named. Raises ValueError on others."""
    if unknown := [op for op in wanted if op not in known]:
        raise ValueError(f"--op {unknown[0]!r} is not known here; choose among: {', '.join(known)}")
    return tuple(op for op in known if op in wanted or not wanted)
