"""Tables of results: plain rows of text, shown with rich or written as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from . import cells
from .cells import CASE, DENSE, OURS, Columns, Limits, Table, number, rows_table, table
from .results import TRAINING, Record, Result
from .tables_layer import distributed_tables, layer_tables, mhc_tables
from .tables_recipes import fp8_tables, frozen_tables, lora_tables, portable_tables, serving_tables
from .targets import copy_target, target

TITLES = {
    "fc1": "FC1 with SwiGLU in one kernel (`grouped_glu`)",
    "fc2": "FC2 (`grouped_mm`)",
    "mlp": "The whole MLP (`grouped_mlp`)",
    "layer": "Forward and backward of one MLP layer, all gradients (`grouped_mlp` under autograd)",
    "dglu": "The gradient of the preactivation (`grouped_dglu`); dense and torch's first step: the GEMM in it",
    "dgrad": "The gradient of FC1's input (`grouped_mm` with `transpose_w`)",
    "dw1": "The weight gradient of w1 (`grouped_wgrad`)",
    "dw2": "The weight gradient of w2 (`grouped_wgrad`)",
}
FLOP_PER_CYCLE = 4096  # an SM's tensor cores, dense BF16 on Hopper


def _operators(result: Result) -> list[Table]:
    """Return a table for each operator; a peer's cell is its time in us and, in brackets, its time over ours."""
    head = [CASE, cells.SKEW, cells.OUR_TIME, cells.our_rate(result["limits"])]
    return cells.by_op(result["records"], TITLES, lambda of: [*head, *cells.columns_of(cells.peers_of(of))])


def _missed(result: Result) -> list[Table]:
    """Return the tables of ratios below their targets."""

    def shares() -> Iterator[tuple[Any, ...]]:
        for record in result["records"]:
            if record["op"] in TITLES:
                what = record["case"]["name"], cells.routing(record), record["op"]
                yield from ((*what, name, cells.ratio(record, name), target(record, name)) for name in record["times"])
                moved = cells.work(record)[1] / (cells.median(record) or math.inf) * 1e-6
                yield (*what, "device copy", moved / result["limits"]["copy_tbps"], copy_target(record))

    return cells.below_target(("case", "routing", "operation", "against"), shares())


def _half_empty(result: Result) -> list[Table]:
    """Return a table that compares rows of half of the experts with as many rows of all experts (the same FLOP)."""
    us = {(r["case"]["name"], r["op"], cells.routing(r)): r["times"][OURS]["median_us"] for r in result["records"]}
    pairs = ((key[:2], us.get((*key[:2], "uniform")), half) for key, half in us.items() if key[2] == "half-empty")
    times = cells.microseconds
    rows = ((*key, times(even), times(half), number(half / even)) for key, even, half in pairs if even)
    header = ("case", "operation", "all experts us", "half empty us", "half / all")
    return rows_table("Half of the experts empty, the same number of rows", header, rows)


def _memory(result: Result) -> list[Table]:
    """Return a table of memory: the peak above what was allocated before, gradients included, and what forward saves
    for backward, x included.
    """

    def gigabytes(record: Record, what: str, name: str) -> str:
        return number(record[what][name] * 1e-9 if name in record.get(what, ()) else None)

    records = [record for record in result["records"] if "peak_bytes" in record]
    names = cells.names_of(records, "peak_bytes")
    columns: Columns = [
        ("case", lambda record: f"{cells.label(record)}, {cells.routing(record)}"),
        *cells.columns_of(names, gigabytes, " peak", what="peak_bytes"),
        *cells.columns_of(names, gigabytes, " saved", what="saved_bytes"),
        ("x, h and s", lambda record: number(record["needed_bytes"] * 1e-9)),
    ]
    return table("Memory of forward and backward, GB", records, columns)


def _host(result: Result) -> list[Table]:
    """Return a table of each item's host time, then one of stored differences."""
    found = (item for record in cells.of_op(result["records"], "differences") for item in record["times"].items())
    rows = ((name, number(time["median_us"])) for name, time in found)
    items = cells.host_table("Host time of a call", result, 2)
    return [*items, *rows_table("Differences of the medians", ("what", "us"), rows)]


def _graph(result: Result) -> list[Table]:
    """Return a table of the wall time of an MLP layer, eager and replayed."""
    times = cells.columns_of(cells.names_of(result["records"]), cells.us_cell)
    equal = cells.fields(**{"replays equal to eager": "replays_equal_to_eager"})
    return table("Wall time an MLP layer", result["records"], [CASE, cells.ROUTING, *times, *equal])


def _transformers(result: Result) -> list[Table]:
    """Return a table of blocks, with our error against float32 and the best of the others', then of a decoding step."""

    def error(record: Record) -> str:
        errors = record.get("errors", {})
        best = min((error for name, error in errors.items() if name != OURS), default=None)
        return "-" if best is None else f"{errors[OURS]:.1e} ({best:.1e})"

    tables: list[Table] = []
    head = [*cells.fields(model="model", tokens="tokens", mode="mode"), cells.OUR_TIME]
    for is_block, title in {True: "One MoE block", False: "A decoding step, experts dominating"}.items():
        records = [record for record in result["records"] if ("errors" in record) is is_block]
        columns: Columns = [*head, *cells.columns_of(cells.peers_of(records)), ("error (best of others)", error)]
        tables += table(title, records, columns)
    return tables


def _curves(result: Result) -> list[Table]:
    """Return a table with a row for each training run; distances are from its smoothed loss to the first run's."""
    *runs, shared = result["records"]
    size, setup = shared["setup"]["size"], shared["setup"]
    ranks = f" on {shared['ranks']} GPUs" if "ranks" in shared else ""
    title = (
        f"A byte-level MoE language model in training, {setup['steps']} steps of {setup['batch']} x {size['context']} "
        f"bytes in {setup['dtype']} (L {size['layers']}, H {size['width']}, I {size['intermediate']}, "
        f"E {size['experts']}, K {size['top_k']}){ranks}; losses in nats a byte, means over {shared['window']} steps"
    )

    def apart(which: str) -> cells.Cell:
        return lambda run: f"{run['distance'][which]:.1e}" if "distance" in run else "-"

    columns: Columns = [
        *cells.fields(run="run"),
        ("loss at the end", lambda run: number(run["loss_at_end"], 4)),
        ("held-out loss", lambda run: number(run["held_out"], 4)),
        ("ms a step", lambda run: number(run["step_ms"], 1)),
        *((f"{which} distance", apart(which)) for which in ("mean", "largest")),
    ]
    return table(title, runs, columns)


def _compare_cells(record: Record, name: str, limits: Limits) -> tuple[str, ...]:
    us = cells.median(record, name)
    if us is None:
        return ("-", "-", "-")
    best = min(time["median_us"] for other, time in record["times"].items() if other != DENSE)
    mark = "*" if us == best and name != DENSE else ""
    of_dense = "-" if name == DENSE else number(cells.ratio(record, DENSE, name), 3)
    return (f"{cells.microseconds(us)}{mark}", of_dense, cells.rate(record, us, limits))


def _compare(result: Result) -> list[Table]:
    """Return a table for each operation, form and case: a row for each kernel, three columns for each routing. * marks
    the fastest.
    """
    groups: dict[str, list[Record]] = {}
    for record in result["records"]:
        groups.setdefault(f"{record['op']}: {cells.label(record)}, {record['form']}", []).append(record)
    tables = []
    for title, records in groups.items():
        heads = (heading for r in records for heading in (f"{cells.SKEW[1](r)} us", "of dense", "rate (of limit)"))
        made = {n: [_compare_cells(record, n, result["limits"]) for record in records] for n in cells.names_of(records)}
        tables.append(Table(title, ("tile", *heads), [(name, *sum(row, ())) for name, row in made.items()]))
    return tables


def _quantize(result: Result) -> list[Table]:
    """Return a table of every form of the quantiser against the copy limit, and against a copy of as many bytes."""
    columns: Columns = [
        *cells.fields(matrix="label", dtype="dtype", axis="axis", block="block", scales="scale_layout"),
        cells.OUR_TIME,
        ("rate (of copy limit)", lambda r: cells.rate(r, cells.median(r), result["limits"])),
        ("equal copy us", lambda r: cells.peer_cell(r, "copy")),
    ]
    title = "Quantising to MXFP8 (`quantize_mxfp8`; of weights, `prepare_mxfp8_weight`)"
    return table(title, result["records"], columns)


def _power(result: Result) -> list[Table]:
    """Return a table of the clock that each contestant runs at alone, and how busy it keeps the tensor cores."""
    rows = []
    for record in result["records"]:
        for name, alone in record["times"].items():
            per_us = record["flop"] / alone["median_us"]
            numbers = (alone["median_us"], per_us * 1e-6, alone["mhz"], alone["watts"])
            of_peak = number(per_us / (FLOP_PER_CYCLE * int(result["stamp"]["sms"]) * alone["mhz"]))
            shown = (*(number(value, 0) for value in numbers), f"{alone['capped']:.0%}", of_peak)
            rows.append((cells.label(record), record["op"], name, *shown))
    title = "Each contestant alone: the clock that power leaves it, and the share of the tensor cores' peak there"
    header = ("case", "op", "contestant", "us", "TF/s", "SM MHz", "W", "power-capped", "of peak")
    return rows_table(title, header, rows)


def _tiles(result: Result) -> list[Table]:
    """Return a table for each operation: each tile's time over the fastest tile's (geometric mean), by rows an
    expert.
    """

    def over_fastest(tile: str, records: list[Record]) -> str:
        logs = [math.log(r["us"][tile] / min(r["us"].values())) for r in records if tile in r["us"]]
        return number(math.exp(sum(logs) / len(logs)) if logs else None)

    tables = []
    for op in dict.fromkeys(record["op"] for record in result["records"]):
        records = cells.of_op(result["records"], op)
        sizes = sorted({record["rows_per_expert"] for record in records})
        by_size = [[record for record in records if record["rows_per_expert"] == size] for size in sizes]
        title = f"{op}: time over the fastest tile's, mean over models and routings, by rows an expert"
        rows = [(tile, *(over_fastest(tile, of_size) for of_size in by_size)) for tile in cells.names_of(records, "us")]
        tables.append(Table(title, ("tile", *map(str, sizes)), rows))
    return tables


def _limits(result: Result) -> list[Table]:
    """Return a table of the machine's limits; no table if they were not measured."""
    texts = {
        "cublas_8192_tflops": ("cuBLAS BF16 8192 x 8192 x 8192", "{:.0f} TF/s"),
        "copy_tbps": ("device copy, read plus written", "{:.2f} TB/s"),
        "launch_us": ("host time of one launch", "{:.2f} us"),
    }
    rows = ((what, text.format(result["limits"][key])) for key, (what, text) in texts.items() if result["limits"])
    return rows_table("The machine's limits, same run", ("limit", "measured"), rows)


_train_host = partial(cells.host_table, "Host time of forward and backward, tiny layer", digits=1)
TABLES: dict[str, tuple[Callable[[Result], list[Table]], ...]] = {
    **dict.fromkeys(("forward", "decode", "rows", "skew"), (_operators, _missed)),
    "backward": (_operators, _half_empty, _missed),
    "train": (_operators, _memory, _train_host, _missed),
    **dict.fromkeys(TRAINING, (_curves,)),
    "host": (_host,),
    "graph": (_graph,),  # of a stored result: `layer` now times calls eager and replayed
    "quantize": (_quantize,),
    "power": (_power,),
    "frozen": (frozen_tables,),
    "serving": (serving_tables,),
    "lora": (lora_tables,),
    "fp8": (fp8_tables,),
    "portable": (portable_tables,),
    "transformers": (_transformers,),
    "distributed": (distributed_tables,),
    "mhc": (mhc_tables,),
    "layer": (layer_tables,),
    "compare": (_compare,),
    "tiles": (_tiles,),
}


def tables_of(result: Result) -> list[Table]:
    """Return a result's tables, the machine's limits last. Raises ValueError for an unknown suite."""
    if result["suite"] not in TABLES:
        raise ValueError(f"no tables for suite {result['suite']!r}; there are: {', '.join(TABLES)}")
    return [made for make in (*TABLES[result["suite"]], _limits) for made in make(result)]
