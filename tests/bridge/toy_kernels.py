"""Tracers for tests of the bridge: toy kernels that compile in a tenth of a second, whatever the spec.

z = x + y over float32 vectors, launched on torch's current stream; a grouped_wgrad launches two kernels. `trace`
makes sound code, `trace_spilling` and `trace_serialised` make what a build refuses, `fail` and `die` make
nothing. Imported in the compile process only. $TOY_LOG names a file that gets a line for each spec traced;
while $TOY_HANG is "1" or the spec's name, tracing does not end before the process that asked for it does.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from cute_kernels.specs import Spec

Traced = tuple[Any, tuple[Any, ...]]
THREADS = 128
_CROWD = 280  # live floats a thread; 255 registers cannot hold them

# Accumulators touched between two wgmma of one pipeline stage: ptxas injects a wait and says so (C7517).
_TOUCHED_ACCUMULATORS = """{
.reg .f32 a, b, c, d; .reg .b64 s; .reg .pred p; .reg .u32 i;
mov.f32 a, $1; mov.f32 b, $1; mov.f32 c, $1; mov.f32 d, $1; mov.b64 s, {$2, $2}; mov.u32 i, 0; setp.lt.u32 p, i, $2;
again:
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {a, b, c, d}, s, s, 1, 1, 1, 0, 0;
@p add.f32 a, a, b;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {a, b, c, d}, s, s, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
add.u32 i, i, 1; setp.lt.u32 p, i, $2;
@p bra again;
wgmma.wait_group.sync.aligned 0;
add.f32 a, a, b; add.f32 c, c, d; add.f32 $0, a, c;
}"""


def _serialised(value: Float32, steps: Int32) -> Float32:
    operands = [value.ir_value(), steps.ir_value()]
    return Float32(llvm.inline_asm(ir.F32Type.get(), operands, _TOUCHED_ACCUMULATORS, "=f,f,r", has_side_effects=True))


@cute.kernel
def add_kernel(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor, n: Int32, variant: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    smem = cutlass.utils.SmemAllocator()
    staged = smem.allocate_tensor(Float32, cute.make_layout(THREADS), byte_alignment=16)
    if cutlass.const_expr(variant == "spilling"):
        crowd = cute.make_rmem_tensor(cute.make_layout(_CROWD), Float32)
        for j in cutlass.range_constexpr(_CROWD):  # out of bounds, but never run: % n takes 1 s to compile
            crowd[j] = x[i + j]
        for step in cutlass.range(n, unroll=1):
            for j in cutlass.range_constexpr(_CROWD):
                crowd[j] = crowd[j] * y[step] + crowd[(j + 1) % _CROWD]
        for j in cutlass.range_constexpr(_CROWD):
            z[i + j] = crowd[j]
    elif cutlass.const_expr(variant == "serialised"):
        z[i] = _serialised(x[i], n)
    elif i < n:
        staged[thread] = x[i]
        z[i] = staged[thread] + y[i]


@cute.jit
def add(
    x: cute.Tensor,
    y: cute.Tensor,
    z: cute.Tensor,
    do_launch: Int32,
    stream: Any,
    variant: cutlass.Constexpr,
    launches: cutlass.Constexpr,
):
    n = Int32(cute.size(x))
    if do_launch > 0:
        for i in cutlass.range_constexpr(launches):
            add_kernel.set_name_prefix(f"glulam_add{i}", remove_cutlass_symbol=True, keep_mangled_name=False)
            grid = ((n + THREADS - 1) // THREADS, 1, 1)
            add_kernel(x, y, z, n, variant).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


def _note(spec: Spec) -> None:
    if log := os.environ.get("TOY_LOG"):
        with Path(log).open("a") as file:
            file.write(f"{spec.name}\n")
    asker = os.getppid()
    while os.environ.get("TOY_HANG") in ("1", spec.name) and os.getppid() == asker:
        time.sleep(0.05)


def _trace(spec: Spec, variant: str) -> Traced:
    """Return the jitted function and fake arguments (x, y, z, do_launch, stream) for any spec."""
    _note(spec)
    n = cute.sym_int()
    launches = 2 if spec.op == "grouped_wgrad" else 1
    x, y, z = (make_fake_compact_tensor(Float32, (n,), stride_order=(0,), assumed_align=4) for _ in range(3))
    return add, (x, y, z, Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True), variant, launches)


def trace(spec: Spec) -> Traced:
    return _trace(spec, "sound")


def trace_spilling(spec: Spec) -> Traced:
    return _trace(spec, "spilling")


def trace_serialised(spec: Spec) -> Traced:
    return _trace(spec, "serialised")


def fail(spec: Spec) -> Traced:
    """Raise ValueError: a tracer that fails."""
    raise ValueError(f"no kernel for {spec.name}")


def die(spec: Spec) -> Traced:
    """Abort the process: a tracer that crashes."""
    os.abort()
