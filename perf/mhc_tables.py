"""The tables of the `mhc` suite, as (title, header, rows)."""

from __future__ import annotations

from typing import Any

from .cells import HOST, host_table
from .results import Result

OURS = "glulam"
GB200_OVER_H200 = 8.0 / 4.8
"""Their memory bandwidths by data sheet, TB/s."""
CUTILE_GB200_US = {
    "sinkhorn": (65, 133),
    "aggregate": (349, 661),
    "post_mix": (684, 2549),
    "project": (426, 1541),
}
"""Published for cuTile kernels on a GB200 at s 8192, b 4, n 4, C 7168: forward and backward."""
PUBLISHED_S = 8192
ISSUE_SLOTS = 4
"""Warp instructions that an SM can start in a cycle."""

Parts = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def _median(record: dict[str, Any], name: str) -> float:
    return float(record["times"][name]["median_us"])


def _of_issue(record: dict[str, Any], stamp: dict[str, Any]) -> str:
    """The least instructions' share of what the SMs could start in the time, at the highest clock."""
    if not record.get("warp_instructions"):
        return "-"
    slots = ISSUE_SLOTS * float(stamp["sms"]) * float(stamp["sm_clock_max_mhz"]) * _median(record, OURS)
    return f"{record['warp_instructions'] / slots:.2f}"


def _row(record: dict[str, Any], copy_tbps: float, stamp: dict[str, Any]) -> tuple[str, ...]:
    ours, peers = _median(record, OURS), [name for name in record["times"] if name != OURS]
    least = record["bytes"] / copy_tbps * 1e-6
    published = CUTILE_GB200_US.get(record["op"], ()) if record["size"]["s"] == PUBLISHED_S else ()
    index = ("forward", "backward").index(record["direction"])
    scaled = f"{published[index] * GB200_OVER_H200:.0f}" if published else "-"
    size = record["size"]
    return (
        record["op"],
        record["direction"],
        f"{size['s']} x {size['b']} x {size['n']} x {size['c']}",
        f"{ours:.1f}",
        f"{record['bytes'] * 1e-9:.3f}",
        f"{least / ours:.2f}",
        _of_issue(record, stamp),
        *(f"{_median(record, name):.0f} ({_median(record, name) / ours:.2f})" for name in peers),
        scaled,
        f"{record['difference']:.1g}",
    )


def mhc_tables(result: Result) -> list[Parts]:
    """Device times of the operators, and host times of small calls."""
    measured = [record for record in result["records"] if record["op"] != HOST]
    parts: list[Parts] = []
    if measured:
        peers = [name for name in measured[0]["times"] if name != OURS]
        header = (
            *("operator", "direction", "s x b x n x C", "glulam us", "least GB", "of copy bandwidth", "of issue slots"),
            *(f"{name} us" for name in peers),
            *("cuTile, GB200, scaled us", "largest difference"),
        )
        rows = [_row(record, result["limits"]["copy_tbps"], result["stamp"]) for record in measured]
        parts.append(("Hyper-connections: device time", header, rows))
    host = host_table("Hyper-connections: host time of a small call", result, 2)
    return [*parts, (host.title, host.header, host.rows)]
