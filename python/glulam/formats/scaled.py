"""Elements of few bits with scales: what all such tensors share, and scales' bytes as powers of two.

A dataclass around two tensors, not a subclass of torch.Tensor. A subclass would have to answer every operator of torch,
and each answer would be either a silent dequantisation or an error; nothing here needs one: operators take the two
tensors, gradients do not pass through quantised values, and modules keep the two as buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..calls.checks import shape_text

NAMES = ("data", "scale", "global_scale", "row_scale")
"""Names of the fields that are tensors; most formats have the first two, some one of the others."""
SCALE_DTYPE = torch.float8_e8m0fnu
SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What is quantised."""
BLOCK = 32
"""Elements that share a scale in the formats."""
E8M0_INF, E8M0_NAN = 0xFE, 0xFF
F32_MANTISSA_BITS = 23
F32_TWO_TO_MINUS_127 = 0x00400000
F32_NAN = 0x7FC00000
Kind = TypeVar("Kind", bound="Scaled")


def _power(exponent: Tensor) -> Tensor:
    """2^(exponent - 127), float32, of int32 exponents from 0 to 0xFE; NaN for 0xFF."""
    bits = (exponent << F32_MANTISSA_BITS).masked_fill(exponent == 0, F32_TWO_TO_MINUS_127)
    return bits.masked_fill(exponent == E8M0_NAN, F32_NAN).view(torch.float32)


def scales_of(exponents: Tensor) -> Tensor:
    """2^(e - 127) of E8M0 bytes, float32; NaN for 0xFF."""
    return _power(exponents.to(torch.int32))


def multipliers_of(exponents: Tensor) -> Tensor:
    """2^(127 - e) of E8M0 bytes, float32; NaN for 0xFF."""
    wide = exponents.to(torch.int32)
    return _power(torch.where(wide == E8M0_NAN, E8M0_NAN, E8M0_INF - wide))


def bytes_of_floats(part: Tensor) -> Tensor:
    """View 8-bit floats as uint8, and leave other dtypes as they are.

    Python's own pickle cannot restore 8-bit floats, and `copy_` into bytes would convert the numbers, 0.5 to 0.
    """
    return part.view(torch.uint8) if part.itemsize == 1 else part


class Parts(NamedTuple):
    """A weight of E experts: elements, scales, and where a format has such, what all scales of an expert are multiplied
    by, or what they are of a row's.

    `scale`: None of a weight in 16 bits, which is to be prepared.
    """

    data: Any
    scale: Tensor | None = None
    global_scale: Tensor | None = None


class Scaled:
    """A dataclass of `data`, elements of 8 bits or less, `scale`, in some formats `global_scale`, and fields that say
    how they lie: what all share.

    They copy and pickle, and pass torch.load(weights_only=True) and pytree functions, and so containers of them
    torch.compile and torch.export.
    """

    data: Tensor
    scale: Tensor
    parts: ClassVar[Parts]
    reads_as: ClassVar[str]
    """`form_name()`. This and parts are an instance's, but no fields."""
    format: ClassVar[str] = "MXFP8"
    recipe: ClassVar[str] = "mxfp8"
    """The name of one that takes it; `weight_only`: of the one that decodes it for rows in 16 bits, if any does."""
    weight_only: ClassVar[str] = "mxfp8_weight_only"
    data_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float8_e4m3fn,)
    """Of data; the first is what bytes of a file are."""
    scale_dtype: ClassVar[torch.dtype] = SCALE_DTYPE
    names: ClassVar[tuple[str, ...]]
    """The fields that are tensors."""
    form: ClassVar[tuple[str, ...]]
    """The fields that are no tensors."""
    fields: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        annotated = cls.__annotations__
        if "data" not in annotated:  # of several formats
            return
        cls.names = tuple(name for name in NAMES if name in annotated)
        cls.form = tuple(name for name in annotated if name not in NAMES)
        cls.fields = cls.names + cls.form
        torch.serialization.add_safe_globals([cls])
        pytree.register_pytree_node(
            cls,
            cls._flat,
            cls._unflattened,
            serialized_type_name=f"glulam.{cls.__name__}",
            to_dumpable_context=list,
            from_dumpable_context=cls.form_of_json,
            flatten_with_keys_fn=cls._flat_with_keys,
        )

    @classmethod
    def form_of_json(cls, form: list[Any]) -> tuple[Any, ...]:
        """The values of `form` as they were before JSON kept them."""
        return tuple(form)

    def form_name(self) -> str:
        """Return the name of the `form.Form` that reads this tensor without preparation; "" if there is none."""
        return ""

    def note(self) -> None:
        """Keep what calls look at: a property takes them a frame each time."""
        object.__setattr__(self, "parts", Parts(*self._tensors()))
        object.__setattr__(self, "reads_as", self.form_name())

    def _tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.names]

    def in_16_bits(self, name: str) -> str:
        """Return the expression that gives argument `name` in 16 bits."""
        return f"{name}.dequantize(torch.bfloat16)"

    def _flat(self) -> tuple[list[Any], Any]:
        return self._tensors(), tuple(getattr(self, name) for name in self.form)

    def _flat_with_keys(self) -> tuple[list[Any], Any]:
        parts, form = self._flat()
        return [(pytree.GetAttrKey(name), part) for name, part in zip(self.names, parts, strict=True)], form

    @classmethod
    def _unflattened(cls, parts: Any, form: Any) -> Any:
        """Unchecked, since pytree functions may have replaced the parts by anything."""
        return cls.unchecked(*parts, *form)

    @classmethod
    def unchecked(cls, *values: Any) -> Any:
        """Of the values of all fields, in their order, that are known to fit: checks take 3 us."""
        result = object.__new__(cls)
        result.__dict__.update(zip(cls.fields, values, strict=True))
        result.note()
        return result

    def check_parts(self) -> None:
        """Raises TypeError for a part that is no tensor of its dtype, ValueError for two that lie apart."""
        kind = type(self).__name__
        dtypes_of = {
            "data": self.data_dtypes,
            "scale": (self.scale_dtype,),
            "global_scale": (torch.float32,),
            "row_scale": (SCALE_DTYPE,),
        }
        for name in self.names:
            tensor, dtypes = getattr(self, name), dtypes_of[name]
            if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes:
                got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise TypeError(f"{kind}: {name} is {got}; it must be a tensor of {dtypes[0]}")
        for name in self.names[1:]:
            if (device := getattr(self, name).device) != self.data.device:
                raise ValueError(f"{kind}: {name} is on {device} but data is on {self.data.device}")
        self.note()

    def __getstate__(self) -> dict[str, Any]:
        """8-bit floats as bytes: Python's own pickle cannot restore torch's."""
        fields = {name: getattr(self, name) for name in self.fields}
        return fields | {name: bytes_of_floats(t) for name, t in fields.items() if name in NAMES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Checked as any other is, since it may come from a file."""
        data = state["data"]
        typed = data.view(self.data_dtypes[0]) if data.dtype == torch.uint8 else data
        self.__init__(**{**state, "data": typed, "scale": state["scale"].view(self.scale_dtype)})  # type: ignore[misc]

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of all parts together."""
        return sum(part.nbytes for part in self._tensors())

    def to(self: Kind, device: torch.device | str | int, non_blocking: bool = False) -> Kind:
        """On another device; itself where it is there. The dtype is the format's: `dequantize` gives others."""
        if isinstance(device, torch.dtype):
            raise TypeError(f"to: {self.format} has no other dtype; call dequantize({device})")
        moved = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in self.names}
        return self if moved["data"] is self.data else self._with(**moved)

    def _with(self: Kind, **changes: Any) -> Kind:
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def __repr__(self) -> str:
        form = "".join(f"{name}={vars(self)[name]!r}, " for name in self.form if isinstance(vars(self)[name], str))
        return f"{type(self).__name__}({shape_text(self.shape)}, {form}device={str(self.device)!r})"


class Stored(Scaled):
    """One whose fields that are no tensors are strings, as a checkpoint keeps them."""

    def cpu(self: Kind) -> Kind:
        return self.to("cpu")

    def cuda(self: Kind, device: int | None = None) -> Kind:
        return self.to(torch.device("cuda") if device is None else torch.device("cuda", device))

    def clone(self: Kind) -> Kind:
        return self._with(**{name: getattr(self, name).clone() for name in self.names})

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores, `<prefix>data` and so on; E8M0 scales as uint8."""
        parts = {f"{prefix}{name}": getattr(self, name) for name in self.names}
        return {name: part.view(torch.uint8) if part.dtype == SCALE_DTYPE else part for name, part in parts.items()}

    def metadata(self, prefix: str = "") -> dict[str, str]:
        """What else a checkpoint stores, as strings: the fields that are no tensors."""
        return {f"{prefix}{name}": getattr(self, name) for name in self.form}

    @classmethod
    def from_tensors(
        cls: type[Kind], tensors: Mapping[str, Tensor], metadata: Mapping[str, str], prefix: str = ""
    ) -> Kind:
        """The inverse of `tensors` and `metadata`; other entries are ignored.

        Raises:
            KeyError: an entry is missing.
            ValueError, TypeError: they do not fit together.
        """
        given: dict[str, Any] = {"tensors": tensors, "metadata": metadata}
        for argument, value in given.items():
            if not isinstance(value, Mapping):
                kind = type(value).__name__
                raise TypeError(f"{cls.__name__}.from_tensors: {argument} is a {kind}; give a mapping by names")
        for names, entries in ((cls.names, tensors), (cls.form, metadata)):
            for name in names:
                if f"{prefix}{name}" not in entries:
                    raise KeyError(f"{cls.__name__}.from_tensors: there is no entry {prefix + name!r}")
        parts = {name: tensors[f"{prefix}{name}"] for name in cls.names}
        if isinstance(scale := parts["scale"], Tensor) and scale.dtype == torch.uint8 and cls.scale_dtype.itemsize == 1:
            parts["scale"] = scale.view(cls.scale_dtype)
        form = {name: metadata[f"{prefix}{name}"] for name in cls.form}
        return cls(**parts, **form)
