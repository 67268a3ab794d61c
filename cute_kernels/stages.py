"""Which module makes a stage's kernel and its launch. Plain Python, as `specs` is."""

from __future__ import annotations

from .arch import FOLDERS
from .specs import (
    DECODED,
    DgluSpec,
    FoldMxfp8Spec,
    GroupedGluSpec,
    GroupedMmSpec,
    GroupedWgradSpec,
    LayerSpec,
    MhcSpec,
    QuantizeMxfp8Spec,
    Spec,
    TailSpec,
)
from .tiles import SpecError

_MODULES: dict[type, str] = {
    TailSpec: "stages.tail",
    GroupedWgradSpec: "stages.wgrad",
    QuantizeMxfp8Spec: "stages.quantize",
    FoldMxfp8Spec: "stages.fold",
}
_HYPER_CONNECTIONS = {"project_backward": "project_backward", "pre_backward": "project_backward"}
_LAYER = {
    "choose": "route",
    "count": "route",
    "place": "route",
    "route_backward": "route_backward",
    "permute": "rows",
    "combine": "rows",
    "row_weights_backward": "rows",
}
_GEMMS: dict[type, str] = {GroupedMmSpec: "mm", GroupedGluSpec: "glu", DgluSpec: "dglu"}


def _module(spec: Spec) -> str:
    if isinstance(spec, MhcSpec):
        return f"mhc.{_HYPER_CONNECTIONS.get(spec.kernel) or spec.kernel.removesuffix('_backward')}"
    if isinstance(spec, LayerSpec) and spec.kernel in _LAYER:
        return f"layer.{_LAYER[spec.kernel]}"
    if isinstance(spec, (GroupedMmSpec, GroupedGluSpec, DgluSpec)):
        operands = "_decoded" if spec.operands in DECODED else {"16bit": "", "mxfp8": "_mxfp8"}[spec.operands]
        return f"stages.{_GEMMS[type(spec)]}{operands}"
    if type(spec) not in _MODULES:
        raise SpecError(f"{spec.name} is a chain of several kernels, no stage")
    return _MODULES[type(spec)]


def tracer_of(spec: Spec) -> str:
    """The "module:function" that turns a stage's spec into a jitted host function and stand-ins for its arguments.

    An object is made of what this module imports and of nothing else. Raises SpecError for a chain.
    """
    return f"cute_kernels.{FOLDERS[spec.arch]}.{_module(spec)}:trace"
