"""Base class of tensors of 4-bit elements, stored as the bytes of checkpoints or as the int32 words of `words.py`."""

from __future__ import annotations

from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from ..calls.checks import shape_text
from .scaled import Stored
from .words import WORD_DTYPE, bytes_of, elements_of, words_of

Kind = TypeVar("Kind", bound="FourBits")


class FourBits(Stored):
    """Base of the classes of 4-bit tensors: E2M1 elements, two a byte, with a scale for each block of a row.

    A tensor is a matrix [N, K], or a batch of matrices.
    """

    data_dtypes = (torch.uint8, WORD_DTYPE)
    block: ClassVar[int]
    """Elements of a row that share a scale."""
    multiple: ClassVar[int] = 32
    """K must be a multiple of this: rows hold whole blocks and whole words."""

    def __post_init__(self) -> None:
        if isinstance(self.scale, Tensor) and self.scale.dtype == torch.uint8:
            object.__setattr__(self, "scale", self.scale.view(self.scale_dtype))
        self.check_parts()
        self._check_shapes()

    def _check_shapes(self) -> None:
        """Raise ValueError if the shapes of data and scales do not fit together."""
        kind = type(self).__name__
        if self.data.dim() < 2:
            raise ValueError(f"{kind}: data has shape {shape_text(self.data.shape)}; give [..., N, K/2]")
        *lead, k = self.shape
        if k % self.multiple:
            raise ValueError(
                f"{kind}: data has shape {shape_text(self.data.shape)}, so K = {k}; it must be a multiple of "
                f"{self.multiple}: pad the matrix with zeros before it is quantised"
            )
        wanted = (*lead, k // self.block)
        if tuple(self.scale.shape) != wanted:
            raise ValueError(
                f"{kind}: scale has shape {shape_text(self.scale.shape)}; the scales of data "
                f"{shape_text(self.data.shape)} are {shape_text(wanted)}"
            )

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix of elements, [..., N, K]."""
        *lead, columns = self.data.shape
        return torch.Size((*lead, columns * elements_of(self.data.dtype)))

    @property
    def is_prepared(self) -> bool:
        """True if data are int32 words in the order that kernels read; False if they are a checkpoint's bytes."""
        return self.data.dtype == WORD_DTYPE

    def prepare_(self: Kind) -> Kind:
        """Reorder data in place into the words that kernels read, unless it is prepared already. Returns self.

        Operators take a tensor in either order, but for an unprepared tensor they make and keep a prepared copy, which
        takes as much memory again. Other tensors in the same memory, such as a checkpoint's blocks or a slice, still
        read it in the old order, so their values become wrong.

        Raises:
            ValueError: data is not contiguous.
        """
        if not self.is_prepared:
            if not self.data.is_contiguous() or self.data.storage_offset() % WORD_DTYPE.itemsize:
                raise ValueError(f"prepare_: the data of {self!r} are not contiguous words; give clone()")
            words = self.data.view(WORD_DTYPE)
            object.__setattr__(self, "data", words_of(self.data, out=words))
            self.note()
        return self

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores, by name. Data is stored as bytes; data in words is converted.

        prefix: the beginning of each name.
        """
        stored = self._with(data=self.bytes) if self.is_prepared else self
        return super(FourBits, stored).tensors(prefix)

    @property
    def bytes(self) -> Tensor:
        """Data in the byte order of checkpoints; a copy if the tensor is prepared."""
        return bytes_of(self.data) if self.is_prepared else self.data

    def __getitem__(self: Kind, index: int | slice) -> Kind:
        """Return a view of some entries of the first dimension: experts of [E, N, K], or a slice of rows of [N, K]."""
        if isinstance(index, int) and self.data.dim() < 3:
            raise IndexError(
                f"{type(self).__name__}: a single matrix has no leading dimension to index; slice its rows"
            )
        return self._with(data=self.data[index], scale=self.scale[index], **self.others_at(index))

    def others_at(self, index: int | slice) -> dict[str, Tensor]:
        """Return the fields of `self[index]` other than data and scale."""
        return {}
