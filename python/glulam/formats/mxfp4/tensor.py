"""MXFP4Tensor: weights as checkpoints of gpt-oss and DeepSeek ship them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ...calls.checks import shape_text
from ..scaled import BLOCK, SCALE_DTYPE, Stored
from .codec import values_of
from .words import WORD_DTYPE, bytes_of, elements_of, words_of

BLOCK_BYTES = BLOCK // 2


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MXFP4Tensor(Stored):
    """A matrix [N, K], or a batch of them, in MXFP4: E2M1 elements, one E8M0 scale for 32 along a row.

    The value of an element is its E2M1 number times 2^(scale byte - 127); a scale byte of 255 is NaN. Leading
    dimensions, as of expert weights [E, N, K], are matrices of their own.

    Attributes:
        data: [..., N, K/2] uint8, two elements a byte, the even one in its lower half; once it is prepared,
            [..., N, K/8] int32, words as kernels read them (`words.py`).
        scale: [..., N, K/32] float8_e8m0fnu; uint8 is taken for it.

    Raises:
        ValueError, TypeError: the parts do not fit together.
    """

    data: Tensor
    scale: Tensor

    format = "MXFP4"
    recipe = "mxfp4_weight_only"
    data_dtypes = (torch.uint8, WORD_DTYPE)

    def __post_init__(self) -> None:
        if isinstance(self.scale, Tensor) and self.scale.dtype == torch.uint8:
            object.__setattr__(self, "scale", self.scale.view(SCALE_DTYPE))
        self.check_parts()
        if self.data.dim() < 2:
            raise ValueError(f"MXFP4Tensor: data has shape {shape_text(self.data.shape)}; give [..., N, K/2]")
        *lead, k = self.shape
        if k % BLOCK:
            raise ValueError(
                f"MXFP4Tensor: data has shape {shape_text(self.data.shape)}, so K = {k}; it must be a multiple of "
                f"{BLOCK}, the elements of a scale"
            )
        wanted = (*lead, k // BLOCK)
        if tuple(self.scale.shape) != wanted:
            raise ValueError(
                f"MXFP4Tensor: scale has shape {shape_text(self.scale.shape)}; the scales of data "
                f"{shape_text(self.data.shape)} are {shape_text(wanted)}"
            )

    @classmethod
    def from_blocks(cls, blocks: Tensor, scales: Tensor) -> MXFP4Tensor:
        """A view of what gpt-oss's checkpoints hold, without a copy.

        Args:
            blocks: [..., N, K/32, 16] uint8, the last two dimensions contiguous.
            scales: [..., N, K/32] uint8 or float8_e8m0fnu.

        Raises:
            ValueError, TypeError: they do not fit together, or blocks cannot be viewed as rows.
        """
        if not isinstance(blocks, Tensor) or blocks.dim() < 3 or blocks.shape[-1] != BLOCK_BYTES:
            got = shape_text(blocks.shape) if isinstance(blocks, Tensor) else type(blocks).__name__
            raise ValueError(f"MXFP4Tensor.from_blocks: blocks is {got}; give [..., N, K/32, {BLOCK_BYTES}]")
        if blocks.stride(-1) != 1 or (blocks.shape[-2] > 1 and blocks.stride(-2) != BLOCK_BYTES):
            raise ValueError("MXFP4Tensor.from_blocks: blocks of a row do not lie together; give blocks.contiguous()")
        return cls(blocks.flatten(-2), scales)

    def form_name(self) -> str:
        return "mxfp4"

    @property
    def shape(self) -> torch.Size:
        """That of the elements."""
        *lead, columns = self.data.shape
        return torch.Size((*lead, columns * elements_of(self.data.dtype)))

    @property
    def is_prepared(self) -> bool:
        """Whether data are words, which kernels read."""
        return self.data.dtype == WORD_DTYPE

    def prepare_(self) -> MXFP4Tensor:
        """Bring data into the order in which kernels read it, where it lies; nothing where it is. Returns self.

        Operators take a tensor in either order, but of one that is not prepared they make and keep a prepared copy.
        Other views of the same memory, as blocks of a checkpoint or a slice, are not told: their values change.

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
        """What a checkpoint stores: `<prefix>data`, as bytes, of prepared ones a copy, and `<prefix>scale`, uint8."""
        stored = self._with(data=bytes_of(self.data)) if self.is_prepared else self
        return super(MXFP4Tensor, stored).tensors(prefix)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values: exact in float32 and bfloat16, but for those that their range cannot hold."""
        data = bytes_of(self.data) if self.is_prepared else self.data
        return values_of(data, self.scale.view(torch.uint8)).to(dtype)

    def __getitem__(self, index: int | slice) -> MXFP4Tensor:
        """Entries of the first leading dimension, as an expert's matrix of [E, N, K], or rows of a matrix; a view."""
        if isinstance(index, int) and self.data.dim() < 3:
            raise IndexError("MXFP4Tensor: a single matrix has no leading dimension to index; slice its rows")
        return self._with(data=self.data[index], scale=self.scale[index])
