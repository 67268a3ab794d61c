"""The tables of the `mhc` suite."""

from __future__ import annotations

from .cells import HOST, OURS, Column, Table, columns_of, field, host_table, median, number, peers_of, ratio, table
from .results import Record, Result

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


def _published(record: Record) -> str:
    """The time of cuTile's kernels, as if bandwidth alone decided."""
    if record["size"]["s"] != PUBLISHED_S or record["op"] not in CUTILE_GB200_US:
        return "-"
    return number(CUTILE_GB200_US[record["op"]][record["direction"] == "backward"] * GB200_OVER_H200, 0)


def _peer(record: Record, name: str) -> str:
    return f"{number(median(record, name), 0)} ({number(ratio(record, name))})"


def mhc_tables(result: Result) -> list[Table]:
    """Device times of the operators, and host times of small calls."""
    stamp, copy_tbps = result["stamp"], result["limits"]["copy_tbps"]
    measured = [record for record in result["records"] if record["op"] != HOST]

    def of_copy(record: Record) -> str:
        return number(record["bytes"] / copy_tbps * 1e-6 / record["times"][OURS]["median_us"])

    def of_issue(record: Record) -> str:
        """The least instructions' share of what the SMs could start in the time, at the highest clock."""
        slots = ISSUE_SLOTS * float(stamp["sms"]) * float(stamp["sm_clock_max_mhz"]) * (median(record) or 0.0)
        least = record.get("warp_instructions")
        return number(least / slots if least else None)

    columns: list[Column] = [
        ("operator", field("op")),
        ("direction", field("direction")),
        ("s x b x n x C", lambda record: " x ".join(str(record["size"][name]) for name in "sbnc")),
        ("glulam us", lambda record: number(median(record), 1)),
        ("least GB", lambda record: number(record["bytes"] * 1e-9, 3)),
        ("of copy bandwidth", of_copy),
        ("of issue slots", of_issue),
        *columns_of(peers_of(measured), _peer),
        ("cuTile, GB200, scaled us", _published),
        ("largest difference", lambda record: f"{record['difference']:.1g}"),
    ]
    host = host_table("Hyper-connections: host time of a small call", result, 2)
    return [*table("Hyper-connections: device time", measured, columns), *host]
