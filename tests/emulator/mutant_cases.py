"""Cases for mutants: calls of shipped functions, and their launches, kept with all memory to be run again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.fake_gpu import reference

import glulam
from cute_kernels.specs import Spec
from ffi_bridge import profiles
from glulam.validate import child

from . import launch as launches
from .calls import F32, Inputs
from .emulated_gpu import installed, live_storages
from .machine import Machine
from .ptx import Kernel
from .races import Races

SIZES = (19, 0, 5)
"""Rows of each expert: more than a tile of 16, none, and less than a tile."""
ROWS = 27
"""3 rows after the last group."""
MANY = (150, 0, 5, 20)
FEW_ROWS = (19, 0, 5, 33, 3, 17, 2, 9)
"""Rows of each expert of kernels whose tiles go through a ring, which they fill more than once."""


class Case(NamedTuple):
    """A call of a shipped function.

    kernel: how the name of the kernel that is changed begins; empty: with the function's name.
    num_sms: 1 where one CTA shall have all tiles, so that its rings come round.
    """

    spec: str
    call: Callable[[Inputs], Any]
    kernel: str = ""
    num_sms: int = 2

    @property
    def arch(self) -> str:
        return "sm_" + self.spec.rpartition("_sm_")[2]


def _offs(given: Inputs, sizes: tuple[int, ...] = SIZES) -> torch.Tensor:
    return given.given(np.cumsum(sizes), torch.int32)


def _tail(x: torch.Tensor, sizes: tuple[int, ...] = SIZES) -> torch.Tensor:
    x[sum(sizes) :] = torch.nan
    return x


def _mm(given: Inputs) -> Any:
    x, w = _tail(given.normal(ROWS, 264)), given.normal(3, 136, 264)
    options = {"bias": given.normal(3, 136), "bias_scale": given.normal(ROWS, dtype=F32)}
    return glulam.grouped_mm(x, w, offs=_offs(given), **options)


def _mm_of_many_rows(given: Inputs) -> Any:
    x, w = _tail(given.normal(178, 136), MANY), given.normal(4, 136, 136)
    options = {"bias": given.normal(4, 136), "bias_scale": given.normal(178, dtype=F32)}
    return glulam.grouped_mm(x, w, offs=_offs(given, MANY), **options)


def _mm_mxfp4(given: Inputs) -> Any:
    x, w = _tail(given.normal(ROWS, 288)), given.normal(3, 136, 288)
    return glulam.grouped_mm(x, _quantized(w), offs=_offs(given))


def _mm_mxfp4_of_many_tiles(given: Inputs) -> Any:
    x, w = _tail(given.normal(91, 288), FEW_ROWS), given.normal(8, 136, 288)
    return glulam.grouped_mm(x, _quantized(w), offs=_offs(given, FEW_ROWS))


def _quantized(w: torch.Tensor) -> Any:
    with reference():
        return glulam.quantize_mxfp4(w)


def _glu(given: Inputs) -> Any:
    x, w = _tail(given.normal(ROWS, 264)), given.normal(3, 256, 264, scale=0.1)
    return glulam.grouped_glu(x, w, offs=_offs(given), bias=given.normal(3, 256))


def _wgrad(given: Inputs) -> Any:
    dy, x = (_tail(given.normal(90, 136), (75, 0, 5)) for _ in range(2))
    return glulam.grouped_wgrad(dy, x, offs=_offs(given, (75, 0, 5)))


def _mlp_mxfp8(given: Inputs) -> Any:
    x = _tail(given.normal(91, 384), FEW_ROWS)
    w1, w2 = given.normal(8, 256, 384, scale=0.1), given.normal(8, 384, 128, scale=0.1)
    return glulam.grouped_mlp(x, w1, w2, offs=_offs(given, FEW_ROWS), recipe="mxfp8")


def _quantize(given: Inputs) -> Any:
    x = given.normal(226, 512) * given.scales(226, 1).to(torch.bfloat16)
    for row in range(5, 226):  # NaN or inf in each place that a thread of the unrolled code looks at
        x[row, 5 * row % 32 + 32 * (row % 3) :: 96] = torch.nan if row % 4 else torch.inf
    x[3, :70], x[4, ::33], x[225] = 0, 3e38, 1e-38
    return glulam.quantize_mxfp8(x)


def _route(given: Inputs) -> Any:
    logits, bias = given.normal(70, 100, dtype=F32), given.normal(100, dtype=F32)
    return glulam.route(logits, 20, score="sigmoid", bias=bias, scale=2.5)


FP8 = "grouped_mlp_mxfp8_bf16_gated_concat_t64x256x128_c1x1_coop__nt_t64x128x128_c1x1_coop_sm_90a"

CASES = {
    case.spec: case
    for case in (
        Case("grouped_mm_bf16_nt_t16x128x64_c1x1_warps_sm_90", _mm),
        Case("grouped_glu_bf16_gated_blocked_t16x128x64_c1x1_warps_sm_90", _glu),
        Case("grouped_wgrad_bf16_bf16_t128x128x64_c1x1_warps_sm_90", _wgrad),
        Case("quantize_mxfp8_bf16_row_sm_90", _quantize),
        Case("layer_route_e128_sm_90", _route, "layer_choose"),
        Case("grouped_mm_mxfp4w_bf16_nt_t16x128x64_c1x1_warps_sm_90", _mm_mxfp4),
        Case("grouped_mm_bf16_nt_t128x128x64_c2x1a_pp_sm_90a", _mm_of_many_rows),
        Case("grouped_mm_mxfp4w_bf16_nt_t16x128x128_c1x1_swap1_sm_90a", _mm_mxfp4_of_many_tiles, num_sms=1),
        Case("grouped_wgrad_bf16_bf16_t128x128x64_c1x2_pp_sm_90a", _wgrad),
        Case(FP8, _mlp_mxfp8, "grouped_glu_mxfp8", num_sms=1),
    )
}


def spec_of(case: Case) -> Spec:
    return next(spec for spec in profiles.shipped_specs(case.arch, "full") if spec.name == case.spec)


@dataclasses.dataclass
class Recorded:
    """A launch, and the memory before it. `kept` holds the tensors whose memory it is."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    kernel: Kernel
    before: dict[int, np.ndarray]
    now: dict[int, np.ndarray]
    kept: list[Any]

    def run(self, kernel: Kernel, program: Any, seed: int, **options: Any) -> Machine:
        """Run a form of the kernel in memory as it was before the launch."""
        for address, values in self.before.items():
            self.now[address][...] = values
        machine = Machine(kernel, *self.arguments, **{**self.options, "program": program, "seed": seed, **options})
        if isinstance(machine.observer, Races):
            machine.observer.launch(machine)
        machine.run()
        return machine

    def after(self) -> np.ndarray:
        """All bytes of the memory."""
        return np.concatenate([self.now[address] for address in self.before])


@contextlib.contextmanager
def _recording() -> Iterator[list[Recorded]]:
    """While entered, launches of the emulator are kept."""
    kept: list[Recorded] = []

    class Recorder(Machine):
        def __init__(self, kernel: Kernel, memory: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(kernel, memory, *arguments, **options)
            self._as_given = (memory, *arguments), options

        def run(self) -> float:
            storages = live_storages()
            now = {at: self.memory.array(at, np.uint8, one.nbytes()) for at, one in sorted(storages.items())}
            before = {address: values.copy() for address, values in now.items()}
            kept.append(Recorded(*self._as_given, self.kernel, before, now, list(storages.values())))
            return super().run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "Machine", Recorder)
        yield kept


@functools.lru_cache(maxsize=4)
def recorded(name: str) -> Recorded:
    """The launch of a case."""
    case = CASES[name]
    gc.collect()
    with installed(case.arch, case.num_sms) as gpu, _recording() as kept, torch.no_grad():
        child.prefer(spec_of(case))
        case.call(Inputs("cpu", name))
        if case.spec not in gpu.called:
            raise ValueError(f"{case.spec} did not serve its call, but {sorted(gpu.called)}")
    return next(launch for launch in kept if launch.kernel.name.startswith(case.kernel or case.spec))
