"""Calls with DTensors (torch.distributed.tensor): each rank calls the operator with its local tensors.

Each dimension of the device mesh either replicates all arguments, or splits them in a way that the operator lists
(`Call.served_splits`). Any other placement is refused. Gradients are DTensors, too, since `DTensor.to_local` and
`DTensor.from_local` are differentiable. Group sizes may be plain tensors: they are the same on all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from cute_kernels.specs import GATED

from ..activations import INTERLEAVED32_BLOCK
from ..choose.problem import changed
from ..host.experts import GateUp
from ..host.invariance import refuse
from .memory import tensors_of
from .roles import GROUPS

SUM = "sum"
"""Stands in a `Split` for a dimension if a tensor is the sum of the ranks' local tensors (placement Partial).

A replicated argument is also accepted there: the first rank then uses the argument, and the others use zeros.
"""
MODULE = "torch.distributed.tensor"


class Split(NamedTuple):
    """A way in which one dimension of a mesh splits a call: which dimension of each argument and result is sharded.

    Attributes:
        dims: {argument: the dimension that is sharded, or SUM}. For lists of experts, dimensions count as in the packed
            tensor [E, ...]. Arguments that are not listed are replicated.
        result: the dimension in which each result is sharded, or SUM. None: results are replicated.
        multiples: {argument: a number that must divide each rank's share of the sharded dimension}. Default: 1.
        refusal: the reason why this call cannot be split this way. Empty: it can.
    """

    dims: Mapping[str, int | str]
    result: int | str | None
    multiples: Mapping[str, int] = {}
    refusal: str = ""


REPLICATED = Split({}, None)


def split_of_width(call: Any, dims: Mapping[str, int | str], result: int | str, bias: str) -> Split:
    """Return the Split that divides the intermediate width I among ranks (tensor parallelism inside each expert).

    Each rank has some rows of every expert's w1, and the matching columns of the matrices with I columns.

    Args:
        call: the call.
        dims: {argument: the dimension that is sharded, or SUM}.
        result: the dimension in which each result is sharded, or SUM.
        bias: the name of w1's bias.
    """
    unit, refusal = 1, ""
    if isinstance(call.w1, GateUp):
        if getattr(call, bias) is not None or getattr(call, "return_preact", False):
            refusal = f"{bias} and the preactivation have all gates before all up-projections; leave them out"
    elif call.activation in GATED:
        unit = 2 * INTERLEAVED32_BLOCK if call.glu_layout == "interleaved32" else 2
        if call.glu_layout == "concat":
            refusal = (
                "glu_layout 'concat' has all gates before all up-projections, so that a rank would have gates without "
                "their up-projections; choose glu_layout 'interleaved', or give w1 as a GateUp whose halves are sharded"
            )
    return Split(dims, result, {"w1": unit}, refusal)


def dtensor() -> Any:
    """Return the class DTensor; None if its module is not imported yet, so that there are no DTensors."""
    return getattr(sys.modules.get(MODULE), "DTensor", None)


def is_dtensor(value: Any) -> bool:
    """Return True for a DTensor."""
    kind = dtensor()
    return kind is not None and isinstance(value, kind)


def on_local(function: Callable[[Tensor], Tensor], tensor: Any) -> Any:
    """Return function(tensor). For a DTensor, apply the function to the local tensor, and keep mesh and placements."""
    if not is_dtensor(tensor):
        return function(tensor)
    made = function(tensor.to_local())
    return dtensor().from_local(made, tensor.device_mesh, tensor.placements, run_check=False)


def moved_shards(tensor: Any, old: int, new: int) -> Tensor:
    """Redistribute a DTensor that is sharded in dimension `old` to dimension `new`; return other tensors unchanged."""
    if is_dtensor(tensor):
        before, after = _placement(old, tensor), _placement(new, tensor)
        tensor = tensor.redistribute(placements=[after if one == before else one for one in tensor.placements])
    made: Tensor = tensor
    return made


def tensors_given(call: Any) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (argument name, name in errors, tensor) for each tensor of a call."""
    for name in call.names:
        for label, tensor in tensors_of(call.labels.get(name, name), getattr(call, name)):
            yield name, label, tensor


def has_dtensors(call: Any) -> bool:
    """Return True if an argument is a DTensor, or a list or GateUp that contains one."""
    kind = dtensor()
    if kind is None:
        return False
    for name in call.given:
        value = getattr(call, name)
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, kind):
                return True
    return False


def refuse_dtensors(call: Any, why: str) -> None:
    """Raise TypeError if an argument is a DTensor. `why`: the error's reason, after the argument's name."""
    for _, label, tensor in tensors_given(call) if has_dtensors(call) else ():
        if isinstance(tensor, dtensor()):
            raise TypeError(f"{call.op}: {label} is a DTensor, and {why}; leave that out, or give {label}.to_local()")


def run(call: Any) -> Any:
    """Compute a call with DTensors by calling the operator with each rank's local tensors; return DTensors.

    Raises:
        TypeError: a tensor is not a DTensor, or an output buffer is given.
        ValueError: DTensors are on several meshes, or the operator does not serve their placements.
        NotImplementedError: ranks would add results, and the call must be batch-invariant.
    """
    for name in call.outputs:
        if getattr(call, name) is not None:
            raise TypeError(f"{call.op}: {name} is given, and arguments are DTensors, which have none; leave it out")
    mesh = _mesh(call)
    splits = [_split_of(call, dim) for dim in range(mesh.ndim)]
    _check_parts(call, splits, mesh)
    _check_sums(call, splits)
    local = {name: _local(getattr(call, name), name, splits) for name in call.names}
    return _global(changed(call, **local).call_public_operator(), mesh, splits)


def _mesh(call: Any) -> Any:
    """Return the mesh of all DTensors.

    Raises:
        TypeError: a tensor other than group sizes is not a DTensor.
        ValueError: DTensors are on several meshes.
    """
    kind = dtensor()
    given = list(tensors_given(call))
    leader: Any
    _, first, leader = next(one for one in given if isinstance(one[2], kind))
    mesh = leader.device_mesh
    for name, label, tensor in given:
        if isinstance(tensor, kind):
            if tensor.device_mesh != mesh:
                raise ValueError(
                    f"{call.op}: {label} is on {tensor.device_mesh}, {first} on {mesh}; put all DTensors on one mesh"
                )
        elif name not in GROUPS:
            raise TypeError(
                f"{call.op}: {label} is a {type(tensor).__name__}, but {first} is a DTensor with placements "
                f"{_text(leader)}. Give {label} as a DTensor (DTensor.from_local(..., [Replicate()]) if all ranks have "
                f"the same), or {first}.full_tensor() or .to_local(). If FSDP shards a module that holds {first}, call "
                "that module, whose hooks gather it, or shard the module around it that is called"
            )
    return mesh


def _split_of(call: Any, dim: int) -> Split:
    """Return the split that fits the placements of all arguments on dimension `dim` of the mesh. Raises ValueError."""
    served = (REPLICATED, *call.served_splits())
    for split in served:
        if not _misfits(call, split, dim):
            if split.refusal:
                placements = _text(_first(call.w1))
                raise ValueError(f"{call.op}: w1 is a DTensor with placements {placements}, but {split.refusal}")
            return split
    _refuse(call, served, dim)


def _misfits(call: Any, split: Split, dim: int) -> list[tuple[str, Any]]:
    """Return the DTensors whose placement on mesh dimension `dim` does not fit a split: (name in errors, tensor)."""
    kind = dtensor()
    return [
        (label, tensor)
        for name, label, tensor in tensors_given(call)
        if isinstance(tensor, kind) and tensor.placements[dim] not in _served(split.dims.get(name), getattr(call, name))
    ]


def _served(cut: int | str | None, value: Any) -> list[Any]:
    """Return the placements that a split allows for an argument.

    Args:
        cut: the split's entry for the argument: the sharded dimension, or SUM. None: it is not listed.
        value: the argument.
    """
    return [_placement(one, value) for one in ((SUM, None) if cut == SUM else (cut,))]


def _refuse(call: Any, served: Sequence[Split], dim: int) -> NoReturn:
    """Raise ValueError for placements on mesh dimension `dim` that fit none of the splits `served`."""
    label, tensor = min((_misfits(call, split, dim) for split in served), key=len)[0]
    ways = ["all Replicate()"]
    for split in served[1:]:
        cuts = {name: cut for name, cut in split.dims.items() if getattr(call, name) is not None}
        placed = [f"{name} {' or '.join(map(repr, _served(cut, getattr(call, name))))}" for name, cut in cuts.items()]
        ways.append(f"{', '.join(placed)}, the rest Replicate()")
    raise ValueError(
        f"{call.op}: {label} is a DTensor with placements {_text(tensor)}, and {tensor.placements[dim]!r} does not go "
        f"with how the other arguments are placed; served are: {'; '.join(ways)}. Call {label}.redistribute() or "
        f"{label}.full_tensor(); for experts on several ranks give {label}.to_local() with "
        "parallel=glulam.distributed.ExpertParallel(...), which nn.MoE and moe take"
    )


def _check_sums(call: Any, splits: Sequence[Split]) -> None:
    """Raise NotImplementedError if the call must be batch-invariant, but a collective would add partial results.

    The partial results are the ranks' addends of a result or of a gradient.

    splits: for each dimension of the mesh, the `Split` that divides the call.
    """
    if not call.invariant:
        return
    is_trained = torch.is_grad_enabled() and any(one.requires_grad for *_, one in tensors_given(call))
    if any(split.result == SUM or (is_trained and split is not REPLICATED) for split in splits):
        refuse(
            call.op, "each rank has an addend of a result, which a collective adds in an order of its own",
            "shard rows or experts instead of the inner width, or set it to False",
        )  # fmt: skip


def _check_parts(call: Any, splits: Sequence[Split], mesh: Any) -> None:
    """Raise ValueError if a sharded dimension cannot be divided equally, with each gate beside its up-projection.

    splits: for each dimension of the mesh, the `Split` that divides the call.
    """
    parts: dict[tuple[str, Any], int] = {}
    for dim, split in enumerate(splits):
        for name, cut in split.dims.items():
            if cut != SUM and getattr(call, name) is not None:
                parts[name, cut] = parts.get((name, cut), split.multiples.get(name, 1)) * mesh.size(dim)
    for (name, cut), multiple in parts.items():
        place = _dim_in(cut, getattr(call, name))
        if (size := _first(getattr(call, name)).shape[place]) % multiple:
            raise ValueError(
                f"{call.op}: {name} has {size} in dimension {place}, which ranks split; give a multiple of {multiple}, "
                "or pad it with zeros"
            )


def _local(value: Any, name: str, splits: Sequence[Split]) -> Any:
    """Replace the DTensors of an argument by this rank's local tensors.

    Args:
        value: the argument.
        name: the argument's name.
        splits: for each dimension of the mesh, the `Split` that divides the call.
    """
    if isinstance(value, dtensor()):
        return _local_tensor(value, [split.dims.get(name) for split in splits], splits)
    if isinstance(value, GateUp):
        return GateUp(*[_local(one, name, splits) for one in value])
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], dtensor()):
        cuts = [cut if cut in (None, SUM) else _dim_in(cut, value) for cut in (s.dims.get(name) for s in splits)]
        return [_local_tensor(one, cuts, splits) for one in value]
    return value


def _local_tensor(tensor: Any, cuts: Sequence[int | str | None], splits: Sequence[Split]) -> Tensor:
    """Return this rank's local tensor of a DTensor: its shard, the whole, or its addend of a sum. Differentiable.

    Args:
        tensor: the DTensor.
        cuts: for each dimension of the mesh, the tensor's sharded dimension, SUM, or None (replicated).
        splits: for each dimension of the mesh, the `Split` that divides the call. It decides the placement of the
            gradient: where the call is divided but the tensor is whole, each rank has an addend of the gradient.
    """
    grads, is_zero = [], False
    for dim, (cut, split, placement) in enumerate(zip(cuts, splits, tensor.placements, strict=True)):
        is_whole = cut is None or (cut == SUM and placement.is_replicate())
        if is_whole and split is not REPLICATED:  # ranks that have parts of the work have addends of the gradient
            grads.append(_placement(SUM, tensor))
            is_zero |= cut == SUM and tensor.device_mesh.get_local_rank(dim) > 0
        else:
            grads.append(_placement(None if cut == SUM else cut, tensor))
    local: Tensor = tensor.to_local(grad_placements=grads)
    return local.masked_fill(local.new_ones((), dtype=torch.bool), 0) if is_zero else local


def _global(result: Any, mesh: Any, splits: Sequence[Split]) -> Any:
    """Make DTensors from this rank's results. `splits`: how each mesh dimension divides the call."""
    if isinstance(result, tuple):
        return tuple([_global(one, mesh, splits) for one in result])
    if result is None:
        return None
    placements = [_placement(split.result, result) for split in splits]
    return dtensor().from_local(result, mesh, placements, run_check=False)


def _placement(cut: int | str | None, value: Any) -> Any:
    """Return the placement for `cut`: None: Replicate. SUM: Partial. A dimension of the packed `value`: Shard."""
    types = sys.modules[MODULE]
    if cut is None:
        return types.Replicate()
    return types.Partial() if cut == SUM else types.Shard(_dim_in(cut, value))


def _dim_in(cut: Any, value: Any) -> int:
    """Convert a dimension of the packed tensor [E, ...] to the dimension of the argument's own tensors.

    For a list this is one less, since the tensors of a list have no dimension E.

    Args:
        cut: the dimension in the packed tensor.
        value: the argument.
    """
    is_list = isinstance(value, (list, tuple)) and not isinstance(value, GateUp)
    return int(cut) - is_list


def _first(value: Any) -> Any:
    return value if isinstance(value, Tensor) else value[0]


def _text(tensor: Any) -> str:
    return str(tuple(tensor.placements))
