"""Synthetic checkpoints of quantised experts, made by the definition of each format, and their values in float64.

No code under test is used: elements and scales are random codes, and values are computed from the codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import mxfp4

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
Random = np.random.Generator
Parts = dict[str, Tensor]


def codes(random: Random, *shape: int) -> Tensor:
    return torch.from_numpy(random.integers(0, 256, shape).astype(np.uint8))


def e4m3(random: Random, rows: int, columns: int) -> Tensor:
    """Return random finite E4M3 numbers [rows, columns] of both signs."""
    bytes_ = codes(random, rows, columns)
    return bytes_.masked_fill(bytes_ % 128 == 127, 5).view(E4M3)


def pairs(random: Random, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return random E2M1 codes, two in a byte, the even element in the lower half, and their values in float64."""
    both = codes(random, rows, columns) % 16
    numbers = mxfp4.NUMBERS[both.long()]
    return both[:, 0::2] + both[:, 1::2] * 16, numbers


def spread(scale: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Return the scale of each element of a matrix, float64, from the scales of blocks."""
    rows = torch.arange(shape[0]) // block[0]
    return scale.double()[rows][:, torch.arange(shape[1]) // block[1]]


def float_blocks(random: Random, shape: tuple[int, int], name: str) -> tuple[Parts, Tensor]:
    data = e4m3(random, *shape)
    grid = -(-shape[0] // 128), -(-shape[1] // 128)
    scale = torch.from_numpy(random.uniform(0.5, 2.0, grid).astype(np.float32)) * 2.0**-9
    return {"weight": data, name: scale}, data.double() * spread(scale, shape, (128, 128))


def powers(random: Random, shape: tuple[int, int], binades: int = 14) -> tuple[Tensor, Tensor]:
    bytes_ = torch.from_numpy(random.integers(124 - binades, 124, (shape[0], shape[1] // 32)).astype(np.uint8))
    return bytes_, spread(torch.exp2(bytes_.double() - 127), shape, (1, 32))


def mxfp8(random: Random, shape: tuple[int, int], name: str) -> tuple[Parts, Tensor]:
    data, (scale, wide) = e4m3(random, *shape), powers(random, shape)
    return {"weight": data, name: scale}, data.double() * wide


def mxfp4_of_deepseek(random: Random, shape: tuple[int, int], binades: int = 14) -> tuple[Parts, Tensor]:
    (data, numbers), (scale, wide) = pairs(random, *shape), powers(random, shape, binades)
    return {"weight": data.view(torch.int8), "scale": scale.view(E8M0)}, numbers * wide


def nvfp4(random: Random, shape: tuple[int, int], names: tuple[str, str, str], divides: bool) -> tuple[Parts, Tensor]:
    data, numbers = pairs(random, *shape)
    bytes_ = torch.from_numpy(random.integers(8, 127, (shape[0], shape[1] // 16)).astype(np.uint8))
    scale, factor = bytes_.view(E4M3), torch.tensor(random.uniform(0.5, 2.0) * 2.0**-8, dtype=torch.float32)
    values = numbers * spread(scale.double(), shape, (1, 16)) * factor.double()
    stored = (1 / factor.double()).float() if divides else factor
    if divides:
        values = numbers * spread(scale.double(), shape, (1, 16)) / stored.double()
    parts = dict(zip(names, (data, scale, stored), strict=True))
    activation = "input_global_scale" if divides else "input_scale"
    return {**parts, activation: torch.tensor(3.0)}, values


MODELOPT = ("weight", "weight_scale", "weight_scale_2")
COMPRESSED_TENSORS = ("weight_packed", "weight_scale", "weight_global_scale")
QWEN, MIXTRAL = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


class Kind(NamedTuple):
    """A family of checkpoints: names of tensors, and the format of weights.

    `recipe`: the recipe that multiplies 16-bit rows by weights in this format.
    """

    prefix: str
    projections: tuple[str, str, str]
    make: Callable[[Random, tuple[int, int]], tuple[Parts, Tensor]]
    tensor: str
    recipe: str


KINDS = {
    "qwen3-fp8": Kind(
        "model.layers.3.mlp.experts", QWEN, lambda r, s: float_blocks(r, s, "weight_scale_inv"), "FP8BlockTensor",
        "fp8_block_weight_only",
    ),
    "deepseek-v4-base": Kind(
        "layers.3.ffn.experts", MIXTRAL, lambda r, s: float_blocks(r, s, "scale"), "FP8BlockTensor",
        "fp8_block_weight_only",
    ),
    "quark": Kind(
        "model.layers.3.mlp.experts", QWEN, lambda r, s: float_blocks(r, s, "weight_scale"), "FP8BlockTensor",
        "fp8_block_weight_only",
    ),
    "deepseek-v4": Kind("layers.3.ffn.experts", MIXTRAL, mxfp4_of_deepseek, "MXFP4Tensor", "mxfp4_weight_only"),
    "minimax-m3": Kind(
        "model.layers.3.block_sparse_moe.experts", MIXTRAL, lambda r, s: mxfp8(r, s, "weight_scale_inv"), "MXFP8Tensor",
        "mxfp8_weight_only",
    ),
    "compressed-mxfp8": Kind(
        "model.layers.3.mlp.experts", QWEN, lambda r, s: mxfp8(r, s, "weight_scale"), "MXFP8Tensor",
        "mxfp8_weight_only",
    ),
    "modelopt-nvfp4": Kind(
        "model.layers.3.mlp.experts", QWEN, lambda r, s: nvfp4(r, s, MODELOPT, False), "NVFP4Tensor",
        "nvfp4_weight_only",
    ),
    "compressed-nvfp4": Kind(
        "model.layers.3.mlp.experts", QWEN, lambda r, s: nvfp4(r, s, COMPRESSED_TENSORS, True), "NVFP4Tensor",
        "nvfp4_weight_only",
    ),
}  # fmt: skip


class Checkpoint(NamedTuple):
    """Tensors by name, and the values of both weights in float64: w1 [E, 2I, H], gate rows first, and w2 [E, H, I]."""

    state: dict[str, Tensor]
    prefix: str
    w1: Tensor
    w2: Tensor


def checkpoint(kind: Kind, experts: int = 3, hidden: int = 160, width: int = 96, seed: int = 0) -> Checkpoint:
    """Return a checkpoint of one layer's experts, shuffled, with tensors of other layers."""
    random = np.random.default_rng(seed)
    state: dict[str, Tensor] = {f"{kind.prefix.replace('.3.', '.4.')}.0.{kind.projections[0]}.weight": torch.zeros(1)}
    values: list[list[Tensor]] = []
    for expert in range(experts):
        values.append([])
        for projection, shape in zip(
            kind.projections, ((width, hidden), (width, hidden), (hidden, width)), strict=True
        ):
            parts, numbers = kind.make(random, shape)
            state |= {f"{kind.prefix}.{expert}.{projection}.{name}": part for name, part in parts.items()}
            values[-1].append(numbers)
    state["model.norm.weight"] = torch.ones(hidden)
    names = list(state)
    random.shuffle(names)
    w1 = torch.stack([torch.cat((gate, up)) for gate, up, _ in values])
    return Checkpoint(
        {name: state[name] for name in names}, kind.prefix, w1, torch.stack([down for *_, down in values])
    )
