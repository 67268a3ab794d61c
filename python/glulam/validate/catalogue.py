"""The trials of each function, by the class of its spec."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from cute_kernels.specs import (
    FoldMxfp8Spec,
    GroupedDgluSpec,
    GroupedGluSpec,
    GroupedMlpSpec,
    GroupedMmSpec,
    GroupedWgradSpec,
    LayerSpec,
    MhcSpec,
    QuantizeMxfp4Spec,
    QuantizeMxfp8Spec,
    Spec,
)

from . import formats, grouped, layers, streams
from .inputs import FULL, Size
from .trial import Trial

_BY_KIND: dict[type, Callable[[Any, Size], Iterator[Trial]]] = {
    GroupedMmSpec: grouped.mm,
    GroupedGluSpec: grouped.glu,
    GroupedMlpSpec: grouped.mlp,
    GroupedDgluSpec: grouped.dglu,
    GroupedWgradSpec: grouped.wgrad,
    FoldMxfp8Spec: grouped.fold,
    QuantizeMxfp8Spec: formats.mxfp8,
    QuantizeMxfp4Spec: formats.mxfp4,
    MhcSpec: streams.hyper_connection,
}
_OF_A_LAYER: dict[str, Callable[[Any, Size], Iterator[Trial]]] = {
    "route": layers.routed,
    "router": layers.few_tokens,
    "sort": layers.sorted_choices,
    "permute": layers.rows,
    "combine": layers.rows,
    "gate": layers.gates,
    "gate_backward": layers.gates,
    "route_backward": layers.route_gradient,
    "row_weights_backward": layers.row_weights_gradient,
}


def _none(spec: Spec, size: Size) -> Iterator[Trial]:
    return iter(())


def trials_of(spec: Spec, size: Size = FULL) -> Iterator[Trial]:
    """Yield the trials of a spec's function: calls that it serves.

    Kernels that only run in a chain or between GPUs have no trials.
    """
    if isinstance(spec, LayerSpec):
        return _OF_A_LAYER.get(spec.kernel, _none)(spec, size)
    return _BY_KIND.get(type(spec), _none)(spec, size)
