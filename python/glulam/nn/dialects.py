"""What other libraries call the parts of an MoE in their state dicts, and how these become an `nn.MoE`'s.

Conversion gives either layout of the module's own names; `layouts` then gives the layout that it has. As there, a
set that is incomplete or ambiguous, or that the module has no place for, is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from cute_kernels.specs import GATED

from ..activations import INTERLEAVED32_BLOCK, join_halves, split_halves
from .layouts import PACKED_RANKS, Move, alike, replaced

RENAMES = {
    "gate.weight": "router.weight",
    "gate.e_score_correction_bias": "choice_bias",
    "shared_expert_gate.weight": "shared_gate.weight",
}


class Source(NamedTuple):
    """A parameter of experts as others have it.

    Attributes:
        keys: of one tensor, or of the gate's and the up-projection's. "{}" is an expert's number.
        packed: whether a tensor holds all experts.
        glu_layout: of one tensor that holds gate and up-projection.
        transposed: whether matrices are [columns, rows].
    """

    keys: tuple[str, ...]
    packed: bool = False
    glu_layout: str | None = None
    transposed: bool = False


Form = dict[str, Source]


def _projections(prefix: str, gate: str, up: str, down: str) -> Form:
    return {
        "fc1.weight": Source((f"{prefix}.{gate}.weight", f"{prefix}.{up}.weight")),
        "fc2.weight": Source((f"{prefix}.{down}.weight",)),
    }


QWEN = ("gate_proj", "up_proj", "down_proj")
STACKED: Form = {
    "fc1.weight": Source(("experts.gate_up_proj",), packed=True, glu_layout="concat"),
    "fc2.weight": Source(("experts.down_proj",), packed=True),
}
GPT_OSS: Form = {
    "fc1.weight": Source(("experts.gate_up_proj",), packed=True, glu_layout="interleaved", transposed=True),
    "fc1.bias": Source(("experts.gate_up_proj_bias",), packed=True, glu_layout="interleaved"),
    "fc2.weight": Source(("experts.down_proj",), packed=True, transposed=True),
    "fc2.bias": Source(("experts.down_proj_bias",), packed=True),
}
FORMS: dict[str, tuple[Form, ...]] = {
    # Qwen2, Qwen3 and DeepSeek; Mixtral; all of these in transformers 5; gpt-oss.
    "experts": (_projections("experts.{}", *QWEN), _projections("experts.{}", "w1", "w3", "w2"), STACKED, GPT_OSS),
    # Qwen2; DeepSeek.
    "shared": (_projections("shared_expert", *QWEN), _projections("shared_experts", *QWEN)),
}


def convert_block(state: Mapping[str, Any], prefix: str, block: Any) -> dict[str, Any]:
    """A copy of `state` in which the entries of `block`, the nn.MoE at `prefix`, have its names."""
    result = dict(state)
    for theirs, ours in RENAMES.items():
        if _has(block, ours) and prefix + theirs in result and prefix + ours not in result:
            result = replaced(result, Move([prefix + theirs], [prefix + ours]), [result[prefix + theirs]])
    for part, forms in FORMS.items():
        mlp = getattr(block, part)
        found = [] if mlp is None else [form for form in forms if _is_whole(result, prefix, part, form, mlp)]
        if len(found) == 1:
            result = _converted(result, prefix, part, found[0], mlp)
    return result


def _has(block: Any, name: str) -> bool:
    path, _, last = name.rpartition(".")
    return getattr(getattr(block, path) if path else block, last, None) is not None


def _old(source: Source, prefix: str, count: int) -> list[list[str]]:
    """The keys of each tensor that is made of a source."""
    experts = range(1 if source.packed else count)
    return [[prefix + key.format(expert) for key in source.keys] for expert in experts]


def _is_whole(state: Mapping[str, Any], prefix: str, part: str, form: Form, mlp: Any) -> bool:
    """Whether a form's keys are there, for each of the module's parameters, and no others beside them."""
    names = {"fc1.weight", "fc2.weight"} | ({"fc1.bias", "fc2.bias"} if mlp.fc1.has_bias else set())
    if form.keys() != names or mlp.form["activation"] not in GATED:
        return False
    keys = {key for source in form.values() for old in _old(source, prefix, mlp.fc1.num_experts) for key in old}
    if not all(key in state for key in keys):
        return False
    spaces = tuple(f"{prefix}{name.split('.')[0]}." for name in (part, *form["fc2.weight"].keys))
    return keys == {key for key in state if key.startswith(spaces)}


def _converted(state: dict[str, Any], prefix: str, part: str, form: Form, mlp: Any) -> dict[str, Any]:
    """`state` itself where the tensors do not fit each other."""
    move, values = Move([], []), []
    for name, source in form.items():
        for expert, keys in enumerate(_old(source, prefix, mlp.fc1.num_experts)):
            rank = PACKED_RANKS[name.split(".")[1]] - (not source.packed)
            value = _value([state[key] for key in keys], source, rank, mlp.form["glu_layout"])
            if value is None:
                return state
            move.old.extend(keys)
            move.new.append(f"{prefix}{part}.{name}" + ("" if source.packed else str(expert)))
            values.append(value)
    return replaced(state, move, values)


def _value(parts: list[Any], source: Source, rank: int, glu_layout: str) -> Tensor | None:
    """[rows, columns] or [rows] of an expert, or of all of them; a gated layer's rows in `glu_layout`."""
    if not alike(parts, rank):
        return None
    parts = [part.mT.contiguous() if source.transposed else part for part in parts]
    if len(parts) == 1 and source.glu_layout in (None, glu_layout):
        whole: Tensor = parts[0]
        return whole
    dim = int(source.packed)
    if len(parts) * parts[0].shape[dim] % (2 * INTERLEAVED32_BLOCK if glu_layout == "interleaved32" else 2):
        return None
    gate, up = parts if len(parts) == 2 else split_halves(parts[0], str(source.glu_layout), dim)
    return join_halves(gate, up, glu_layout, dim)
