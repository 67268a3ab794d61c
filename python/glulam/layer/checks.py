"""Checks of a layer's arguments: a router's options, chosen experts, and the number of experts on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from cute_kernels.layer.kernels import CAPACITIES

from ..calls.addressed import forms
from ..calls.checks import check_plain, check_tensor, mismatch, runs_kernels, shape_text
from ..names import Score

INT32_MAX = 2**31 - 1
SCORES: tuple[Score, ...] = get_args(Score)
MAX_K = 32
"""Most experts that a token may choose: kernels have a warp for each token, and a lane for each choice."""
MAX_EXPERTS = CAPACITIES[-1]
COUNTED = "a CTA counts the choices of each"
"""The reason for MAX_EXPERTS in errors."""
MAX_GROUPS = 32
LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _number(op: str, name: str, value: Any, least: int, most: int, why: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} is {value!r}; give an integer")
    if not least <= value <= most:
        raise ValueError(f"{op}: {name} is {value}; it must be {least} to {most}, since {why}")


def check_rule(
    op: str, experts: int, k: int, score: str, normalize: bool, num_groups: int, top_groups: int, scale: float,
    name_of_k: str = "k", of: str = "",
) -> None:  # fmt: skip
    """Raise ValueError or TypeError if options of `route` are invalid for this number of experts.

    Args:
        k, score, normalize, num_groups, top_groups, scale: see `route`.
        name_of_k: the name of k in errors.
        of: text before the number of experts in errors, such as "logits has ".
    """
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"{op}: {of}E = {experts} experts; 1 to {MAX_EXPERTS} are possible")
    if score not in SCORES:
        raise ValueError(f"{op}: score={score!r}; choose {', '.join(map(repr, SCORES))}")
    if not isinstance(normalize, bool):
        raise TypeError(f"{op}: normalize is {normalize!r}; give True or False")
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"{op}: scale is {scale!r}; give a Python float")
    _number(op, "num_groups", num_groups, 1, MAX_GROUPS, "a warp has a lane for each group")
    if experts % num_groups or (num_groups > 1 and experts == num_groups):
        raise ValueError(
            f"{op}: num_groups is {num_groups}; it must cut {experts} experts into equal groups of 2 or more"
        )
    _number(op, "top_groups", top_groups, 1, num_groups, f"there are {num_groups} groups")
    available = experts // num_groups * top_groups
    _number(op, name_of_k, k, 1, min(MAX_K, available), f"{available} experts take part, and a warp chooses {MAX_K}")


def check_matrix(
    op: str, name: str, value: Any, letters: str, like: Tensor | None = None, dtypes: Sequence[torch.dtype] = ()
) -> tuple[int, int]:  # fmt: skip
    """Check that a value is a contiguous 2-D tensor on the device of `like` (None: any), and return its sizes.

    Args:
        name, letters: the argument's name, and the letters of its sizes, such as "N, E", for errors.
        dtypes: allowed dtypes; empty: any.

    Raises:
        ValueError, TypeError: the value is not such a tensor.
    """
    tensor = check_tensor(op, name, value, f"a tensor [{letters}]", like, dtypes=dtypes)
    if tensor.dim() != 2:
        raise ValueError(f"{op}: {name} has shape {shape_text(tensor.shape)}; give [{letters}]")
    rows, columns = tensor.shape
    return rows, columns


def check_row_of(op: str, name: str, row_of: Any, like: Any = None) -> None:
    """Check that `Routing.row_of` is int32 [N, K], contiguous, on the device of `like` (None: any device).

    Raises:
        ValueError, TypeError: row_of is not such a tensor.
    """
    _, k = check_matrix(op, name, row_of, "N, K", like, (torch.int32,))
    if k == 0:
        raise ValueError(f"{op}: {name} has shape {shape_text(row_of.shape)}; a token has 1 choice or more")
    check_plain(op, name, row_of)


def experts_of_world(op: str, num_experts: Any, expert_map: Any, given: Any) -> Any:
    """Return the number of experts on all ranks, among which ids choose (`world_experts` of `Routing.from_topk`).

    given: the caller's world_experts. None: the length of expert_map, at least num_experts; num_experts without a map.

    Raises:
        ValueError, TypeError: the caller's number is invalid, or smaller than num_experts.
    """
    if given is not None:
        _number(op, "num_experts", num_experts, 1, MAX_EXPERTS, COUNTED)
        check_world(op, "world_experts", given, num_experts)
        return given
    if isinstance(expert_map, Tensor) and expert_map.dim() and isinstance(num_experts, int):
        return max(expert_map.shape[0], num_experts)
    return num_experts  # if it is wrong, sorting says so


def check_world(op: str, name: str, world_experts: Any, num_experts: int) -> None:
    """Check that world_experts is an integer of at least `num_experts`, the experts on this rank.

    Raises:
        ValueError, TypeError: it is not.
    """
    _number(op, name, world_experts, num_experts, INT32_MAX, f"{num_experts} experts are here")


def check_choices(op: str, ids: Any, weights: Any, expert_map: Any, num_experts: Any, first: Any) -> None:
    """Raise ValueError or TypeError if an argument of `Routing.from_topk` is invalid."""
    shape = check_matrix(op, "ids", ids, "N, K", dtypes=(torch.int32, torch.int64))
    _number(op, "the number of ids a token", shape[1], 1, MAX_K, "a warp has a lane for each")
    valid = LOGITS_DTYPES if runs_kernels(ids) else (*LOGITS_DTYPES, torch.float64)
    if check_matrix(op, "weights", weights, "N, K", ids, valid) != shape:
        mismatch(op, "weights", weights.shape, shape, "each id has a weight")
    _number(op, "num_experts", num_experts, 1, MAX_EXPERTS, COUNTED)
    _number(op, "first", first, 0, INT32_MAX - MAX_EXPERTS, "it is the id of an expert")
    if ids.numel() > INT32_MAX:
        raise ValueError(f"{op}: {ids.numel()} choices are more than {INT32_MAX} rows; split the batch")
    if expert_map is not None:
        _check_map(op, expert_map, ids)
        if first:
            raise ValueError(f"{op}: first is {first}, and expert_map is given, which maps ids itself; leave out first")


def _check_map(op: str, expert_map: Any, ids: Tensor) -> None:
    """Check that expert_map is int32 [experts of all ranks], contiguous, on the device of ids.

    Raises:
        ValueError, TypeError: expert_map is not such a tensor.
    """
    what = "[experts of all ranks]"
    tensor = check_tensor(op, "expert_map", expert_map, f"a tensor {what}", ids, dtypes=(torch.int32,))
    if tensor.dim() != 1 or not tensor.shape[0]:  # an empty tensor has address 0, which means no map
        raise ValueError(
            f"{op}: expert_map has shape {shape_text(tensor.shape)}; give {what}, which has a place or more"
        )


def num_mapped(expert_map: Tensor | None) -> int:
    """Return the number of ids for which expert_map has an entry; 0 without a map."""
    return 0 if expert_map is None else expert_map.shape[0]


def forms_of_choices(ids: Tensor, weights: Tensor) -> tuple[int, int]:
    """Return kernel constants: (1 if ids are int64, else 0; the code of the weights' dtype)."""
    return int(ids.dtype == torch.int64), forms(weights)
