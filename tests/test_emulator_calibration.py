"""Calibrate the emulator against an H100: it must compute what the GPU computed with the same kernels.

Calls are those of `emulator.calls`, results are in `emulator/h100.json`, recorded by `emulator.record`. Kernels are
chosen for the H100's SM count, which the tile depends on. Launches use a grid for LAUNCHED_SMS, since 132 CTAs, most of
them idle, take ten times as long. A sum that is split by that number is exact or within the tolerance.

The file does not record the functions that served a call on the H100. The choice needs no GPU, so SERVED_BY is checked
here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from fnmatch import fnmatch
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
SERVED_BY = {
    "grouped_mm": "grouped_mm_bf16_nt_*",
    "grouped_mm_float16": "grouped_mm_f16_nt_*",
    "grouped_mm_transposed": "grouped_mm_bf16_nn_*",
    "grouped_mm_by_index": "grouped_mm_bf16_nt_*",
    "grouped_mm_of_listed_experts": "grouped_mm_bf16_nt_*",
    "grouped_mm_of_few_rows": "grouped_mm_bf16_nt_*",
    "grouped_mm_mxfp4": "quantize_mxfp4_bf16 grouped_mm_mxfp4w_bf16_*",
    "grouped_glu_reglu": "grouped_glu_bf16_gated_blocked_preact_*",
    "grouped_wgrad": "grouped_wgrad_bf16_bf16_*",
    "grouped_wgrad_by_index_in_float32": "grouped_wgrad_bf16_f32_*",
    "grouped_bias_grad": "grouped_wgrad_bf16_f32_*",
    "grouped_dglu_reglu": "grouped_dglu_bf16_reglu_concat_*",
    "quantize_mxfp8": "quantize_mxfp8_bf16_row quantize_mxfp8_bf16_col quantize_mxfp8_bf16_both",
    "quantize_mxfp8_swizzled": "quantize_mxfp8_bf16_row",
    "quantize_mxfp4": "quantize_mxfp4_bf16",
    "prepare_mxfp8_weight": "fold_mxfp8_bf16_row",
    "permute_and_combine": "layer_sort_* layer_permute_bf16 layer_combine_bf16",
    "permute_and_combine_backward": "layer_sort_* layer_permute_bf16 layer_combine_bf16",
    "grouped_glu": "grouped_glu_bf16_gated_blocked_preact_*",
    "grouped_glu_gate_up": "grouped_glu_bf16_*",
    "grouped_mlp": "grouped_mlp_bf16_*",
    "grouped_mlp_clamped": "grouped_mlp_bf16_*",
    "grouped_mlp_mxfp8": "fold_mxfp8_bf16_row grouped_mlp_mxfp8_bf16_*",
    "grouped_mlp_mxfp8_exact": "quantize_mxfp8_bf16_row quantize_mxfp8_bf16_row_rounded grouped_mlp_mxfp8exact_bf16_*",
    "grouped_mlp_mxfp8_weight_only": "quantize_mxfp8_bf16_row grouped_mlp_mxfp8w_bf16_*",
    "grouped_mlp_mxfp4_weight_only": "quantize_mxfp4_bf16 grouped_mlp_mxfp4w_bf16_*",
    "grouped_mlp_backward": "grouped_mlp_bf16_*_preact_* grouped_dglu_bf16_*__nn_* grouped_wgrad_bf16_bf16_*",
    "route": "layer_route_e* layer_route_backward",
    "route_by_sigmoids_and_groups": "layer_route_e*",
    "moe": "layer_sort_* grouped_mlp_bf16_*",
    "mhc_sinkhorn": "mhc_sinkhorn_n4 mhc_sinkhorn_backward_n4",
    "mhc_aggregate_and_post_mix": "mhc_aggregate_bf16_n4 mhc_aggregate_backward_bf16_n4 "
    "mhc_post_mix_bf16_n4 mhc_post_mix_backward_bf16_n4",
    "mhc_project": "mhc_project_bf16_n4 mhc_project_backward_bf16_n4",
}
"""Exported functions that a call is meant to try: patterns of their names, without the architecture."""


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
    with _gpu(arch) as gpu:
        made = calls.results(name, "cpu")
    _check_served(name, gpu)
    assert not record.complaint(name, made, RECORDED[arch][name])


def _check_served(name: str, gpu: EmulatedGpu) -> None:
    """Check that a call was served by every function that SERVED_BY names and no other, and that their kernels ran."""
    patterns = [f"{pattern}_{gpu.emulator.arch}" for pattern in SERVED_BY[name].split()]
    functions = {spec.name for spec in gpu.fake.specs}
    matches = {pattern: {function for function in functions if fnmatch(function, pattern)} for pattern in patterns}
    assert all(matches.values()) and set.union(*matches.values()) == functions, f"{functions} served it"
    stages = tuple(f"{stage}_" for stage in gpu.called)
    assert gpu.emulator.counts.kernels and all(ran.startswith(stages) for ran in gpu.emulator.counts.kernels)


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
