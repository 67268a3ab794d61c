"""Where the host function of each stage is: a kernel, and its launch. Plain Python: this imports no compiler.

An object depends on what that module imports and on nothing else (`ffi_bridge.sources`), so that an edit compiles anew
what it touches.
"""

from __future__ import annotations

from .specs import (
    DECODED,
    DgluSpec,
    FoldMxfp8Spec,
    GroupedGluSpec,
    GroupedMmSpec,
    GroupedWgradSpec,
    MhcSpec,
    QuantizeMxfp8Spec,
    Spec,
    TailSpec,
)
from .tiles import SpecError

FOLDERS = {"sm_90a": "sm90"}
_TRACER = "cute_kernels.tracing"
_HYPER_CONNECTIONS = {
    "sinkhorn": "sinkhorn:Sinkhorn",
    "sinkhorn_backward": "sinkhorn:SinkhornBackward",
    "aggregate": "aggregate:Aggregate",
    "aggregate_backward": "aggregate:AggregateBackward",
    "post_mix": "post_mix:PostMix",
    "post_mix_backward": "post_mix:PostMixBackward",
    "project": "project:Project",
    "project_backward": "project_backward:ProjectBackward",
    "pre_backward": "project_backward:PreBackward",
}


def _gemm(spec: GroupedMmSpec | GroupedGluSpec | DgluSpec) -> str:
    kind = "_decoded" if spec.operands in DECODED else {"16bit": "", "mxfp8": "_mxfp8"}[spec.operands]
    name = {GroupedMmSpec: "mm", GroupedGluSpec: "glu", DgluSpec: "dglu"}[type(spec)]
    preact = "Preact" if isinstance(spec, GroupedGluSpec) and spec.save_preact else ""
    return f"stages.{name}{kind}:{name.title()}{preact}"


def host_of(spec: Spec) -> str:
    """The "module:class" of a stage's launch, a callable made of its spec. Raises SpecError of a chain."""
    if isinstance(spec, (GroupedMmSpec, GroupedGluSpec, DgluSpec)):
        place = _gemm(spec)
    elif isinstance(spec, MhcSpec):
        place = f"mhc.{_HYPER_CONNECTIONS[spec.kernel]}"
    elif isinstance(spec, QuantizeMxfp8Spec):
        place = "stages.quantize:Round" if spec.rounded else "stages.quantize:Quantize"
    elif isinstance(spec, FoldMxfp8Spec):
        place = "stages.fold:Fold"
    elif isinstance(spec, GroupedWgradSpec):
        place = "stages.wgrad:Wgrad"
    elif isinstance(spec, TailSpec):
        place = "stages.tail:Tail"
    else:
        raise SpecError(f"{spec.name} is a chain of several kernels, no stage")
    return f"cute_kernels.{FOLDERS[spec.arch]}.{place}"


def modules_of(spec: Spec) -> tuple[str, ...]:
    """The modules whose imports are all that a stage's object is made of."""
    return _TRACER, host_of(spec).partition(":")[0]
