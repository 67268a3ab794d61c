"""The tables of the `layer` suite."""

from __future__ import annotations

from . import cells
from .cases import FORWARD, TRAIN
from .cells import CASE, OURS, Column, Table, table
from .results import Record, Result

STAGES, PARTS = "stages", "parts"
BY_INDEX, SORTED, COPY, REPLAYED = "by index", "sorted rows", "copy", "replayed"
TITLES = {
    FORWARD: "The layer from tokens to tokens, forward (`route` and `moe`, the router's GEMM by torch)",
    TRAIN: "The layer from tokens to tokens, forward and backward, all gradients",
}


def _peer(record: Record, name: str) -> str:
    """Return a contestant's time and, in brackets, its time over ours; "wrong" or "failed" if it was left out."""
    if name in record["times"]:
        return cells.peer_cell(record, name) if OURS in record["times"] else cells.us_cell(record, name)
    why = record.get("left_out", {}).get(name)
    return "-" if why is None else "wrong" if why.startswith("wrong") else "failed"


def _times(records: list[Record], op: str, result: Result) -> list[Table]:
    peers = dict.fromkeys(n for r in records for n in (*r.get("times", ()), *r.get("left_out", ())) if n != OURS)
    columns: list[Column] = [
        CASE,
        cells.SKEW,
        ("mode", cells.field("mode")),
        ("glulam us", lambda record: cells.our_cell(record) if OURS in record["times"] else _peer(record, OURS)),
        cells.our_rate(result["limits"]),
        *cells.columns_of(peers, _peer),
    ]
    return table(TITLES[op], records, columns)


def _left_out(records: list[Record]) -> list[Table]:
    rows = [
        (cells.label(r), r["case"]["routing"], r["op"], r["mode"], *why)
        for r in records
        for why in r.get("left_out", {}).items()
    ]
    header = ("case", "routing", "operation", "mode", "contestant", "why it was not timed")
    return cells.rows_table("Left out", header, rows)


def _memory(records: list[Record]) -> list[Table]:
    """Return a table of memory. The peak includes results and gradients; what is kept from forward to backward includes
    the result.
    """

    def held(record: Record, name: str, what: str) -> str:
        found = record["memory"].get(name, {})
        return cells.number(found[what] * 1e-9 if what in found else None, 3)

    measured = [record for record in records if record.get("memory")]
    names = cells.names_of(measured, "memory")
    columns = [CASE, cells.ROUTING, ("operation", cells.field("op"))]
    columns += [column for what in ("kept", "peak") for column in cells.columns_of(names, held, f" {what}", what=what)]
    return table("Memory, GB: kept after the forward, and the peak of a call", measured, columns)


def _whole_us(record: Record, records: list[Record]) -> float | None:
    """Return our time of the whole layer that a record of stages belongs to: replayed if that was measured, else
    eager.
    """
    same = (r for r in cells.of_op(records, record["of"]) if r["case"] == record["case"])
    found = {r["mode"]: us for r in same if (us := cells.median(r)) is not None}
    return found.get("graph", found.get("eager"))


def _stages(result: Result, op: str) -> list[Table]:
    records = [r for r in cells.of_op(result["records"], STAGES) if r["of"] == op]
    columns: list[Column] = [
        CASE,
        *cells.columns_of(cells.names_of(records), cells.us_cell, ""),
        ("sum", lambda record: cells.microseconds(sum(time["median_us"] for time in record["times"].values()))),
        ("measured as a whole", lambda record: cells.microseconds(_whole_us(record, result["records"]))),
    ]
    return table(f"Where our time goes, {op}: each step as a call of its own, us", records, columns)


def _routing(records: list[Record]) -> list[Table]:
    """Return a table of routing: a row for each number of choices, a column for each operator."""
    sizes = records[0]["case"] if records else {"top_k": 0, "experts": 0}
    title = f"Routing in a graph, {sizes['top_k']} of {sizes['experts']} experts a token"
    return cells.pivot(
        title,
        ("choices (N K)",),
        records,
        lambda r: (str(cells.case_of(r).rows),),
        "part",
        lambda r: cells.us_cell(r, REPLAYED),
    )


def _parts(result: Result) -> list[Table]:
    def of(name: str) -> list[Record]:
        return [record for record in cells.of_op(result["records"], PARTS) if name in record["times"]]

    def reached(record: Record) -> str:
        return cells.bound(record["flop"] / record["times"][BY_INDEX]["median_us"], 0.0, result["limits"])

    head: list[Column] = [("part", cells.field("part")), CASE]
    indexed: list[Column] = [
        *cells.columns_of((BY_INDEX,), cells.us_cell),
        ("rate (of limit)", reached),
        *cells.columns_of((SORTED,), cells.us_cell),
        (f"{SORTED} / {BY_INDEX}", lambda record: cells.number(cells.ratio(record, SORTED, BY_INDEX), 3)),
    ]
    moving: list[Column] = [
        *cells.columns_of((OURS,), cells.us_cell),
        cells.our_rate(result["limits"]),
        ("copy of as many bytes us", lambda record: cells.peer_cell(record, COPY)),
    ]
    title = "Operators that read tokens by index, against the same on sorted rows"
    return [
        *table(title, of(BY_INDEX), [*head, *indexed]),
        *table("Moving rows", of(COPY), [*head, *moving]),
        *_routing(of(REPLAYED)),
    ]


def layer_tables(result: Result) -> list[Table]:
    """Return the tables in this order: times of the whole, who was left out, memory, stages, parts."""
    timed = [record for record in result["records"] if record["op"] in TITLES]
    times = [made for op in TITLES for made in _times(cells.of_op(timed, op), op, result)]
    steps = [made for op in TITLES for made in _stages(result, op)]
    return [*times, *_left_out(timed), *_memory(timed), *steps, *_parts(result)]
