"""Clock and power of the GPU while something runs, as nvidia-smi reads them."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from .stamp import smi_query

FIELDS = ("clocks.sm", "power.draw.instant", "clocks_event_reasons.sw_power_cap")
PERIOD_MS = 20


class Reading(NamedTuple):
    """SM clock, power, and whether the power limit holds the clock down: 0 or 1, or a share of several readings."""

    mhz: float
    watts: float
    capped: float


class Readings:
    """A reading every PERIOD_MS, with the time (`time.monotonic`) that it came at."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, Reading]] = []

    def follow(self, lines: Iterator[str]) -> None:
        """Take lines of nvidia-smi's; a line where a field is missing is passed over."""
        for line in lines:
            with contextlib.suppress(ValueError):
                mhz, watts, reason = (field.strip() for field in line.split(","))
                reading = Reading(float(mhz), float(watts), float(reason == "Active"))
                self.taken.append((time.monotonic(), reading))

    def mean(self, begin: float, end: float) -> Reading:
        """Over what came between two times. Raises RuntimeError where nothing did."""
        found = [reading for at, reading in self.taken if begin <= at <= end]
        if not found:
            raise RuntimeError(f"nvidia-smi gave none of {', '.join(FIELDS)}; the power suite needs a driver that does")
        return Reading(*(sum(values) / len(found) for values in zip(*found, strict=True)))


@contextmanager
def follow_gpu() -> Iterator[Readings]:
    """Readings of the current device until the block ends."""
    readings = Readings()
    command = [*smi_query(FIELDS), f"--loop-ms={PERIOD_MS}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as smi:
        assert smi.stdout is not None
        thread = threading.Thread(target=readings.follow, args=(smi.stdout,), daemon=True)
        thread.start()
        try:
            yield readings
        finally:
            smi.terminate()
            thread.join()
