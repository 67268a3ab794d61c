"""Tables of suites that compare recipes, or kernels by them: fp8, frozen, lora, portable, serving."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

from . import cells, targets
from .cells import CASE, Columns, Table, columns_of, number, ratio, table
from .results import Record, Result
from .targets import BF16, FP8_RECIPES, MMA_ALONE, NATIVE, PORTABLE, PORTABLE_MXFP8, TORCH, TORCH_FP8


def of_copy(record: Record, name: str, copy_tbps: float, recipe: str = "") -> float | None:
    """Return the bytes a second that an MLP moves over a device copy's; weights count in the recipe's format."""
    us = cells.median(record, name)
    moved = cells.case_of(record).bytes("mlp", record["active_experts"], targets.WEIGHT_BITS[recipe or name])
    return moved / us * 1e-6 / copy_tbps if us else None


def fp8_tables(result: Result) -> list[Table]:
    """Return a table of every case, with the share of a copy's rate in decoding; then one of ratios below their
    targets, if any.
    """
    records, copy_tbps = result["records"], result["limits"]["copy_tbps"]
    recipes = [recipe for recipe in FP8_RECIPES if any(recipe in record["times"] for record in records)]
    decoding = [record for record in records if cells.case_of(record).decode]
    first = FP8_RECIPES[0]

    def tflops(record: Record) -> str:
        us = cells.median(record, first)
        return number(cells.case_of(record).flop("mlp") / us * 1e-6 if us else None, 0)

    def shares() -> Iterator[tuple[Any, ...]]:
        for record in records:
            name = record["case"]["name"]
            for (ours, peer), aim in targets.fp8_targets(name).items():
                yield name, ours, peer, ratio(record, peer, ours), aim
        for record in decoding:
            for recipe, aim in targets.FP4_COPY.items():
                yield record["case"]["name"], recipe, "device copy", of_copy(record, recipe, copy_tbps), aim

    title = (
        f"The whole MLP in MXFP8 (`grouped_mlp`), quantising x included; in brackets {BF16}'s time, then {TORCH_FP8}'s "
        "(`torch._scaled_grouped_mm`, row-wise scales, unfused), over the recipe's"
    )
    columns: Columns = [
        CASE,
        *columns_of(recipes, cells.ratios_cell, peers=(BF16, TORCH_FP8)),
        (f"{first} TF/s", tflops),
        *columns_of((BF16, TORCH_FP8), cells.us_cell),
    ]
    copies = columns_of((*recipes, BF16), lambda record, name: number(of_copy(record, name, copy_tbps)), "")
    copied = "Decoding, of a device copy's bytes a second: weights as they are stored, rows and results"
    below = cells.below_target(("case", "recipe", "against"), shares())
    return [*table(title, records, columns), *table(copied, decoding, [CASE, *copies]), *below]


def frozen_tables(result: Result) -> list[Table]:
    """Return a table of gradients through frozen weights, by recipe."""
    title = "Gradients through frozen weights; in brackets dequantising first, then 16-bit weights, over ours"
    return cells.pivot(
        title, ("case", "operation"), result["records"], lambda r: (cells.label(r), r["op"]), "recipe",
        lambda r: cells.ratios_cell(r, r["recipe"], ("dequantised", BF16)),
    )  # fmt: skip


def lora_tables(result: Result) -> list[Table]:
    """Return a table of steps of adapters: the layer alone, with adapters, the third contestant over that, and peak
    memory.
    """

    def other(record: Record) -> str:
        *_, name = record["times"]
        return f"{name} {number(ratio(record, name, 'lora'), 2, 'x')}"

    columns: Columns = [
        CASE,
        *cells.fields(weights="recipe"),
        ("alone us", lambda r: cells.us_cell(r, "the layer alone")),
        ("lora us", lambda r: cells.us_cell(r, "lora")),
        ("of alone", lambda r: number(ratio(r, "lora", "the layer alone"))),
        ("without lora=", other),
        ("peaks MiB", lambda r: " / ".join(number(r["peak_bytes"][name] / 2**20, 0) for name in r["times"])),
    ]
    title = f"Forward and backward with adapters of rank {result['records'][0]['rank']} on frozen experts"
    return table(title, result["records"], columns)


def reached(record: Record, copy_tbps: float) -> dict[str, float | None]:
    """Return ratios that portable kernels reach in a case, by what they are compared with.

    Prefill: {MMA_ALONE: FLOP rate over that of mma.sync alone}. Decoding: the rate of bytes over a device copy's, and
    the MLP's time in 16 bits over its time with weights in MXFP8 (above 1: MXFP8 is faster).
    """
    us, alone = (record["times"][name]["median_us"] for name in (PORTABLE, MMA_ALONE))
    if not cells.case_of(record).decode:
        return {MMA_ALONE: cells.case_of(record).flop("mlp") / us / (record["mma_flop"] / alone)}
    of_itself = ratio(record, PORTABLE, PORTABLE_MXFP8) or 0.0
    return {"device copy": of_copy(record, PORTABLE, copy_tbps, BF16), PORTABLE_MXFP8: of_itself}


def portable_tables(result: Result) -> list[Table]:
    """Return a table of every case, then one of ratios below their targets, if any."""
    find = partial(reached, copy_tbps=result["limits"]["copy_tbps"])
    title = (
        "The MLP on portable kernels (cp.async, mma.sync) compiled for Hopper: the time of Hopper's own kernels and of "
        "torch over theirs, their share of what mma.sync reaches alone and of a device copy's rate, and their time in "
        "16 bits over that with weights in MXFP8"
    )
    columns: Columns = [
        CASE,
        ("us", lambda r: number(cells.median(r, PORTABLE), 1)),
        *columns_of((NATIVE, TORCH), lambda r, name: number(ratio(r, name, PORTABLE)), ""),
        (f"of {MMA_ALONE}", lambda r: number(find(r).get(MMA_ALONE))),
        ("of a copy", lambda r: number(find(r).get("device copy"))),
        ("weights in MXFP8", lambda r: number(find(r).get(PORTABLE_MXFP8))),
    ]
    names = ((record, record["case"]["name"]) for record in result["records"])
    shares = (
        (name, what, value, targets.portable_targets(name).get(what))
        for record, name in names
        for what, value in find(record).items()
    )
    return [*table(title, result["records"], columns), *cells.below_target(("case", "of"), shares)]


def serving_tables(result: Result) -> list[Table]:
    """Return a table for each recipe, then one of each peer's times over ours."""
    titles = {name: f"Experts called with ids and weights, in CUDA graphs, L2 cold: `{name}`" for name in _ops(result)}
    head: Columns = [("experts", cells.label), cells.OUR_TIME, cells.our_rate(result["limits"])]
    tables = cells.by_op(result["records"], titles, lambda of: [*head, *columns_of(cells.peers_of(of))])
    return [*tables, *serving_peers(result)]


def serving_peers(result: Result) -> list[Table]:
    """Return a table with a row for each recipe and peer: the least and the median of the peer's times over ours."""
    rows: list[tuple[str, ...]] = []
    for recipe in _ops(result):
        records = cells.of_op(result["records"], recipe)
        for name in cells.peers_of(records):
            ratios = [found for record in records if (found := ratio(record, name)) is not None]
            ahead = f"{sum(one >= 1.0 for one in ratios)} of {len(ratios)}"
            rows.append((recipe, name, number(min(ratios)), number(statistics.median(ratios)), ahead))
    return cells.rows_table("Peers' times over ours", ("recipe", "peer", "least", "median", "not slower"), rows)


def _ops(result: Result) -> list[str]:
    """Return the operations of a result's records, in their order."""
    return list(dict.fromkeys(record["op"] for record in result["records"]))
