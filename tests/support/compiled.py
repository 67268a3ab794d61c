"""What some kernels of an architecture take of a GPU: a process of its own compiles them, and prints JSON."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import io
import json
import sys

from cute_kernels.stages import tracer_of
from ffi_bridge import profiles

NAMES = (
    "grouped_mm_bf16_*",
    "grouped_glu_bf16_gated_blocked_*",
    "grouped_wgrad_bf16_f32_*",
    "dglu_bf16_clamped_swiglu_interleaved_*",
    "grouped_mm_mxfp?w_*",
    "grouped_glu_mxfp8exact_bf16_gated_*",
    "quantize_mxfp8_bf16_both_*",
    "quantize_mxfp4_bf16_*",
    "tail_bf16_*",
    "layer_choose_e256_*",
    "layer_place_e1024_*",
    "layer_combine_bf16_*",
    "mhc_project_bf16_n4_*",
    "mhc_aggregate_f32_n4_*",
    "mhc_post_mix_backward_bf16_n8_*",
)


def resources(arch: str) -> list[tuple[str, int, int]]:
    """Of each kernel: spec, bytes spilled, bytes of shared memory."""
    compiler = importlib.import_module("ffi_bridge.compiler")
    cute, found = compiler._cutlass(arch), []
    for spec in profiles.all_stages(profiles.shipped_specs(arch, "bf16")):
        if any(fnmatch.fnmatch(spec.name, name) for name in NAMES):
            remarks = io.StringIO()
            host, arguments = compiler.load_tracer(tracer_of(spec))(spec)
            with contextlib.redirect_stderr(remarks):
                made = cute.compile(host, *arguments, options=compiler.OPTIONS + arch, no_jit_engine=True)
            for kernel in compiler.read_resources(made.kernel_info, remarks.getvalue(), str(made.ir_module)):
                smem = kernel.dynamic_smem + kernel.static_smem
                found.append((spec.name, kernel.spill_stores + kernel.spill_loads, smem))
    return found


if __name__ == "__main__":
    print(json.dumps(resources(sys.argv[1])))
