"""Tables of experts across GPUs: both ends against the links, and layers against the other transport."""

from __future__ import annotations

from typing import Any

from .cells import Table
from .results import Result

OURS, THEIRS, ALONE = "symmetric", "all_to_all", "experts alone"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _end_row(record: dict[str, Any]) -> tuple[str, ...]:
    ours, theirs = record["times"][OURS], record["times"][THEIRS]
    floor = record["bytes"] / record["put_gbps"] * 1e-3
    shares = [f"{_us(ours[part])} ({floor / ours[part]:.2f})" for part in ("dispatch", "combine")]
    label = f"{record['layer']}, {record['tokens']}"
    return (label, _us(floor), *shares, _us(ours["both"]), _us(ours["graph"]), _us(theirs["both"]))


def _layer_row(record: dict[str, Any]) -> tuple[str, ...]:
    times = {name: time["us"] for name, time in record["times"].items()}
    ours, theirs, alone = times[OURS], times.get(THEIRS), times[ALONE]
    ratio = "-" if theirs is None else f"{theirs / ours:.2f}"
    label = f"{record['layer']}, {record['tokens']}, {record['mode']}"
    return (label, _us(ours), _us(theirs), ratio, _us(ours - alone), f"{record['world'] * alone / ours:.2f}")


def distributed_tables(result: Result) -> list[Table]:
    """Ends first, then layers. A share: of what the bytes that must cross take at the links' rate in the same run."""
    ends = [record for record in result["records"] if record["kind"] == "ends"]
    layers = [record for record in result["records"] if record["kind"] == "layer"]
    first = (ends or layers)[0]
    where = f"{first['world']} GPUs"
    puts = f", an elementwise kernel's stores to a peer {ends[0]['put_gbps']:.0f} GB/s" if ends else ""
    return [
        Table(
            f"Dispatch with its routing, and combine of rows, us; {where}{puts}",
            ("layer, tokens a rank", "bytes alone", "dispatch (share)", "combine (share)", "both", "both, graph",
             "both by all_to_all"),
            [_end_row(record) for record in ends],
        ),
        Table(
            f"The layer, us; {where}",
            ("layer, tokens a rank", "symmetric", "all_to_all", "ratio", "over experts alone",
             "tokens a second over 1 GPU's"),
            [_layer_row(record) for record in layers],
        ),
    ]  # fmt: skip
