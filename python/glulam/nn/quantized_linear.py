"""Linear layers of a GroupedMLP with quantised weights (MXFP4, NVFP4, FP8 blocks): buffers, which are not trained."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import is_fake
from torch.compiler import is_dynamo_compiling

from cute_kernels.formats import WORD_ELEMENTS

from ..calls.checks import shape_text
from ..calls.sharding import on_local
from ..formats.e2m1 import MAGNITUDES
from ..formats.form import Form
from ..formats.fp8_block.form import Fp8Block
from ..formats.mxfp4.codec import SCALE_BIAS
from ..formats.mxfp4.form import Mxfp4, Mxfp4Rebased
from ..formats.mxfp4.rebase import row_scales, words_of_bytes
from ..formats.mxfp8.layout import DATA_DTYPE
from ..formats.mxfp8.reference import E4M3_MAX
from ..formats.nvfp4.form import Nvfp4
from ..formats.prepared import Snapshot
from ..formats.scaled import SCALE_DTYPE, SOURCE_DTYPES, Parts, Scaled, bytes_of_floats
from ..formats.words import WORD_DTYPE, bytes_of, words_of
from ..host.device import PLAIN_TENSORS
from .linear import GroupedLinear
from .options import held
from .state import Move, layout_move

SCALE_DTYPES = torch.uint8, SCALE_DTYPE
E4M3_NAN = 0x7F
"""The bits of an E4M3 NaN without its sign bit."""
Buffer = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a buffer."""


class _Kept:
    """Cache entry: the quantised tensor object that operators take, and the buffers from which it was made.

    A write into a buffer leaves the entry valid, since the tensor's parts are views of the buffers. The addresses show
    whether a buffer was moved to other memory, for example by `buffer.data = ...`.
    """

    __slots__ = ("addresses", "parts", "tensor")

    def __init__(self, parts: list[Tensor], tensor: Scaled) -> None:
        self.parts, self.tensor = parts, tensor
        self.addresses = [part.data_ptr() for part in parts]

    def is_of(self, parts: list[Tensor]) -> bool:
        """Return True if the cached tensor was made from these buffers, at their present addresses."""
        for kept, part, address in zip(self.parts, parts, self.addresses, strict=True):
            if part is not kept or part.data_ptr() != address:
                return False
        return True


def _is_memory(part: Tensor) -> bool:
    """Return True if a tensor is a plain one with memory, so that it may be cached; not fake, none of torch.func."""
    return type(part) in PLAIN_TENSORS and not is_functorch_wrapped_tensor(part)


class QuantizedLinear(GroupedLinear):
    """A GroupedLinear with quantised weights: buffers `weight` (elements) and `weight_scale`, in a recipe's format.

    Kernels read the buffers directly. 8-bit floats are stored as bytes.

    Loading a state dict: a `weight` [E, N, K] in 16 bits or float32 without a `weight_scale`, or one such weight per
    expert, is quantised. If the state dict lacks one of the buffers, or has it in another dtype or shape,
    load_state_dict raises an error, and the layer keeps its whole previous weight.

    Args:
        form: the `formats.form.Form` of the weights: the format and layout in which a recipe's kernels read them.
        halves: 2 if the first half of the rows is a gate's and the second half an up-projection's (gated w1 in layout
            "concat"), else 1.
        args, options: see `GroupedLinear`.
    """

    weight_names: tuple[str, ...] = ("weight", "weight_scale")
    derived_names: tuple[str, ...] = ()
    """Names of more buffers of the weight, which are computed from `weight_names` and not stored in state dicts."""
    trained_names = ("bias",)
    loads: ClassVar[tuple[tuple[torch.dtype, ...], ...]]
    """For each of `weight_names`: the dtypes that state dicts may have for it."""
    has_scales_of_rows: ClassVar[bool] = True
    """True: each scale belongs to one row of the weight, so rows can be reordered together with their scales."""
    weight: Tensor
    weight_scale: Tensor
    _kept: _Kept | None = None

    def __init__(self, *args: Any, form: Form, halves: int = 1, **options: Any) -> None:
        self.form, self.halves = form, halves
        super().__init__(*args, **options)
        self.register_load_state_dict_pre_hook(_read)  # type: ignore[no-untyped-call]
        self.register_state_dict_post_hook(_write)  # type: ignore[no-untyped-call]

    def make_weights(self, device: Any) -> None:
        if self.halves == 2:
            self.form = self.form.of_gate(self.out_features)
        shape = self.num_experts, self.out_features, self.in_features
        for name, (size, dtype) in zip(self.weight_names, self.buffers_of(shape), strict=True):
            self.register_buffer(name, torch.empty(size, dtype=dtype, device=device))

    def buffers_of(self, shape: tuple[int, int, int]) -> list[Buffer]:
        """Return (shape, dtype) of each buffer for a weight of shape [E, N, K], in the order of `weight_names`."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Set random weights of at most 1 / sqrt(in_features) in magnitude; initialise biases as in GroupedLinear."""
        super().reset_parameters()
        self.reset_weights(1 / math.sqrt(self.in_features))

    def reset_weights(self, bound: float) -> None:
        """Set random elements, with scales so small that no value exceeds `bound` in magnitude."""
        raise NotImplementedError

    def experts(self, name: str) -> Any:
        if name != "weight":
            return held(self, self._parameters, name)
        parts = [held(self, self._buffers, part) for part in (*self.weight_names, *self.derived_names)]
        if is_dynamo_compiling():
            return self.form.tensor_of(Parts(*parts))
        kept = self._kept
        if kept is not None and kept.is_of(parts):
            return kept.tensor
        with torch.inference_mode(False):  # views made in inference mode cannot be saved for backward
            made = self.form.tensor_of(Parts(*parts))
        if all(part is None or _is_memory(part) for part in (*parts, *made.parts)):
            self.__dict__["_kept"] = _Kept(parts, made)
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.weight_names:
            self.forget()
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kept": None}

    def forget(self) -> None:
        """Drop the cached tensor, so that it does not keep alive buffers that are about to be replaced."""
        self.__dict__["_kept"] = None

    def grad_writer(self, *_: Any) -> None:
        """Return None: weights are not trained."""

    def moves(self, keys: Collection[str], prefix: str, moments: bool = False) -> Iterator[list[Move]]:
        for name in ("weight", *self.trained_names):
            whole = prefix + name
            move = layout_move(keys, whole, name, self.packed, self.num_experts, moments)
            if name == "weight":
                move = None if moments else self._quantizing(keys, prefix, move)
            if move is not None:
                yield [move]

    def _quantizing(self, keys: Collection[str], prefix: str, packing: Move | None) -> Move | None:
        """Return the move (a `state.Move`, a conversion of entries) that quantises a 16-bit or float32 weight.

        None: the state dict has no weight for this layer, or has its scales too, so that the weight is quantised.

        Args:
            keys, prefix: the state dict's keys, and the prefix of this layer's keys.
            packing: the move that first stacks experts' separate weights; None: they are stacked already.
        """
        whole, *others = (prefix + name for name in self.weight_names)
        if any(key in keys for key in others) or (packing is None and whole not in keys):
            return None
        old, pack = ([whole], list) if packing is None else (packing.old, packing.make)
        return Move(old, [whole, *others], partial(self._quantized, pack=pack))

    def _quantized(self, values: list[Any], pack: Any) -> list[Any] | None:
        """Quantise a weight from a state dict; return the tensors that state dicts store for a quantised weight.

        None: the weight cannot be quantised: its dtype, rank or K does not fit.

        Args:
            values: the weight's entries in the state dict: one, or one per expert.
            pack: function that makes one weight [E, N, K] from the entries.
        """
        (weight,) = pack(values) or (None,)
        if not isinstance(weight, Tensor) or weight.dtype not in SOURCE_DTYPES or weight.dim() != 3:
            return None
        if weight.shape[2] % self.form.multiple:
            return None
        data, *scales = self.quantized(weight.detach())
        return [data, *[bytes_of_floats(scale) for scale in scales if scale is not None]]

    def quantized(self, weight: Tensor) -> Parts:
        return self.form.quantized(weight)

    def as_kept(self, name: str, part: Tensor) -> Tensor:
        """Convert a tensor from a state dict to the dtype and order of elements of the buffer `name`."""
        return bytes_of_floats(part)

    def as_stored(self, name: str, part: Tensor) -> Tensor:
        """Convert the buffer `name` to the dtype and order of elements that state dicts store. Inverse of `as_kept`."""
        return part

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedLinear:
        """Apply fn as Module._apply does (.to, .cuda, .half), but keep the weight buffers' dtypes through casts."""
        self.forget()
        before = {name: getattr(self, name) for name in (*self.weight_names, *self.derived_names)}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            if (now := getattr(self, name)).dtype != buffer.dtype:
                setattr(self, name, buffer.to(now.device))
        return self


class FourBitsLinear(QuantizedLinear):
    """Base of layers with 4-bit weights, stored in int32 words (`formats.words`) as kernels read them.

    `weight` is int32 [E, N, K/8], eight elements a word, and `weight_scale` uint8 [E, N, K/block], one scale for each
    `block` elements of a row (32 in MXFP4, 16 in NVFP4).

    State dicts store `weight` as bytes, uint8 [E, N, K/2]; a state dict with int32 words loads, too.
    """

    def buffers_of(self, shape: tuple[int, int, int]) -> list[Buffer]:
        *rows, k = shape
        return [((*rows, k // WORD_ELEMENTS), WORD_DTYPE), ((*rows, k // self.form.block), torch.uint8)]

    def reset_weights(self, bound: float) -> None:
        self.weight.view(torch.uint8).random_(256)
        self.reset_scales(bound / MAGNITUDES[-1])

    def reset_scales(self, factor: float) -> None:
        """Set all scales to about `factor`, at most: no value exceeds `factor` times its 4-bit element."""
        raise NotImplementedError

    def as_kept(self, name: str, part: Tensor) -> Tensor:
        if name != "weight" or part.dtype == WORD_DTYPE:
            return super().as_kept(name, part)
        made: Tensor = on_local(words_of, part if self.weight.is_meta else part.to(self.weight.device))
        return made

    def as_stored(self, name: str, part: Tensor) -> Tensor:
        stored: Tensor = on_local(bytes_of, part) if name == "weight" else part
        return stored


class MXFP4Linear(FourBitsLinear):
    """A layer with MXFP4 weights, for recipe "mxfp4_weight_only", whose kernels multiply in 16 bits."""

    loads = (torch.uint8, WORD_DTYPE), SCALE_DTYPES

    def reset_scales(self, factor: float) -> None:
        self.weight_scale.fill_(SCALE_BIAS + math.floor(math.log2(factor)))


class RebasedLinear(MXFP4Linear):
    """A layer with MXFP4 weights for recipe "mxfp4", whose kernels multiply in FP8.

    `weight` int32 [E, N, K/8] holds a checkpoint's bytes, four in a word. The additional buffer `weight_row_scale`,
    uint8 [E, N], holds a power of two for each weight row as an E8M0 byte (see `formats.mxfp4.rebase`). It is computed
    when the weight loads, and again in an eager forward if `weight` or `weight_scale` was replaced or written
    (`formats.prepared.Snapshot`). The computation raises FoldError under the conditions of `prepare_mxfp4_weight`.
    """

    derived_names = ("weight_row_scale",)
    weight_row_scale: Tensor
    _computed_from: Snapshot | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_load_state_dict_post_hook(_rebase)  # type: ignore[no-untyped-call]

    def make_weights(self, device: Any) -> None:
        super().make_weights(device)
        rows = torch.empty(self.num_experts, self.out_features, dtype=torch.uint8, device=device)
        self.register_buffer("weight_row_scale", rows, persistent=False)

    def reset_weights(self, bound: float) -> None:
        super().reset_weights(bound)
        self.rebase()

    def experts(self, name: str) -> Any:
        if name == "weight" and not is_dynamo_compiling():
            parts, known = self._sources(), self._computed_from
            if (known is None or not known.is_of(parts)) and not is_fake(parts[0]):
                self.rebase()
        return super().experts(name)

    def rebase(self) -> None:
        """Recompute `weight_row_scale` from the other buffers, and note their versions for `experts`."""
        self.forget()
        parts = self._sources()
        if not parts[0].is_meta and not is_fake(parts[0]):
            data, scale = parts
            self.weight_row_scale = row_scales(data, scale, type(self).__name__).to(data.device)
        self.__dict__["_computed_from"] = Snapshot(parts)

    def _sources(self) -> list[Tensor]:
        """Return the buffers from which `weight_row_scale` is computed."""
        return [held(self, self._buffers, name) for name in self.weight_names]

    def forget(self) -> None:
        super().forget()
        self.__dict__["_computed_from"] = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_computed_from": None}

    def as_kept(self, name: str, part: Tensor) -> Tensor:
        return words_of_bytes(part) if name == "weight" else bytes_of_floats(part)

    def as_stored(self, name: str, part: Tensor) -> Tensor:
        return part.view(torch.uint8) if name == "weight" else part


def _rebase(layer: RebasedLinear, _: Any) -> None:
    layer.rebase()


class NVFP4Linear(FourBitsLinear):
    """A GroupedLinear with NVFP4 weights: buffers `weight` and `weight_scale` as in `FourBitsLinear`, and a third
    buffer `weight_global_scale`, a factor of each expert's weight.

    `weight_global_scale` is float32 [E]. If `halves` is 2 (a gated w1, whose rows are a gate's half and an
    up-projection's half), it is [E, 2], one factor for each half.
    """

    weight_names = ("weight", "weight_scale", "weight_global_scale")
    loads = (torch.uint8, WORD_DTYPE), (torch.uint8, Nvfp4.kind.scale_dtype), (torch.float32,)
    weight_global_scale: Tensor

    def buffers_of(self, shape: tuple[int, int, int]) -> list[Buffer]:
        factors = shape[:1] if self.halves == 1 else (shape[0], self.halves)
        return [*super().buffers_of(shape), (factors, torch.float32)]

    def reset_scales(self, factor: float) -> None:
        self.weight_scale.view(self.form.kind.scale_dtype).fill_(1.0)
        self.weight_global_scale.fill_(factor)

    def quantized(self, weight: Tensor) -> Parts:
        """Quantise a weight [E, N, K]; if `halves` is 2, each half of the rows by itself, with its own global scale."""
        experts, rows, k = weight.shape
        data, scale, global_scale = super().quantized(weight.reshape(-1, rows // self.halves, k))
        assert scale is not None and global_scale is not None
        shape = experts, rows, -1
        return Parts(data.view(shape), scale.view(shape), global_scale.view(self.weight_global_scale.shape))


class FP8BlockLinear(QuantizedLinear):
    """A layer with FP8 (E4M3) weights that have one float32 scale for each block of 128 x 128.

    `weight` is uint8 [E, N, K], and `weight_scale` float32 [E, ceil(N / 128), ceil(K / 128)], or [E, 2, ceil(N/2 /
    128), ceil(K / 128)] for a gated w1 in layout "concat" whose halves end inside a block.

    State dicts store uint8, since Python's pickle cannot restore 8-bit floats; a state dict with float8_e4m3fn loads,
    too.
    """

    loads = (torch.uint8, DATA_DTYPE), (torch.float32,)
    has_scales_of_rows = False

    def buffers_of(self, shape: tuple[int, int, int]) -> list[Buffer]:
        scale = self.form.on_meta(torch.empty(0, device="meta"), shape).scale
        assert scale is not None
        return [(shape, torch.uint8), (tuple(scale.shape), torch.float32)]

    def reset_weights(self, bound: float) -> None:
        self.weight.random_(256)
        self.weight.masked_fill_(self.weight.bitwise_and(E4M3_NAN) == E4M3_NAN, 0)
        self.weight_scale.fill_(bound / E4M3_MAX)


LAYERS: dict[type, type[QuantizedLinear]] = {
    Mxfp4: MXFP4Linear, Mxfp4Rebased: RebasedLinear, Nvfp4: NVFP4Linear, Fp8Block: FP8BlockLinear,
}  # fmt: skip
"""Layer class for each class of `formats.form.Form`, the format in which a recipe's kernels read weights."""


def refusal(key: str, value: Any, dtypes: tuple[torch.dtype, ...]) -> str:
    """Return the error text for a state dict's entry whose dtype does not fit; "": the dtype fits.

    Args:
        key, value: the entry. A value that is no tensor gives "", since torch refuses it.
        dtypes: the valid dtypes. Parts of a quantised weight are never converted from other dtypes.
    """
    if not isinstance(value, Tensor) or value.dtype in dtypes:
        return ""
    wanted = " or ".join(map(str, dtypes))
    return f"{key} is {value.dtype}; it must be {wanted}, since parts of a quantised weight are never converted"


def _read(
    layer: QuantizedLinear, state: dict[str, Any], prefix: str, _metadata: Any, _strict: bool, _missing: Any,
    _unexpected: Any, errors: list[str],
) -> None:  # fmt: skip
    """Hook before load_state_dict: convert the entries of the weight to the dtypes and order of the layer's buffers.

    If an entry is missing, or has another dtype or shape, add an error, and keep all of the layer's previous buffers.
    """
    layer.forget()
    given = {name: state[prefix + name] for name in layer.weight_names if prefix + name in state}
    if not given:
        return
    parts = zip(layer.weight_names, layer.loads, strict=True)
    found = [_fault(layer, prefix, name, dtypes, given) for name, dtypes in parts]
    if faults := [fault for fault in found if fault]:
        errors.extend(faults)
        state.update({prefix + name: getattr(layer, name) for name in layer.weight_names})
        return
    for name, value in given.items():
        if isinstance(value, Tensor):
            state[prefix + name] = layer.as_kept(name, value)


def _fault(
    layer: QuantizedLinear, prefix: str, name: str, dtypes: tuple[torch.dtype, ...], given: dict[str, Any]
) -> str:
    """Return the error text for the entry of buffer `name`; "": the entry is valid.

    Args:
        prefix: prefix of the layer's keys.
        dtypes: dtypes that the entry may have.
        given: the state dict's entries for this weight, by buffer name.
    """
    key, own = prefix + name, getattr(layer, name)
    if name not in given:
        return f"{key} is missing, but {prefix}{next(iter(given))} is there; give all parts of a quantised weight"
    value = given[name]
    if fault := refusal(key, value, dtypes):
        return fault
    if not isinstance(value, Tensor):  # torch raises an error that names it
        return ""
    wanted = *own.shape[:-1], own.shape[-1] * own.itemsize // value.itemsize
    if tuple(value.shape) == wanted:
        return ""
    return (
        f"{key} has shape {shape_text(value.shape)}; in {layer.form.kind.format} a weight [{layer.num_experts}, "
        f"{layer.out_features}, {layer.in_features}] has {shape_text(wanted)} there, so it is truncated, or another's"
    )


def _write(layer: QuantizedLinear, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in layer.weight_names:
        state[prefix + name] = layer.as_stored(name, state[prefix + name])
