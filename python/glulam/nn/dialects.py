"""Conversion of other libraries' state dicts of MoE blocks to the names of `nn.MoE`.

The conversion changes names, but not whether experts are packed in one tensor or stored one by one: that stays as in
the other library. The module's layers (`GroupedLinear.moves`) then stack or split the tensors as they need.

A "block" is an MoE layer; a "move" (`state.Move`) converts some entries of a state dict to other entries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.specs import GATED

from ..activations import INTERLEAVED32_BLOCK, join_halves, split_halves
from ..formats.checkpoint_names import ExpertNames, dialects_of, experts_at
from ..formats.checkpoints import load_named
from ..formats.scaled import bytes_of_floats
from .quantized_linear import SCALE_DTYPES, QuantizedLinear, refusal
from .state import PACKED_RANKS, Move, alike

RENAMES = {
    "gate.weight": "router.weight",
    "gate.e_score_correction_bias": "choice_bias",
    "shared_expert_gate.weight": "shared_gate.weight",
}


class Source(NamedTuple):
    """Keys and layout of one parameter of a GroupedMLP in another library's state dict.

    Attributes:
        keys: the key of one tensor, or the gate's and the up-projection's keys. "{}" stands for an expert's number.
        packed: True: one tensor holds all experts.
        glu_layout: row order of a tensor that holds gate and up-projection; None: the tensor does not hold both.
        transposed: True: matrices are [columns, rows].
        in_blocks: True: the columns' dimension is split into two, [blocks, bytes].
    """

    keys: tuple[str, ...]
    packed: bool = False
    glu_layout: str | None = None
    transposed: bool = False
    in_blocks: bool = False


Naming = dict[str, Source]
"""One library's naming: for each parameter of a GroupedMLP, such as "fc1.weight", its Source."""


def _projections(prefix: str, gate: str, up: str, down: str) -> Naming:
    return {
        "fc1.weight": Source((f"{prefix}.{gate}.weight", f"{prefix}.{up}.weight")),
        "fc2.weight": Source((f"{prefix}.{down}.weight",)),
    }


QWEN = ("gate_proj", "up_proj", "down_proj")
STACKED: Naming = {
    "fc1.weight": Source(("experts.gate_up_proj",), packed=True, glu_layout="concat"),
    "fc2.weight": Source(("experts.down_proj",), packed=True),
}
GPT_OSS: Naming = {
    "fc1.weight": Source(("experts.gate_up_proj",), packed=True, glu_layout="interleaved", transposed=True),
    "fc1.bias": Source(("experts.gate_up_proj_bias",), packed=True, glu_layout="interleaved"),
    "fc2.weight": Source(("experts.down_proj",), packed=True, transposed=True),
    "fc2.bias": Source(("experts.down_proj_bias",), packed=True),
}
GPT_OSS_IN_MXFP4: Naming = {
    "fc1.weight": Source(("experts.gate_up_proj_blocks",), packed=True, glu_layout="interleaved", in_blocks=True),
    "fc1.weight_scale": Source(("experts.gate_up_proj_scales",), packed=True, glu_layout="interleaved"),
    "fc1.bias": GPT_OSS["fc1.bias"],
    "fc2.weight": Source(("experts.down_proj_blocks",), packed=True, in_blocks=True),
    "fc2.weight_scale": Source(("experts.down_proj_scales",), packed=True),
    "fc2.bias": GPT_OSS["fc2.bias"],
}
NAMINGS: dict[str, tuple[Naming, ...]] = {
    # Qwen2, Qwen3 and DeepSeek; Mixtral; all of these in transformers 5; gpt-oss, in 16 bits and as it ships.
    "experts": (
        _projections("experts.{}", *QWEN),
        _projections("experts.{}", "w1", "w3", "w2"),
        STACKED,
        GPT_OSS,
        GPT_OSS_IN_MXFP4,
    ),
    # Qwen2; DeepSeek.
    "shared": (_projections("shared_expert", *QWEN), _projections("shared_experts", *QWEN)),
}
QUANTIZED = {"experts": ("experts",), "shared": ("shared_expert", "shared_experts")}
"""For the children `experts` and `shared` of nn.MoE: prefixes of quantised weights' keys in other libraries.

Keys of routed experts continue with the expert's number: "experts.0.", ...
"""


def moves(keys: Collection[str], prefix: str, block: Any) -> Iterator[list[Move]]:
    """Yield lists of moves (conversions of entries, see `state.Move`) from another library's names to `block`'s.

    Args:
        keys: all keys of the state dict.
        prefix: prefix of the block's keys.
        block: the nn.MoE.

    A move that is applied later raises TypeError if MXFP4 blocks or scales are not bytes. A move of quantised experts
    that are stored one by one raises the errors of `load_experts`.
    """
    for theirs, ours in RENAMES.items():
        path, _, last = ours.rpartition(".")
        has_one = getattr(getattr(block, path) if path else block, last, None) is not None
        if has_one and prefix + theirs in keys and prefix + ours not in keys:
            yield [Move([prefix + theirs], [prefix + ours], list)]
    for part, namings in NAMINGS.items():
        if (mlp := getattr(block, part)) is not None:
            for theirs in QUANTIZED[part]:
                if move := _of_quantized(keys, prefix, part, theirs, mlp):
                    yield [move]
            found = [moves for naming in namings if (moves := _moves_of_naming(keys, prefix, part, naming, mlp))]
            if len(found) == 1:
                yield found[0]


def _moves_of_naming(keys: Collection[str], prefix: str, part: str, naming: Naming, mlp: Any) -> list[Move]:
    """Return the moves (`state.Move`) that convert from one library's naming.

    []: the state dict has other keys under this prefix than the naming, or the module's parameters or activation do not
    fit the naming.

    Args:
        part: "experts" or "shared", the child of nn.MoE. mlp: this child, a GroupedMLP.
        naming: for each parameter of the child, its `Source`: keys and layout in the other library's state dict.
    """
    own = {f"{layer}.{name}" for layer in ("fc1", "fc2") for name in mlp.fc1.names}
    scales = {name for name in own if name.endswith("_scale")}  # layers make scales themselves from weights in 16 bits
    if naming.keys() not in (own, own - scales) or mlp.call_options["activation"] not in GATED:
        return []
    found = []
    for name, source in naming.items():
        rank = PACKED_RANKS[name.split(".")[1]] - (not source.packed) + source.in_blocks
        for expert in range(1 if source.packed else mlp.fc1.num_experts):
            old = [prefix + key.format(expert) for key in source.keys]
            new = f"{prefix}{part}.{name}" + ("" if source.packed else str(expert))
            make: Any = partial(_joined, source=source, rank=rank, glu_layout=mlp.call_options["glu_layout"])
            if naming is GPT_OSS_IN_MXFP4 and not name.endswith("bias"):
                dtypes = (torch.uint8,) if source.in_blocks else SCALE_DTYPES
                make = partial(_joined_bytes, key=old[0], dtypes=dtypes, make=make)
            found.append(Move(old, [new], make))
    spaces = tuple(f"{prefix}{name.split('.')[0]}." for name in (part, *naming["fc2.weight"].keys))
    there = {key for key in keys if isinstance(key, str) and key.startswith(spaces)}
    return found if there == {key for move in found for key in move.old} else []


def _of_quantized(keys: Collection[str], prefix: str, part: str, theirs: str, mlp: Any) -> Move | None:
    """Return the move (`state.Move`) that loads quantised experts stored one by one (`formats.checkpoint_names`).

    None: the state dict has no such experts, or the module's format, bias or activation does not fit them. Weights
    without scales get a move, too. It does nothing for 16-bit weights, and raises ValueError for quantised weights,
    whose scales are missing.

    Args:
        part: "experts" or "shared", the child of nn.MoE. mlp: this child, a GroupedMLP.
        theirs: the other library's prefix of these experts, from QUANTIZED.
    """
    if not isinstance(mlp.fc1, QuantizedLinear) or mlp.fc1.has_bias or mlp.call_options["activation"] not in GATED:
        return None
    start = f"{prefix}{theirs}."
    names = experts_at(keys, start, is_numbered=part == "experts")
    old = [key for key in keys if isinstance(key, str) and key.startswith(start)]
    part_names = names.part_names().keys()
    is_known = any(dialect.form.kind is mlp.fc1.form.kind for dialect in dialects_of(part_names))
    if not (is_known or part_names == {"weight"}):
        return None
    if names.is_numbered and any(not key.removeprefix(start)[:1].isdecimal() for key in old):
        return None
    new = [f"{prefix}{part}.{fc}.{name}" for fc in ("fc1", "fc2") for name in mlp.fc1.weight_names]
    return Move(old, new, partial(_of_checkpoint, keys=old, names=names, mlp=mlp))


def _of_checkpoint(values: list[Any], keys: list[str], names: ExpertNames, mlp: Any) -> list[Tensor] | None:
    """Make a GroupedMLP's weight buffers, fc1's and then fc2's, from quantised experts that are stored one by one.

    Returns None if the stored tensors are in 16 bits, or in another format than the module's.

    Args:
        values, keys: the tensors, and their keys in the state dict.
        names: the naming of the stored tensors.
        mlp: the GroupedMLP that gets the buffers.
    """
    in_16_bits = all(isinstance(value, Tensor) and value.itemsize > 1 for value in values)
    if in_16_bits and names.part_names().keys() == {"weight"}:
        return None
    w1, w2 = load_named(dict(zip(keys, values, strict=True)), names, mlp.fc1.num_experts)
    if not isinstance(w1, mlp.fc1.form.kind):
        return None
    layout, made = mlp.call_options["glu_layout"], []
    for layer, weight in ((mlp.fc1, w1), (mlp.fc2, w2)):
        parts = [weight.data, bytes_of_floats(weight.scale)]
        if layer is mlp.fc1 and layout != "concat":
            if not layer.has_scales_of_rows:
                raise ValueError(
                    f"state dict: scales of {names.start.removesuffix('.')} are of blocks of the gate's or of the "
                    f"up-projection's rows, which glu_layout {layout!r} mixes; make the module with glu_layout='concat'"
                )
            parts = [join_halves(gate, up, layout, 1) for gate, up in (part.chunk(2, dim=1) for part in parts)]
        factors = weight.parts.global_scale
        made += [*parts, *([] if factors is None else [_factors(factors, layer.halves, names.start, layout)])]
    return made


def _factors(factors: Tensor, halves: int, start: str, layout: str) -> Tensor:
    """Return NVFP4 global scales in the layer's shape: [E], or [E, 2] if gate and up-projection have their own scales.

    Args:
        factors: the stored global scales: [E], or [E, 2] if gate and up-projection have different ones.
        halves: 1: the layer has [E]; 2: it has [E, 2].
        start, layout: prefix of the keys, and the layer's glu_layout, for the error.

    Raises:
        ValueError: the layer has one global scale for each expert, but gate and up-projection have different ones.
    """
    if factors.dim() == halves:
        return factors
    if halves == 1:
        raise ValueError(
            f"state dict: gate and up-projection at {start.removesuffix('.')} have different global scales, which rows "
            f"in glu_layout {layout!r} cannot; make the module with glu_layout='concat'"
        )
    return factors[:, None].expand(-1, halves).contiguous()


def _joined_bytes(parts: list[Any], key: str, dtypes: tuple[torch.dtype, ...], make: Any) -> list[Tensor] | None:
    """View the blocks or scales of MXFP4 weights as bytes, and convert them by `make`, a partial `_joined`.

    Args:
        parts, make: the tensors, and the conversion, whose result is returned.
        key: the key of the first tensor, for the error.
        dtypes: the valid dtypes.

    Raises:
        TypeError: the first tensor has another dtype.
    """
    if message := refusal(key, parts[0], dtypes):
        raise TypeError(f"state dict: {message}")
    joined: list[Tensor] | None = make([bytes_of_floats(part) if isinstance(part, Tensor) else part for part in parts])
    return joined


def _joined(parts: list[Any], source: Source, rank: int, glu_layout: str) -> list[Tensor] | None:
    """Convert tensors of another library's layout to one parameter: [rows, columns], or [rows] for a bias.

    The parameter of all experts has a first dimension E.

    Args:
        parts: one tensor, or the gate's and the up-projection's.
        source: the layout of the tensors.
        rank: the required number of dimensions.
        glu_layout: the module's order of a gated layer's rows.

    Returns:
        A list of the parameter; None: the tensors do not fit.
    """
    if not alike(parts, rank):
        return None
    parts = [part.mT.contiguous() if source.transposed else part for part in parts]
    if source.in_blocks:
        parts = [part.flatten(-2) for part in parts]
    if len(parts) == 1 and source.glu_layout in (None, glu_layout):
        return parts
    dim = int(source.packed)
    if len(parts) * parts[0].shape[dim] % (2 * INTERLEAVED32_BLOCK if glu_layout == "interleaved32" else 2):
        return None
    gate, up = parts if len(parts) == 2 else split_halves(parts[0], str(source.glu_layout), dim)
    return [join_halves(gate, up, glu_layout, dim)]
