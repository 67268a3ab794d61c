"""A sample of each architecture's functions, with the resources and the PTX of their kernels.

Objects and PTX are the emulator's: compiled once and kept in the user's cache (docs/emulator.md).
"""

from __future__ import annotations

import fnmatch
import functools

from emulator import ptx
from emulator.launch import texts

from cute_kernels.architectures import ARCHS
from cute_kernels.plain import plain_in
from cute_kernels.specs import Spec
from ffi_bridge import profiles
from ffi_bridge.compiler import KernelArtifact
from ffi_bridge.resources import KernelResources

PORTABLE = (
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
    "mhc_boundary_*bf16_n?_*",
)
# Each family's functions with the shortest epilogue, and those that need the most registers.
TENSOR_MEMORY = (
    "grouped_mm_bf16_nt_t128x256*",
    "grouped_mm_bf16_nt_t128x128*",
    "grouped_mm_bf16_nn_t128x256*",
    "grouped_mm_bf16_nn_halves_t128x256*",
    "grouped_glu_bf16_gated_blocked_t128x256*",
    "grouped_glu_bf16_gated_blocked_preact_t128x256*",
    "grouped_glu_bf16_gated_concat_preact_nn_t128x256*",
    "grouped_glu_bf16_situ_strided_preact_t128x128*",
    "dglu_bf16_none_t128x128*",
    "dglu_bf16_clamped_swiglu_interleaved_nt_t128x128*",
    "dglu_bf16_clamped_swiglu_concat_t128x128*",
    "dglu_bf16_situ_concat_nt_t128x128*",
    "grouped_wgrad_bf16_bf16_t128x256*",
    "grouped_wgrad_bf16_f32_t128x256*",
    "wgrad_mxfp8blocks_bf16_t128x128*",
    "wgrad_mxfp8blocks_f32_t128x128*",
)
PATTERNS = {"portable": PORTABLE, "sm100": TENSOR_MEMORY}
"""Names of functions, by the folder of their architecture."""
SAMPLED = [arch for arch, one in ARCHS.items() if one.folder in PATTERNS]


def sample(arch: str) -> list[Spec]:
    """Return the specs of an architecture's functions that match its patterns.

    Raises:
        LookupError: a pattern matches no function.
    """
    patterns = PATTERNS[ARCHS[arch].folder]
    stages = profiles.all_stages(profiles.shipped_specs(arch, "bf16"))
    names = [stage.name for stage in stages]
    if unused := [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]:
        raise LookupError(f"{arch} ships no function of these names: {unused}")
    return [stage for stage in stages if any(fnmatch.fnmatch(stage.name, pattern) for pattern in patterns)]


@functools.cache
def _compiled_without(stage: Spec, constructs: tuple[str, ...]) -> KernelArtifact:
    return texts().of(stage)


def _compiled(stage: Spec) -> KernelArtifact:
    return _compiled_without(stage, plain_in(stage.arch))


def resources_of(stage: Spec) -> tuple[KernelResources, ...]:
    """Return registers, spills and shared memory of a function's kernels. The first call compiles the function."""
    return _compiled(stage).kernels


def parsed(stage: Spec) -> list[ptx.Kernel]:
    """Return the PTX of a function's kernels. Not cached: a kernel's instructions take megabytes."""
    return ptx.parse(_compiled(stage).object_file.with_suffix(".ptx").read_text())
