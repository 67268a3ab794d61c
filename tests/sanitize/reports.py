"""The findings of a tool of compute-sanitizer, from the logs of its processes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MOST_NAMES = 5
"""Largest number of functions named that were not launched."""
_SUMMARIES = (
    re.compile(r"^=+ ERROR SUMMARY: (?P<errors>\d+) errors?\b(?! were not printed)", re.MULTILINE),
    re.compile(
        r"^=+ RACECHECK SUMMARY: (?P<errors>\d+) hazards? displayed \(\d+ errors?, \d+ warnings?\)", re.MULTILINE
    ),
)
_REPORT = re.compile(r"^=+ (?P<headline>\S.*)\n?(?P<rest>(?:=+  .*\n?)*)", re.MULTILINE)
"""A line that is not indented, and the indented lines after it."""
_KERNEL = re.compile(r" ?\bat (?P<name>.+?)\+0x[0-9a-f]+( in \S+)?")
_PLACE = re.compile(r"\b0x[0-9a-f]+|\(\d+,\d+,\d+\)")


class Ran(NamedTuple):
    """A watched process that has ended.

    Attributes:
        status: its exit status.
        log: its tool's log; "" if there is none.
        called: names of the functions that it called.
    """

    status: int
    log: str
    called: Sequence[str]


class Report(NamedTuple):
    """A kind of report: its kernel, "" if the tool names none, and its headline without addresses and threads."""

    kernel: str
    headline: str


def errors(log: str) -> int | None:
    """Return the number of errors or hazards in a log's summaries; None if there is no summary."""
    counts = [int(match["errors"]) for pattern in _SUMMARIES for match in pattern.finditer(log)]
    return sum(counts) if counts else None


def by_kernel(log: str) -> Counter[Report]:
    """Return the number of reports of each kind in a log.

    The first place in code, on a report's headline or after it, names the kernel.
    """
    found: Counter[Report] = Counter()
    for report in _REPORT.finditer(log):
        if "SUMMARY" not in report["headline"] and report["headline"] != "COMPUTE-SANITIZER":
            place = _KERNEL.search(report[0])
            headline = _PLACE.sub("..", _KERNEL.sub("", report["headline"])).rstrip(" :")
            found[Report(place["name"] if place else "", headline)] += 1
    return found


def listed(logs: Iterable[str]) -> str:
    """Return a line for each kind of report in the logs, the most frequent first."""
    kinds = sum(map(by_kernel, logs), Counter[Report]())
    lines = []
    for (kernel, headline), count in sorted(kinds.items(), key=lambda item: (-item[1], item[0])):
        lines.append(f"\n    {f'{kernel}: ' if kernel else ''}{count} x {headline}")
    return "".join(lines)


def verdict(tool: str, ran: Sequence[Ran], left: Sequence[str]) -> str:
    """Return text on what is wrong with a tool's run; "" if nothing is.

    Args:
        tool: the tool's name.
        ran: its processes.
        left: functions that none of them launched.
    """
    counts = [errors(one.log) for one in ran]
    wrong = [f"{total} errors"] if (total := sum(filter(None, counts))) else []
    for number, (one, count) in enumerate(zip(ran, counts, strict=True), 1):
        ended = f"process {number} of {len(ran)} ended with {one.status}"
        if count is None:
            wrong.append(f"{ended}, without a summary")
        elif one.status and not count:
            wrong.append(f"{ended}, though it found nothing")
    if left:
        named = ", ".join([*left[:MOST_NAMES], *["..."] * (len(left) > MOST_NAMES)])
        wrong.append(f"{len(left)} functions were not launched: {named}")
    return f"{tool}: {'; '.join(wrong)}{listed(one.log for one in ran)}" if wrong else ""
