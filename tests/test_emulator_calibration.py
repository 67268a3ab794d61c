"""The emulator is right about NVIDIA's GPUs: it computes what an H100 computed with the same kernels.

Calls are `emulator.calls`', results `emulator/h100.json`, as `emulator.record` kept them. Kernels are chosen as on the
H100, whose number of SMs decides about tiles; launches have a grid for LAUNCHED_SMS, since 132 CTAs, most of which have
nothing to do, take ten times as long. Where a sum is split by that number, it is exact or within the tolerance.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulator import calls, record
from emulator.emulated_gpu import EmulatedGpu, installed

from cute_kernels.specs import Spec

RECORDED = json.loads(Path(record.__file__).with_name("h100.json").read_text())
ARCHS = ("sm_90a", "sm_90")
H100_SMS = 132
LAUNCHED_SMS = 2
FAST = {
    "sm_90a": ("grouped_mm", "grouped_wgrad", "grouped_mm_of_few_rows", "quantize_mxfp4"),
    "sm_90": ("grouped_mm_transposed", "grouped_glu_reglu", "grouped_bias_grad", "route_by_sigmoids_and_groups"),
}
"""Calls of one launch each; all others run with `-m emulator`."""


@contextlib.contextmanager
def _gpu(arch: str) -> Iterator[EmulatedGpu]:
    with installed(arch, num_sms=H100_SMS) as gpu:
        run = gpu.emulator.run

        def with_a_small_grid(spec: Spec, named: dict[str, Any], *others: Any) -> None:
            run(spec, {**named, "num_sms": LAUNCHED_SMS} if "num_sms" in named else named, *others)

        gpu.emulator.run = with_a_small_grid
        yield gpu


def _of(arch: str, names: list[str]) -> list[Any]:
    slow = pytest.mark.emulator
    return [pytest.param(arch, name, marks=() if name in FAST[arch] else slow, id=f"{arch}-{name}") for name in names]


@pytest.mark.parametrize(("arch", "name"), [case for arch in ARCHS for case in _of(arch, calls.calls_of(arch))])
def test_a_call_gives_what_an_h100_gave(arch: str, name: str) -> None:
    with _gpu(arch):
        made = calls.results(name, "cpu")
    assert not record.complaint(name, made, RECORDED[arch][name])


@pytest.mark.parametrize("arch", ARCHS)
def test_every_call_was_recorded(arch: str) -> None:
    assert sorted(RECORDED[arch]) == sorted(calls.calls_of(arch))


@pytest.mark.parametrize("name", ["grouped_glu", "grouped_mlp_mxfp8"])
def test_the_tolerance_tells_results_apart(name: str) -> None:
    """Recorded values are right, and no longer so when an eighth of them are larger by a sixteenth."""
    kept = RECORDED["sm_90a"][name]
    made = [torch.zeros(one["shape"], dtype=getattr(torch, one["dtype"].removeprefix("torch."))) for one in kept]
    for one, tensor in zip(kept, made, strict=True):
        tensor.view(-1)[record.places(tensor)] = torch.tensor(one["values"], dtype=tensor.dtype)
    assert not record.complaint(name, made, kept)
    made[0].view(-1)[record.places(made[0])[:8]] *= 1 + 2.0**-4
    assert record.complaint(name, made, kept)
