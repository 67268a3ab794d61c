"""The machine's own limits, measured in the same run as what is compared with them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .timing import device_sampler, host_sampler, interleave, sleep_cycles

SQUARE = 8192
COPY_BYTES = 2**32
BUDGET_S = 2.0


def _square_mm() -> Callable[[int], object]:
    a, b = (torch.randn(SQUARE, SQUARE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return lambda number: torch.mm(a, b, out=out)


def _copy() -> Callable[[int], object]:
    source = torch.empty(COPY_BYTES, device="cuda", dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    return lambda number: target.copy_(source)


def launch_nothing() -> None:
    """One launch of a kernel that returns at once."""
    sleep_cycles(0)


def measure_limits() -> dict[str, float]:
    """cuBLAS BF16 8192^3 (TF/s), device copy (TB/s, read plus written), one launch's host time (us)."""
    samplers = {
        "mm": device_sampler(_square_mm()),
        "copy": device_sampler(_copy()),
        "launch": host_sampler(launch_nothing),
    }
    times = interleave(samplers, BUDGET_S)
    torch.cuda.empty_cache()
    return {
        "cublas_8192_tflops": 2 * SQUARE**3 / times["mm"].median_us * 1e-6,
        "copy_tbps": 2 * COPY_BYTES / times["copy"].median_us * 1e-6,
        "launch_us": times["launch"].median_us,
    }
