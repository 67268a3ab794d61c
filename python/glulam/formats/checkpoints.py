"""load_experts: read a layer's quantised experts from a checkpoint, and return them as weights for operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..calls.checks import shape_text
from .checkpoint_names import DIALECTS, PROJECTIONS, Dialect, ExpertNames, dialects_of, experts_at, prefixes
from .scaled import SCALE_DTYPE, Scaled, bytes_of_floats, scales_of

OP = "load_experts"
LISTED = 4
"""A message lists at most this many names."""


def load_experts(
    state: Mapping[str, Tensor],
    prefix: str,
    num_experts: int,
    *,
    experts: Sequence[int] | None = None,
    device: torch.device | str | int | None = None,
) -> tuple[Scaled, Scaled]:
    """Load a layer's quantised experts from a checkpoint that stores them one by one, and stack them to (w1, w2).

    The format is recognised by the tensors' names and dtypes: FP8 blocks (DeepSeek-V3, Qwen3-FP8, DeepSeek-V4's base,
    AMD Quark), MXFP8 (MiniMax-M3, compressed-tensors), MXFP4 (DeepSeek-V4), NVFP4 (modelopt, compressed-tensors). w1
    and w2 hold the checkpoint's numbers unchanged, except for compressed-tensors' global scales, which become their
    reciprocals. Scales of activations (`input_scale`, `input_global_scale`) are not read.

    Args:
        state: tensors by the checkpoint's names, on any device, contiguous or not. A mapping that reads files on access
            works, since tensors are read one by one. The mapping is not changed.
        prefix: the part of names before an expert's number, such as "model.layers.3.mlp.experts".
        num_experts: number of experts of the layer.
        experts: numbers of the experts to load, in this order, for example a rank's experts; None: all.
        device: device of the result; None: the first tensor's device.

    Returns:
        (w1, w2): FP8BlockTensors, MXFP8Tensors, MXFP4Tensors or NVFP4Tensors [E, 2I, H] and [E, H, I], for glu_layout
            "concat": the gate's rows before the up-projection's. Their `recipe` names a recipe that takes them. An
            NVFP4 w1 has global scales [E], or [E, 2] if the two halves' scales differ.

    Raises:
        ValueError: there are no experts at the prefix, an expert or a part is missing, names of several formats are
            mixed, shapes do not fit each other, a scale is NaN, infinite or negative, or a global scale is not
            positive.
        TypeError: an argument has the wrong type, or a tensor the wrong dtype.
    """
    _check_arguments(state, prefix, num_experts)
    names = experts_at(state, prefix)
    return load_named(state, names, num_experts, experts, device)


def load_named(
    state: Mapping[str, Tensor],
    names: ExpertNames,
    num_experts: int,
    experts: Sequence[int] | None = None,
    device: torch.device | str | int | None = None,
) -> tuple[Scaled, Scaled]:
    """Load experts as `load_experts` does, but with names that `experts_at` has found already; return (w1, w2).

    Args:
        names: the names of the experts' tensors, as `experts_at` returns them.
        state, num_experts, experts, device: see `load_experts`.
    """
    wanted, projections = _wanted(state, num_experts, experts, names), _projections(names)
    source = Source(state, names, _dialect(state, names, wanted, projections))
    *gate_up, down = projections
    to = source.data(wanted[0], gate_up[0]).device if device is None else torch.device(device)
    w1 = _loaded(source, wanted, gate_up, to)
    w2 = _loaded(source, wanted, [down], to)
    if w2.shape[2] * 2 != w1.shape[1]:
        first = (names.key(wanted[0], one, next(iter(source.dialect.parts))) for one in (down, gate_up[0]))
        raise ValueError(
            f"{OP}: {next(first)} is of {w2.shape[2]} columns, but {next(first)} of {w1.shape[1] // 2} rows, and both "
            f"are I; one of them is truncated or another projection's"
        )
    return w1, w2


def _check_arguments(state: Any, prefix: Any, num_experts: Any) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(f"{OP}: state is a {type(state).__name__}; give a mapping of tensors by names")
    if not isinstance(prefix, str):
        raise TypeError(f"{OP}: prefix is a {type(prefix).__name__}; give a string, as 'model.layers.0.mlp.experts'")
    if not isinstance(num_experts, int) or num_experts < 1:
        raise ValueError(f"{OP}: num_experts is {num_experts!r}; give a positive number")


def _listed(names: Sequence[Any]) -> str:
    """Return the first LISTED names as text, and the number of further names."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{', '.join(map(repr, names[:LISTED]))}{more}"


# Names ----------------------------------------------------------------------------------------------------------------


def _wanted(
    state: Mapping[str, Tensor], num_experts: int, experts: Sequence[int] | None, names: ExpertNames
) -> list[int]:
    """Check which experts the checkpoint has; return the numbers of the experts to load: `experts`, or all if None.

    Raises:
        ValueError: there are no experts at the prefix, or one of those to load is missing.
    """
    prefix = names.start.removesuffix(".")
    if not names.parts:
        found = sorted(prefixes(state), key=lambda one: not one.startswith(prefix))
        where = f"there are experts at {_listed(found)}" if found else "nor anywhere else in the mapping"
        raise ValueError(f"{OP}: there is no expert at prefix {prefix!r}; {where}")
    if max(names.parts) >= num_experts:
        raise ValueError(
            f"{OP}: num_experts is {num_experts}, but there is an expert {max(names.parts)} at prefix {prefix!r}; give "
            "the number of the layer's experts, and which of them to load as experts="
        )
    wanted = list(range(num_experts) if experts is None else experts)
    if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(range(num_experts)):
        raise ValueError(f"{OP}: experts is {experts!r:.60}; give different numbers from 0 to {num_experts - 1}")
    if missing := [expert for expert in wanted if expert not in names.parts]:
        raise ValueError(
            f"{OP}: {_listed(missing)} of the experts at prefix {prefix!r} are missing; give all tensors of the layer, "
            "from each of the checkpoint's files, or name the experts to load as experts="
        )
    return wanted


def _projections(names: ExpertNames) -> tuple[str, str, str]:
    found = names.projections()
    for projections in PROJECTIONS:
        if found == set(projections):
            return projections
    known = ", or ".join(map(", ".join, PROJECTIONS))
    raise ValueError(
        f"{OP}: experts at {names.start!r} have the projections {', '.join(sorted(found))}; known are {known}, each "
        "complete and alone: names of two checkpoints are mixed, or a projection is missing"
    )


def _dialect(state: Mapping[str, Tensor], names: ExpertNames, wanted: list[int], projections: Sequence[str]) -> Dialect:
    """Find the dialect (`checkpoint_names.Dialect`, a storage convention) by the names and dtypes of the parts in which
    a weight is stored, such as its elements and its scales.

    Args:
        state: the checkpoint's tensors by name.
        names: the experts' names.
        wanted: numbers of the experts to load.
        projections: names of gate, up- and down-projection.

    Raises:
        ValueError: no dialect has parts of these names, or a weight lacks a part that others have.
        TypeError: no dialect has these dtypes.
    """
    part_names = names.part_names()
    by_names = dialects_of(part_names)
    if not by_names:
        _refuse_names(part_names)
    for expert in wanted:
        for projection in projections:
            if missing := part_names.keys() - names.parts[expert].get(projection, set()):
                key = names.key(expert, projection, min(missing))
                raise ValueError(f"{OP}: {key} is missing, which other experts have; give all tensors of the layer")
    given = {part: _tensor(state, names.key(wanted[0], projections[0], part)).dtype for part in part_names}
    for dialect in by_names:
        if all(given[part] in dtypes for part, dtypes in dialect.parts.items()):
            return dialect
    got = ", ".join(f"{names.key(wanted[0], projections[0], part)} is {dtype}" for part, dtype in given.items())
    raise TypeError(f"{OP}: {got}; by these names there are {'; '.join(map(str, by_names))}")


def _refuse_names(part_names: Mapping[str, str]) -> None:
    """Raise ValueError with a remedy for part names that are not exactly a dialect's."""
    known = {name for dialect in DIALECTS for name in dialect.parts}
    if unknown := [key for part, key in part_names.items() if part not in known]:
        raise ValueError(
            f"{OP}: {_listed(unknown)} has a name that no known format of weights has; give a mapping without it if "
            "it is no part of a weight, as a bias, which operators take as b1 or b2"
        )
    if set(part_names) == {"weight"}:
        raise ValueError(
            f"{OP}: {part_names['weight']} has no scales beside it; give all tensors of the layer. Weights in 16 bits "
            "need no loader: stack them, or load them into nn.MoE by load_state_dict"
        )
    formats = dict.fromkeys(" and ".join(dialect.parts) for dialect in DIALECTS)
    raise ValueError(
        f"{OP}: {_listed(list(part_names.values()))} do not belong together: names of several formats are mixed, or "
        f"one is missing; formats have {', or '.join(formats)}"
    )


# Tensors --------------------------------------------------------------------------------------------------------------


def _tensor(state: Mapping[str, Tensor], key: str) -> Tensor:
    tensor = state[key]
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{OP}: {key} is a {type(tensor).__name__}; give a tensor")
    if tensor.is_meta:
        raise ValueError(f"{OP}: {key} is on the meta device and has no values; give it on another")
    return tensor.detach()


class Source(NamedTuple):
    """A checkpoint's experts: all tensors by name, the experts' names, and the dialect in which they are stored."""

    state: Mapping[str, Tensor]
    names: ExpertNames
    dialect: Dialect

    def data(self, expert: int, projection: str) -> Tensor:
        return _tensor(self.state, self.names.key(expert, projection, next(iter(self.dialect.parts))))

    def parts(self, expert: int, projection: str) -> dict[str, Tensor]:
        """Return {tensor name: tensor} of one expert's projection: data, scales and, in some dialects, a global scale.

        Raises:
            TypeError, ValueError: a part has the wrong dtype or shape.
        """
        found = {}
        for part, dtypes in self.dialect.parts.items():
            key = self.names.key(expert, projection, part)
            tensor = _tensor(self.state, key)
            if tensor.dtype not in dtypes:
                raise TypeError(
                    f"{OP}: {key} is {tensor.dtype}; in {self.dialect.name} it is {' or '.join(map(str, dtypes))}, and "
                    "parts are never converted, so give the checkpoint's own"
                )
            found[key] = tensor
        self._check_shapes(found)
        return found

    def _check_shapes(self, parts: Mapping[str, Tensor]) -> None:
        """Raise ValueError if the parts' shapes do not fit each other, or kernels do not support the row width."""
        (data_key, data), (scale_key, scale), *others = parts.items()
        if data.dim() != 2 or not data.numel():
            raise ValueError(f"{OP}: {data_key} has shape {shape_text(data.shape)}; give a matrix [out, in]")
        columns, multiple = self.dialect.form.columns(data), self.dialect.form.multiple
        if columns % multiple:
            raise ValueError(
                f"{OP}: {data_key} has rows of {columns} elements; kernels take multiples of {multiple}, so dequantise "
                "it, and pad it with zeros or use recipe 'bf16'"
            )
        grid = tuple(-(-size // block) for size, block in zip((len(data), columns), self.dialect.block, strict=True))
        if tuple(scale.shape) != grid:
            raise ValueError(
                f"{OP}: {scale_key} has shape {shape_text(scale.shape)}; the scales of a weight [{len(data)}, "
                f"{columns}] in {self.dialect.name} are {shape_text(grid)}, so it is truncated, or another tensor's"
            )
        for key, number in others:
            if number.numel() != 1 or number.dim() > 1:
                raise ValueError(f"{OP}: {key} has shape {shape_text(number.shape)}; it is one number for a projection")


def _loaded(source: Source, experts: Sequence[int], projections: Sequence[str], device: torch.device) -> Any:
    """Load one stacked weight, w1 or w2, of all these experts, in the dialect's format.

    Args:
        source: the checkpoint's experts.
        experts: numbers of the experts.
        projections: names of the projections whose rows are concatenated: gate and up-projection for w1, the
            down-projection for w2.
        device: device of the weight.
    """
    wholes: list[Tensor] = []
    like, keys, bad = None, [], []
    for place, expert in enumerate(experts):
        for half, projection in enumerate(projections):
            parts = source.parts(expert, projection)
            first = next(iter(parts.items()))
            if like is None:
                like, shape = first, (len(experts), len(projections))
                wholes = [_made(shape, part, device) for part in parts.values()]
            _check_like(first, like)
            for whole, part in zip(wholes, parts.values(), strict=True):
                whole[place, half] = bytes_of_floats(part).view(whole.shape[2:])
            keys.append(list(parts)[1:])
            bad.append(torch.stack(_are_bad(source.dialect, [whole[place, half] for whole in wholes[1:]])))
    _refuse_bad(keys, torch.stack(bad).cpu())
    return _joined(source.dialect, wholes)


def _made(shape: tuple[int, ...], part: Tensor, device: torch.device) -> Tensor:
    """Allocate a tensor [experts, projections, ...] for one part (data, scales or global scale) of all experts.

    Global scales get [experts, projections], whether a checkpoint stores one as [] or [1].

    Args:
        shape: (experts, projections).
        part: the part of one projection.
    """
    own = part.shape if part.dim() == 2 else ()
    return torch.empty(*shape, *own, dtype=torch.uint8 if part.itemsize == 1 else torch.float32, device=device)


def _check_like(part: tuple[str, Tensor], first: tuple[str, Tensor]) -> None:
    (key, tensor), (first_key, like) = part, first
    if tensor.shape != like.shape:
        raise ValueError(
            f"{OP}: {key} has shape {shape_text(tensor.shape)}, but {first_key} {shape_text(like.shape)}; a layer's "
            "experts, and gate and up-projection, are alike, so one is truncated or another projection's"
        )


def _are_bad(dialect: Dialect, scales: list[Tensor]) -> list[Tensor]:
    """Test the scales of one projection; return a flag, bool [], for the block scales and one for the global scale.

    True: the scales are invalid. The flags stay on the scales' device, so that all are read back at once.

    Args:
        scales: the projection's block scales and, in some dialects, its global scale.
    """
    first, *others = scales
    dtype = dialect.form.kind.scale_dtype
    numbers = scales_of(first) if dtype == SCALE_DTYPE else first.view(dtype).float()
    found = [(numbers.signbit() | ~numbers.isfinite()).any()]
    factors = [one.reciprocal() if dialect.divides else one for one in others]
    return found + [~((factor > 0) & factor.isfinite()) for factor in factors]


def _refuse_bad(keys: list[list[str]], bad: Tensor) -> None:
    """Raise ValueError that names the first invalid scales, if there are any.

    Args:
        keys: for each expert's projection, the names of its scales in the checkpoint.
        bad: bool, one row for each entry of `keys` and one column for each of its names. True: the scales are invalid.
    """
    for names, flags in zip(keys, bad.tolist(), strict=True):
        for place, (key, is_bad) in enumerate(zip(names, flags, strict=True)):
            if is_bad and not place:
                raise ValueError(f"{OP}: {key} has a scale that is NaN, infinite or negative; mend the checkpoint")
            if is_bad:
                raise ValueError(
                    f"{OP}: {key} is 0, negative, NaN or infinite; a global scale is positive, so mend the checkpoint"
                )


def _joined(dialect: Dialect, wholes: list[Tensor]) -> Scaled:
    """Make the quantised tensor from its parts [E, P, ...], concatenating the rows of the projections.

    P is the number of projections: 2 for a w1 (gate and up-projection), 1 for a w2.
    """
    data, scale, *others = wholes
    kind, has_halves = dialect.form.kind, data.shape[1] > 1
    is_by_row = dialect.block[0] == 1
    scale = scale.flatten(1, 2) if is_by_row else scale if has_halves else scale[:, 0]
    made = {"data": data.flatten(1, 2).view(kind.data_dtypes[0]), "scale": scale.view(kind.scale_dtype)}
    for factors in others:
        factors = factors.reciprocal() if dialect.divides else factors
        is_one = not has_halves or bool((factors[:, 0] == factors[:, 1]).all())
        made["global_scale"] = factors[:, 0].contiguous() if is_one else factors
    result: Scaled = kind(**made)
    return result
