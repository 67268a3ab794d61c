"""Tables of the hyper-connections, and of experts across GPUs: dispatch and combine against the links, layers by
transport.
"""

from __future__ import annotations

from .cells import HOST, OURS, Column, Table, columns_of, field, host_table, median, number, peers_of, ratio, table
from .results import Record, Result

GB200_OVER_H200 = 8.0 / 4.8
"""The ratio of a GB200's memory bandwidth to an H200's by data sheet, in TB/s."""
CUTILE_GB200_US = {
    "sinkhorn": (65, 133),
    "aggregate": (349, 661),
    "post_mix": (684, 2549),
    "project": (426, 1541),
}
"""Times published for cuTile kernels on a GB200 at s 8192, b 4, n 4, C 7168: forward and backward."""
PUBLISHED_S = 8192
ISSUE_SLOTS = 4
"""Warp instructions that an SM can start in a cycle."""
SYMMETRIC, ALL_TO_ALL, ALONE = "symmetric", "all_to_all", "experts alone"


def _published(record: Record) -> str:
    """Return the time of cuTile's kernels scaled to this GPU as if bandwidth alone decided; "-" if none is
    published.
    """
    if record["size"]["s"] != PUBLISHED_S or record["op"] not in CUTILE_GB200_US:
        return "-"
    return number(CUTILE_GB200_US[record["op"]][record["direction"] == "backward"] * GB200_OVER_H200, 0)


def mhc_tables(result: Result) -> list[Table]:
    """Return tables of the operators' device times, and of host times of small calls."""
    stamp, copy_tbps = result["stamp"], result["limits"]["copy_tbps"]
    measured = [record for record in result["records"] if record["op"] != HOST]

    def of_issue(record: Record) -> str:
        """Return the fewest instructions over what the SMs could start in the measured time at the highest clock."""
        slots = ISSUE_SLOTS * float(stamp["sms"]) * float(stamp["sm_clock_max_mhz"]) * (median(record) or 0.0)
        least = record.get("warp_instructions")
        return number(least / slots if least else None)

    columns: list[Column] = [
        ("operator", field("op")),
        ("direction", field("direction")),
        ("s x b x n x C", lambda r: " x ".join(str(r["size"][name]) for name in "sbnc")),
        ("glulam us", lambda r: number(median(r), 1)),
        ("least GB", lambda r: number(r["bytes"] * 1e-9, 3)),
        ("of copy bandwidth", lambda r: number(r["bytes"] / copy_tbps * 1e-6 / r["times"][OURS]["median_us"])),
        ("of issue slots", of_issue),
        *columns_of(peers_of(measured), lambda r, name: f"{number(median(r, name), 0)} ({number(ratio(r, name))})"),
        ("cuTile, GB200, scaled us", _published),
        ("largest difference", lambda r: f"{r['difference']:.1g}"),
    ]
    host = host_table("Hyper-connections: host time of a small call", result, 2)
    return [*table("Hyper-connections: device time", measured, columns), *host]


def _floor(record: Record) -> float:
    """Return the microseconds that the bytes which must cross take at the links' rate."""
    return float(record["bytes"] / record["put_gbps"] * 1e-3)


def _share(record: Record, part: str) -> str:
    """Return our time of dispatch or combine and, in brackets, the bytes' time at the links' rate over it."""
    us = record["times"][SYMMETRIC][part]
    return f"{us:.1f} ({_floor(record) / us:.2f})"


def _us(record: Record, name: str) -> float | None:
    return record["times"].get(name, {}).get("us")


def _transports(record: Record) -> str:
    ours, theirs = _us(record, SYMMETRIC), _us(record, ALL_TO_ALL)
    return number(theirs / ours if ours and theirs else None)


def distributed_tables(result: Result) -> list[Table]:
    """Return a table of dispatch and combine, then one of layers. A share is the bytes' time at the links' rate,
    measured in the same run, over our time.
    """
    ends, layers = ([r for r in result["records"] if r["kind"] == kind] for kind in ("ends", "layer"))
    where = f"{(ends or layers)[0]['world']} GPUs"
    puts = f", an elementwise kernel's stores to a peer {ends[0]['put_gbps']:.0f} GB/s" if ends else ""
    of_ends: list[Column] = [
        ("layer, tokens a rank", lambda r: f"{r['layer']}, {r['tokens']}"),
        ("bytes alone", lambda r: number(_floor(r), 1)),
        ("dispatch (share)", lambda r: _share(r, "dispatch")),
        ("combine (share)", lambda r: _share(r, "combine")),
        ("both", lambda r: number(r["times"][SYMMETRIC]["both"], 1)),
        ("both, graph", lambda r: number(r["times"][SYMMETRIC]["graph"], 1)),
        ("both by all_to_all", lambda r: number(r["times"][ALL_TO_ALL]["both"], 1)),
    ]
    of_layers: list[Column] = [
        ("layer, tokens a rank", lambda r: f"{r['layer']}, {r['tokens']}, {r['mode']}"),
        *columns_of((SYMMETRIC, ALL_TO_ALL), lambda r, name: number(_us(r, name), 1), ""),
        ("ratio", _transports),
        ("over experts alone", lambda r: number(r["times"][SYMMETRIC]["us"] - r["times"][ALONE]["us"], 1)),
        ("tokens a second over 1 GPU's", lambda r: number(r["world"] * _us(r, ALONE) / _us(r, SYMMETRIC))),
    ]
    return [
        *table(f"Dispatch with its routing, and combine of rows, us; {where}{puts}", ends, of_ends),
        *table(f"The layer, us; {where}", layers, of_layers),
    ]
