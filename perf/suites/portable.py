"""The MLP on portable kernels beside Hopper's own, torch, and MMAs that do nothing else, all as CUDA graphs.

At one time, all calls of a process are served by one architecture, but a graph keeps the kernels with which it was
captured. So each contestant is captured while its architecture serves; then the graphs are timed alternately.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import torch

from glulam.host import device as devices
from glulam.host.plans import forget_plans
from glulam.tuner.timing import Call

from ..cases import Case
from ..contest import Contestant, contest, over_cases, rotating
from ..mlp import Buffers, make_buffers, torch_mlp
from ..quantised import MAX_RELATIVE_ERROR, Mlp, error, mlp_by
from ..results import Record
from ..targets import BF16, MMA_ALONE, NATIVE, PORTABLE, PORTABLE_MXFP8, TORCH
from ..timing import capture

ARCHS = {PORTABLE: "sm_90", PORTABLE_MXFP8: "sm_90", NATIVE: "sm_90a"}
RECIPES = {PORTABLE: BF16, NATIVE: BF16, PORTABLE_MXFP8: "mxfp8_weight_only"}
MMA_SHAPE = 16, 8, 16
TILES = 16
"""Independent accumulator tiles of a warp, so that no MMA waits for the one before it."""
WARPS, ROUNDS = 8, 2048
SOURCE = f"""
extern "C" __global__ void mma_alone(float* out, int rounds) {{
    float sums[{TILES}][4];
    unsigned a[4], b[2];
    for (int i = 0; i < 4; ++i) a[i] = 0x3c003c00u + threadIdx.x * (i + 1);
    for (int i = 0; i < 2; ++i) b[i] = 0x3c003c00u + threadIdx.x * (i + 5);
    for (int t = 0; t < {TILES}; ++t) for (int i = 0; i < 4; ++i) sums[t][i] = 0.0f;
    for (int round = 0; round < rounds; ++round) {{
        #pragma unroll
        for (int t = 0; t < {TILES}; ++t)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
                : "+f"(sums[t][0]), "+f"(sums[t][1]), "+f"(sums[t][2]), "+f"(sums[t][3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }}
    float total = 0.0f;
    for (int t = 0; t < {TILES}; ++t) for (int i = 0; i < 4; ++i) total += sums[t][i];
    out[blockIdx.x * blockDim.x + threadIdx.x] = total;
}}
"""
"""The ceiling of kernels without wgmma: mma.sync from registers, and nothing else, on all SMs."""


def mma_alone() -> tuple[Call, int]:
    """Return a call of the kernel that does nothing but mma.sync, and its FLOP. Raises RuntimeError if torch cannot
    compile CUDA here.
    """
    compile_kernel = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None:
        raise RuntimeError("this torch cannot compile CUDA at run time; take 2.9 or later")
    num_sms, (m, n, k) = torch.cuda.get_device_properties("cuda").multi_processor_count, MMA_SHAPE
    kernel, out = compile_kernel(SOURCE, "mma_alone"), torch.empty(num_sms * WARPS * 32, device="cuda")
    flop = num_sms * WARPS * ROUNDS * TILES * 2 * m * n * k
    return lambda number: kernel((num_sms, 1, 1), (WARPS * 32, 1, 1), (out, ROUNDS)), flop


@contextmanager
def served_by(arch: str) -> Iterator[None]:
    """Let the kernels of `arch` serve all calls in the block."""
    with mock.patch.dict(os.environ, {devices.ENV_ARCH: arch, devices.ENV_UNVALIDATED: "1"}):
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    devices.gpu.cache_clear()
    forget_plans()


def _replays(name: str, sets: Sequence[Buffers]) -> Call:
    """Capture a graph for each set of tensors; return a function of a call's number that replays one of them."""
    with served_by(ARCHS[name]) if name in ARCHS else nullcontext():
        mlp: Mlp = mlp_by(RECIPES[name], sets) if name in RECIPES else torch_mlp
        replays = [capture(partial(mlp, b)) for b in sets]
    return rotating(lambda replay: replay(), replays)


def contestants(case: Case, sets: Sequence[Buffers], alone: Call) -> Iterator[Contestant]:
    for name in (PORTABLE, NATIVE, *((PORTABLE_MXFP8,) if case.decode else ())):
        bound = MAX_RELATIVE_ERROR[RECIPES[name]]
        yield Contestant(name, partial(_replays, name, sets), partial(error, b=sets[0]), bound, required=True)
    yield Contestant(TORCH, partial(_replays, TORCH, sets), required=True)
    yield Contestant(MMA_ALONE, lambda: alone, required=True)


@over_cases("portable")
def run_portable(case: Case, budget_s: float) -> Iterator[Record]:
    """Yield the record of a case."""
    sets, (alone, flop) = make_buffers(case), mma_alone()
    yield contest(case, contestants(case, sets, alone), budget_s, sets[0].sizes, op="mlp", mma_flop=flop)
