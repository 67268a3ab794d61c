"""Table of the roles of arguments (matrix, weight, bias, group sizes, ...) by name.

A name has the same role in every operator. Checks, keys of plans, address tables of lists, launches and torch's schemas
are derived from the roles. Operators whose kernels take only addresses and numbers declare their arguments by
annotations instead (`addressed`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

import torch


class Kind(enum.Enum):
    """Kinds of arguments. The value of each kind is its description."""

    MATRIX = "a matrix [T, .]; [num_tokens, .] if its rows come by index"
    WEIGHT = "experts' weights: packed, a list with one tensor an expert, or a GateUp"
    BIAS = "experts' biases: packed, or a list"
    BY_ROW = "a number for each of T rows, which kernels take by address"
    OF_TOKENS = "of a layer: a row for each token, which kernels take by address"
    PART = "a part of a quantised weight besides its elements, which kernels take by address"
    MASK = "a flag for each expert, which kernels take by address"
    MAP = "a place for each expert of the world, which kernels take by address"
    GROUPS = "group sizes"
    OUTPUT = "a buffer that is written"
    OPTION = "no tensor"


class Role(NamedTuple):
    """The role of an argument name: its kind, its type in torch's schemas, its dtype.

    Attributes:
        kind: the kind of argument.
        schema: the argument's type in torch's schemas; an operator may override it (`Call.torch_types`).
        dtype: the dtype of the elements. None: other arguments determine it, or the argument is not a tensor.
    """

    kind: Kind
    schema: str
    dtype: torch.dtype | None = None

    @property
    def is_tensor(self) -> bool:
        return self.kind not in (Kind.GROUPS, Kind.OPTION)


SUFFIXES = ("", "_scale", "_global_scale")
"""Suffixes for the elements, the scales and the global scale of a quantised argument: w, w_scale, w_global_scale."""


def _roles(kind: Kind, schema: str, *names: str, dtype: torch.dtype | None = None) -> dict[str, Role]:
    return dict.fromkeys(names, Role(kind, schema, dtype))


_WEIGHTS = ("w", "w1", "w2")
ROLES: dict[str, Role] = {
    **_roles(Kind.MATRIX, "Tensor", "x", "dy", "preact", "low"),
    **_roles(Kind.WEIGHT, "Tensor[]", *_WEIGHTS, "low_w"),
    **_roles(Kind.WEIGHT, "Tensor[]?", "lora_a1", "lora_b1", "lora_a2", "lora_b2"),
    **_roles(Kind.PART, "Tensor?", *[name + suffix for name in _WEIGHTS for suffix in SUFFIXES[1:]]),
    **_roles(Kind.BIAS, "Tensor[]?", "bias", "b1", "b2"),
    **_roles(Kind.BY_ROW, "Tensor?", "row_scale", "bias_scale", "x_scale", dtype=torch.float32),
    **_roles(Kind.BY_ROW, "Tensor?", "rows", "dy_rows", "x_rows", dtype=torch.int32),
    **_roles(Kind.OF_TOKENS, "Tensor", "row_of", "ids", dtype=torch.int32),
    **_roles(Kind.OF_TOKENS, "Tensor", "id_weights", dtype=torch.float32),
    **_roles(Kind.OF_TOKENS, "Tensor?", "residual"),
    **_roles(Kind.MASK, "Tensor?", "mask"),
    **_roles(Kind.MAP, "Tensor?", "expert_map", dtype=torch.int32),
    **_roles(Kind.GROUPS, "Tensor?", "offs", "splits"),
    **_roles(Kind.OUTPUT, "Tensor(a!)", "out"),
    **_roles(Kind.OPTION, "str", "activation", "glu_layout", "recipe", "axis", "block", "scale_layout"),
    **_roles(Kind.OPTION, "ScalarType?", "dtype", "out_dtype"),
    **_roles(Kind.OPTION, "float[]", "numbers"),
    **_roles(Kind.OPTION, "int", "num_experts", "world_experts"),
    **_roles(Kind.OPTION, "float", "lora_scale"),
    **_roles(
        Kind.OPTION, "bool",
        "return_preact", "recompute", "row_scale_grad", "accumulate", "transpose_w", "trained", "input_grad",
    ),
}  # fmt: skip


def roles_of(op: str, names: Iterable[str]) -> dict[str, Role]:
    """Return the roles of an operator's parameters. Raises TypeError for a name without a role."""
    found = {name: ROLES.get(name) for name in names}
    unknown = [name for name, role in found.items() if role is None]
    if unknown:
        raise TypeError(f"{op}: {', '.join(unknown)} have no role; add them to glulam.calls.roles.ROLES")
    return {name: role for name, role in found.items() if role is not None}


def names_of(*kinds: Kind) -> tuple[str, ...]:
    """Return the names of all arguments of these kinds."""
    return tuple(name for name, role in ROLES.items() if role.kind in kinds)


GROUPS, WEIGHTS, BIASES = names_of(Kind.GROUPS), names_of(Kind.WEIGHT), names_of(Kind.BIAS)
TABLES = {**dict.fromkeys(WEIGHTS, "weight"), **dict.fromkeys(BIASES, "bias")}
"""{argument that may be a list of experts' tensors: the kind of its address table in `host.experts`}."""
