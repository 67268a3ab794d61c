"""MXFP4Linear: the layers of a GroupedMLP whose weights are in MXFP4, and which is not trained."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from cute_kernels.formats import WORD_ELEMENTS

from ..formats.mxfp4 import MXFP4Tensor, quantize_mxfp4
from ..formats.mxfp4.codec import SCALE_BIAS
from ..formats.mxfp4.tensor import BLOCK_BYTES
from ..formats.mxfp4.words import WORD_DTYPE, bytes_of, words_of
from ..formats.scaled import BLOCK, SCALE_DTYPE, SOURCE_DTYPES
from .linear import GroupedLinear
from .state import Move

SCALE_DTYPES = torch.uint8, SCALE_DTYPE
WEIGHT_DTYPES = torch.uint8, WORD_DTYPE


class MXFP4Linear(GroupedLinear):
    """A GroupedLinear with buffers `weight` [E, N, K/8] int32 and `weight_scale` [E, N, K/32] uint8, those of an
    MXFP4Tensor that is prepared.

    State dicts have `weight` as bytes, uint8 [E, N, K/2]; those that are loaded may also have the words themselves, and
    scales in float8_e8m0fnu. A `weight` [E, N, K] in 16 bits or float32 without a `weight_scale` is quantised as it
    loads; any other dtype is an error of load_state_dict.
    """

    weight_names = ("weight", "weight_scale")
    trained_names = ("bias",)
    weight: Tensor
    weight_scale: Tensor

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_load_state_dict_pre_hook(_read)  # type: ignore[no-untyped-call]
        self.register_state_dict_post_hook(_write)  # type: ignore[no-untyped-call]

    def make_weights(self, device: Any) -> None:
        rows = self.num_experts, self.out_features
        for name, elements, dtype in (("weight", WORD_ELEMENTS, WORD_DTYPE), ("weight_scale", BLOCK, torch.uint8)):
            self.register_buffer(name, torch.empty(*rows, self.in_features // elements, dtype=dtype, device=device))

    def reset_parameters(self) -> None:
        """Any elements, on the largest scale by which all are within 1 / sqrt(in_features); biases as any layer's."""
        super().reset_parameters()
        self.weight.view(torch.uint8).random_(256)
        self.weight_scale.fill_(SCALE_BIAS + math.floor(math.log2(1 / (6 * math.sqrt(self.in_features)))))

    def experts(self, name: str) -> Any:
        if name == "weight":
            return MXFP4Tensor(self.weight, self.weight_scale)
        return super().experts(name)

    def grad_writer(self, *_: Any) -> None:
        """Nothing is trained."""

    def moves(self, keys: Collection[str], prefix: str, moments: bool = False) -> Iterator[list[Move]]:
        whole, scale = (prefix + name for name in self.weight_names)
        if not moments and whole in keys and scale not in keys:
            yield [Move([whole], [whole, scale], _quantized)]


def refusal(key: str, value: Any, dtypes: tuple[torch.dtype, ...]) -> str:
    """Say why an entry of a state dict is no part of a quantised weight; "" if its dtype is one of `dtypes`."""
    if not isinstance(value, Tensor) or value.dtype in dtypes:
        return ""
    wanted = " or ".join(map(str, dtypes))
    return f"{key} is {value.dtype}; it must be {wanted}, since parts of a quantised weight are never converted"


def scale_bytes(scale: Tensor) -> Tensor:
    """Scales as bytes: copy_ would convert the numbers, 0.5 to 0."""
    return scale.view(torch.uint8) if scale.dtype == SCALE_DTYPE else scale


def _read(
    layer: MXFP4Linear, state: dict[str, Any], prefix: str, _metadata: Any, _strict: bool, _missing: Any,
    _unexpected: Any, errors: list[str],
) -> None:  # fmt: skip
    """Make words of the bytes of a weight before it loads, on the device where they will lie, and bytes of scales.

    An entry of another dtype is an error, and the layer keeps what it has.
    """
    key, scale_key = (prefix + name for name in layer.weight_names)
    for name, own, dtypes in ((key, layer.weight, WEIGHT_DTYPES), (scale_key, layer.weight_scale, SCALE_DTYPES)):
        if message := refusal(name, state.get(name), dtypes):
            errors.append(message)
            state[name] = own
    if isinstance(scale := state.get(scale_key), Tensor):
        state[scale_key] = scale_bytes(scale)
    data = state.get(key)
    if isinstance(data, Tensor) and data.dtype == torch.uint8 and data.dim() == 3 and not data.shape[2] % BLOCK_BYTES:
        state[key] = words_of(data if layer.weight.is_meta else data.to(layer.weight.device))


def _write(layer: MXFP4Linear, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[f"{prefix}weight"] = bytes_of(state[f"{prefix}weight"])


def _quantized(values: list[Any]) -> list[Any] | None:
    (weight,) = values
    if not isinstance(weight, Tensor) or weight.dtype not in SOURCE_DTYPES or weight.shape[-1] % BLOCK:
        return None
    made = quantize_mxfp4(weight.detach())
    return [made.data, made.scale.view(torch.uint8)]
