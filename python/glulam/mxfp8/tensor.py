"""MXFP8Tensor: elements, scales, and what they mean.

A dataclass around two tensors, not a subclass of torch.Tensor. A subclass would have to answer every operator of torch,
and each answer would be either a silent dequantisation or an error; nothing here needs one: operators take the two
tensors, gradients do not pass through quantised values, and modules keep the two as buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..signature import shape_text
from .layout import (
    ATOM,
    ATOM_BLOCKS,
    ATOM_OUTER,
    AXES,
    BLOCK,
    BLOCK_SIZES,
    DATA_DTYPE,
    GROUP_ALIGNMENT,
    SCALE_DTYPE,
    SCALE_LAYOUTS,
    num_blocks,
    round_up,
    scale_shape,
    swizzled,
    unswizzled,
)
from .reference import dequantized

FORM = ("axis", "block", "scale_layout")


class InMXFP8:
    """Part of a dataclass of `data` and `scale` in 8-bit floats, and of what describes them: what both kinds do alike.

    It copies and pickles; `pass_through_torch` lets it pass what torch does to containers.
    """

    data: Tensor
    scale: Tensor

    def check_parts(self) -> None:
        """Raises TypeError for a part that is no tensor of its dtype, ValueError for two that lie apart."""
        kind = type(self).__name__
        for name, dtype in (("data", DATA_DTYPE), ("scale", SCALE_DTYPE)):
            tensor = getattr(self, name)
            if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
                got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise TypeError(f"{kind}: {name} is {got}; it must be a tensor of {dtype}")
        if self.scale.device != self.data.device:
            raise ValueError(f"{kind}: scale is on {self.scale.device} but data is on {self.data.device}")

    def __getstate__(self) -> dict[str, Any]:
        """As bytes: Python's own pickle cannot restore torch's 8-bit floats."""
        return {**vars(self), "data": self.data.view(torch.uint8), "scale": self.scale.view(torch.uint8)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Checked as any other is, since it may come from a file."""
        typed = {"data": state["data"].view(DATA_DTYPE), "scale": state["scale"].view(SCALE_DTYPE)}
        self.__init__(**{**state, **typed})  # type: ignore[misc]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MXFP8Tensor(InMXFP8):
    """A matrix [T, K], or a batch of them, in MXFP8: float8_e4m3fn elements, one E8M0 scale for 32 along an axis.

    The value of an element is its E4M3 number times 2^(scale byte - 127). Leading dimensions, as of expert weights
    [E, N, K], are matrices of their own.

    Attributes:
        data: [..., T, K] float8_e4m3fn, as the matrix lies, whatever the axis.
        scale: float8_e8m0fnu. Plain: [..., T, ceil(K/32)] by rows, [..., ceil(T/32), K] by columns. Swizzled:
            [..., atoms * 512], atoms of 128 x 4 scales; see `layout.swizzled`.
        axis: along which a scale's elements lie: "row" (along K) or "col" (along T).
        block: "1x32", or "1x128" where the scales of 128 elements are equal.
        scale_layout: "plain" or "swizzled".

    Raises:
        ValueError, TypeError: the parts do not fit together.
    """

    data: Tensor
    scale: Tensor
    axis: str = "row"
    block: str = "1x32"
    scale_layout: str = "plain"

    def __post_init__(self) -> None:
        check_form(type(self).__name__, AXES, **{name: getattr(self, name) for name in FORM})
        self.check_parts()
        if self.data.dim() < 2:
            raise ValueError(f"MXFP8Tensor: data has shape {shape_text(self.data.shape)}; give [..., T, K]")
        *batch, rows, columns = self.data.shape
        wanted = (*batch, *scale_shape(rows, columns, self.axis, self.scale_layout))
        if tuple(self.scale.shape) != wanted:
            raise ValueError(
                f"MXFP8Tensor: scale has shape {shape_text(self.scale.shape)}; {self.scale_layout} scales by "
                f"{self.axis} of data {shape_text(self.data.shape)} are {shape_text(wanted)}"
            )

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Of data and scales together."""
        return self.data.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values. Exact in float32, but that it has no 2^128, to which E4M3 rounds its very largest numbers."""
        plain = self.plain()
        scales = plain.scale.view(torch.uint8)
        if self.axis == "row":
            return dequantized(self.data, scales).to(dtype)
        return dequantized(self.data.mT, scales.mT).mT.contiguous().to(dtype)

    def plain(self) -> MXFP8Tensor:
        """The same with plain scales; itself where they are."""
        if self.scale_layout == "plain":
            return self
        outer, blocks = self._outer_and_blocks()
        scales = unswizzled(self.scale.view(torch.uint8), outer, blocks)
        by_axis = scales if self.axis == "row" else scales.mT
        return self._with(scale=by_axis.contiguous().view(SCALE_DTYPE), scale_layout="plain")

    def swizzled(self) -> MXFP8Tensor:
        """The same with swizzled scales; itself where they are."""
        if self.scale_layout == "swizzled":
            return self
        scales = self.scale.view(torch.uint8)
        return self._with(
            scale=swizzled(scales if self.axis == "row" else scales.mT).view(SCALE_DTYPE), scale_layout="swizzled"
        )

    def group(self, index: int, offs: Tensor | Sequence[int]) -> MXFP8Tensor:
        """The rows of one group, views where the scales allow it.

        By rows, groups lie one behind the other; by columns they begin at multiples of 128 rows (`quantize_mxfp8`).
        Swizzled scales by rows can be cut where a group begins at a multiple of 128 rows, or is empty.

        Args:
            index: of the group.
            offs: each group's end. On the device they are read back, so not under capture.

        Raises:
            IndexError: there is no such group.
            ValueError: a batch of matrices; a group that cannot be cut out, or lies outside of data.
        """
        if self.data.dim() != 2:
            raise ValueError(f"group: data has shape {shape_text(self.shape)}; take one matrix of it, as tensor[0]")
        ends = offs.tolist() if isinstance(offs, Tensor) else list(offs)
        if not 0 <= index < len(ends):
            raise IndexError(f"group: index is {index}, but there are {len(ends)} groups")
        before = ends[index - 1] if index else 0
        begin = before if self.axis == "row" else round_up(before, GROUP_ALIGNMENT)
        end = max(begin, ends[index])
        if not 0 <= begin <= end <= self.shape[0] and end > begin:
            raise ValueError(f"group: group {index} is rows {begin} to {end}, but data has {self.shape[0]}")
        if end == begin:
            begin = end = 0
        return self._with(data=self.data[begin:end], scale=self._scales_of_rows(begin, end))

    def _scales_of_rows(self, begin: int, end: int) -> Tensor:
        if self.scale_layout == "plain":
            if self.axis == "row":
                return self.scale[begin:end]
            return self.scale[begin // BLOCK : num_blocks(end)]
        outer, blocks = self._outer_and_blocks()
        tiles = -(-blocks // ATOM_BLOCKS)
        atoms = self.scale.view(torch.uint8).view(-1, tiles, ATOM)
        if self.axis == "row":
            if begin % ATOM_OUTER:
                raise ValueError(
                    f"group: the group begins at row {begin}, inside a 128-row atom of swizzled scales; call .plain() "
                    "first"
                )
            part = atoms[begin // ATOM_OUTER : -(-end // ATOM_OUTER)]
        else:
            part = atoms[:, begin // GROUP_ALIGNMENT : -(-end // GROUP_ALIGNMENT)]
        return part.reshape(-1).view(SCALE_DTYPE)

    def _outer_and_blocks(self) -> tuple[int, int]:
        rows, columns = self.shape[-2:]
        return (rows, num_blocks(columns)) if self.axis == "row" else (columns, num_blocks(rows))

    def __getitem__(self, index: int) -> MXFP8Tensor:
        """One entry of the first leading dimension, as an expert's matrix of [E, N, K]; a view."""
        if self.data.dim() < 3:
            raise IndexError("MXFP8Tensor: a single matrix has no leading dimension to index; see group()")
        return self._with(data=self.data[index], scale=self.scale[index])

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> MXFP8Tensor:
        """On another device; itself where it is there. The dtype is the format's: `dequantize` gives others."""
        if isinstance(device, torch.dtype):
            raise TypeError(f"to: MXFP8 has no other dtype; call dequantize({device})")
        data = self.data.to(device, non_blocking=non_blocking)
        if data is self.data:
            return self
        return self._with(data=data, scale=self.scale.to(device, non_blocking=non_blocking))

    def cpu(self) -> MXFP8Tensor:
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> MXFP8Tensor:
        return self.to(torch.device("cuda") if device is None else torch.device("cuda", device))

    def clone(self) -> MXFP8Tensor:
        return self._with(data=self.data.clone(), scale=self.scale.clone())

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """What a checkpoint stores: `<prefix>data` and `<prefix>scale`; scales as uint8, which every format knows."""
        return {f"{prefix}data": self.data, f"{prefix}scale": self.scale.view(torch.uint8)}

    def metadata(self, prefix: str = "") -> dict[str, str]:
        """What else a checkpoint stores, as strings: the fields that are no tensors."""
        return {f"{prefix}{name}": getattr(self, name) for name in FORM}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], prefix: str = "") -> MXFP8Tensor:
        """The inverse of `tensors` and `metadata`; other entries are ignored.

        Raises:
            KeyError: an entry is missing.
            ValueError, TypeError: they do not fit together.
        """
        missing = [f"{prefix}{n}" for n in ("data", "scale") if f"{prefix}{n}" not in tensors]
        missing += [f"{prefix}{n}" for n in FORM if f"{prefix}{n}" not in metadata]
        if missing:
            raise KeyError(f"MXFP8Tensor.from_tensors: there is no entry {missing[0]!r}")
        scale = tensors[f"{prefix}scale"]
        if scale.dtype == torch.uint8:
            scale = scale.view(SCALE_DTYPE)
        return cls(tensors[f"{prefix}data"], scale, **{name: metadata[f"{prefix}{name}"] for name in FORM})

    def _with(self, **changes: Any) -> MXFP8Tensor:
        return dataclasses.replace(self, **changes)

    def __repr__(self) -> str:
        form = ", ".join(f"{name}={getattr(self, name)!r}" for name in FORM)
        return f"MXFP8Tensor({shape_text(self.shape)}, {form}, device={str(self.device)!r})"


class MXFP8Copies(NamedTuple):
    """One matrix quantised along both axes, each copy from the original values."""

    row: MXFP8Tensor
    col: MXFP8Tensor


def check_form(op: str, axes: Sequence[str], axis: Any, block: Any, scale_layout: Any) -> None:
    """Raises ValueError for an axis, block or layout that does not exist."""
    choices = (
        ("axis", axis, axes),
        ("block", block, tuple(BLOCK_SIZES)),
        ("scale_layout", scale_layout, SCALE_LAYOUTS),
    )
    for name, got, valid in choices:
        if not isinstance(got, str) or got not in valid:
            raise ValueError(f"{op}: {name} is {got!r}; choose one of {', '.join(valid)}")


def unchecked(data: Any, scale: Any, axis: str, block: str, scale_layout: str) -> MXFP8Tensor:
    """Of parts that fit, as a kernel's results do."""
    result = object.__new__(MXFP8Tensor)
    result.__dict__.update(data=data, scale=scale, axis=axis, block=block, scale_layout=scale_layout)
    return result


def pass_through_torch(
    kind: type, form: Sequence[str], dump: Callable[[Any], Any], load: Callable[[Any], Any], also: Sequence[type] = ()
) -> None:
    """Let objects of an InMXFP8 class, and of others that they hold, pass torch.load(weights_only=True) and pytree
    functions, and so containers of them torch.compile and torch.export.

    Args:
        form: the fields that are no tensors.
        dump, load: of these fields' values, as a tuple, to what JSON knows, and back.
        also: classes that are only to be read from files.
    """

    def flatten(value: Any) -> tuple[list[Any], Any]:
        return [value.data, value.scale], tuple(getattr(value, name) for name in form)

    def flatten_with_keys(value: Any) -> tuple[list[Any], Any]:
        return [(pytree.GetAttrKey(name), getattr(value, name)) for name in ("data", "scale")], flatten(value)[1]

    def unflatten(parts: Any, values: Any) -> Any:
        result: Any = object.__new__(kind)  # unchecked, since pytree functions may have replaced the parts by anything
        result.__dict__.update(zip(("data", "scale", *form), (*parts, *values), strict=True))
        return result

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"glulam.{kind.__name__}",
        to_dumpable_context=dump,
        from_dumpable_context=load,
        flatten_with_keys_fn=flatten_with_keys,
    )
    torch.serialization.add_safe_globals([kind, *also])


pass_through_torch(MXFP8Tensor, FORM, dump=list, load=tuple, also=[MXFP8Copies])
