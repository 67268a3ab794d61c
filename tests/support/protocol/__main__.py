"""Run the sizes of the models that take too long for tests.

Run as `python -m tests.support.protocol`, from the repository's root.
"""

from __future__ import annotations

import sys
import time

from .ranks import Model

BOTH = ("early", "late")
LARGER = {
    "3 ranks, any order": Model(3, "D1 C1 D2 C2"),
    "3 ranks, enter, any order": Model(3, "D1 D2 C1"),
    **{f"4 ranks, {way}": Model(4, "D1 C1", rows=2, landing=way) for way in BOTH},
    **{f"3 ranks, a crash, backward, {way}": Model(3, "D1 C1 B1 C1", 2, way, crash=True) for way in BOTH},
    **{f"3 ranks, a crash, enter, {way}": Model(3, "D1 D2 C1 C2", 2, way, crash=True) for way in BOTH},
    **{f"3 ranks, time-outs, {way}": Model(3, "D1 C1 D2", 2, way, impatient=True) for way in BOTH},
    **{f"3 ranks, time-outs, enter, {way}": Model(3, "D1 D2", 2, way, impatient=True) for way in BOTH},
}


def main() -> int:
    faulty = False
    for name, model in LARGER.items():
        start = time.perf_counter()
        found = model.explore()
        outcome = f"FAULTS: {sorted(found.faults)}" if found.faults else f"holds, ends: {sorted(found.ends)}"
        print(f"{name:36} {found.states:7} states {time.perf_counter() - start:5.1f} s  {outcome}", flush=True)
        faulty |= bool(found.faults)
    return int(faulty)


if __name__ == "__main__":
    sys.exit(main())
