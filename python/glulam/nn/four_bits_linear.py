"""The layers of a GroupedMLP whose weights are in 4 bits, and which is not trained."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from cute_kernels.formats import WORD_ELEMENTS

from ..formats.e2m1 import MAGNITUDES
from ..formats.form import Form
from ..formats.four_bits import FourBits
from ..formats.mxfp4.codec import SCALE_BIAS
from ..formats.mxfp4.form import MXFP4
from ..formats.nvfp4.form import NVFP4
from ..formats.scaled import SCALE_DTYPE, SOURCE_DTYPES, Parts
from ..formats.words import WORD_DTYPE, bytes_of, words_of
from .linear import GroupedLinear
from .state import Move

SCALE_DTYPES = torch.uint8, SCALE_DTYPE
WEIGHT_DTYPES = torch.uint8, WORD_DTYPE
BLOCK_BYTES = FourBits.multiple // 2


class FourBitsLinear(GroupedLinear):
    """A GroupedLinear with buffers `weight` [E, N, K/8] int32 and `weight_scale` [E, N, K/block] uint8, those of a
    tensor of `form` that is prepared.

    State dicts have `weight` as bytes, uint8 [E, N, K/2]; those that are loaded may also have the words themselves, and
    scales in their own dtype. A `weight` [E, N, K] in 16 bits or float32 without a `weight_scale` is quantised as it
    loads; any other dtype is an error of load_state_dict.
    """

    form: ClassVar[Form]
    weight_names: tuple[str, ...] = ("weight", "weight_scale")
    trained_names = ("bias",)
    weight: Tensor
    weight_scale: Tensor

    def __init__(self, *args: Any, halves: int = 1, **options: Any) -> None:
        self.halves = halves
        super().__init__(*args, **options)
        self.register_load_state_dict_pre_hook(_read)  # type: ignore[no-untyped-call]
        self.register_state_dict_post_hook(_write)  # type: ignore[no-untyped-call]

    def make_weights(self, device: Any) -> None:
        rows = self.num_experts, self.out_features
        sizes = ("weight", WORD_ELEMENTS, WORD_DTYPE), ("weight_scale", self.form.block, torch.uint8)
        for name, elements, dtype in sizes:
            self.register_buffer(name, torch.empty(*rows, self.in_features // elements, dtype=dtype, device=device))

    def reset_parameters(self) -> None:
        """Any elements, by a scale by which all are within 1 / sqrt(in_features); biases as any layer's."""
        super().reset_parameters()
        self.weight.view(torch.uint8).random_(256)
        self.reset_scales(1 / (MAGNITUDES[-1] * math.sqrt(self.in_features)))

    def reset_scales(self, factor: float) -> None:
        """Make elements at most this many times as large as they are."""
        raise NotImplementedError

    def experts(self, name: str) -> Any:
        if name == "weight":
            return self.form.tensor_of(Parts(*[getattr(self, name) for name in self.weight_names]))
        return super().experts(name)

    def grad_writer(self, *_: Any) -> None:
        """Nothing is trained."""

    def moves(self, keys: Collection[str], prefix: str, moments: bool = False) -> Iterator[list[Move]]:
        whole, scale, *others = (prefix + name for name in self.weight_names)
        if not moments and whole in keys and scale not in keys:
            yield [Move([whole], [whole, scale, *others], self._quantized)]

    def _quantized(self, values: list[Any]) -> list[Any] | None:
        (weight,) = values
        if not isinstance(weight, Tensor) or weight.dtype not in SOURCE_DTYPES or weight.shape[-1] % self.form.multiple:
            return None
        made = self.quantized(weight.detach())
        return [made.data, made.scale.view(torch.uint8), *self.others(made)]

    def quantized(self, weight: Tensor) -> FourBits:
        made: FourBits = type(self.form).quantize(weight)
        return made

    def others(self, made: FourBits) -> list[Tensor]:
        """Its parts besides data and scales, as buffers have them."""
        return []


class MXFP4Linear(FourBitsLinear):
    """In MXFP4."""

    form = MXFP4

    def reset_scales(self, factor: float) -> None:
        self.weight_scale.fill_(SCALE_BIAS + math.floor(math.log2(factor)))


class NVFP4Linear(FourBitsLinear):
    """In NVFP4: besides, `weight_global_scale` float32 [E], or [E, 2] where `halves` is 2: of a gated w1."""

    form = NVFP4
    weight_names = ("weight", "weight_scale", "weight_global_scale")
    weight_global_scale: Tensor

    def make_weights(self, device: Any) -> None:
        super().make_weights(device)
        shape = (self.num_experts, 2) if self.halves == 2 else (self.num_experts,)
        self.register_buffer("weight_global_scale", torch.empty(shape, dtype=torch.float32, device=device))

    def reset_scales(self, factor: float) -> None:
        self.weight_scale.view(NVFP4.kind.scale_dtype).fill_(1.0)
        self.weight_global_scale.fill_(factor)

    def quantized(self, weight: Tensor) -> FourBits:
        """Each half by itself."""
        made = super().quantized(weight.reshape(-1, weight.shape[1] // self.halves, weight.shape[2]))
        data, scale, global_scale = made.parts
        shape = (*weight.shape[:2], -1)
        assert scale is not None and global_scale is not None
        return NVFP4.tensor_of(
            Parts(data.view(shape), scale.view(shape), global_scale.view(self.weight_global_scale.shape))
        )

    def others(self, made: FourBits) -> list[Tensor]:
        return [made.parts.global_scale]  # type: ignore[list-item]


LAYERS: dict[Form, type[FourBitsLinear]] = {layer.form: layer for layer in (MXFP4Linear, NVFP4Linear)}
"""Keyed by the form in which recipes read weights."""


def refusal(key: str, value: Any, dtypes: tuple[torch.dtype, ...]) -> str:
    """Say why an entry of a state dict is no part of a quantised weight; "" if its dtype is one of `dtypes`."""
    if not isinstance(value, Tensor) or value.dtype in dtypes:
        return ""
    wanted = " or ".join(map(str, dtypes))
    return f"{key} is {value.dtype}; it must be {wanted}, since parts of a quantised weight are never converted"


def scale_bytes(scale: Tensor) -> Tensor:
    """Scales as bytes: copy_ would convert the numbers, 0.5 to 0."""
    return scale.view(torch.uint8) if scale.itemsize == 1 else scale


def _read(
    layer: FourBitsLinear, state: dict[str, Any], prefix: str, _metadata: Any, _strict: bool, _missing: Any,
    _unexpected: Any, errors: list[str],
) -> None:  # fmt: skip
    """Make words of the bytes of a weight before it loads, on the device where they will lie, and bytes of scales.

    An entry of another dtype is an error, and the layer keeps what it has.
    """
    dtypes_of = WEIGHT_DTYPES, (torch.uint8, layer.form.kind.scale_dtype), (torch.float32,)
    for name, dtypes in zip(layer.weight_names, dtypes_of, strict=False):
        if message := refusal(prefix + name, state.get(prefix + name), dtypes):
            errors.append(message)
            state[prefix + name] = getattr(layer, name)
    key, scale_key = prefix + "weight", prefix + "weight_scale"
    if isinstance(scale := state.get(scale_key), Tensor):
        state[scale_key] = scale_bytes(scale)
    data = state.get(key)
    if isinstance(data, Tensor) and data.dtype == torch.uint8 and data.dim() == 3 and not data.shape[2] % BLOCK_BYTES:
        state[key] = words_of(data if layer.weight.is_meta else data.to(layer.weight.device))


def _write(layer: FourBitsLinear, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[f"{prefix}weight"] = bytes_of(state[f"{prefix}weight"])
