"""From results to tables: plain rows of text, shown with rich or written as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .cases import Case
from .cells import (
    DENSE,
    HOST,
    OURS,
    Table,
    bound,
    host_table,
    microseconds,
    our_cell,
    peer_cell,
    peers_of,
    rate,
    ratio,
    skew_cell,
    work,
)
from .distributed_tables import distributed_tables
from .fp8_tables import fp8_parts, frozen_part, lora_part
from .layer_tables import layer_tables
from .mhc_tables import mhc_tables
from .portable_tables import portable_parts
from .power_tables import power_parts
from .results import TRAINING, Result
from .serving_tables import serving_tables
from .targets import copy_target, target

OP_TITLES = {
    "fc1": "FC1 with SwiGLU in one kernel (`grouped_glu`)",
    "fc2": "FC2 (`grouped_mm`)",
    "mlp": "The whole MLP (`grouped_mlp`)",
}
LAYER_TITLE = "Forward and backward of one MLP layer, all gradients (`grouped_mlp` under autograd)"
KERNEL_TITLES = {
    "dglu": "The gradient of the preactivation (`grouped_dglu`); dense and torch's first step: the GEMM in it",
    "dgrad": "The gradient of FC1's input (`grouped_mm` with `transpose_w`)",
    "dw1": "The weight gradient of w1 (`grouped_wgrad`)",
    "dw2": "The weight gradient of w2 (`grouped_wgrad`)",
}
TITLES = {**OP_TITLES, "layer": LAYER_TITLE, **KERNEL_TITLES}
MEMORY_TITLE = "Memory of forward and backward, GB"


def _op_row(record: dict[str, Any], peers: list[str], limits: dict[str, float]) -> tuple[str, ...]:
    reached = rate(record, record["times"][OURS]["median_us"], limits)
    cells = (peer_cell(record, name) for name in peers)
    return (Case(**record["case"]).label, skew_cell(record), our_cell(record), reached, *cells)


def op_tables(result: Result) -> list[Table]:
    """One table an operator; a peer's cell is its time in us and, in brackets, its time over ours."""
    tables = []
    for op, title in TITLES.items():
        records = [record for record in result["records"] if record.get("op") == op]
        if records:
            peers = peers_of(records)
            header = ("case", "routing (max/mean)", "glulam us", "rate (of limit)", *(f"{name} us" for name in peers))
            tables.append(Table(title, header, [_op_row(r, peers, result["limits"]) for r in records]))
    return tables


def _shares(record: dict[str, Any], limits: dict[str, float]) -> list[tuple[str, float, float]]:
    """(against what, what was reached, what is aimed at), wherever there is a target."""
    found = [(name, ratio(record, name), target(record, name)) for name in record["times"]]
    moved = work(record)[1] / record["times"][OURS]["median_us"] * 1e-6
    found.append(("device copy", moved / limits["copy_tbps"], copy_target(record)))
    return [(name, reached, wanted) for name, reached, wanted in found if wanted is not None]


def below_target(result: Result) -> list[Table]:
    """Where a ratio is below what is aimed at; no table where none is."""
    rows: list[tuple[str, ...]] = []
    for record in result["records"]:
        for name, reached, wanted in _shares(record, result["limits"]):
            if reached < wanted:
                case = record["case"]
                rows.append((case["name"], case["routing"], record["op"], name, f"{reached:.3f}", f"{wanted:.2f}"))
    header = ("case", "routing", "operation", "against", "ratio", "target")
    return [Table("Below the target", header, rows)] if rows else []


def forward_tables(result: Result) -> list[Table]:
    """Operators, then what is below its target."""
    return [*op_tables(result), *below_target(result)]


def half_empty_table(records: list[dict[str, Any]]) -> list[Table]:
    """Half of the experts empty, against the same rows over all experts: the same useful FLOP."""
    times = {(r["case"]["name"], r["op"], r["case"]["routing"]): r["times"][OURS]["median_us"] for r in records}
    rows: list[tuple[str, ...]] = []
    for (name, op, routing), us in times.items():
        even = times.get((name, op, "uniform"))
        if routing == "half-empty" and even:
            rows.append((name, op, microseconds(even), microseconds(us), f"{us / even:.2f}"))
    header = ("case", "operation", "all experts us", "half empty us", "half / all")
    return [Table("Half of the experts empty, the same number of rows", header, rows)] if rows else []


def backward_tables(result: Result) -> list[Table]:
    return [*op_tables(result), *half_empty_table(result["records"]), *below_target(result)]


def host_tables(result: Result) -> list[Table]:
    """Host time of each item, then the differences that decide."""
    found = (record["times"] for record in result["records"] if record["op"] == "differences")
    rows: list[tuple[str, ...]] = [
        (name, f"{value['median_us']:.2f}") for times in found for name, value in times.items()
    ]
    return [
        host_table("Host time of a call", result, 2),
        Table("Differences of the medians", ("what", "us"), rows),
    ]


def _graph_row(record: dict[str, Any], names: list[str]) -> tuple[str, ...]:
    cells = (microseconds(record["times"][name]["median_us"]) for name in names)
    return (Case(**record["case"]).label, record["case"]["routing"], *cells, str(record["replays_equal_to_eager"]))


def graph_tables(result: Result) -> list[Table]:
    """Wall time a layer, eager and replayed."""
    names = list(dict.fromkeys(name for record in result["records"] for name in record["times"]))
    header = ("case", "routing", *(f"{name} us" for name in names), "replays equal to eager")
    return [Table("Wall time an MLP layer", header, [_graph_row(record, names) for record in result["records"]])]


def _transformers_row(record: dict[str, Any], peers: list[str]) -> tuple[str, ...]:
    errors = record.get("errors", {})
    best = min((error for name, error in errors.items() if name != OURS), default=None)
    error = "-" if best is None else f"{errors[OURS]:.1e} ({best:.1e})"
    what = (record["model"], str(record["tokens"]), record["mode"])
    return (*what, our_cell(record), *(peer_cell(record, name) for name in peers), error)


def transformers_tables(result: Result) -> list[Table]:
    """Blocks first, then a decoding step. Errors: ours and the best of transformers', against float32."""
    titles = {True: "One MoE block", False: "A decoding step, experts dominating"}
    tables = []
    for is_block, title in titles.items():
        records = [record for record in result["records"] if ("errors" in record) is is_block]
        peers = peers_of(records)
        header = ("model", "tokens", "mode", "glulam us", *(f"{name} us" for name in peers), "error (best of others)")
        tables.append(Table(title, header, [_transformers_row(record, peers) for record in records]))
    return [table for table in tables if table.rows]


def _gigabytes(values: dict[str, float], names: list[str]) -> tuple[str, ...]:
    return tuple(f"{values[name] * 1e-9:.2f}" if name in values else "-" for name in names)


def memory_table(result: Result) -> list[Table]:
    """Peak above what was allocated before, gradients included, and what forward saves for backward, x included."""
    records = [record for record in result["records"] if "peak_bytes" in record]
    names = list(dict.fromkeys(name for record in records for name in record["peak_bytes"]))
    header = ("case", *(f"{name} peak" for name in names), *(f"{name} saved" for name in names), "x, h and s")
    rows = []
    for record in records:
        saved = _gigabytes(record.get("saved_bytes", {}), names)
        (needed,) = _gigabytes({"all": record["needed_bytes"]} if "needed_bytes" in record else {}, ["all"])
        case = record["case"]
        label = f"{Case(**case).label}, {case['routing']}"
        rows.append((label, *_gigabytes(record["peak_bytes"], names), *saved, needed))
    return [Table(MEMORY_TITLE, header, rows)] if rows else []


def train_tables(result: Result) -> list[Table]:
    """A layer's training, its memory, and the host's time of a small layer."""
    measured = [record for record in result["records"] if record["op"] != HOST]
    return [
        *op_tables(result),
        *memory_table(result),
        host_table("Host time of forward and backward, tiny layer", result, 1),
        *below_target({**result, "records": measured}),
    ]


def _curve_row(record: dict[str, Any]) -> tuple[str, ...]:
    apart = [f"{value:.1e}" for value in record["distance"].values()] if "distance" in record else ["-", "-"]
    return (
        record["run"],
        f"{record['loss_at_end']:.4f}",
        f"{record['held_out']:.4f}",
        f"{record['step_ms']:.1f}",
        *apart,
    )


def curves_tables(result: Result) -> list[Table]:
    """One row a training run; distances are those of its smoothed loss from the first run's."""
    *runs, shared = result["records"]
    size, setup = shared["setup"]["size"], shared["setup"]
    ranks = f" on {shared['ranks']} GPUs" if "ranks" in shared else ""
    title = (
        f"A byte-level MoE language model in training, {setup['steps']} steps of {setup['batch']} x {size['context']} "
        f"bytes in {setup['dtype']} (L {size['layers']}, H {size['width']}, I {size['intermediate']}, "
        f"E {size['experts']}, K {size['top_k']}){ranks}; losses in nats a byte, means over {shared['window']} steps"
    )
    header = ("run", "loss at the end", "held-out loss", "ms a step", "mean distance", "largest distance")
    return [Table(title, header, [_curve_row(record) for record in runs])]


def _compare_cells(record: dict[str, Any], name: str, limits: dict[str, float]) -> tuple[str, ...]:
    times = record["times"]
    if name not in times:
        return ("-", "-", "-")
    us = times[name]["median_us"]
    best = min(time["median_us"] for other, time in times.items() if other != DENSE)
    mark = "*" if us == best and name != DENSE else ""
    of_dense = f"{times[DENSE]['median_us'] / us:.3f}" if DENSE in times and name != DENSE else "-"
    return (f"{microseconds(us)}{mark}", of_dense, bound(record["flop"] / us, record["bytes"] / us, limits))


def compare_tables(result: Result) -> list[Table]:
    """One table for each operation, form and case: a row a kernel, three columns a routing. * marks the fastest."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for record in result["records"]:
        groups.setdefault((record["op"], record["form"], Case(**record["case"]).label), []).append(record)
    tables = []
    for (op, form, label), records in groups.items():
        routings = (f"{r['case']['routing']} ({r['skew']['max_over_mean']:.1f})" for r in records)
        header = ("tile", *(cell for routing in routings for cell in (f"{routing} us", "of dense", "rate (of limit)")))
        names = dict.fromkeys(name for record in records for name in record["times"])
        rows = [
            (name, *(cell for r in records for cell in _compare_cells(r, name, result["limits"]))) for name in names
        ]
        tables.append(Table(f"{op}: {label}, {form}", header, rows))
    return tables


def _quantize_row(record: dict[str, Any], limits: dict[str, float]) -> tuple[str, ...]:
    tbps = record["bytes"] / record["times"][OURS]["median_us"] * 1e-6
    form = (record["dtype"], record["axis"], record["block"], record["scale_layout"])
    reached = f"{tbps:.2f} TB/s ({100 * tbps / limits['copy_tbps']:.0f} %)"
    return (record["label"], *form, our_cell(record), reached, peer_cell(record, "copy"))


def quantize_tables(result: Result) -> list[Table]:
    """Every form of the quantiser against the copy limit, and against a copy of as many bytes."""
    header = ("matrix", "dtype", "axis", "block", "scales", "glulam us", "rate (of copy limit)", "equal copy us")
    rows = [_quantize_row(record, result["limits"]) for record in result["records"]]
    return [Table("Quantising to MXFP8 (`quantize_mxfp8`; of weights, `prepare_mxfp8_weight`)", header, rows)]


def _tile_row(tile: str, records: list[dict[str, Any]], sizes: list[int]) -> tuple[str, ...]:
    """How much longer than the fastest a tile takes, geometric mean over the models and routings, by rows an expert."""
    cells = []
    for size in sizes:
        here = [r["us"] for r in records if r["rows_per_expert"] == size and tile in r["us"]]
        logs = [math.log(us[tile] / min(us.values())) for us in here]
        cells.append(f"{math.exp(sum(logs) / len(logs)):.2f}" if logs else "-")
    return (tile, *cells)


def tiles_tables(result: Result) -> list[Table]:
    """One table an operation: tiles by rows an expert, time over the fastest tile's."""
    tables = []
    for op in dict.fromkeys(record["op"] for record in result["records"]):
        records = [record for record in result["records"] if record["op"] == op]
        sizes = sorted({record["rows_per_expert"] for record in records})
        tiles = dict.fromkeys(tile for record in records for tile in record["us"])
        title = f"{op}: time over the fastest tile's, mean over models and routings, by rows an expert"
        tables.append(Table(title, ("tile", *map(str, sizes)), [_tile_row(tile, records, sizes) for tile in tiles]))
    return tables


TABLES: dict[str, Callable[[Result], list[Table]]] = {
    "forward": forward_tables,
    "decode": forward_tables,
    "rows": forward_tables,
    "skew": forward_tables,
    "backward": backward_tables,
    "train": train_tables,
    "host": host_tables,
    "graph": graph_tables,
    **dict.fromkeys(TRAINING, curves_tables),
    "quantize": quantize_tables,
    "power": lambda result: [Table(*parts) for parts in power_parts(result["records"], int(result["stamp"]["sms"]))],
    "frozen": lambda result: [Table(*frozen_part(result["records"]))],
    "serving": serving_tables,
    "lora": lambda result: [Table(*lora_part(result["records"]))],
    "fp8": lambda result: [Table(*parts) for parts in fp8_parts(result["records"], result["limits"]["copy_tbps"])],
    "portable": lambda result: [
        Table(*parts) for parts in portable_parts(result["records"], result["limits"]["copy_tbps"])
    ],
    "transformers": transformers_tables,
    "distributed": distributed_tables,
    "mhc": lambda result: [Table(*parts) for parts in mhc_tables(result)],
    "layer": layer_tables,
    "compare": compare_tables,
    "tiles": tiles_tables,
}


def limits_table(result: Result) -> Table:
    limits = result["limits"]
    rows: list[tuple[str, ...]] = [
        ("cuBLAS BF16 8192 x 8192 x 8192", f"{limits['cublas_8192_tflops']:.0f} TF/s"),
        ("device copy, read plus written", f"{limits['copy_tbps']:.2f} TB/s"),
        ("host time of one launch", f"{limits['launch_us']:.2f} us"),
    ]
    return Table("The machine's limits, same run", ("limit", "measured"), rows)


def tables_of(result: Result) -> list[Table]:
    """A result's tables, the machine's limits last where they were measured. Raises ValueError for an unknown suite."""
    if result["suite"] not in TABLES:
        raise ValueError(f"no tables for suite {result['suite']!r}; there are: {', '.join(TABLES)}")
    limits = [limits_table(result)] if result["limits"] else []
    return [*TABLES[result["suite"]](result), *limits]
