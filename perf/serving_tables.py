"""Tables of the serving suite."""

from __future__ import annotations

import statistics
from typing import Any

from .cells import OURS, Table, our_cell, peer_cell, peers_of, rate, ratio
from .results import Result
from .serving_cases import ServingCase


def _row(record: dict[str, Any], peers: list[str], limits: dict[str, float]) -> tuple[str, ...]:
    us = record["times"][OURS]["median_us"]
    cells = (peer_cell(record, name) for name in peers)
    return (ServingCase(**record["case"]).label, our_cell(record), rate(record, us, limits), *cells)


def _ratio_rows(recipe: str, records: list[dict[str, Any]], peers: list[str]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name in peers:
        ratios = [ratio(record, name) for record in records if name in record["times"]]
        ahead = sum(one >= 1.0 for one in ratios)
        least, median = min(ratios), statistics.median(ratios)
        rows.append((recipe, name, f"{least:.2f}", f"{median:.2f}", f"{ahead} of {len(ratios)}"))
    return rows


def serving_tables(result: Result) -> list[Table]:
    """A table a recipe, then each peer's times over ours."""
    tables: list[Table] = []
    summary: list[tuple[str, ...]] = []
    for recipe in dict.fromkeys(record["op"] for record in result["records"]):
        records = [record for record in result["records"] if record["op"] == recipe]
        peers = peers_of(records)
        header = ("experts", "glulam us", "rate (of limit)", *(f"{name} us" for name in peers))
        rows = [_row(record, peers, result["limits"]) for record in records]
        tables.append(Table(f"Experts called with ids and weights, in CUDA graphs, L2 cold: `{recipe}`", header, rows))
        summary += _ratio_rows(recipe, records, peers)
    if summary:
        header = ("recipe", "peer", "least", "median", "not slower")
        tables.append(Table("Peers' times over ours", header, summary))
    return tables
