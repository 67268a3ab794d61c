"""Kernel specs. A spec has everything that changes a kernel's generated code, and nothing else.

A spec is a frozen dataclass with a stable, readable `name`. The name is the exported symbol, the key in the manifest,
and the readable half of the cache key. A spec never holds a token count, an expert count, N, K or a device: these are
run-time values of every kernel.

Fields that several specs have:

    dtype                   the dtype of 16-bit tensors, a key of DTYPES
    tile                    the GEMM's tile, a `tiles.TileConfig`
    arch                    the architecture, a key of ARCHS
    operands                the formats in which a GEMM's x and weights are stored, a key of OPERANDS
    activation, glu_layout  keys of ACTIVATION_FORMS and LAYOUT_FORMS
    save_preact             the preactivation is stored, too

Letters: T rows, E experts, H hidden, I intermediate, N and K rows and columns of a weight, r rank of an adapter; a
subscript e is the row's expert.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..dtypes import DTYPES as DTYPES
from ..dtypes import PARAM_FORMS as PARAM_FORMS
from ..dtypes import WIDE_DTYPES as WIDE_DTYPES
from ..formats import DECODED as DECODED
from ..formats import OPERANDS as OPERANDS
from ..tiles import SpecError, TileConfig, require
from .activations import ACTIVATION_FORMS as ACTIVATION_FORMS
from .activations import ACTIVATIONS as ACTIVATIONS
from .activations import BLOCK_ROWS as BLOCK_ROWS
from .activations import GATED as GATED
from .activations import GLU_LAYOUTS as GLU_LAYOUTS
from .activations import KINDS as KINDS
from .activations import LAYOUT_FORMS as LAYOUT_FORMS
from .activations import LAYOUTS as LAYOUTS
from .activations import UNGATED as UNGATED
from .activations import form_of_several as form_of_several
from .activations import is_gated as is_gated
from .checks import check_served as check_served
from .gemms import DgluSpec as DgluSpec
from .gemms import GroupedDgluSpec as GroupedDgluSpec
from .gemms import GroupedGluSpec as GroupedGluSpec
from .gemms import GroupedMlpSpec as GroupedMlpSpec
from .gemms import GroupedMmSpec as GroupedMmSpec
from .gemms import GroupedWgradSpec as GroupedWgradSpec
from .gemms import WgradSpec as WgradSpec
from .others import BY_GROUP as BY_GROUP
from .others import FOLD_AXES as FOLD_AXES
from .others import QUANTIZE_AXES as QUANTIZE_AXES
from .others import BackwardCleanupSpec as BackwardCleanupSpec
from .others import FoldMxfp8Spec as FoldMxfp8Spec
from .others import LayerSpec as LayerSpec
from .others import MhcSpec as MhcSpec
from .others import QuantizeFp8BlockSpec as QuantizeFp8BlockSpec
from .others import QuantizeMxfp4Spec as QuantizeMxfp4Spec
from .others import QuantizeMxfp8Spec as QuantizeMxfp8Spec

_SPECS = (
    GroupedMmSpec,
    GroupedGluSpec,
    GroupedMlpSpec,
    GroupedDgluSpec,
    DgluSpec,
    BackwardCleanupSpec,
    GroupedWgradSpec,
    WgradSpec,
    QuantizeMxfp8Spec,
    FoldMxfp8Spec,
    QuantizeMxfp4Spec,
    QuantizeFp8BlockSpec,
    MhcSpec,
    LayerSpec,
)


Spec = (
    GroupedMmSpec
    | GroupedGluSpec
    | GroupedMlpSpec
    | GroupedDgluSpec
    | DgluSpec
    | BackwardCleanupSpec
    | GroupedWgradSpec
    | WgradSpec
    | QuantizeMxfp8Spec
    | FoldMxfp8Spec
    | QuantizeMxfp4Spec
    | QuantizeFp8BlockSpec
    | MhcSpec
    | LayerSpec
)
RaggedSpec = GroupedMmSpec | GroupedGluSpec | DgluSpec
"""Specs of a single GEMM whose rows belong to groups of varying size. Weight gradients are not among them."""
GemmSpec = RaggedSpec | GroupedWgradSpec | WgradSpec
"""Specs of a single GEMM kernel."""
_SPEC_TYPES: dict[str, type] = {spec.op: spec for spec in _SPECS}
_NESTED: dict[str, type] = {"tile": TileConfig, "dgrad": TileConfig, "fc1": GroupedGluSpec, "fc2": GroupedMmSpec}


def operands_of(spec: Spec) -> str:
    """Return the key of OPERANDS for a spec: the formats of its x and its weights. For a grouped_mlp, these are FC1's
    formats; for kernels that are not GEMMs, the key is "16bit"."""
    first = spec.fc1 if isinstance(spec, GroupedMlpSpec) else spec
    return str(getattr(first, "operands", "16bit"))


def to_dict(spec: Spec) -> dict[str, Any]:
    """Return a spec as a JSON-ready dict. `from_dict` turns the dict back into an equal spec."""
    return {"op": spec.op, **dataclasses.asdict(spec)}


def _build(cls: type, fields: dict[str, Any]) -> Any:
    """Return an object of class `cls` with the given fields, nested specs included. Raises SpecError for an unknown
    field."""
    known = {f.name for f in dataclasses.fields(cls)}
    unknown = set(fields) - known
    if unknown:
        raise SpecError(f"{cls.__name__} has no field {sorted(unknown)[0]!r}; it has: {', '.join(sorted(known))}")
    return cls(**{k: _build(_NESTED[k], v) if k in _NESTED and isinstance(v, dict) else v for k, v in fields.items()})


def from_dict(data: dict[str, Any]) -> Spec:
    """Return the spec that `to_dict` turned into `data`. Raises SpecError for an unknown operator or field."""
    fields = dict(data)
    op = fields.pop("op", None)
    require("op", op, _SPEC_TYPES)
    return _build(_SPEC_TYPES[op], fields)
