"""Tables of experts across GPUs: both ends against the links, and layers against the other transport."""

from __future__ import annotations

from .cells import Column, Table, number, table
from .results import Record, Result

OURS, THEIRS, ALONE = "symmetric", "all_to_all", "experts alone"


def _share(record: Record, part: str) -> str:
    """Our time of an end, and what its bytes take at the links' rate over that."""
    us = record["times"][OURS][part]
    return f"{us:.1f} ({_floor(record) / us:.2f})"


def _floor(record: Record) -> float:
    return float(record["bytes"] / record["put_gbps"] * 1e-3)


def _us(record: Record, name: str) -> float | None:
    return record["times"].get(name, {}).get("us")


def _ratio(record: Record) -> str:
    ours, theirs = _us(record, OURS), _us(record, THEIRS)
    return number(theirs / ours if ours and theirs else None)


def _speedup(record: Record) -> str:
    return number(record["world"] * record["times"][ALONE]["us"] / record["times"][OURS]["us"])


def distributed_tables(result: Result) -> list[Table]:
    """Ends first, then layers. A share: of what the bytes that must cross take at the links' rate in the same run."""
    ends = [record for record in result["records"] if record["kind"] == "ends"]
    layers = [record for record in result["records"] if record["kind"] == "layer"]
    where = f"{(ends or layers)[0]['world']} GPUs"
    puts = f", an elementwise kernel's stores to a peer {ends[0]['put_gbps']:.0f} GB/s" if ends else ""
    of_ends: list[Column] = [
        ("layer, tokens a rank", lambda r: f"{r['layer']}, {r['tokens']}"),
        ("bytes alone", lambda r: number(_floor(r), 1)),
        ("dispatch (share)", lambda r: _share(r, "dispatch")),
        ("combine (share)", lambda r: _share(r, "combine")),
        ("both", lambda r: number(r["times"][OURS]["both"], 1)),
        ("both, graph", lambda r: number(r["times"][OURS]["graph"], 1)),
        ("both by all_to_all", lambda r: number(r["times"][THEIRS]["both"], 1)),
    ]
    of_layers: list[Column] = [
        ("layer, tokens a rank", lambda r: f"{r['layer']}, {r['tokens']}, {r['mode']}"),
        (OURS, lambda r: number(_us(r, OURS), 1)),
        (THEIRS, lambda r: number(_us(r, THEIRS), 1)),
        ("ratio", _ratio),
        ("over experts alone", lambda r: number(r["times"][OURS]["us"] - r["times"][ALONE]["us"], 1)),
        (
            "tokens a second over 1 GPU's",
            _speedup,
        ),
    ]
    return [
        *table(f"Dispatch with its routing, and combine of rows, us; {where}{puts}", ends, of_ends),
        *table(f"The layer, us; {where}", layers, of_layers),
    ]
