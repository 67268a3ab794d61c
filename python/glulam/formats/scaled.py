"""Base classes of quantised tensors (elements of few bits with scales), and the decoding of E8M0 scale bytes.

A quantised tensor is a dataclass around two or three tensors, not a subclass of torch.Tensor. A subclass would have to
answer every operator of torch, by a silent dequantisation or by an error. Nothing here needs that: operators take the
tensors, gradients do not pass through quantised values, and modules keep the tensors as buffers.
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
"""Names of fields that are tensors. All formats have data and scale; some also have one of the other two."""
SCALE_DTYPE = torch.float8_e8m0fnu
SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that can be quantised."""
BLOCK = 32
"""Elements that share a scale in the MX formats."""
E8M0_INF, E8M0_NAN = 0xFE, 0xFF
F32_MANTISSA_BITS = 23
F32_TWO_TO_MINUS_127 = 0x00400000
F32_NAN = 0x7FC00000
Kind = TypeVar("Kind", bound="Scaled")


def _power(exponent: Tensor) -> Tensor:
    """Return 2^(exponent - 127), float32, for int32 exponents from 0 to 0xFE; NaN for 0xFF."""
    bits = (exponent << F32_MANTISSA_BITS).masked_fill(exponent == 0, F32_TWO_TO_MINUS_127)
    return bits.masked_fill(exponent == E8M0_NAN, F32_NAN).view(torch.float32)


def scales_of(exponents: Tensor) -> Tensor:
    """Return the scales 2^(e - 127), float32, of E8M0 bytes e; NaN for 0xFF."""
    return _power(exponents.to(torch.int32))


def multipliers_of(exponents: Tensor) -> Tensor:
    """Return the reciprocal scales 2^(127 - e), float32, of E8M0 bytes e; NaN for 0xFF."""
    wide = exponents.to(torch.int32)
    return _power(torch.where(wide == E8M0_NAN, E8M0_NAN, E8M0_INF - wide))


def bytes_of_floats(part: Tensor) -> Tensor:
    """View 8-bit floats as uint8; return tensors of wider dtypes unchanged.

    Why: Python's pickle cannot restore 8-bit floats, and `copy_` into uint8 would convert the numbers (0.5 to 0).
    """
    return part.view(torch.uint8) if part.itemsize == 1 else part


class Parts(NamedTuple):
    """The tensors of a weight of E experts, quantised or not, as operators pass them to kernels.

    Attributes:
        data: quantised elements; or a weight in 16 bits, [E, N, K] or a list of E [N, K], that must still be prepared
            (converted to a kernel's layout).
        scale: scales of blocks or rows; None: the weight is in 16 bits.
        global_scale: the third tensor, if the format has one: global scales of experts, or a power of two for each row.
    """

    data: Any
    scale: Tensor | None = None
    global_scale: Tensor | None = None


class Scaled:
    """Base of the classes of quantised tensors of all formats, such as MXFP8Tensor.

    Subclasses are dataclasses with the fields `data` (elements of 8 bits or less), `scale`, in some formats a third
    tensor, and fields that describe the layout. Instances can be copied and pickled, and work with
    torch.load(weights_only=True) and with torch's pytree functions. So containers of instances pass torch.compile and
    torch.export.
    """

    data: Tensor
    scale: Tensor
    parts: ClassVar[Parts]
    """The tensors of an instance. `parts` and `reads_as` are attributes of instances, but not dataclass fields."""
    reads_as: ClassVar[str]
    """The result of `form_name()`."""
    format: ClassVar[str] = "MXFP8"
    recipe: ClassVar[str] = "mxfp8"
    """Name of a recipe of grouped_mlp that takes weights of this class."""
    weight_only: ClassVar[str] = "mxfp8_weight_only"
    """Name of the weight-only recipe by which grouped_mm multiplies with weights of this class."""
    data_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float8_e4m3fn,)
    """The dtypes that data may have. Bytes (uint8) from a file are viewed as the first of them."""
    scale_dtype: ClassVar[torch.dtype] = SCALE_DTYPE
    names: ClassVar[tuple[str, ...]]
    """Names of the fields that are tensors."""
    form: ClassVar[tuple[str, ...]]
    """Names of the fields that are not tensors."""
    fields: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        annotated = cls.__annotations__
        if "data" not in annotated:  # a base class of several formats
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
        """Restore the values of the non-tensor fields from `form`, their JSON in a program of torch.export."""
        return tuple(form)

    def form_name(self) -> str:
        """Return the name of the `form.Form` (layout) in which kernels can read this tensor without preparation.

        "": no kernel reads it unprepared.
        """
        return ""

    def note(self) -> None:
        """Store `parts` and `reads_as`, which every call reads; properties would cost a Python frame each time."""
        object.__setattr__(self, "parts", Parts(*self._tensors()))
        object.__setattr__(self, "reads_as", self.form_name())

    def _tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.names]

    def in_16_bits(self, name: str) -> str:
        """Return, for error messages, a Python expression that dequantises the argument `name` to 16 bits."""
        return f"{name}.dequantize(torch.bfloat16)"

    def _flat(self) -> tuple[list[Any], Any]:
        return self._tensors(), tuple(getattr(self, name) for name in self.form)

    def _flat_with_keys(self) -> tuple[list[Any], Any]:
        parts, form = self._flat()
        return [(pytree.GetAttrKey(name), part) for name, part in zip(self.names, parts, strict=True)], form

    @classmethod
    def _unflattened(cls, parts: Any, form: Any) -> Any:
        """Rebuild an instance for pytree functions, without checks: the parts may have been replaced by any objects.

        Args:
            parts: the values of the tensor fields.
            form: the values of all other fields.
        """
        return cls.unchecked(*parts, *form)

    @classmethod
    def unchecked(cls, *values: Any) -> Any:
        """Make an instance from the values of all fields, in order, without checks, which would take 3 us."""
        result = object.__new__(cls)
        result.__dict__.update(zip(cls.fields, values, strict=True))
        result.note()
        return result

    def check_parts(self) -> None:
        """Check dtypes and devices of all tensors, and store `parts` and `reads_as`.

        Raises:
            TypeError: a field is not a tensor of its dtype.
            ValueError: two tensors are on different devices.
        """
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
        """Return the fields with 8-bit floats as bytes, since Python's pickle cannot restore torch's 8-bit floats."""
        fields = {name: getattr(self, name) for name in self.fields}
        return fields | {name: bytes_of_floats(t) for name, t in fields.items() if name in NAMES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the fields with all checks, since the state may come from a file."""
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
        """Total bytes of all parts."""
        return sum(part.nbytes for part in self._tensors())

    def to(self: Kind, device: torch.device | str | int, non_blocking: bool = False) -> Kind:
        """Return this tensor on a device: itself if it is there already. For another dtype call `dequantize`."""
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
    """Base of quantised tensors that checkpoints can store: all fields that are not tensors are strings."""

    def cpu(self: Kind) -> Kind:
        return self.to("cpu")

    def cuda(self: Kind, device: int | None = None) -> Kind:
        return self.to(torch.device("cuda") if device is None else torch.device("cuda", device))

    def clone(self: Kind) -> Kind:
        return self._with(**{name: getattr(self, name).clone() for name in self.names})

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the tensors for a checkpoint: {"<prefix>data": ..., "<prefix>scale": ...}; E8M0 scales as uint8."""
        parts = {f"{prefix}{name}": getattr(self, name) for name in self.names}
        return {name: part.view(torch.uint8) if part.dtype == SCALE_DTYPE else part for name, part in parts.items()}

    def metadata(self, prefix: str = "") -> dict[str, str]:
        """Return the non-tensor fields for a checkpoint, {"<prefix><field>": string}; store them besides `tensors`."""
        return {f"{prefix}{name}": getattr(self, name) for name in self.form}

    @classmethod
    def from_tensors(
        cls: type[Kind], tensors: Mapping[str, Tensor], metadata: Mapping[str, str], prefix: str = ""
    ) -> Kind:
        """Restore an instance from a checkpoint's `tensors` and `metadata`; other entries are ignored.

        Args:
            tensors, metadata: mappings with the results of the methods `tensors` and `metadata`.
            prefix: the prefix that was given to these methods.

        Raises:
            KeyError: an entry is missing.
            ValueError, TypeError: the entries do not fit together.
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
