"""Make the table that the dispatcher reads from a result of the tiles suite."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from cute_kernels.sm90.policy import MEASURED

from .results import RESULTS, Result, read

FORMS = {"fc1": "glu", "fc2": "nt", "dgrad": "nn"}
STAMPED = ("commit", "date", "gpu", "driver", "versions")
DIGITS = 4

Record = dict[str, Any]
Shape = tuple[str, int, int, int]


def _mean(records: list[Record]) -> dict[str, float]:
    """Microseconds by tile, geometric mean over the routings, of the tiles that all of them have."""
    names = [name for name in records[0]["us"] if all(name in record["us"] for record in records)]
    logs = {name: sum(math.log(record["us"][name]) for record in records) / len(records) for name in names}
    return {name: float(f"{math.exp(log):.{DIGITS}g}") for name, log in logs.items()}


def _shape(key: Shape, records: list[Record]) -> dict[str, Any]:
    """One line of the table: times by rows an expert."""
    sizes = sorted({record["rows_per_expert"] for record in records})
    means = [_mean([record for record in records if record["rows_per_expert"] == size]) for size in sizes]
    tiles = [name for name in means[0] if all(name in mean for mean in means)]
    us = {name: [mean[name] for mean in means] for name in tiles}
    return {**dict(zip(("form", "experts", "columns", "depth"), key, strict=True)), "rows_per_expert": sizes, "us": us}


def make_table(result: Result) -> dict[str, Any]:
    """Every shape's times and what they were measured on."""
    shapes: dict[Shape, list[Record]] = {}
    for record in result["records"]:
        key = FORMS[record["op"]], record["experts"], record["n"], record["k"]
        shapes.setdefault(key, []).append(record)
    stamp = {name: result["stamp"][name] for name in STAMPED}
    return {"stamp": stamp, "shapes": [_shape(key, records) for key, records in sorted(shapes.items())]}


def text(table: dict[str, Any]) -> str:
    """JSON with a shape a line."""
    lines = ",\n".join(json.dumps(shape, separators=(",", ":")) for shape in table["shapes"])
    return f'{{"stamp": {json.dumps(table["stamp"])},\n"shapes": [\n{lines}\n]}}\n'


def write_table(source: Path = RESULTS / "tiles-h200.csv", path: Path = MEASURED) -> Path:
    """Writes the measurements that ship, from a result file. Raises ValueError where that is not of the tiles suite."""
    result = read(source)
    if result["suite"] != "tiles":
        raise ValueError(f"{source} is a result of suite {result['suite']!r}; a table is made of one of 'tiles'")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(make_table(result)))
    return path
