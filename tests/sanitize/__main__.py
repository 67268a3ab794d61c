"""`make sanitize`: every kernel of the bundle once, under each tool of compute-sanitizer.

A tool watches one process, or with --jobs several, which share the functions. It makes the first call of `glulam
validate` for each function, and all calls for a function that chooses among several kernels, and writes down what was
launched. A tool that finds something, gives no summary, or a kernel that nothing launched, is a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from glulam.host import device as gpus

from . import launches
from .reports import Ran, listed, verdict

PROGRAM = "compute-sanitizer"
MOST_REPORTS = 10_000
"""Largest number of reports that a process prints; the program's own limit hides other kernels behind one that has 100.
"""
POLL_S = 0.2
READS_STORES_OF_TMA = "quantize_mxfp8"
"""Within the names of the kernels whose threads read what the kernel before stored by TMA. initcheck does not see such
stores, and would report these reads.
"""


class Tool(NamedTuple):
    """A tool of compute-sanitizer.

    Attributes:
        options: its options.
        has_tail: calls have rows after the last group. Nobody writes such rows of intermediate tensors, and the row
            quantiser, which does not know groups, reads them; nobody reads what it makes of them.
    """

    options: tuple[str, ...] = ()
    has_tail: bool = True


TOOLS = {
    "memcheck": Tool(("--check-device-heap", "no")),
    "racecheck": Tool(("--racecheck-report", "all")),
    "synccheck": Tool(),
    "initcheck": Tool(("--kernel-name-exclude", f"kernel_substring={READS_STORES_OF_TMA}"), has_tail=False),
}


class Files(NamedTuple):
    """Files of a watched process: its tool's log, and the names of the functions that it called."""

    log: Path
    called: Path

    def ran(self, status: int) -> Ran:
        """Return what the process left; status: its exit status."""
        names = json.loads(self.called.read_text()) if self.called.exists() else []
        return Ran(status, self.log.read_text(errors="replace") if self.log.exists() else "", names)


def refusal() -> str:
    """Return text on what is missing to run at all; "" if nothing is."""
    if shutil.which(PROGRAM) is None:
        return f"sanitize: there is no {PROGRAM}; install the CUDA toolkit, and put its bin folder on PATH"
    if not torch.cuda.is_available():
        return "sanitize: torch sees no GPU; run it where there is one"
    return ""


def command(tool: str, index: int, share: launches.Share, files: Files) -> list[str]:
    """Return the command line of a watched process."""
    options = ("--log-file", str(files.log), "--print-limit", str(MOST_REPORTS), *TOOLS[tool].options)
    return [PROGRAM, "--tool", tool, *options, sys.executable, "-m", "sanitize", "--child", str(files.called),
            "--tool", tool, "--device", str(index), "--job", str(share.job), "--jobs", str(share.jobs),
            "--part", f"{share.part}/{share.parts}"]  # fmt: skip


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a watched process, in which each tensor has its own allocation, so that tools see its
    bounds.
    """
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), given.get("PYTHONPATH"))))
    return {**given, "PYTHONPATH": path, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_LAUNCH_BLOCKING": "1",
            gpus.ENV_UNVALIDATED: "1"}  # fmt: skip


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Context in which SIGINT and SIGTERM are only listed: raised, they would lose a process that is being started."""
    came: list[int] = []
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    for each in before:
        signal.signal(each, lambda number, frame: came.append(number))
    try:
        yield came
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def run_together(commands: Sequence[Sequence[str]], env: Mapping[str, str]) -> list[int]:
    """Run commands side by side; return their exit statuses. If interrupted, end them and what they started.

    Raises:
        SystemExit: SIGINT or SIGTERM came.
    """
    running: list[subprocess.Popen[bytes]] = []
    with _signals() as came:
        try:
            for each in commands:
                running.append(subprocess.Popen(each, env=env, start_new_session=True))
            while not came and any(one.poll() is None for one in running):
                time.sleep(POLL_S)
        finally:
            for one in running:
                if one.poll() is None:
                    os.killpg(one.pid, signal.SIGKILL)
        statuses = [one.wait() for one in running]
        if came:
            sys.exit(128 + came[0])
    return statuses


def sanitize(index: int, tools: Sequence[str], run: launches.Share, folder: Path) -> int:
    """Run tools one after the other.

    Args:
        index: index of the GPU.
        tools: names of the tools.
        run: the number of a tool's processes, and the run's part of the functions.
        folder: folder for the files of processes.

    Returns:
        0 if none found anything, else 1.
    """
    os.environ[gpus.ENV_UNVALIDATED] = "1"
    _, shipped = launches.shipped(index)
    specs, elsewhere = {spec.name: spec for spec in run.part_of(shipped)}, run.elsewhere(shipped)
    failed = 0
    for tool in tools:
        files = [Files(folder / f"{tool}.{job}.log", folder / f"{tool}.{job}.json") for job in range(run.jobs)]
        for old in (path for each in files for path in each):
            old.unlink(missing_ok=True)
        commands = [command(tool, index, run._replace(job=job), each) for job, each in enumerate(files)]
        try:
            statuses = run_together(commands, environment(os.environ))
        except SystemExit:
            print(f"{tool}: interrupted{listed(each.ran(0).log for each in files)}", flush=True)
            raise
        ran = [each.ran(status) for each, status in zip(files, statuses, strict=True)]
        called = {specs[name] for one in ran for name in one.called if name in specs}
        wrong = verdict(tool, ran, launches.missed(specs.values(), called, elsewhere))
        print(wrong or f"{tool}: {len(specs)} functions, nothing found", flush=True)
        failed += bool(wrong)
    return int(bool(failed))


def _part(text: str) -> tuple[int, int]:
    """Read a part K/N. Raises ArgumentTypeError unless 1 <= K <= N."""
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part; give K/N with 1 <= K <= N, such as 1/4")
    return int(part), int(parts)


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if no tool found anything, 1 if one did, 2 if the program or a GPU is missing."""
    parser = argparse.ArgumentParser(prog="sanitize", description=__doc__)
    parser.add_argument("--device", type=int, default=0, help="index of the GPU")
    parser.add_argument("--tool", action="append", default=[], choices=TOOLS, help="repeatable; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes of a tool, side by side on the GPU")
    parser.add_argument(
        "--part", type=_part, default=(1, 1), metavar="K/N",
        help="only the K-th of N parts of the functions, where all take a tool too long",
    )  # fmt: skip
    parser.add_argument("--logs", type=Path, help="folder to keep the logs in; default: they are removed")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--job", type=int, default=0, help=argparse.SUPPRESS)
    told = parser.parse_args(given)
    if told.jobs < 1:
        parser.error(f"--jobs {told.jobs}: a tool needs a process")
    run = launches.Share(0, told.jobs, *told.part)
    if told.child:
        size = launches.SMALL._replace(has_tail=TOOLS[told.tool[0]].has_tail)
        launches.run_child(told.device, run._replace(job=told.job), size, told.child)
        return 0
    if why := refusal():
        print(why, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as own:
        folder = told.logs or Path(own)
        folder.mkdir(parents=True, exist_ok=True)
        return sanitize(told.device, told.tool or list(TOOLS), run, folder)


if __name__ == "__main__":
    sys.exit(main())
