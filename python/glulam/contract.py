"""The contract of batch invariance: for each operator, recipe and architecture, the verdict and the reason.

Batch-invariant means: a row's bits depend neither on the other rows nor on the GPU's number of SMs. The verdicts are
derived from the code; none is listed by hand. A recipe names the operands that are multiplied. The choice of kernels
for an architecture names the tiles that serve an operator, and the order in which each tile adds. An operator's
definition says how a call's sums are cut into partial sums. docs/batch-invariance.md has the table that `table` makes;
`python -m glulam.contract docs/batch-invariance.md` writes it there.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cute_kernels.accumulation import Accumulation
from cute_kernels.architectures import ARCHS
from cute_kernels.formats import OPERANDS

from .calls import front
from .calls.addressed import AddressedCall
from .choose import choose, invariance
from .choose.problem import Problem
from .choose.shipped import TILED
from .recipes import BF16, RECIPES, Recipe

YES, SWITCH, NONE = "yes", "switch", "none"
"""Verdicts: batch-invariant without the switch; only with the switch `glulam.batch_invariant(True)`; no such kernel."""
MOST_ROWS = 4096
"""Rows per expert up to which the choice of tiles is queried; it does not change for more rows."""
WIDTHS = {"in_features": 512, "intermediate": 512, "out_features": 512}
COLUMNS = {"sm_90a": "sm_90a", "portable": "sm_90", "sm_100a": "sm_100a"}
"""Columns of the table, and for each an architecture whose kernels represent the column."""
BEGIN, END = "<!-- contract:begin -->", "<!-- contract:end -->"
"""Marks before and after the table in a page."""
NAMES = {"grouped_mlp": "grouped_mlp`, `moe"}
"""Text of the table's first column, by operator, if that row stands for several operators.

Others show their own name.
"""
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "grouped_mm": ({"intermediate": 0}, {"intermediate": 0, "transpose_w": True}),
    "grouped_glu": ({"out_features": 0}, {"out_features": 0, "save_preact": True}),
    "grouped_mlp": ({}, {"save_preact": True}),
    "grouped_dglu": ({},),
    "grouped_wgrad": ({"intermediate": 0, "out_dtype": "bfloat16"},),
}
"""For each operator, sets of options of a call (fields of a Problem); each set may be served by different tiles."""


class Verdict(NamedTuple):
    """The verdict on one operator with one recipe in one column of the table.

    Attributes:
        op, recipe: names; recipe "": any.
        column: a key of COLUMNS.
        verdict: YES, SWITCH or NONE.
        why: for SWITCH, the difference that occurs without the switch.
    """

    op: str
    recipe: str
    column: str
    verdict: str
    why: str = ""


def recipe_on(recipe: Recipe, arch: str) -> Recipe:
    """Return the recipe that an architecture really uses when `recipe` is requested."""
    return RECIPES[ARCHS[arch].recipes.get(recipe.name, recipe.name)]


def serves(op: str, recipe: Recipe) -> bool:
    """Return True if an operator has kernels of its own for a recipe."""
    if recipe is BF16 or op == "grouped_mlp":
        return True
    if op == "grouped_mm":
        return recipe.freezes_weights
    if op == "grouped_dglu":
        return recipe.trains
    return op == "grouped_wgrad" and recipe.wgrad is not None


def problems(op: str, recipe: Recipe, arch: str, rows: int = 1, experts: int = 1) -> Iterator[Problem]:
    """Yield a Problem (sizes and options of a call) in bfloat16 for each entry of VARIANTS[op] that has kernels.

    Args:
        op: the operator.
        recipe: the requested recipe.
        arch: the architecture; nothing is yielded if it has no kernels for the operator with this recipe.
        rows, experts: total number of rows, and number of experts.
    """
    recipe = recipe_on(recipe, arch)
    operands = recipe.wgrad_operands if op == "grouped_wgrad" else recipe.operands
    if not serves(op, recipe) or operands in ARCHS[arch].lacks:
        return
    for variant in VARIANTS[op]:
        if variant.get("save_preact") and not OPERANDS[operands].trains:
            continue
        options: dict[str, Any] = {"fc2_operands": recipe.fc2_operands} if op == "grouped_mlp" else {}
        yield Problem(
            op, "bfloat16", rows, experts, activation="none" if op == "grouped_mm" else "swiglu", operands=operands,
            **{**WIDTHS, **options, **variant},
        )  # fmt: skip


@functools.cache
def tiled(op: str, recipe: str, column: str) -> Verdict:
    """Return the verdict on an operator of TILED, whose kernels exist in several tiles, with a recipe.

    column: a key of COLUMNS.
    """
    arch = COLUMNS[column]
    found = list(problems(op, RECIPES[recipe], arch))
    if not found:
        return Verdict(op, recipe, column, NONE)
    reasons = dict.fromkeys(filter(None, (_left_out(problem, arch) for problem in found)))
    if op == "grouped_mlp" and recipe_on(RECIPES[recipe], arch).freezes_weights:
        reasons[invariance.ROUNDED[0].upper() + invariance.ROUNDED[1:]] = None
    return Verdict(op, recipe, column, SWITCH if reasons else YES, ". ".join(reasons))


def _left_out(problem: Problem, arch: str) -> str:
    """Name the tiles that the switch `glulam.batch_invariant(True)` excludes for a problem; "" if it excludes none.

    The text also has the largest number of rows per expert at which these tiles are used without the switch.
    """
    order = invariance.order_of(problem, arch)
    orders = invariance.orders_by_tile(problem, arch)
    others = [tile for tile, own in orders.items() if own != order]
    if not others:
        return ""
    most = max(rows for rows in range(1, MOST_ROWS + 1) if _leaves_order(problem, arch, rows))
    tiles: dict[Accumulation, list[str]] = {}
    for tile in others:
        tiles.setdefault(orders[tile][0], []).append(f"tile {tile.m} x {tile.n}")
    differ = "; ".join(f"{', '.join(names)}: {own}" for own, names in tiles.items())
    return f"Up to {most} rows an expert on average, {differ}"


def _leaves_order(problem: Problem, arch: str, rows: int) -> bool:
    spec = choose(dataclasses.replace(problem, rows=rows), arch).spec
    return not invariance.keeps_order(spec, dataclasses.replace(problem, invariant=True), arch)


@functools.cache
def cuts() -> dict[str, str]:
    """Return, for each operator without tiles, text that says how its kernels cut sums into partial sums.

    The text covers forward and backward. "": no sum is cut; a row's result depends on this row's values alone.
    """
    found: dict[str, list[str]] = {}
    for kind in front.OPERATORS:
        if issubclass(kind, AddressedCall):
            name = f"mhc.{kind.op}" if kind.family == "mhc" else kind.op
            found.setdefault(name, []).append(kind.definition.cuts)
    return {name: "; ".join(dict.fromkeys(filter(None, each))) for name, each in found.items()}


def verdicts() -> list[Verdict]:
    """Return all verdicts: first on operators with tiles, by recipe and column, then on all other operators.

    The other operators have the same verdict in all columns.
    """
    found = [tiled(op, recipe, column) for op in TILED for recipe in RECIPES for column in COLUMNS]
    for op, cut in cuts().items():
        found += [Verdict(op, "", column, SWITCH if cut else YES, cut and f"Cuts {cut}") for column in COLUMNS]
    return found


def table() -> str:
    """Return the table of verdicts and its numbered notes in Markdown.

    A row (an operator with a recipe) is left out if no architecture has kernels for it.
    """
    found = verdicts()
    by_row: dict[tuple[str, str], list[Verdict]] = {}
    for one in found:
        by_row.setdefault((one.op, one.recipe), []).append(one)
    notes = list(dict.fromkeys(one.why for one in found if one.verdict == SWITCH))

    def cell(one: Verdict) -> str:
        if one.verdict == SWITCH:
            return f"{SWITCH}, note {1 + notes.index(one.why)}"
        return YES if one.verdict == YES else "-"

    lines = [f"| operator | recipe | {' | '.join(COLUMNS)} |", f"|---|---|{'---|' * len(COLUMNS)}"]
    for (op, recipe), cells in by_row.items():
        if any(each.verdict != NONE for each in cells):
            lines.append(f"| `{NAMES.get(op, op)}` | {recipe or 'any'} | {' | '.join(map(cell, cells))} |")
    numbered = (f"{number}. {note}" for number, note in enumerate(notes, 1))
    return "\n".join([*lines, "", *(textwrap.fill(note, 120, subsequent_indent="   ") for note in numbered)])


def with_table(page: str) -> str:
    """Return `page`, the Markdown text of a page, with `table()` between the marks BEGIN and END.

    What was between the marks is replaced. A page without marks is returned unchanged.
    """
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{table()}\n{END}", page, flags=re.DOTALL)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(with_table(path.read_text()))
