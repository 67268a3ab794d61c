"""The ceiling of kernels without wgmma: mma.sync from registers, and nothing else, on all SMs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SHAPE = 16, 8, 16
TILES = 16
"""Independent sums of a warp, so that no MMA waits for the one before."""
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


def flop(num_sms: int) -> int:
    """Of one call."""
    m, n, k = SHAPE
    return num_sms * WARPS * ROUNDS * TILES * 2 * m * n * k


def make() -> tuple[Callable[[int], Any], int]:
    """A call, and its FLOP. Raises RuntimeError where torch cannot compile CUDA here."""
    compile_kernel = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None:
        raise RuntimeError("this torch cannot compile CUDA at run time; take 2.9 or later")
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    kernel = compile_kernel(SOURCE, "mma_alone")
    out = torch.empty(num_sms * WARPS * 32, device="cuda")
    return lambda number: kernel((num_sms, 1, 1), (WARPS * 32, 1, 1), (out, ROUNDS)), flop(num_sms)
