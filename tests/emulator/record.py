"""Record results that a GPU computed in a small file.

Run it in tests/, on a machine with the GPU: `python -m emulator.record FILE`. An exact result is stored as the hash of
its bytes, another result as SAMPLE values at places that depend on its size. The file also names the GPU and the
version of torch; add the commit by hand.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .calls import EXACT, ROUNDED_TO_E4M3, calls_of, results

SAMPLE = 64
ROUNDINGS = 2.0
"""Allowed error of a result that is not exact: a number of roundings, in its dtype, of the sample's largest value."""
OF_FLOAT32 = 2.0**-15
"""Allowed relative error of float32 results, used instead of a rounding.

The GPU approximates exp, rsqrt and division.
"""

EDGES = 4
"""Number of sampled values that may differ by more than ROUNDINGS, in calls that round their activation to E4M3.

The GPU, whose exp is an approximation and whose FP8 MMA keeps fewer bits than float32, rounds an activation near the
edge between two numbers to the other one.
"""
OF_AN_EDGE = 2.0**-5
"""Largest change of a result by one activation that is rounded to the other number, over the sample's largest value."""


def described(name: str, tensors: list[Tensor]) -> list[dict[str, Any]]:
    """Return a call's results in the form in which they are stored."""
    return [_described(tensor, name in EXACT) for tensor in tensors]


def _described(tensor: Tensor, is_exact: bool) -> dict[str, Any]:
    tensor = tensor.contiguous()
    kept: dict[str, Any] = {"dtype": str(tensor.dtype), "shape": list(tensor.shape)}
    if is_exact or not tensor.is_floating_point():
        kept["sha256"] = hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    else:
        kept["values"] = tensor.view(-1)[places(tensor)].double().tolist()
    return kept


def places(tensor: Tensor) -> Tensor:
    """Return the indices of the sampled elements, which depend only on the result's size."""
    count = tensor.numel()
    return torch.from_numpy(np.random.default_rng(count).permutation(count)[:SAMPLE])


def complaint(name: str, tensors: list[Tensor], kept: list[dict[str, Any]]) -> str:
    """Return text on how a call's results differ from the stored ones; empty: they agree."""
    if len(tensors) != len(kept):
        return f"{len(tensors)} results, recorded are {len(kept)}"
    for place, (tensor, wanted) in enumerate(zip(tensors, kept, strict=True)):
        got = _described(tensor, name in EXACT)
        for field in ("dtype", "shape", "sha256"):
            if got.get(field) != wanted.get(field):
                return f"result {place} has {field} {got.get(field)}, recorded is {wanted.get(field)}"
        if "values" in wanted and (words := _distance(name, tensor.dtype, got["values"], wanted["values"])):
            return f"result {place}: {words}"
    return ""


def _distance(name: str, dtype: torch.dtype, got: list[float], wanted: list[float]) -> str:
    ours, theirs = np.array(got), np.array(wanted)
    unit = OF_FLOAT32 if dtype == torch.float32 else torch.finfo(dtype).eps
    largest = np.abs(theirs).max(initial=0.0)
    wrong = _differ(ours, theirs, ROUNDINGS * unit * np.maximum(np.abs(theirs), 0.1 * largest))
    if name in ROUNDED_TO_E4M3 and wrong.sum() <= EDGES:
        wrong = _differ(ours, theirs, np.full_like(theirs, OF_AN_EDGE * largest))
    if not wrong.any():
        return ""
    worst = int(np.argmax(np.where(wrong, np.abs(ours - theirs), 0)))
    return f"{int(wrong.sum())} of {wrong.size} values differ, the worst is {ours[worst]:.6g} for {theirs[worst]:.6g}"


def _differ(ours: np.ndarray, theirs: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    return ~(np.abs(ours - theirs) <= allowed) & ~(np.isnan(ours) & np.isnan(theirs))


def main(path: str) -> None:
    from glulam.host import device

    arch = device.gpu(torch.cuda.current_device()).arch
    kept: dict[str, Any] = json.loads(Path(path).read_text()) if Path(path).exists() else {}
    kept["gpu"] = torch.cuda.get_device_name()
    kept["torch"], kept["command"] = torch.__version__, f"python -m emulator.record {path}"
    calls = {name: described(name, results(name, "cuda")) for name in calls_of(arch)}
    for name, first in calls.items():
        again = described(name, results(name, "cuda"))
        assert again == first, f"{name} has other bits in a second call"
    kept[arch] = calls
    Path(path).write_text(json.dumps(kept, indent=None, separators=(",", ":")) + "\n")
    print(arch, len(calls), "calls recorded")


if __name__ == "__main__":
    main(sys.argv[1])
