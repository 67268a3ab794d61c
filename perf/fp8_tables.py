"""Tables of the fp8 suite, as parts of `tables.Table`: title, header, rows."""

from __future__ import annotations

from typing import Any

from .cases import Case
from .layer_cases import LayerCase
from .targets import BF16, FP4_COPY, FP8_RECIPES, TORCH_FP8, fp8_targets

WEIGHT_BITS = {BF16: 16.0, "mxfp8": 8.0, "mxfp8_exact": 8.25, "mxfp8_weight_only": 8.25,
               "mxfp4": 4.25, "mxfp4_weight_only": 4.25, "nvfp4_weight_only": 4.5,
               "fp8_block": 8.0, "fp8_block_weight_only": 8.0}  # fmt: skip
"""Of a weight as it is stored, with its part of a scale."""

Parts = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def _us(record: dict[str, Any], name: str) -> float | None:
    times = record["times"]
    return float(times[name]["median_us"]) if name in times else None


def ratio(record: dict[str, Any], recipe: str, peer: str) -> float | None:
    """The peer's median over the recipe's; None where one was not measured."""
    ours, theirs = _us(record, recipe), _us(record, peer)
    return theirs / ours if ours and theirs else None


def _time(us: float | None) -> str:
    return "-" if us is None else f"{us:.0f}" if us >= 100 else f"{us:.1f}"


def _recipe_cell(record: dict[str, Any], recipe: str) -> str:
    us = _us(record, recipe)
    if us is None:
        return "-"
    against = (ratio(record, recipe, peer) for peer in (BF16, TORCH_FP8))
    return f"{_time(us)} ({', '.join('-' if r is None else f'{r:.2f}x' for r in against)})"


def _row(record: dict[str, Any], recipes: list[str]) -> tuple[str, ...]:
    case = Case(**record["case"])
    mxfp8 = _us(record, FP8_RECIPES[0])
    rate = "-" if mxfp8 is None else f"{case.flop('mlp') / mxfp8 * 1e-6:.0f}"
    cells = (_recipe_cell(record, recipe) for recipe in recipes)
    return (case.label, *cells, rate, _time(_us(record, BF16)), _time(_us(record, TORCH_FP8)))


def _of_copy(record: dict[str, Any], recipe: str, copy_tbps: float) -> float | None:
    """Of a device copy's bytes a second."""
    us = _us(record, recipe)
    moved = Case(**record["case"]).bytes("mlp", record["active_experts"], WEIGHT_BITS[recipe])
    return moved / us * 1e-6 / copy_tbps if us else None


def _decoding(records: list[dict[str, Any]], recipes: list[str], copy_tbps: float) -> Parts:
    shares = [[_of_copy(record, recipe, copy_tbps) for recipe in (*recipes, BF16)] for record in records]
    cells = [["-" if share is None else f"{share:.2f}" for share in row] for row in shares]
    rows = [(Case(**record["case"]).label, *row) for record, row in zip(records, cells, strict=True)]
    title = "Decoding, of a device copy's bytes a second: weights as they are stored, rows and results"
    return title, ("case", *recipes, BF16), rows


def fp8_parts(records: list[dict[str, Any]], copy_tbps: float) -> list[Parts]:
    """Every case; of decoding the share of a copy's rate; then what is below what is aimed at, if any."""
    title = (
        f"The whole MLP in MXFP8 (`grouped_mlp`), quantising x included; in brackets {BF16}'s time, then {TORCH_FP8}'s "
        "(`torch._scaled_grouped_mm`, row-wise scales, unfused), over the recipe's"
    )
    recipes = [recipe for recipe in FP8_RECIPES if any(recipe in record["times"] for record in records)]
    header = (
        "case",
        *(f"{recipe} us" for recipe in recipes),
        f"{FP8_RECIPES[0]} TF/s",
        f"{BF16} us",
        f"{TORCH_FP8} us",
    )
    missed: list[tuple[str, ...]] = [
        (record["case"]["name"], recipe, peer, f"{reached:.3f}", f"{wanted:.2f}")
        for record in records
        for recipe, peer, wanted in fp8_targets(record["case"]["name"])
        if (reached := ratio(record, recipe, peer)) is not None and reached < wanted
    ]
    decoding = [record for record in records if Case(**record["case"]).decode]
    missed += [
        (record["case"]["name"], recipe, "device copy", f"{share:.3f}", f"{wanted:.2f}")
        for record in decoding
        for recipe, wanted in FP4_COPY.items()
        if (share := _of_copy(record, recipe, copy_tbps)) is not None and share < wanted
    ]
    parts: list[Parts] = [(title, header, [_row(record, recipes) for record in records])]
    if decoding:
        parts.append(_decoding(decoding, recipes, copy_tbps))
    if missed:
        parts.append(("Below the target", ("case", "recipe", "against", "ratio", "target"), missed))
    return parts


def frozen_part(records: list[dict[str, Any]]) -> Parts:
    """Gradients through frozen weights, by recipe; in brackets dequantising first, then 16-bit weights, over that."""
    recipes = list(dict.fromkeys(record["recipe"] for record in records))
    found = {(Case(**r["case"]).label, r["op"], r["recipe"]): r for r in records}
    rows = []
    for label, op in dict.fromkeys((label, op) for label, op, _ in found):
        cells = []
        for recipe in recipes:
            record = found.get((label, op, recipe))
            if record is None:
                cells.append("-")
                continue
            against = (ratio(record, recipe, peer) for peer in ("dequantised", BF16))
            cells.append(f"{_time(_us(record, recipe))} ({', '.join(f'{r:.2f}x' for r in against if r is not None)})")
        rows.append((label, op, *cells))
    title = "Gradients through frozen weights; in brackets dequantising first, then 16-bit weights, over ours"
    return title, ("case", "operation", *(f"{recipe} us" for recipe in recipes)), rows


def lora_part(records: list[dict[str, Any]]) -> Parts:
    """Steps of adapters: the layer alone, with adapters, the third contestant over that, and peak memory."""
    rows = []
    for record in records:
        alone, adapted, other = record["times"]
        peaks = [f"{record['peak_bytes'][name] / 2**20:.0f}" for name in (alone, adapted, other)]
        against = [f"{x:.2f}" for x in (1 / (ratio(record, adapted, alone) or 1), ratio(record, adapted, other) or 0)]
        times = [_time(_us(record, name)) for name in (alone, adapted)]
        label = LayerCase(**record["case"]).label
        rows.append((label, record["recipe"], *times, against[0], f"{other} {against[1]}x", " / ".join(peaks)))
    title = f"Forward and backward with adapters of rank {records[0]['rank']} on frozen experts"
    return title, ("case", "weights", "alone us", "lora us", "of alone", "without lora=", "peaks MiB"), rows
