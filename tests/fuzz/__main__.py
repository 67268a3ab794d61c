"""`PYTHONPATH=tests python -m fuzz`: draw problems, compare them with float64, print those that fail, shrunk."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from . import declared, loop
from .check import check
from .problem import parse


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu: the reference path; cuda: the kernels")
    parser.add_argument("--count", type=int, default=1000, help="problems to try")
    parser.add_argument("--minutes", type=float, default=0.0, help="end after so many minutes; 0: never")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other problems")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with a problem in flight")
    parser.add_argument("--call", action="append", default=[], choices=sorted(declared.FUNCTIONS),
                        help="a function to draw; repeatable; default: all")  # fmt: skip
    parser.add_argument("--problem", help="try this one alone, as a failure prints it")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if every problem passed, 1 if one failed, 2 if the device does not exist."""
    told = _arguments(given)
    if told.device.startswith("cuda") and not torch.cuda.is_available():
        print(f"fuzz: there is no GPU for --device {told.device}; run it where there is one, or with --device cpu",
              file=sys.stderr)  # fmt: skip
        return 2
    if told.problem:
        try:
            problem = parse(told.problem)
        except ValueError as error:
            print(f"fuzz: {error}", file=sys.stderr)
            return 2
        print(check(problem, torch.device(told.device)))
        return 0
    planned = loop.rounds(told.seed, told.count, told.device, told.call)
    report = loop.run(planned, told.jobs, minutes=told.minutes)
    print(report.text())
    return int(bool(report.failures))


if __name__ == "__main__":
    sys.exit(main())
