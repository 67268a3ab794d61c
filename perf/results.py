"""Result files: one JSON a suite and machine, self-describing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMA = 1
ONE_LINE_RECORDS = ("tiles",)
RESULTS = Path(__file__).resolve().parent / "results"

Result = dict[str, Any]


def make_result(suite: str, stamp: dict[str, Any], limits: dict[str, float], records: list[dict[str, Any]]) -> Result:
    """What a result file holds: the suite's name, how it was measured, the machine's limits, the records."""
    return {"schema": SCHEMA, "suite": suite, "stamp": stamp, "limits": limits, "records": records}


def gpu_slug(gpu: str) -> str:
    """A GPU's name for a file: lower case, without vendor and blanks."""
    return gpu.lower().replace("nvidia", "").strip().replace(" ", "-")


def default_path(suite: str, gpu: str) -> Path:
    """perf/results/<suite>-<gpu>.json."""
    return RESULTS / f"{suite}-{gpu_slug(gpu)}.json"


def _rounded(value: Any) -> Any:
    """Floats to five significant digits: more is noise, and makes every diff of a result file unreadable."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


def _lines(records: list[dict[str, Any]]) -> str:
    """One record a line."""
    return "[\n" + ",\n".join(json.dumps(record, separators=(",", ":")) for record in records) + "\n]"


def write(result: Result, path: Path) -> None:
    """Indented; a record a line for suites of many small ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = _rounded(result)
    if result["suite"] not in ONE_LINE_RECORDS:
        path.write_text(json.dumps(rounded, indent=1) + "\n")
        return
    head = json.dumps({**rounded, "records": []}, indent=1)
    path.write_text(head.replace('"records": []', f'"records": {_lines(rounded["records"])}') + "\n")


def read(path: Path) -> Result:
    """One result file. Raises ValueError, naming the file, where it is not one of this schema."""
    try:
        result = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); measure it again") from error
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise ValueError(f"{path} is not a result of schema {SCHEMA}; measure it again with `python -m perf`")
    return result


def read_all(folder: Path = RESULTS) -> list[Result]:
    """Every result file of a folder, in the order of their names."""
    return [read(path) for path in sorted(folder.glob("*.json"))]
