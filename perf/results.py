"""Result files: one CSV a suite and machine, self-describing.

A file begins with lines `# key: value`: the suite, what it was measured on and with, and the machine's limits. Then
comes a table with one line for each contestant of each record. Keys of nested dicts are joined by dots ("case.rows").
Columns before "contestant" are the record's own fields, which its contestants share; columns after it are measurements
of the contestant (`BY_CONTESTANT`).
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SCHEMA = "perf result, schema 2"
BY_CONTESTANT = ("times", "errors", "memory", "peak_bytes", "saved_bytes", "left_out")
"""Fields of a record that are dicts by contestant."""
TRAINING = ("training-curves", "megatron-allgather", "megatron-alltoall")
"""Suites of training runs, which `examples/train_moe.py` and `examples/train_megatron.py` measure."""
CONTESTANT = "contestant"
RESULTS = Path(__file__).resolve().parent / "results"
DIGITS = 5  # digits of a number that is not whole: more is noise, and makes every diff of a result file unreadable

Record = dict[str, Any]
Result = dict[str, Any]


def make_result(suite: str, stamp: dict[str, Any], limits: dict[str, float], records: list[Record]) -> Result:
    """Return the content of a result file: the suite's name, how it was measured, the machine's limits, the records.

    The field "tuning" of records (choices of peers' tuners) is left out of them, and added up for the whole suite.
    """
    found = [t for record in records for t in record.get("tuning", {}).values()]
    chosen = {(t["config"], t["timed"], t["seconds"]) for t in found}  # an operation's records share their case's
    tuned = {"kernels": len(chosen), "timed": sum(t[1] for t in chosen), "seconds": sum(t[2] for t in chosen)}
    kept = [{key: value for key, value in record.items() if key != "tuning"} for record in records]
    return {"suite": suite, "stamp": stamp, "limits": limits, "tuned": tuned if chosen else {}, "records": kept}


def default_path(suite: str, gpu: str, suffix: str = ".csv") -> Path:
    """Return perf/results/<suite>-<gpu>.csv, with the GPU in lower case, without vendor, hyphens for blanks."""
    return RESULTS / f"{suite}-{gpu.lower().replace('nvidia', '').strip().replace(' ', '-')}{suffix}"


def _text(value: Any) -> str:
    """Return the text of a cell: a float with DIGITS digits, a list in brackets with blanks between its numbers."""
    if isinstance(value, float):
        rounded = float(f"{value:.{DIGITS}g}")
        return str(int(rounded)) if rounded.is_integer() else str(rounded)
    if isinstance(value, (list, tuple)):
        return f"[{' '.join(map(_text, value))}]"
    return str(value).replace("\n", " ")


def _value(text: str) -> Any:
    """Return the value of a cell: a truth value, a list, a number, or the text itself."""
    if text in ("True", "False"):
        return text == "True"
    if text.startswith("[") and text.endswith("]"):
        return [_value(word) for word in text[1:-1].split()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the column names and cells of a value; the keys of nested dicts are joined by dots."""
    if not isinstance(value, dict):
        yield name, _text(value)
    else:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else key)


def _nested(cells: Iterable[tuple[str, Any]]) -> Record:
    """Return nested dicts from column names and cells, the inverse of `_flat`: each dot of a name opens a level."""
    made: Record = {}
    for name, value in cells:
        *path, last = name.split(".")
        held = made
        for key in path:
            held = held.setdefault(key, {})
        held[last] = value
    return made


def _lines(record: Record) -> Iterator[dict[str, str]]:
    """Yield a record's lines, one for each contestant; a single line if the record has no contestants."""
    shared = dict(_flat({key: value for key, value in record.items() if key not in BY_CONTESTANT}, ""))
    measured = [(key, record[key]) for key in BY_CONTESTANT if key in record]
    for name in dict.fromkeys(name for _, held in measured for name in held) or [""]:
        of_name = (cell for key, held in measured if name in held for cell in _flat(held[name], key))
        yield {**shared, CONTESTANT: name, **dict(of_name)}


def write(result: Result, path: Path) -> None:
    """Write a result file; create its folder if it is missing.

    Columns: the fields that a record's contestants share, the contestant, then what was measured of each contestant.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"suite": result["suite"], **{key: result[key] for key in ("stamp", "limits", "tuned")}}
    lines = [line for record in result["records"] for line in _lines(record)]
    names = [name for name in dict.fromkeys(name for line in lines for name in line) if name != CONTESTANT]
    measured = [name for name in names if name.partition(".")[0] in BY_CONTESTANT]
    columns = [*(name for name in names if name not in measured), CONTESTANT, *measured]
    text = io.StringIO()
    text.write(f"# {SCHEMA}\n" + "".join(f"# {name}: {value}\n" for name, value in _flat(head, "")))
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(lines)
    path.write_text(text.getvalue())  # at once: records that cannot be written leave an earlier file whole


def _head(lines: list[str]) -> Result:
    """Return the keys and values of a file's `# key: value` lines: numbers for limits and tuning, else text."""
    cells = (line.removeprefix("# ").partition(": ")[::2] for line in lines)
    return _nested((name, _value(text) if name.startswith(("limits", "tuned")) else text) for name, text in cells)


def _records(lines: list[str]) -> Iterator[Record]:
    """Yield the records of a table. Consecutive lines that differ only in the contestant's columns are one record."""
    header, *table = csv.reader(lines)
    own = header.index(CONTESTANT)
    for shared, group in itertools.groupby(table, lambda line: line[:own]):
        record = _nested((name, _value(text)) for name, text in zip(header[:own], shared, strict=True) if text)
        for contestant, *measured in (line[own:] for line in group):
            if contestant:
                record.setdefault("times", {})  # empty where all are left out
            for column, text in zip(header[own + 1 :], measured, strict=True):
                key, _, path = column.partition(".")
                held = record.setdefault(key, {}) if text else {}
                if path:
                    held.setdefault(contestant, {})[path] = _value(text)
                else:
                    held[contestant] = _value(text)
        yield record


def read(path: Path) -> Result:
    """Read a result file. Raises ValueError, naming the file, if it does not have this schema."""
    first, *lines = path.read_text().splitlines() or [""]
    if first != f"# {SCHEMA}":
        raise ValueError(f"{path} is not a {SCHEMA!r}; measure it again with `python -m perf`")
    head = list(itertools.takewhile(lambda line: line.startswith("# "), lines))
    return {"limits": {}, "tuned": {}, **_head(head), "records": list(_records(lines[len(head) :]))}


def read_all(folder: Path = RESULTS) -> list[Result]:
    """Read every result file of a folder, in the order of their names."""
    return [read(path) for path in sorted(folder.glob("*.csv"))]
