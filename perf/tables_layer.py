"""Tables of whole layers, on one GPU and across GPUs, and of the hyper-connections."""

from __future__ import annotations

from . import cells
from .cases import FORWARD, TRAIN
from .cells import CASE, HOST, OURS, Columns, Table, columns_of, median, number, ratio, rows_table, table
from .results import Record, Result

STAGES, PARTS = "stages", "parts"
BY_INDEX, SORTED, COPY, REPLAYED = "by index", "sorted rows", "copy", "replayed"
TITLES = {
    FORWARD: "The layer from tokens to tokens, forward (`route` and `moe`, the router's GEMM by torch)",
    TRAIN: "The layer from tokens to tokens, forward and backward, all gradients",
}
SYMMETRIC, ALL_TO_ALL, ALONE = "symmetric", "all_to_all", "experts alone"
GB200_OVER_H200 = 8.0 / 4.8
"""The ratio of a GB200's memory bandwidth to an H200's by data sheet, in TB/s."""
CUTILE_GB200_US = {"sinkhorn": (65, 133), "aggregate": (349, 661), "post_mix": (684, 2549), "project": (426, 1541)}
"""Times published for cuTile kernels on a GB200 at s 8192, b 4, n 4, C 7168: forward and backward."""
PUBLISHED_S = 8192
ISSUE_SLOTS = 4
"""Warp instructions that an SM can start in a cycle."""


def _contestant(record: Record, name: str) -> str:
    """Return a contestant's time and, in brackets, its time over ours; "wrong" or "failed" if it was left out."""
    if name in record["times"]:
        cell = cells.us_cell if OURS not in record["times"] else cells.peer_cell
        return cells.our_cell(record) if name == OURS else cell(record, name)
    why = record.get("left_out", {}).get(name)
    return "-" if why is None else "wrong" if why.startswith("wrong") else "failed"


def _left_out(records: list[Record]) -> list[Table]:
    found = ((record, why) for record in records for why in record.get("left_out", {}).items())
    rows = ((cells.label(r), cells.routing(r), r["op"], r["mode"], *why) for r, why in found)
    header = ("case", "routing", "operation", "mode", "contestant", "why it was not timed")
    return rows_table("Left out", header, rows)


def _memory(records: list[Record]) -> list[Table]:
    """Return a table of memory. The peak includes results and gradients; what is kept from forward to backward includes
    the result.
    """

    def held(record: Record, name: str, what: str) -> str:
        found = record["memory"].get(name, {})
        return number(found[what] * 1e-9 if what in found else None, 3)

    measured = [record for record in records if record.get("memory")]
    columns: Columns = [CASE, cells.ROUTING, *cells.fields(operation="op")]
    for what in ("kept", "peak"):
        columns += columns_of(cells.names_of(measured, "memory"), held, f" {what}", what=what)
    return table("Memory, GB: kept after the forward, and the peak of a call", measured, columns)


def _stages(records: list[Record], op: str) -> list[Table]:
    """Return a table of a forward's or a training's steps, their sum, and our time of the whole layer: replayed if that
    was measured, else eager.
    """

    def whole(record: Record) -> str:
        same = (r for r in cells.of_op(records, op) if r["case"] == record["case"])
        found = {r["mode"]: us for r in same if (us := median(r)) is not None}
        return cells.microseconds(found.get("graph", found.get("eager")))

    stages = [r for r in cells.of_op(records, STAGES) if r["of"] == op]
    columns: Columns = [
        CASE,
        *columns_of(cells.names_of(stages), cells.us_cell, ""),
        ("sum", lambda record: cells.microseconds(sum(time["median_us"] for time in record["times"].values()))),
        ("measured as a whole", whole),
    ]
    return table(f"Where our time goes, {op}: each step as a call of its own, us", stages, columns)


def _parts(result: Result) -> list[Table]:
    """Return tables of GEMMs and of moving rows, and one of routing: a row for each number of choices, a column for
    each operator.
    """

    def of(name: str) -> list[Record]:
        return [record for record in cells.of_op(result["records"], PARTS) if name in record["times"]]

    head: Columns = [*cells.fields(part="part"), CASE]
    indexed: Columns = [
        *columns_of((BY_INDEX,), cells.us_cell),
        ("rate (of limit)", lambda record: cells.rate(record, median(record, BY_INDEX), result["limits"])),
        *columns_of((SORTED,), cells.us_cell),
        (f"{SORTED} / {BY_INDEX}", lambda record: number(ratio(record, SORTED, BY_INDEX), 3)),
    ]
    moving: Columns = [*columns_of((OURS,), cells.us_cell), cells.our_rate(result["limits"])]
    moving.append(("copy of as many bytes us", lambda record: cells.peer_cell(record, COPY)))
    routed = of(REPLAYED)
    sizes = routed[0]["case"] if routed else {"top_k": 0, "experts": 0}
    routing = f"Routing in a graph, {sizes['top_k']} of {sizes['experts']} experts a token"
    return [
        *table("Operators that read tokens by index, against the same on sorted rows", of(BY_INDEX), head + indexed),
        *table("Moving rows", of(COPY), head + moving),
        *cells.pivot(
            routing, ("choices (N K)",), routed, lambda r: (str(cells.case_of(r).rows),), "part",
            lambda r: cells.us_cell(r, REPLAYED),
        ),
    ]  # fmt: skip


def layer_tables(result: Result) -> list[Table]:
    """Return the tables in this order: times of the whole, who was left out, memory, stages, parts."""
    timed = [record for record in result["records"] if record["op"] in TITLES]
    head: Columns = [CASE, cells.SKEW, *cells.fields(mode="mode"), ("glulam us", lambda r: _contestant(r, OURS))]
    head.append(cells.our_rate(result["limits"]))

    def columns(records: list[Record]) -> Columns:
        return [*head, *columns_of(cells.peers_of(records, "times", "left_out"), _contestant)]

    steps = [made for op in TITLES for made in _stages(result["records"], op)]
    return [*cells.by_op(timed, TITLES, columns), *_left_out(timed), *_memory(timed), *steps, *_parts(result)]


def distributed_tables(result: Result) -> list[Table]:
    """Return a table of dispatch and combine, then one of layers.

    A share is the time that the bytes take at the links' rate (measured in the same run), divided by our time.
    """

    def alone(record: Record) -> float:
        return float(record["bytes"] / record["put_gbps"] * 1e-3)

    def share(record: Record, name: str) -> str:
        us = record["times"][SYMMETRIC][name]
        return f"{us:.1f} ({alone(record) / us:.2f})"

    def us(record: Record, name: str) -> float:
        return float(record["times"].get(name, {}).get("us", 0.0))

    ends, layers = ([r for r in result["records"] if r["kind"] == kind] for kind in ("ends", "layer"))
    where = f"{(ends or layers)[0]['world']} GPUs"
    puts = f", an elementwise kernel's stores to a peer {ends[0]['put_gbps']:.0f} GB/s" if ends else ""
    of_ends: Columns = [
        ("layer, tokens a rank", lambda r: f"{r['layer']}, {r['tokens']}"),
        ("bytes alone", lambda r: number(alone(r), 1)),
        *columns_of(("dispatch", "combine"), share, " (share)"),
        ("both", lambda r: number(r["times"][SYMMETRIC]["both"], 1)),
        ("both, graph", lambda r: number(r["times"][SYMMETRIC]["graph"], 1)),
        ("both by all_to_all", lambda r: number(r["times"][ALL_TO_ALL]["both"], 1)),
    ]
    of_layers: Columns = [
        ("layer, tokens a rank", lambda r: f"{r['layer']}, {r['tokens']}, {r['mode']}"),
        *columns_of((SYMMETRIC, ALL_TO_ALL), lambda r, name: number(us(r, name) or None, 1), ""),
        ("ratio", lambda r: number(us(r, ALL_TO_ALL) / us(r, SYMMETRIC) or None)),
        ("over experts alone", lambda r: number(us(r, SYMMETRIC) - us(r, ALONE), 1)),
        ("tokens a second over 1 GPU's", lambda r: number(r["world"] * us(r, ALONE) / us(r, SYMMETRIC))),
    ]
    title = f"Dispatch with its routing, and combine of rows, us; {where}{puts}"
    return [*table(title, ends, of_ends), *table(f"The layer, us; {where}", layers, of_layers)]


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
        """Return text: the fewest instructions, divided by those that all SMs could issue in the measured time.

        The SMs' clock is taken as the highest.
        """
        slots = ISSUE_SLOTS * float(stamp["sms"]) * float(stamp["sm_clock_max_mhz"]) * (median(record) or 0.0)
        least = record.get("warp_instructions")
        return number(least / slots if least else None)

    columns: Columns = [
        *cells.fields(operator="op", direction="direction"),
        ("s x b x n x C", lambda r: " x ".join(str(r["size"][name]) for name in "sbnc")),
        ("glulam us", lambda r: number(median(r), 1)),
        ("least GB", lambda r: number(r["bytes"] * 1e-9, 3)),
        ("of copy bandwidth", lambda r: number(r["bytes"] / copy_tbps * 1e-6 / r["times"][OURS]["median_us"])),
        ("of issue slots", of_issue),
        *columns_of(
            cells.peers_of(measured), lambda r, name: f"{number(median(r, name), 0)} ({number(ratio(r, name))})"
        ),
        ("cuTile, GB200, scaled us", _published),
        ("largest difference", lambda r: f"{r['difference']:.1g}"),
    ]
    host = cells.host_table("Hyper-connections: host time of a small call", result, 2)
    return [*table("Hyper-connections: device time", measured, columns), *host]
