"""python -m perf SUITE [--out FILE]; python -m perf report; python -m perf table."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from .cells import Table
from .options import add_flags, chosen, command_line
from .results import Result, default_path, make_result, write
from .suites import SUITES, function_of
from .tables import tables_of

PIPE_WIDTH = 160  # columns where the output is not a terminal


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="python -m perf", description="Measure Glulam on this machine's GPU.")
    commands = root.add_subparsers(dest="command", required=True)
    for name, about in SUITES.items():
        suite = commands.add_parser(name, help=about)
        suite.add_argument("--out", type=Path, help="result file; of a whole suite perf/results/<suite>-<gpu>.csv")
        suite.add_argument("--commit", help="the commit to stamp, where there is no git checkout")
        add_flags(suite, name)
    commands.add_parser("table", help="write the dispatcher's table of measured tiles from perf/results")
    commands.add_parser("report", help="draw the overview, write perf/results/README.md and the README's overview")
    return root


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def show(table: Table, console: Console) -> None:
    rich_table = RichTable(title=escape(table.title))
    for number, heading in enumerate(table.header):
        rich_table.add_column(escape(heading), justify="right" if number else "left")
    for row in table.rows:
        rich_table.add_row(*(escape(cell) for cell in row))
    console.print(rich_table)


def measure(arguments: argparse.Namespace) -> Result:
    """Run one suite on the current GPU and return its result. Raises RuntimeError if there is no CUDA GPU, or if a
    required contestant is wrong.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("measuring needs a CUDA GPU; without one, read perf/results/README.md")
    import glulam
    from glulam.choose import known

    from .stamp import make_stamp
    from .timing import measure_limits

    os.environ.setdefault(known.ENV_TUNED, "")  # measure what ships, not a user's tuned table
    known.ignore_preferences()
    options = chosen(arguments)
    glulam.batch_invariant(options.batch_invariant)
    stamp = make_stamp(command_line(arguments.command, options), arguments.commit)
    limits = measure_limits()
    torch.cuda.empty_cache()
    return make_result(arguments.command, stamp, limits, function_of(arguments.command)(options))


def _is_part(arguments: argparse.Namespace) -> bool:
    """Return whether a run measures less than its suite, or in another way, and must not replace its results."""
    options, suite = chosen(arguments), arguments.command
    in_part = options.case is not None or options.ops or options.published or options.batch_invariant
    return suite == "compare" or bool(in_part or (suite == "layer" and options.routings))


def _run_suite(arguments: argparse.Namespace, console: Console) -> list[Path]:
    result = measure(arguments)
    for table in tables_of(result):
        show(table, console)
    if not arguments.out and _is_part(arguments):
        console.print("not written: --out FILE keeps a comparison, or a part of a suite")
        return []
    path = arguments.out or default_path(result["suite"], result["stamp"]["gpu"])
    write(result, path)
    return [path]


def _run(arguments: argparse.Namespace, console: Console) -> list[Path]:
    """Run a command; return the files that it has written."""
    if arguments.command == "report":
        from .report import write_report

        return write_report()
    if arguments.command == "table":
        from .suites.tiles import write_table

        return [write_table()]
    return _run_suite(arguments, console)


def main() -> int:
    """Run the command line; return exit status 0, or 1 after one line about an error that the user can mend."""
    console = _console()
    try:
        for path in _run(parser().parse_args(), console):
            console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    except (RuntimeError, ValueError) as error:
        Console(stderr=True).print(f"perf: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


def one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning as one line without its source location: which contestant was left out, and why."""
    return " ".join(f"perf: {message}".split()) + "\n"


if __name__ == "__main__":
    warnings.formatwarning = one_line
    sys.exit(main())
