"""Windows: memory of one rank that all ranks of its host can access. The symmetric transport writes rows into it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cute_kernels.windows import REGIONS, WORD_BYTES, WORDS

from ..formats.mxfp8 import MXFP8Tensor
from ..formats.mxfp8.layout import DATA_DTYPE, num_blocks
from ..formats.scaled import SCALE_DTYPE
from .tokens import SENT_AS

ALIGNMENT = 256


class Sizes(NamedTuple):
    """The sizes that determine a window's layout.

    Attributes:
        world: W, the number of ranks.
        max_tokens: L, the most tokens of a rank.
        top_k: K, the number of choices of a token.
        hidden_size: H.
        dtype: dtype of tokens.
    """

    world: int
    max_tokens: int
    top_k: int
    hidden_size: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.world * self.max_tokens

    def regions(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return {region's name: (dtype, shape)} of a window's regions, in the order of `windows.REGIONS`."""
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "rows": (self.dtype, (self.rows, self.hidden_size)),
            "scales": (torch.uint8, (self.rows, num_blocks(self.hidden_size))),
            "ids": (torch.int32, (self.rows, self.top_k)),
            "weights": (torch.float32, (self.rows, self.top_k)),
            "sums": (self.dtype, (self.rows + 1, self.hidden_size)),
            "weight_gradients": (torch.float32, (self.rows * self.top_k + 1,)),
            "words": (torch.int64, (len(WORDS), self.world, WORD_BYTES // 8)),
        }
        return {name: shapes[name] for name in REGIONS}

    def offsets(self) -> dict[str, int]:
        """Return {region's name: the byte at which it begins}; the entry "" is the size of the window in bytes."""
        found, end = {}, 0
        for name, (dtype, shape) in self.regions().items():
            found[name] = end
            end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return {**found, "": end}


class Window:
    """A rank's own window, memory that all ranks of the host can access, divided into the regions of `windows.REGIONS`.

    Args:
        buffer: uint8, `sizes.offsets()[""]` bytes.
        bases: the address of each rank's buffer, this rank's included.
        sizes: the numbers of ranks, tokens and choices from which the regions' shapes follow.

    Attributes:
        rows, scales, ids, weights, sums, weight_gradients, words: views of the regions.
        in_mxfp8: `rows` and `scales` viewed as MXFP8 tokens [W L, H]: W ranks, at most L tokens of each, H columns.
        addresses: int64 [number of regions, W], the address of each region on each rank.
    """

    def __init__(self, buffer: Tensor, bases: list[int], sizes: Sizes) -> None:
        offsets = sizes.offsets()
        for name, (dtype, shape) in sizes.regions().items():
            size = math.prod(shape) * dtype.itemsize
            setattr(self, name, buffer[offsets[name] : offsets[name] + size].view(dtype).view(shape))
        shape = sizes.rows, sizes.hidden_size
        data = self.rows.view(DATA_DTYPE).flatten()[: math.prod(shape)].view(shape)
        self.in_mxfp8 = MXFP8Tensor.unchecked(data, self.scales.view(SCALE_DTYPE), *SENT_AS)
        self.addresses = torch.tensor(
            [[base + offsets[name] for base in bases] for name in REGIONS], dtype=torch.int64, device=buffer.device
        )
        self.words.zero_()
        self.ids.fill_(-1)
        self.sums[-1:].fill_(math.nan)
        self.weight_gradients[-1:].fill_(math.nan)

    rows: Tensor
    scales: Tensor
    in_mxfp8: MXFP8Tensor
    ids: Tensor
    weights: Tensor
    sums: Tensor
    weight_gradients: Tensor
    words: Tensor


def shared_window(group: Any, sizes: Sizes, device: torch.device) -> tuple[Window, Any]:
    """Allocate this rank's window, and exchange addresses with all ranks. Every rank must call this.

    Returns:
        (the window, objects that keep its memory alive).
    """
    size = sizes.offsets()[""]
    if sizes.world == 1:
        buffer, held = torch.empty(size, dtype=torch.uint8, device=device), None
        bases = [buffer.data_ptr()]
    else:
        import torch.distributed._symmetric_memory as symmetric

        buffer = symmetric.empty(size, dtype=torch.uint8, device=device)
        held = symmetric.rendezvous(buffer, group)
        bases = list(held.buffer_ptrs)
    window = Window(buffer, bases, sizes)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # no rank may write a word before every window's words are zero
    return window, (buffer, held)
