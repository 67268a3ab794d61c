"""What tables are made of: text of times, rates and ratios."""

from __future__ import annotations

import dataclasses
from typing import Any

from .cases import Case
from .results import Result

OURS, DENSE = "glulam", "dense"
HOST = "host"
"""The operation of a record of host times, whose contestants are items."""


@dataclasses.dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def microseconds(value: float) -> str:
    """Three significant digits at least: 2825, 365, 24.3, 4.71."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def work(record: dict[str, Any]) -> tuple[float, float]:
    """Useful FLOP and the fewest bytes of one call; no bytes where they are not known."""
    if "flop" in record:
        return record["flop"], record.get("bytes", 0.0)
    case, op = Case(**record["case"]), record["op"]
    return case.flop(op), case.bytes(op, record["active_experts"])


def rate(record: dict[str, Any], median_us: float, limits: dict[str, float]) -> str:
    """Useful TF/s or TB/s, whichever the machine's limits bind first, and how much of that limit it is."""
    flop, moved = work(record)
    return bound(flop / median_us, moved / median_us, limits)


def bound(flop_per_us: float, bytes_per_us: float, limits: dict[str, float]) -> str:
    """The rate in what binds first, and how much of that limit it is."""
    tflops, tbps = flop_per_us * 1e-6, bytes_per_us * 1e-6
    of_flop, of_bytes = tflops / limits["cublas_8192_tflops"], tbps / limits["copy_tbps"]
    if of_bytes > of_flop:
        return f"{tbps:.2f} TB/s ({100 * of_bytes:.0f} %)"
    return f"{tflops:.0f} TF/s ({100 * of_flop:.0f} %)"


def ratio(record: dict[str, Any], name: str) -> float:
    """The peer's median over ours: above 1 we are faster."""
    times = record["times"]
    return float(times[name]["median_us"] / times[OURS]["median_us"])


def peers_of(records: list[dict[str, Any]]) -> list[str]:
    """Every contestant but us, in order of first appearance."""
    return [name for name in dict.fromkeys(name for r in records for name in r["times"]) if name != OURS]


def peer_cell(record: dict[str, Any], name: str) -> str:
    if name not in record["times"]:
        return "-"
    return f"{microseconds(record['times'][name]['median_us'])} ({ratio(record, name):.2f}x)"


def our_cell(record: dict[str, Any]) -> str:
    """Our median with its spread."""
    ours = record["times"][OURS]
    spread = (ours["high_us"] - ours["low_us"]) / (2 * ours["median_us"])
    return f"{microseconds(ours['median_us'])} ± {100 * spread:.1f} %"


def host_table(title: str, result: Result, digits: int) -> Table:
    """Host time of each item: the median and the outer deciles."""
    items = next((record["times"] for record in result["records"] if record.get("op") == HOST), {})
    rows: list[tuple[str, ...]] = [
        (name, *(f"{times[key]:.{digits}f}" for key in ("median_us", "low_us", "high_us")))
        for name, times in items.items()
    ]
    return Table(title, ("item", "median us", "10 %", "90 %"), rows)


def skew_cell(record: dict[str, Any]) -> str:
    return f"{record['case']['routing']} ({record['skew']['max_over_mean']:.1f})"
