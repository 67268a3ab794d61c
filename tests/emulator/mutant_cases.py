"""Cases for mutants: recorded launches of shipped functions, with all their memory, that can be run again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from cute_kernels import plain
from cute_kernels.chains import stages_of
from cute_kernels.specs import Spec
from ffi_bridge import profiles
from glulam.validate import child

from . import launch as launches
from . import mutant_calls as calls
from .calls import Call, Inputs
from .emulated_gpu import installed, live_storages
from .machine import Machine
from .ptx import Kernel
from .races import Races

Written = Sequence[tuple[int, int]]


class Case(NamedTuple):
    """A shipped function, and calls of it.

    Attributes:
        spec: the function's name.
        calls: calls, the smallest first, each with a small number of SMs, so that a CTA has many tiles and its rings
            wrap around.
        kernel: prefix of the name of the kernel that is changed; empty: the function's name.
        without: constructs that the function is compiled without, as in $GLULAM_PLAIN.
        title: the case's name; empty: the function's.
    """

    spec: str
    calls: tuple[tuple[Call, int], ...]
    kernel: str = ""
    without: str = ""
    title: str = ""

    @property
    def name(self) -> str:
        return self.title or self.spec

    @property
    def arch(self) -> str:
        return "sm_" + self.spec.rpartition("_sm_")[2]


FP8 = "grouped_mlp_mxfp8_bf16_gated_concat_t64x256x128_c1x1_coop__nt_t64x128x128_c1x1_coop_sm_90a"
IN_MXFP8 = {"recipe": "mxfp8_wgrad"}
WGRAD_MXFP8 = "grouped_wgrad_mxfp8blocks_bf16_bf16_t128x128x128_c1x1_tm_sm_100a"
BY_GROUPS = "quantize_mxfp8_bf16_group_sm_100a"
PLAIN_MM = "grouped_mm_bf16_nt_t128x128x64_c1x1_tm_sm_100a, plain"
PLAIN_WGRAD = "grouped_wgrad_bf16_bf16_t128x256x64_c1x1_tm_sm_100a, plain"
BLOCK_SCALED = "grouped_mlp_mxfp8blocks_bf16_gated_blocked_t128x128x128_c1x1_tm__nt_t128x128x128_c1x1_tm_sm_100a"

BLACKWELL_MM_CALLS: tuple[tuple[Call, int], ...] = (
    (calls.mm_of_two_tiles, 3),
    (calls.mm_of_three_k_tiles, 2),
    (partial(calls.mm, sizes=(100, 0, 19), n=64, k=128), 1),
    (partial(calls.mm_by_index, k=328), 1),
    (calls.mm_by_tickets, 2),
    (calls.mm_of_listed_experts, 2),
    (calls.mm_of_bands, 2),
    (calls.mm_of_three_columns, 1),
)
BLACKWELL_WGRAD_CALLS: tuple[tuple[Call, int], ...] = (
    (partial(calls.wgrad_of_many_columns, sizes=(5, 0, 70, 1, 9, 3, 64), n=72, k=136), 1),
    (partial(calls.wgrad_added, k=264), 2),
    (calls.wgrad_of_wraps, 2),
    (partial(calls.wgrad_by_index, k=264), 2),
    (calls.wgrad_of_many_rows, 2),
    (calls.wgrad_of_ends, 5),
    (calls.wgrad_of_many, 4),
)
"""Calls for a weight-gradient kernel, both as it ships and compiled without some constructs."""

CASES = {
    case.name: case
    for case in (
        Case(
            "grouped_mm_bf16_nt_t16x128x64_c1x1_warps_sm_90",
            (
                # a mainloop copies four k-tiles a turn: the last one, and its ragged end, come in each place
                (partial(calls.mm, k=456), 2),
                (partial(calls.mm, sizes=(5,), n=72, k=328), 2),
                (partial(calls.mm_of_bands, rows=150, k=264), 1),
                (calls.mm_of_many_experts, 2),
            ),
        ),
        Case(
            "grouped_glu_bf16_gated_blocked_t16x128x64_c1x1_warps_sm_90",
            ((calls.glu, 2), (calls.glu_of_bands, 1), (calls.glu_of_many_experts, 2)),
        ),
        Case(
            "grouped_wgrad_bf16_bf16_t128x128x64_c1x1_warps_sm_90",
            ((calls.wgrad, 2), (calls.wgrad_by_index, 2), (calls.wgrad_added, 1), (calls.wgrad_of_many, 2)),
        ),
        Case(
            "quantize_mxfp8_bf16_row_sm_90",
            (
                *((partial(calls.quantize, rows=rows), 2) for rows in calls.LAST_ROWS),
                (calls.quantize, 2),
                (calls.quantize_to_an_end, 2),
            ),
        ),
        Case(
            "layer_route_e128_sm_90",
            (
                (calls.route_to_one, 5),
                (calls.route_to_most, 2),
                (calls.route_in_groups, 2),
                (calls.route_to_nearly_all, 2),
                (calls.route, 2),
                *((partial(calls.route_choices, tokens=tokens, k=k), 2) for tokens, k in calls.CHOICES),
                *(
                    (partial(calls.route_special, experts=experts, dtype=dtype), 2)
                    for experts in calls.ROUTINGS
                    for dtype in (torch.bfloat16, torch.float16, torch.float32)
                ),
            ),
            "layer_choose",
        ),
        Case(
            "grouped_mm_mxfp4w_bf16_nt_t16x128x64_c1x1_warps_sm_90",
            ((partial(calls.mm_mxfp4, k=544), 2), (calls.mm_mxfp4_of_bands, 1), (calls.mm_mxfp4_of_many_experts, 2)),
        ),
        Case(
            "grouped_mm_bf16_nt_t128x128x64_c2x1a_pp_sm_90a",
            (
                (calls.mm_of_two_tiles, 4),
                (calls.mm_of_two_k_tiles, 2),
                (calls.mm_of_three_k_tiles, 2),
                (calls.mm_by_tickets, 4),
                (calls.mm_of_listed_experts, 4),
                (calls.mm_of_bands, 4),
                (calls.mm_of_three_columns, 4),
            ),
        ),
        Case(
            "grouped_mm_mxfp4w_bf16_nt_t16x128x128_c1x1_swap1_sm_90a",
            (
                (calls.mm_mxfp4_of_many_columns, 2),
                (calls.mm_mxfp4_of_bands, 1),
                (calls.mm_mxfp4_of_many_tiles, 1),
                (calls.mm_mxfp4_of_many_experts, 2),
            ),
        ),
        Case(
            "grouped_wgrad_bf16_bf16_t128x128x64_c1x2_pp_sm_90a",
            (
                (calls.wgrad_added, 2),
                (calls.wgrad_of_wraps, 2),
                (calls.wgrad_by_index, 2),
                (calls.wgrad_of_many_columns, 2),
                (calls.wgrad_of_heavy_columns, 2),
                (calls.wgrad_of_many_rows, 2),
                (calls.wgrad_of_ends, 10),
                (calls.wgrad_of_many, 4),
            ),
        ),
        Case(
            FP8,
            (
                (calls.mlp_mxfp8_of_two_tiles, 3),
                (calls.mlp_mxfp8, 1),
                (calls.mlp_mxfp8_by_index, 1),
                (calls.mlp_mxfp8_of_many_rows, 1),
                (calls.mlp_mxfp8_of_many_experts, 2),
                (calls.mlp_mxfp8_of_bands, 1),
            ),
            "grouped_glu_mxfp8",
        ),
        Case(
            "grouped_mm_bf16_nt_t128x128x64_c1x1_tm_sm_100a",
            (
                (calls.mm_of_two_k_tiles, 1),
                *((partial(calls.mm_by_index, k=k), 1) for k in (136, 256)),
                *BLACKWELL_MM_CALLS,
            ),
        ),
        Case(
            "grouped_wgrad_bf16_bf16_t128x256x64_c1x1_tm_sm_100a",
            ((calls.wgrad_of_many_columns, 2), (calls.wgrad_of_heavy_columns, 2), *BLACKWELL_WGRAD_CALLS),
        ),
        Case(
            BLOCK_SCALED,
            (
                *((partial(calls.mlp_mxfp8_of_scales, blocks=blocks), 1) for blocks in calls.SCALES_A_ROW),
                # rows of 4, 16, 12, 20, 24, 32, 4 and 4 scales, which are read by words, or by four words at once
                (calls.mlp_mxfp8_of_two_tiles, 3),
                (partial(calls.mlp_mxfp8, h=512), 1),
                (calls.mlp_mxfp8_by_index, 1),
                (partial(calls.mlp_mxfp8_by_index, sizes=calls.EACH_COUNT, h=640, i=64), 1),
                (calls.mlp_mxfp8_of_many_rows, 1),
                (calls.mlp_mxfp8_of_whole_vectors, 2),
                (partial(calls.mlp_mxfp8_of_many_experts, i=64), 2),
                (calls.mlp_mxfp8_of_bands, 1),
            ),
            "grouped_glu_mxfp8blocks",
        ),
        Case(
            "grouped_dglu_bf16_swiglu_concat_t128x128x64_c1x1_tm_sm_100a",
            (
                (calls.dglu, 1),
                (calls.dglu_by_index, 1),
                (partial(calls.dglu_by_index, h=328), 1),
                (calls.dglu_of_many_experts, 2),
            ),
            "dglu",
        ),
        Case(
            WGRAD_MXFP8,
            (
                (partial(calls.wgrad_of_many_columns, sizes=(5, 0, 70, 1, 9, 3, 64), n=96, k=160, **IN_MXFP8), 1),
                (partial(calls.wgrad_added, n=160, k=288, **IN_MXFP8), 2),
                (partial(calls.wgrad_by_index, n=160, k=288, **IN_MXFP8), 2),
                (partial(calls.wgrad_of_wraps, n=96, k=160, **IN_MXFP8), 2),
                (partial(calls.wgrad_of_many_columns, n=160, k=2336, **IN_MXFP8), 2),
                (partial(calls.wgrad_of_many_columns, sizes=(5, 161), n=1184, k=288, **IN_MXFP8), 2),
                (partial(calls.wgrad_of_many_columns, sizes=calls.ENDS, n=96, k=160, **IN_MXFP8), 5),
                (partial(calls.wgrad_of_many, n=96, k=160, **IN_MXFP8), 4),
            ),
            "wgrad_mxfp8blocks",
        ),
        Case(
            WGRAD_MXFP8,
            (
                (partial(calls.wgrad_of_all_kinds, sizes=calls.LAST_ROWS, **IN_MXFP8), 2),
                (partial(calls.wgrad_of_all_kinds, **IN_MXFP8), 2),
                (partial(calls.wgrad_added, n=160, k=96, **IN_MXFP8), 2),
                (partial(calls.wgrad_of_many, n=96, k=96, **IN_MXFP8), 2),
            ),
            "quantize_mxfp8_bf16_group",
            title=BY_GROUPS,
        ),
        Case(
            "grouped_mm_bf16_nt_t128x128x64_c1x1_tm_sm_100a",
            BLACKWELL_MM_CALLS,
            without="tmem_loads,rows",
            title=PLAIN_MM,
        ),
        Case(
            "grouped_wgrad_bf16_bf16_t128x256x64_c1x1_tm_sm_100a",
            BLACKWELL_WGRAD_CALLS,
            without="tmem_loads,rows",
            title=PLAIN_WGRAD,
        ),
    )
}


def spec_of(case: Case) -> Spec:
    return next(spec for spec in profiles.shipped_specs(case.arch, "full") if spec.name == case.spec)


@contextlib.contextmanager
def _compiled_as(case: Case) -> Iterator[None]:
    """Context in which functions are compiled without the constructs that the case leaves out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(plain.ENV, case.without)
        yield


def kernel_of(case: Case) -> Kernel:
    """Return the kernel that is changed, without launching it."""
    with _compiled_as(case):
        programs = [launches.stage_of(stage).programs for stage in stages_of(spec_of(case))]
    named = (item for each in programs for item in each.items())
    return next(program.kernel for name, program in named if name.startswith(case.kernel or case.spec))


@dataclasses.dataclass
class Recorded:
    """A recorded launch, and the memory before it.

    `kept`: the tensors that own the memory; `reached`: the blocks that ran.
    """

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    kernel: Kernel
    before: dict[int, np.ndarray]
    now: dict[int, np.ndarray]
    kept: list[Any]
    reached: set[int]

    def storages(self) -> list[tuple[int, int]]:
        """Return (address, bytes) of each piece of memory."""
        return [(address, values.size) for address, values in self.before.items()]

    def run(self, kernel: Kernel, program: Any, seed: int, written: Written = (), **options: Any) -> Machine:
        """Run a variant of the kernel on the memory as it was before the launch.

        Args:
            written: for a race check, (address, bytes) of memory that the previous launch may still write.
        """
        for address, values in self.before.items():
            self.now[address][...] = values
        machine = Machine(kernel, *self.arguments, **{**self.options, "program": program, "seed": seed, **options})
        if not isinstance(machine.observer, Races):
            machine.run()
            return machine
        machine.observer.follow(machine, written)
        try:
            machine.run()
        finally:
            machine.observer.close()  # hundreds of MB, which the collector of cycles would leave for long
        return machine

    def after(self) -> np.ndarray:
        """Return all bytes of the memory."""
        return np.concatenate([self.now[address] for address in self.before])


@contextlib.contextmanager
def _recording() -> Iterator[list[Recorded]]:
    """Context that records the emulator's launches."""
    kept: list[Recorded] = []

    class Recorder(Machine):
        def __init__(self, kernel: Kernel, memory: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(kernel, memory, *arguments, **options)
            self._as_given = (memory, *arguments), options

        def run(self) -> float:
            storages = live_storages()
            now = {at: self.memory.array(at, np.uint8, one.nbytes()) for at, one in sorted(storages.items())}
            before = {address: values.copy() for address, values in now.items()}
            kept.append(Recorded(*self._as_given, self.kernel, before, now, list(storages.values()), self.reached))
            return super().run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "Machine", Recorder)
        yield kept


@functools.lru_cache(maxsize=2)
def recorded(name: str) -> tuple[Recorded, ...]:
    """Return the recorded launches of a case, one for each call."""
    case = CASES[name]
    return tuple(_recorded(case, *call) for call in case.calls)


@functools.lru_cache(maxsize=4)
def recorded_last(name: str) -> Recorded:
    """Return the recorded launch of a case's last and largest call."""
    case = CASES[name]
    return _recorded(case, *case.calls[-1])


def _recorded(case: Case, call: Call, num_sms: int) -> Recorded:
    gc.collect()
    with _compiled_as(case), installed(case.arch, num_sms) as gpu, _recording() as kept, torch.no_grad():
        child.prefer(spec_of(case))
        call(Inputs("cpu", case.spec))
        if case.spec not in gpu.called:
            raise ValueError(f"{case.spec} did not serve its call, but {sorted(gpu.called)}")
    return next(launch for launch in kept if launch.kernel.name.startswith(case.kernel or case.spec))
