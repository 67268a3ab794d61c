"""Building blocks of tables: columns, and the text of times, rates and ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from .cases import Case, LayerCase, ServingCase
from .results import Record, Result

OURS, DENSE = "glulam", "dense"
HOST = "host"
"""The "op" of a record of host times; the contestants of such a record are the timed items."""
Limits = dict[str, float]
Cell = Callable[[Record], str]
Column = tuple[str, Cell]
"""A column's heading, and the function that makes the cell of a record."""
Columns = list[Column]


class Table(NamedTuple):
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def table(title: str, records: Iterable[Record], columns: Sequence[Column]) -> list[Table]:
    """Return a list of one table with a row for each record; an empty list if there are no records."""
    rows = [tuple(cell(record) for _, cell in columns) for record in records]
    return rows_table(title, tuple(heading for heading, _ in columns), rows)


def rows_table(title: str, header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[Table]:
    """Return a list of one table of ready rows; an empty list if there are no rows."""
    found = list(rows)
    return [Table(title, header, found)] if found else []


def by_op(
    records: Iterable[Record], titles: Mapping[str, str], columns: Callable[[list[Record]], Columns]
) -> list[Table]:
    """Return a table for each operation that has records, with the columns that `columns` gives for them."""
    found = {op: of_op(records, op) for op in titles}
    return [made for op, of in found.items() for made in table(titles[op], of, columns(of))]


def pivot(
    title: str, head: Sequence[str], records: Iterable[Record], keys: Callable[[Record], tuple[str, ...]], column: str,
    cell: Cell,
) -> list[Table]:  # fmt: skip
    """Return a table with a row for each of the records' keys, and a column for each value of the field `column`."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for record in records:
        rows.setdefault(keys(record), {})[record[column]] = cell(record)
    names = dict.fromkeys(name for row in rows.values() for name in row)
    cells = [(*key, *(row.get(name, "-") for name in names)) for key, row in rows.items()]
    return rows_table(title, (*head, *(f"{name} us" for name in names)), cells)


def below_target(what: tuple[str, ...], found: Iterable[tuple[Any, ...]]) -> list[Table]:
    """Return a table of the ratios that miss their targets.

    Args:
        what: headings of the names.
        found: for each measurement its names, the ratio reached and the target; those without ratio or target are
            passed over.
    """
    known = (one for one in found if None not in one[-2:])
    rows = ((*names, f"{got:.3f}", f"{wanted:.2f}") for *names, got, wanted in known if got < wanted)
    return rows_table("Below the target", (*what, "ratio", "target"), rows)


def of_op(records: Iterable[Record], op: str) -> list[Record]:
    return [record for record in records if record["op"] == op]


def case_of(record: Record) -> Any:
    """Return the record's case as the class that fits its fields: ServingCase, LayerCase or Case."""
    data = record["case"]
    kind: Any = ServingCase if "world_experts" in data else LayerCase if "tokens" in data else Case
    return kind(**data)


def label(record: Record) -> str:
    return str(case_of(record).label)


def routing(record: Record) -> str:
    return str(record["case"]["routing"])


def fields(**names: str) -> Columns:
    """Return a column for each heading that shows a record's field as text."""
    return [(heading, lambda record, name=name: str(record[name])) for heading, name in names.items()]  # type: ignore[misc]


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """Return a number as text with its unit; "-" for None, which means that it was not measured."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def microseconds(value: float | None) -> str:
    """Return microseconds as text with at least three significant digits: 2825, 365, 24.3, 4.71."""
    return number(value, 2 if value is None or value < 10 else 1 if value < 100 else 0)


def median(record: Record, name: str = OURS) -> float | None:
    """Return the median time of a contestant in us; None if it was not measured."""
    times = record["times"]
    return float(times[name]["median_us"]) if name in times else None


def ratio(record: Record, peer: str, ours: str = OURS) -> float | None:
    """Return the peer's median time over ours: above 1, we are faster. None if one of the two was not measured."""
    theirs, mine = median(record, peer), median(record, ours)
    return theirs / mine if theirs and mine else None


def work(record: Record) -> tuple[float, float]:
    """Return the useful FLOP and the fewest bytes of one call; 0 for a number that a record leaves out."""
    if "flop" in record or "bytes" in record:
        return record.get("flop", 0.0), record.get("bytes", 0.0)
    case, op = case_of(record), record["op"]
    return case.flop(op), case.bytes(op, record["active_experts"])


def rate(record: Record, us: float | None, limits: Limits) -> str:
    """Return useful TF/s or TB/s of a call that takes `us`, whichever is closer to the machine's limit, and its
    percentage of that limit; "-" if the call was not measured.
    """
    if not us:
        return "-"
    tflops, tbps = (amount / us * 1e-6 for amount in work(record))
    of_flop, of_bytes = tflops / limits["cublas_8192_tflops"], tbps / limits["copy_tbps"]
    if of_bytes > of_flop:
        return f"{tbps:.2f} TB/s ({100 * of_bytes:.0f} %)"
    return f"{tflops:.0f} TF/s ({100 * of_flop:.0f} %)"


def names_of(records: Iterable[Record], *fields: str) -> list[str]:
    """Return every contestant of the records' fields ("times" if none is named), in order of first appearance."""
    found = (name for record in records for field in fields or ("times",) for name in record.get(field, ()))
    return list(dict.fromkeys(found))


def peers_of(records: Iterable[Record], *fields: str) -> list[str]:
    """Return every contestant except ours."""
    return [name for name in names_of(records, *fields) if name != OURS]


def us_cell(record: Record, name: str) -> str:
    return microseconds(median(record, name))


def ratios_cell(record: Record, name: str, peers: Sequence[str]) -> str:
    """Return a contestant's time and, in brackets, each peer's time over it; "-" if it was not measured."""
    if median(record, name) is None:
        return "-"
    return f"{us_cell(record, name)} ({', '.join(number(ratio(record, peer, name), 2, 'x') for peer in peers)})"


def peer_cell(record: Record, name: str) -> str:
    """Return a peer's time and, in brackets, that time over ours; "-" if it was not measured."""
    return "-" if median(record, name) is None else f"{us_cell(record, name)} ({number(ratio(record, name), 2, 'x')})"


def our_cell(record: Record) -> str:
    """Return our median time, and half the distance of the outer deciles as a percentage of it."""
    ours = record["times"][OURS]
    spread = (ours["high_us"] - ours["low_us"]) / (2 * ours["median_us"])
    return f"{microseconds(ours['median_us'])} ± {100 * spread:.1f} %"


CASE: Column = ("case", label)
ROUTING: Column = ("routing", routing)
SKEW: Column = ("routing (max/mean)", lambda r: f"{routing(r)} ({r['skew']['max_over_mean']:.1f})")
OUR_TIME: Column = ("glulam us", our_cell)


def our_rate(limits: Limits) -> Column:
    return "rate (of limit)", lambda record: rate(record, median(record), limits)


def columns_of(names: Iterable[str], cell: Callable[..., str] = peer_cell, unit: str = " us", **more: Any) -> Columns:
    """Return a column for each contestant; `cell(record, name, **more)` makes its cells."""
    return [(f"{name}{unit}", partial(cell, name=name, **more)) for name in names]


def host_table(title: str, result: Result, digits: int) -> list[Table]:
    """Return a table of each item's host time: the median and the outer deciles."""
    items = (item for record in of_op(result["records"], HOST) for item in record["times"].items())
    keys = ("median_us", "low_us", "high_us")
    rows = ((name, *(number(times[key], digits) for key in keys)) for name, times in items)
    return rows_table(title, ("item", "median us", "10 %", "90 %"), rows)
