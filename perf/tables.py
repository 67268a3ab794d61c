"""From results to tables: plain rows of text, shown with rich or written as Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from .cases import Case
from .mhc_tables import mhc_tables
from .results import Result
from .timing import Summary

OURS = "glulam"
OP_TITLES = {
    "fc1": "FC1 with SwiGLU in one kernel (`grouped_glu`)",
    "fc2": "FC2 (`grouped_mm`)",
    "mlp": "The whole MLP (`grouped_mlp`)",
}
TRAIN_TITLES = {
    "layer": "Forward and backward of one MLP layer, all gradients (`grouped_mlp` under autograd)",
    "dw1": "The weight gradient of w1 (`grouped_wgrad`)",
    "dw2": "The weight gradient of w2 (`grouped_wgrad`)",
    "dglu": "The gradient of the preactivation (`grouped_dglu`) against the GEMM in it",
}


@dataclasses.dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def _summary(data: dict[str, Any]) -> Summary:
    return Summary(**data)


def microseconds(value: float) -> str:
    """Three significant digits at least: 2825, 365, 24.3, 4.71."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def rate(record: dict[str, Any], median_us: float, limits: dict[str, float]) -> str:
    """Useful TF/s or TB/s, whichever the machine's limits bind first, and how much of that limit it is."""
    case, op = Case(**record["case"]), record["op"]
    tflops = case.flop(op) / median_us * 1e-6
    tbps = case.bytes(op, record["active_experts"]) / median_us * 1e-6
    of_flop, of_bytes = tflops / limits["cublas_8192_tflops"], tbps / limits["copy_tbps"]
    if of_bytes > of_flop:
        return f"{tbps:.2f} TB/s ({100 * of_bytes:.0f} %)"
    return f"{tflops:.0f} TF/s ({100 * of_flop:.0f} %)"


def ratio(record: dict[str, Any], name: str) -> float:
    """The peer's median over ours: above 1 we are faster."""
    times = record["times"]
    return float(times[name]["median_us"] / times[OURS]["median_us"])


def _peers(records: list[dict[str, Any]]) -> list[str]:
    """Every contestant but us, in order of first appearance."""
    return [name for name in dict.fromkeys(name for r in records for name in r["times"]) if name != OURS]


def _peer_cell(record: dict[str, Any], name: str) -> str:
    if name not in record["times"]:
        return "-"
    return f"{microseconds(record['times'][name]['median_us'])} ({ratio(record, name):.2f}x)"


def _forward_row(record: dict[str, Any], peers: list[str], limits: dict[str, float]) -> tuple[str, ...]:
    ours = _summary(record["times"][OURS])
    case = Case(**record["case"])
    own = f"{microseconds(ours.median_us)} ± {100 * ours.spread:.1f} %"
    skew = f"{case.routing} ({record['skew']['max_over_mean']:.1f})"
    reached = rate(record, ours.median_us, limits)
    return (case.label, skew, own, reached, *(_peer_cell(record, name) for name in peers))


def forward_tables(result: Result) -> list[Table]:
    """One table an operator; a peer's cell is its time in us and, in brackets, its time over ours."""
    tables = []
    for op, title in OP_TITLES.items():
        records = [record for record in result["records"] if record["op"] == op]
        if records:
            peers = _peers(records)
            header = ("case", "routing (max/mean)", "glulam us", "rate (of limit)", *(f"{name} us" for name in peers))
            tables.append(Table(title, header, [_forward_row(r, peers, result["limits"]) for r in records]))
    return tables


def host_tables(result: Result) -> list[Table]:
    """Host time of each item, then the differences that decide."""
    rows: list[tuple[str, ...]] = []
    differences: list[tuple[str, ...]] = []
    for record in result["records"]:
        if "derived" in record:
            differences = [(name, f"{value:.2f}") for name, value in record["derived"].items()]
        else:
            fields = (record["median_us"], record["low_us"], record["high_us"])
            rows.append((record["item"], *(f"{value:.2f}" for value in fields)))
    return [
        Table("Host time of a call", ("item", "median us", "10 %", "90 %"), rows),
        Table("Differences of the medians", ("what", "us"), differences),
    ]


def _graph_row(record: dict[str, Any], names: list[str]) -> tuple[str, ...]:
    cells = (microseconds(record["times"][name]["median_us"]) for name in names)
    return (Case(**record["case"]).label, record["case"]["routing"], *cells, str(record["replays_equal_to_eager"]))


def graph_tables(result: Result) -> list[Table]:
    """Wall time a layer, eager and replayed."""
    names = list(dict.fromkeys(name for record in result["records"] for name in record["times"]))
    header = ("case", "routing", *(f"{name} us" for name in names), "replays equal to eager")
    return [Table("Wall time an MLP layer", header, [_graph_row(record, names) for record in result["records"]])]


def _train_row(record: dict[str, Any], peers: list[str], limits: dict[str, float]) -> tuple[str, ...]:
    ours, case = _summary(record["times"][OURS]), Case(**record["case"])
    own = f"{microseconds(ours.median_us)} ± {100 * ours.spread:.1f} %"
    skew = f"{case.routing} ({record['skew']['max_over_mean']:.1f})"
    tflops = record["flop"] / ours.median_us * 1e-6
    reached = f"{tflops:.0f} TF/s ({100 * tflops / limits['cublas_8192_tflops']:.0f} %)"
    peaks = (f"{peak * 1e-9:.2f}" for peak in record.get("peak_bytes", {}).values())
    return (case.label, skew, own, reached, *(_peer_cell(record, name) for name in peers), *peaks)


def train_tables(result: Result) -> list[Table]:
    """One table an operation of training, and the host's time of a small layer."""
    tables = []
    for op, title in TRAIN_TITLES.items():
        records = [record for record in result["records"] if record.get("op") == op]
        if records:
            peers = _peers(records)
            peaks = (f"{name} peak GB" for name in records[0].get("peak_bytes", {}))
            header = ("case", "routing (max/mean)", "glulam us", "rate (of limit)", *(f"{name} us" for name in peers))
            rows = [_train_row(record, peers, result["limits"]) for record in records]
            tables.append(Table(title, (*header, *peaks), rows))
    items = [record for record in result["records"] if "item" in record]
    rows = [(r["item"], *(f"{r[name]:.1f}" for name in ("median_us", "low_us", "high_us"))) for r in items]
    return [
        *tables,
        Table("Host time of forward and backward, tiny layer", ("item", "median us", "10 %", "90 %"), rows),
    ]


TABLES: dict[str, Callable[[Result], list[Table]]] = {
    "forward": forward_tables,
    "host": host_tables,
    "graph": graph_tables,
    "train": train_tables,
    "mhc": lambda result: [Table(*parts) for parts in mhc_tables(result)],
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
    """A result's tables, the machine's limits last. Raises ValueError for a suite that has none."""
    if result["suite"] not in TABLES:
        raise ValueError(f"no tables for suite {result['suite']!r}; there are: {', '.join(TABLES)}")
    return [*TABLES[result["suite"]](result), limits_table(result)]
