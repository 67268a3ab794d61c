"""Names and formats of quantised experts in checkpoints.

A tensor is named `<prefix>.<expert>.<projection>.<part>`, as in "model.layers.3.mlp.experts.0.up_proj.weight_scale". A
part is one of the tensors that make up a quantised weight: elements, scales, or a global scale.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch

from .form import Form
from .fp8_block.codec import BLOCK as FP8_BLOCK_SIZE
from .fp8_block.form import FP8_BLOCK
from .mxfp4.form import MXFP4
from .mxfp8.forms import BLOCKS as MXFP8
from .nvfp4.form import NVFP4

PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of gate, up-projection and down-projection; checkpoints use one of these two conventions."""
IGNORED = frozenset(("input_scale", "input_global_scale"))
"""Scales of activations. They are not read: recipes quantise rows of x by the rows' own maxima, or not at all."""

Dtypes = tuple[torch.dtype, ...]
E4M3: Dtypes = (torch.float8_e4m3fn,)
E8M0: Dtypes = (torch.float8_e8m0fnu, torch.uint8)
E2M1_PAIRS: Dtypes = (torch.uint8, torch.int8)
FLOAT32: Dtypes = (torch.float32,)
FLOATS: Dtypes = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of block scales that are not powers of two; they are loaded as float32. Qwen's checkpoints use 16 bits."""
SQUARE = (FP8_BLOCK_SIZE, FP8_BLOCK_SIZE)


class Dialect(NamedTuple):
    """One convention by which checkpoints store a projection's quantised weight [out, in]: names, dtypes, block size.

    Attributes:
        name: the format, and whose checkpoints have it.
        form: the `form.Form` (layout for kernels) of the loaded weight.
        block: (rows, columns) of the block of elements that share a scale.
        parts: names of the elements, the scales and, if the format has one, the global scale, in this order. The values
            are the allowed dtypes.
        divides: True: values are divided by the global scale; False: multiplied.
    """

    name: str
    form: Form
    block: tuple[int, int]
    parts: Mapping[str, Dtypes]
    divides: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(f'{name} ({dtypes[0]})' for name, dtypes in self.parts.items())}"


DIALECTS = (
    Dialect("FP8 blocks of DeepSeek-V3, Qwen3", FP8_BLOCK, SQUARE, {"weight": E4M3, "weight_scale_inv": FLOATS}),
    Dialect("FP8 blocks of DeepSeek-V4", FP8_BLOCK, SQUARE, {"weight": E4M3, "scale": FLOATS}),
    Dialect("FP8 blocks of AMD Quark", FP8_BLOCK, SQUARE, {"weight": E4M3, "weight_scale": FLOATS}),
    Dialect("MXFP8 of MiniMax-M3", MXFP8, (1, 32), {"weight": E4M3, "weight_scale_inv": E8M0}),
    Dialect("MXFP8 of compressed-tensors", MXFP8, (1, 32), {"weight": E4M3, "weight_scale": E8M0}),
    Dialect("MXFP4 of DeepSeek-V4", MXFP4, (1, 32), {"weight": E2M1_PAIRS, "scale": E8M0}),
    Dialect(
        "NVFP4 of modelopt", NVFP4, (1, 16),
        {"weight": E2M1_PAIRS, "weight_scale": E4M3, "weight_scale_2": FLOAT32},
    ),
    Dialect(
        "NVFP4 of compressed-tensors", NVFP4, (1, 16),
        {"weight_packed": E2M1_PAIRS, "weight_scale": E4M3, "weight_global_scale": FLOAT32}, divides=True,
    ),
)  # fmt: skip
"""All known dialects. Dialects with the same part names differ in dtypes."""


class ExpertNames(NamedTuple):
    """Names of all experts' tensors at one prefix of a checkpoint.

    Attributes:
        start: the beginning of all these names, such as "model.layers.3.mlp.experts.".
        parts: {expert: {projection: names of the parts}}, without the parts in IGNORED.
        is_numbered: True: names have an expert's number. False: they have none, as for a shared expert; `parts` then
            has the only expert 0.
    """

    start: str
    parts: dict[int, dict[str, set[str]]]
    is_numbered: bool = True

    def key(self, expert: int, projection: str, part: str) -> str:
        number = f"{expert}." if self.is_numbered else ""
        return f"{self.start}{number}{projection}.{part}"

    def projections(self) -> set[str]:
        return {projection for expert in self.parts.values() for projection in expert}

    def part_names(self) -> dict[str, str]:
        """Return {part name: the first full tensor name that ends with it}, over all experts and projections."""
        found: dict[str, str] = {}
        for expert, projections in sorted(self.parts.items()):
            for projection, parts in projections.items():
                for part in sorted(parts):
                    found.setdefault(part, self.key(expert, projection, part))
        return found


_EXPERT, _PROJECTION = re.compile(r"(\d+)\.(\w+)\.(\w+)"), re.compile(r"(\w+)\.(\w+)")
_ANY_EXPERT = re.compile(rf"(.*?)\.?\d+\.(?:{'|'.join(name for names in PROJECTIONS for name in names)})\.\w+")


def experts_at(keys: Iterable[object], prefix: str, is_numbered: bool = True) -> ExpertNames:
    """Find the names of experts' tensors at a prefix; other names are ignored.

    Args:
        keys: names of all tensors of a checkpoint.
        prefix: the part of names before the expert's number, with or without a final dot.
        is_numbered: True: names have an expert's number. False: they have none, as for a shared expert.
    """
    start = f"{prefix.removesuffix('.')}." if prefix else ""
    parts: dict[int, dict[str, set[str]]] = {}
    for key in keys:
        if not isinstance(key, str) or not key.startswith(start):
            continue
        if match := (_EXPERT if is_numbered else _PROJECTION).fullmatch(key, len(start)):
            *expert, projection, part = match.groups()
            names = parts.setdefault(int(*expert), {}).setdefault(projection, set())
            if part not in IGNORED:
                names.add(part)
    return ExpertNames(start, parts, is_numbered)


def prefixes(keys: Iterable[object]) -> list[str]:
    """Return all prefixes at which a checkpoint with these tensor names has numbered experts."""
    matches = (_ANY_EXPERT.fullmatch(key) for key in keys if isinstance(key, str))
    return list(dict.fromkeys(match[1] for match in matches if match))


def dialects_of(part_names: Collection[str]) -> list[Dialect]:
    """Return the dialects (storage conventions, see `Dialect`) whose part names are exactly these."""
    return [dialect for dialect in DIALECTS if dialect.parts.keys() == set(part_names)]
