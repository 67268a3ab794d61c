"""Tables of the fp8 suite, as parts of `tables.Table`: title, header, rows."""

from __future__ import annotations

from typing import Any

from .cases import Case
from .targets import BF16, FP8_RECIPES, TORCH_FP8, fp8_targets

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


def fp8_parts(records: list[dict[str, Any]]) -> list[Parts]:
    """Every case; then the ratios that are below what is aimed at, if any."""
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
    parts: list[Parts] = [(title, header, [_row(record, recipes) for record in records])]
    if missed:
        parts.append(("Below the target", ("case", "recipe", "against", "ratio", "target"), missed))
    return parts
