"""How roles of persistent kernels hand over tiles and k-tiles, as models (support/protocol/gemm.py): they hold in every
order of steps and copies, each rule is needed, and the kernels' docstrings table the same.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest
from support.protocol import copies, gemm
from support.protocol.barriers import Machine

from cute_kernels.sm90 import budget

READS = "a role reads what is not there yet, or not any more"
WAITS = "a live rank waits for ever"
ENDED = "{} (empty): an arrival at a CTA that has ended"
Build = Callable[..., Machine]

HOLDS: list[tuple[Build, dict[str, Any]]] = [
    (gemm.ring, {}),
    (gemm.ring, {"consumers": (gemm.LOADS, gemm.MMA, gemm.MMA), "n": 6, "slots": 4}),
    (gemm.stages, {}),
    (gemm.stages, {"slots": 3, "n": 7}),
    (gemm.stages, {"gathers": gemm.GATHER}),
    (gemm.shared_stages, {}),
    (gemm.shared_stages, {"slots": 2, "n": 4}),
    (gemm.turns, {}),
    (gemm.turns, {"slots": 3, "k_tiles": 3}),
    (gemm.turns, {"slots": 4, "k_tiles": 1, "tiles": 6}),
    (gemm.loads, {}),
    (gemm.tickets, {}),
    *((gemm.decoded, {"slots": slots}) for slots in (2, 3, 4)),
    (gemm.decoded, {"tiles": 4, "k_tiles": 1}),
    *(
        (gemm.decoded, {"warpgroups": plan.warpgroups, "room": plan.slots, "slots": plan.slots, "k_tiles": 5})
        for plan in budget.DECODING_TO_FP8.values()
    ),
    (gemm.decoding, {}),
    (gemm.decoding, {"slots": 3}),
    (gemm.shared_depth, {}),
    (gemm.shared_depth, {"k_tiles": 1}),
    (gemm.shared_depth, {"splits": 4, "slots": 4, "k_tiles": 6, "tiles": 2}),
    (gemm.accumulators, {}),
    (copies.copies, {}),
    (copies.copies, {"slots": 3, "n": 5}),
]
BROKEN: list[tuple[Build, str, dict[str, Any], set[str]]] = [
    (gemm.ring, "few arrivals", {}, {READS, WAITS}),
    (gemm.ring, "no wait", {}, {READS, WAITS}),
    (gemm.ring, "early", {}, {READS}),
    (gemm.ring, "parity", {}, {WAITS}),
    (gemm.stages, "bytes", {}, {READS, WAITS}),
    (gemm.stages, "released early", {}, {READS}),
    (gemm.stages, "one gatherer", {"gathers": gemm.GATHER}, {READS}),
    (gemm.shared_stages, "own room", {}, {READS}),
    (gemm.shared_stages, "no tail", {}, {ENDED.format("stages")}),
    (gemm.turns, "no turns", {}, {READS}),
    (gemm.loads, "freed early", {}, {READS, WAITS}),
    (gemm.loads, "alone", {}, {READS, WAITS}),
    (gemm.tickets, "no wait", {"slots": 1}, {READS, WAITS}),
    (gemm.tickets, "released last", {"n": 2}, {ENDED.format("broadcast")}),
    (gemm.tickets, "no tail", {"n": 2}, {ENDED.format("stages")}),
    (gemm.decoded, "rows forgotten", {}, {READS, WAITS}),
    (gemm.decoded, "turns by tile", {"tiles": 3, "slots": 2}, {READS}),
    (gemm.decoded, "no room", {}, {READS, WAITS}),
    (gemm.decoded, "packed first", {}, {READS}),
    (gemm.decoded, "", {"warpgroups": 3, "room": 2, "k_tiles": 4}, {READS, WAITS}),
    (gemm.decoded, "", {"room": 4, "slots": 3, "k_tiles": 5}, {READS}),
    (gemm.decoding, "no wait", {}, {READS, WAITS}),
    (gemm.decoding, "turns by tile", {}, {READS}),
    (gemm.decoding, "all stages", {}, {WAITS}),
    (gemm.shared_depth, "no barrier", {}, {READS}),
    (gemm.shared_depth, "on the way", {"tiles": 2, "k_tiles": 5}, {READS}),
    (gemm.shared_depth, "", {"buffers": 1}, {READS}),
    (gemm.shared_depth, "", {"slots": 3, "k_tiles": 7, "tiles": 1}, {READS}),
    (gemm.accumulators, "freed early", {}, {READS}),
    (gemm.accumulators, "no commit", {}, {READS}),
    (copies.copies, "no wait", {}, {READS}),
    (copies.copies, "no barrier", {}, {READS}),
    (copies.copies, "filled early", {}, {READS}),
]


def name_of(value: Any) -> str | None:
    return value.__name__ if callable(value) else None


ROLES = (
    gemm.LOADS, gemm.SCHEDULER, gemm.EPILOGUE_LOADS, gemm.GATHER, gemm.SCALES, gemm.MMA, gemm.DECODE, gemm.EPILOGUE,
)  # fmt: skip
BARRIER = re.compile(r"(ring|stages|loads|decoded|accumulators) \((tile|full|empty)[^)]*\)|\b(turns|sums)(?:,|$)")


def tabled(module: str) -> gemm.Table:
    """Parse the table of roles in a kernel's docstring."""
    lines = (importlib.import_module(module).__doc__ or "").splitlines()
    begin = next(number for number, line in enumerate(lines) if "waits for" in line)
    rows: gemm.Table = {}
    for line in lines[begin + 1 : lines.index("", begin)]:
        if line[4] != " ":
            role = min((name for name in ROLES if f" {name}" in line), key=line.index)
            sides = rows.setdefault(role, (set(), set()))
        cells = [found for cell in re.split(r"\s{2,}", line) if (found := BARRIER.findall(cell))]
        for side, found in zip(sides, cells, strict=False):
            for pipeline, what, turns in found:
                side.add(turns or f"{pipeline} ({what.replace('tile', 'full')})")
    for _, signals in rows.values():
        signals.discard("ring (empty)")
    return rows


@pytest.mark.parametrize(
    ("module", "table"),
    [("cute_kernels.sm90.persistent", gemm.hopper), ("cute_kernels.sm100.persistent", gemm.blackwell)],
)
def test_a_docstring_tables_what_holds(module: str, table: Callable[[], gemm.Table]) -> None:
    assert tabled(module) == table()


@pytest.mark.parametrize(("build", "sizes"), HOLDS, ids=name_of)
def test_a_protocol_holds_in_any_order(build: Build, sizes: dict[str, Any]) -> None:
    found = build(**sizes).explore()
    assert (found.faults, found.ends) == (set(), {"all roles have ended"}) and found.states > 100


@pytest.mark.parametrize(("build", "broken", "sizes", "faults"), BROKEN, ids=name_of)
def test_each_rule_is_needed(build: Build, broken: str, sizes: dict[str, Any], faults: set[str]) -> None:
    assert build(**sizes, broken=broken).explore().faults == faults
