"""The tables of the `layer` suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .cells import OURS, Table, bound, microseconds, our_cell, peer_cell, rate, skew_cell
from .layer_cases import LayerCase
from .results import Result

FORWARD, TRAIN, STAGES, PARTS = "forward", "train", "stages", "parts"
BY_INDEX, SORTED, COPY, GRAPH = "by index", "sorted rows", "copy", "replayed"
TITLES = {
    FORWARD: "The layer from tokens to tokens, forward (`route` and `moe`, the router's GEMM by torch)",
    TRAIN: "The layer from tokens to tokens, forward and backward, all gradients",
}

Record = dict[str, Any]


def _label(record: Record) -> str:
    return LayerCase(**record["case"]).label


def _peer(record: Record, name: str) -> str:
    """Its time, in brackets over ours; or that it failed or was wrong."""
    if name in record["times"]:
        return peer_cell(record, name) if OURS in record["times"] else microseconds(record["times"][name]["median_us"])
    why = record.get("left_out", {}).get(name)
    return "-" if why is None else "wrong" if why.startswith("wrong") else "failed"


def _time_row(record: Record, peers: list[str], limits: dict[str, float]) -> tuple[str, ...]:
    own = (_peer(record, OURS), "-")
    if OURS in record["times"]:
        own = (our_cell(record), rate(record, record["times"][OURS]["median_us"], limits))
    return (_label(record), skew_cell(record), record["mode"], *own, *(_peer(record, name) for name in peers))


def _time_table(records: list[Record], op: str, limits: dict[str, float]) -> list[Table]:
    named = dict.fromkeys(name for record in records for name in (*record["times"], *record.get("left_out", ())))
    peers = [name for name in named if name != OURS]
    header = ("case", "routing (max/mean)", "mode", "glulam us", "rate (of limit)", *(f"{name} us" for name in peers))
    return [Table(TITLES[op], header, [_time_row(r, peers, limits) for r in records])] if records else []


def _left_out_table(records: list[Record]) -> list[Table]:
    rows: list[tuple[str, ...]] = [
        (_label(r), r["case"]["routing"], r["op"], r["mode"], name, why)
        for r in records
        for name, why in r.get("left_out", {}).items()
    ]
    header = ("case", "routing", "operation", "mode", "contestant", "why it was not timed")
    return [Table("Left out", header, rows)] if rows else []


def _memory_row(record: Record, names: list[str]) -> tuple[str, ...]:
    held = record["memory"]
    pairs = ((held.get(name, {}), what) for what in ("kept", "peak") for name in names)
    cells = (f"{of[what] * 1e-9:.3f}" if what in of else "-" for of, what in pairs)
    return (_label(record), record["case"]["routing"], record["op"], *cells)


def _memory_table(records: list[Record]) -> list[Table]:
    """The peak includes results and gradients; what is kept from forward to backward, the result."""
    measured = [record for record in records if record.get("memory")]
    names = list(dict.fromkeys(name for record in measured for name in record["memory"]))
    header = ("case", "routing", "operation", *(f"{n} {what}" for what in ("kept", "peak") for n in names))
    title = "Memory, GB: kept after the forward, and the peak of a call"
    return [Table(title, header, [_memory_row(record, names) for record in measured])] if measured else []


def whole_us(record: Record, records: list[Record]) -> float | None:
    """Our time of the whole that a record of stages is about: replayed where that was measured."""
    found = {
        r["mode"]: r["times"][OURS]["median_us"]
        for r in records
        if r["op"] == record["of"] and r["case"] == record["case"] and OURS in r["times"]
    }
    us: float | None = found.get("graph", found.get("eager"))
    return us


def steps_of(record: Record) -> dict[str, float]:
    """Microseconds of each step."""
    return {name: float(times["median_us"]) for name, times in record["times"].items()}


def _stage_row(record: Record, names: list[str], records: list[Record]) -> tuple[str, ...]:
    steps, whole = steps_of(record), whole_us(record, records)
    cells = (microseconds(steps[name]) if name in steps else "-" for name in names)
    total = microseconds(sum(steps.values()))
    return (_label(record), *cells, total, microseconds(whole) if whole else "-")


def _stage_tables(result: Result) -> list[Table]:
    times = [record for record in result["records"] if record["op"] in TITLES]
    tables = []
    for op in TITLES:
        records = [r for r in result["records"] if r["op"] == STAGES and r["of"] == op]
        names = list(dict.fromkeys(name for record in records for name in record["times"]))
        if records:
            header = ("case", *names, "sum", "measured as a whole")
            rows = [_stage_row(record, names, times) for record in records]
            tables.append(Table(f"Where our time goes, {op}: each step as a call of its own, us", header, rows))
    return tables


def _index_row(record: Record, limits: dict[str, float]) -> tuple[str, ...]:
    us, peer = (record["times"][name]["median_us"] for name in (BY_INDEX, SORTED))
    reached = bound(record["flop"] / us, 0.0, limits)
    return (record["part"], _label(record), microseconds(us), reached, microseconds(peer), f"{peer / us:.3f}")


def _moving_row(record: Record, limits: dict[str, float]) -> tuple[str, ...]:
    us = record["times"][OURS]["median_us"]
    reached = bound(0.0, record["bytes"] / us, limits)
    return (record["part"], _label(record), microseconds(us), reached, peer_cell(record, COPY))


def _routing_rows(records: list[Record]) -> list[tuple[str, ...]]:
    """A row a number of choices, a column an operator."""
    times: dict[int, dict[str, float]] = {}
    for record in records:
        choices = record["case"]["tokens"] * record["case"]["top_k"]
        times.setdefault(choices, {})[record["part"]] = record["times"][GRAPH]["median_us"]
    names = list(dict.fromkeys(record["part"] for record in records))
    return [
        (str(choices), *(microseconds(us[name]) if name in us else "-" for name in names))
        for choices, us in times.items()
    ]


def _part_tables(result: Result) -> list[Table]:
    limits = result["limits"]
    parts = [record for record in result["records"] if record["op"] == PARTS]
    indexed = [record for record in parts if BY_INDEX in record["times"]]
    moving = [record for record in parts if COPY in record["times"]]
    routing = [record for record in parts if GRAPH in record["times"]]
    tables: list[Table] = []
    header: tuple[str, ...]
    if indexed:
        header = ("part", "case", "by index us", "rate (of limit)", "sorted rows us", "sorted rows / by index")
        title = "Operators that read tokens by index, against the same on sorted rows"
        tables.append(Table(title, header, [_index_row(record, limits) for record in indexed]))
    if moving:
        header = ("part", "case", "glulam us", "rate (of limit)", "copy of as many bytes us")
        tables.append(Table("Moving rows", header, [_moving_row(record, limits) for record in moving]))
    if routing:
        names = dict.fromkeys(record["part"] for record in routing)
        case = routing[0]["case"]
        title = f"Routing in a graph, {case['top_k']} of {case['experts']} experts a token"
        tables.append(Table(title, ("choices (N K)", *(f"{name} us" for name in names)), _routing_rows(routing)))
    return tables


def layer_tables(result: Result) -> list[Table]:
    """Times of the whole, who was left out, memory, stages, parts."""
    records, tables = result["records"], []
    for op in TITLES:
        tables += _time_table([record for record in records if record["op"] == op], op, result["limits"])
    timed = [record for record in records if record["op"] in TITLES]
    more: tuple[Callable[[list[Record]], list[Table]], ...] = (_left_out_table, _memory_table)
    tables += [table for make in more for table in make(timed)]
    return [*tables, *_stage_tables(result), *_part_tables(result)]
