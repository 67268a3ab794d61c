"""The power suite's table: what clock each contestant earns alone, and how busy it keeps the tensor cores at it."""

from __future__ import annotations

from typing import Any

from .cases import Case
from .fp8_tables import Parts

FLOP_PER_CYCLE = 4096  # of an SM's tensor cores, dense BF16 on Hopper
TITLE = "Each contestant alone: the clock that power leaves it, and the share of the tensor cores' peak there"
HEADER = ("case", "op", "contestant", "us", "TF/s", "SM MHz", "W", "power-capped", "of peak")


def power_parts(records: list[dict[str, Any]], sms: int) -> list[Parts]:
    """The only table of a result, measured on a GPU of `sms` SMs."""
    rows: list[tuple[str, ...]] = []
    for record in records:
        case = Case(**record["case"])
        for name, alone in record["times"].items():
            per_us = record["flop"] / alone["median_us"]
            peak = FLOP_PER_CYCLE * sms * alone["mhz"]
            speed = f"{alone['median_us']:.0f}", f"{per_us * 1e-6:.0f}"
            readings = f"{alone['mhz']:.0f}", f"{alone['watts']:.0f}", f"{alone['capped']:.0%}"
            rows.append((case.label, record["op"], name, *speed, *readings, f"{per_us / peak:.2f}"))
    return [(TITLE, HEADER, rows)]
