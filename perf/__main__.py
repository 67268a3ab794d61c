"""python -m perf forward|host|graph|train|mhc [--out FILE]; python -m perf report."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from .options import QUACK_MODES, Options
from .results import Result, default_path, make_result, write
from .tables import Table, tables_of

SUITE_NAMES = ("forward", "host", "graph", "train", "mhc")
PIPE_WIDTH = 160  # columns where the output is not a terminal


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="python -m perf", description="Measure Glulam on this machine's GPU.")
    commands = root.add_subparsers(dest="command", required=True)
    for name in SUITE_NAMES:
        suite = commands.add_parser(name, help=f"measure the {name} suite")
        suite.add_argument("--out", type=Path, help="result file; default: perf/results/<suite>-<gpu>.json")
        suite.add_argument("--budget", type=float, default=Options.budget_s, help="seconds of sampling (%(default)s)")
        suite.add_argument("--case", help="only the cases whose name, sizes or routing contain this text")
        suite.add_argument("--quack", choices=QUACK_MODES, default=Options.quack, help="where installed (%(default)s)")
        suite.add_argument("--commit", help="the commit to stamp, where there is no git checkout")
    commands.add_parser("report", help="write perf/results/README.md and the README's table from the result files")
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


def command_line(suite: str, options: Options) -> str:
    """The command that measures this again, less what says only where the result goes."""
    chosen = {"--budget": options.budget_s, "--case": options.case, "--quack": options.quack}
    default = {"--budget": Options.budget_s, "--case": Options.case, "--quack": Options.quack}
    words = [word for name, value in chosen.items() if value != default[name] for word in (name, str(value))]
    return shlex.join(["python", "-m", "perf", suite, *words])


def measure(arguments: argparse.Namespace) -> Result:
    """Runs one suite on the current GPU. Raises RuntimeError where there is none or a contestant is wrong."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("measuring needs a CUDA GPU; without one, `python -m perf report` shows earlier results")
    from .limits import measure_limits
    from .stamp import make_stamp
    from .suites import SUITES

    options = Options(arguments.budget, arguments.case, arguments.quack)
    stamp = make_stamp(command_line(arguments.command, options), arguments.commit)
    limits = measure_limits()
    return make_result(arguments.command, stamp, limits, SUITES[arguments.command](options))


def _run_suite(arguments: argparse.Namespace, console: Console) -> None:
    result = measure(arguments)
    for table in tables_of(result):
        show(table, console)
    path = arguments.out or default_path(result["suite"], result["stamp"]["gpu"])
    write(result, path)
    console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def main() -> int:
    """Exit status: 0 measured, 1 what a user can mend, said in one line."""
    arguments = parser().parse_args()
    console = _console()
    try:
        if arguments.command == "report":
            from .report import write_report

            for path in write_report():
                console.print(f"wrote {path}", highlight=False, soft_wrap=True)
        else:
            _run_suite(arguments, console)
    except (RuntimeError, ValueError) as error:
        Console(stderr=True).print(f"perf: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
