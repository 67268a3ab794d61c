"""Lookups that start from a spec: its GEMMs, the module that makes a stage's kernel and host launch, and the order in
which its GEMMs add. A stage is one kernel with its host launch. Plain Python, like `specs`."""

from __future__ import annotations

import functools

from .accumulation import Accumulation
from .arch import policy_of
from .architectures import ARCHS
from .chains import stages_of
from .formats import OPERANDS
from .specs import (
    ACTIVATION_FORMS,
    ACTIVATIONS,
    BY_GROUP,
    BackwardCleanupSpec,
    DgluSpec,
    FoldMxfp8Spec,
    GemmSpec,
    GroupedGluSpec,
    GroupedMmSpec,
    GroupedWgradSpec,
    LayerSpec,
    MhcSpec,
    QuantizeFp8BlockSpec,
    QuantizeMxfp4Spec,
    QuantizeMxfp8Spec,
    Spec,
    WgradSpec,
    operands_of,
)
from .tiles import SpecError

_MODULES: dict[type, str] = {
    BackwardCleanupSpec: "layer.finish_backward",
    QuantizeMxfp8Spec: "quantize.quantize_mxfp8",
    FoldMxfp8Spec: "quantize.fold_mxfp8",
    QuantizeMxfp4Spec: "quantize.quantize_mxfp4",
    QuantizeFp8BlockSpec: "quantize.quantize_fp8_block",
}
"""Modules of kernels that are the same for all architectures, by spec type. Kernels of `layer` and `mhc` name their
modules in their tables (`Kernel.module`)."""
_GEMMS: dict[type, str] = {
    GroupedMmSpec: "mm", GroupedGluSpec: "glu", DgluSpec: "dglu", GroupedWgradSpec: "wgrad", WgradSpec: "wgrad"
}  # fmt: skip

FORMULAS, READS_FORMULAS = "cute_kernels.formulas", "cute_kernels.activation"
"""FORMULAS: the module that has the activations' formulas. READS_FORMULAS: the module through which kernels compute
formulas.

A module that imports only FORMULAS reads the formulas' names, so a changed formula does not change its kernels.
"""


def formulas_of(spec: Spec) -> tuple[str, ...]:
    """Return the names of the formulas that a stage's kernel may compute, if the kernel's module imports
    READS_FORMULAS."""
    if isinstance(spec, (GroupedGluSpec, DgluSpec)):
        return ACTIVATION_FORMS[spec.activation]
    if isinstance(spec, (GroupedMmSpec, GroupedWgradSpec, WgradSpec)):
        return ()
    return ACTIVATIONS


def _module(spec: Spec) -> str:
    """Return the module, relative to this package, that makes a stage's kernel. Raises SpecError if the spec is of a
    chain of several kernels."""
    if isinstance(spec, (MhcSpec, LayerSpec)) and spec.of_kernel.module:
        return spec.of_kernel.module
    if isinstance(spec, GemmSpec):
        formats = OPERANDS[operands_of(spec)]
        in_fp8 = "_fp8_block" if formats.w.rows > 1 else "_mxfp4" if formats.decodes_to_fp8 else "_mxfp8"
        mainloop = "_decoded" if formats.decodes else in_fp8 if formats.has_scaled_rows else ""
        if formats.decodes and isinstance(spec, GroupedMmSpec) and spec.transpose_w:
            mainloop += "_nn"
        folder = "portable" if spec.tile.by_warps else ARCHS[spec.arch].folder
        return f"{folder}.stages.{_GEMMS[type(spec)]}{mainloop}"
    if isinstance(spec, QuantizeMxfp8Spec) and spec.axis == BY_GROUP:
        return "quantize.quantize_groups"
    if type(spec) not in _MODULES:
        raise SpecError(f"{spec.name} is a chain of several kernels, no stage")
    return _MODULES[type(spec)]


def tracer_of(spec: Spec) -> str:
    """Return "module:trace", the import path of the function that traces a stage (one kernel with its host launch).

    That function takes the stage's spec. It returns a jitted host function with stand-ins for the function's arguments
    (`tracing.Traced`). Of the kernels' sources, a compiled object depends only on this module and on the modules that
    it imports.

    Raises:
        SpecError: the spec is of a chain of several kernels.
    """
    return f"cute_kernels.{_module(spec)}:trace"


def draws_tickets(spec: Spec) -> bool:
    """Return True if a spec has a GEMM whose clusters take their tiles by tickets (`GemmPolicy`). Calls must then pass
    a counter."""
    return any(policy_of(stage.arch).gemm_policy(stage).tickets for stage in gemms_of(spec))


def gemms_of(spec: Spec) -> tuple[GemmSpec, ...]:
    """Return the GEMMs among the stages of a spec."""
    return tuple(stage for stage in stages_of(spec) if isinstance(stage, GemmSpec))


@functools.lru_cache(maxsize=4096)
def accumulations_of(spec: Spec) -> tuple[Accumulation, ...]:
    """Return the order in which each GEMM of a spec adds its products, one item for each GEMM.

    If two specs differ only in their tiles and have the same orders, every row has the same bits with both.
    """
    return tuple(policy_of(stage.arch).accumulation(stage) for stage in gemms_of(spec))
