"""The order in which kernels read elements of 4 bits, and bytes of checkpoints in it: int32 words of eight elements.

A block of 32 elements is four words. Word j has, of every eight elements of the block, those at 2j and 2j + 1, which
are one byte of a checkpoint and a register of two bfloat16 numbers in a kernel: bits 15 and 8 to 6 of such a number are
its element's sign and three other bits, the even element's number in the lower half. A word's bits are ordered so that
its four pairs are these, with all other bits of a register masked away (shifts fill with zeros):

    pair 0   word                        pair 2   (word >> 4) ^ (word rotated left by 10)
    pair 1   word << 4                   pair 3   (word >> 4) ^ (word << 6)

Their 32 bits are a linear function, over bits, of the word's, and it has an inverse. That is four shifts and four
logical operations, since one instruction takes the exclusive or and masks it; a search found no such function of three
shifts, nor one of four shifts without the exclusive or.

In the third and fourth of every four blocks of a row, pairs 2 and 3 come before 0 and 1: with that the four threads
which have neighbouring blocks ask for x from banks of their own (`cute_kernels/sm90/mainloop/few_rows.py`).
"""

from __future__ import annotations

import functools
from typing import TypeVar

import torch
from torch import Tensor

from cute_kernels.formats import WORD_ELEMENTS

from .scaled import BLOCK

Bits = TypeVar("Bits", Tensor, int)
WORD_DTYPE = torch.int32
WORD_BITS, WORD_BYTES = 32, WORD_ELEMENTS // 2
PAIRS = WORD_ELEMENTS // 2
BLOCK_WORDS = BLOCK // WORD_ELEMENTS
CHUNK_BYTES = 2**24
"""That are converted together: what they become on the way takes sixteen times as much memory."""


def elements_of(dtype: torch.dtype) -> int:
    """Return how many elements one number of data has: a byte's, or a word's."""
    return WORD_ELEMENTS if dtype == WORD_DTYPE else 2


def words_of(data: Tensor, out: Tensor | None = None) -> Tensor:
    """int32 [..., K/8] of bytes [..., K/2], two elements a byte, the even one in its lower half; K a multiple of 32.

    out: where they are written, contiguous, which may be where the bytes lie.
    """
    *lead, num_bytes = data.shape
    words = torch.empty(*lead, num_bytes // WORD_BYTES, dtype=WORD_DTYPE, device=data.device) if out is None else out
    # Made anew by each call: under a FakeTensorMode they are fake, and kept ones would leave later words unwritten.
    tables = torch.tensor(_tables(), dtype=WORD_DTYPE, device=data.device)
    for source, target in _chunks(data, words):
        pairs = _turned(source.unflatten(-1, (-1, PAIRS, BLOCK_WORDS))).int().unbind(-2)
        found = [table[pair] for table, pair in zip(tables, pairs, strict=True)]
        target.copy_((found[0] ^ found[1] ^ found[2] ^ found[3]).flatten(-2))
    return words


def bytes_of(words: Tensor) -> Tensor:
    """The inverse of `words_of`."""
    *lead, count = words.shape
    data = torch.empty(*lead, count * WORD_BYTES, dtype=torch.uint8, device=words.device)
    for source, target in _chunks(words, data):
        pairs = torch.stack(_pairs(source.unflatten(-1, (-1, BLOCK_WORDS))), dim=-2)
        target.copy_(_turned(pairs.to(torch.uint8)).flatten(-3))
    return data


def _chunks(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Rows of all, some at a time."""
    flat = [tensor.flatten(0, -2) for tensor in tensors]
    rows = max(CHUNK_BYTES // max(flat[0].shape[1] * flat[0].element_size(), 1), 1)
    return list(zip(*(tensor.split(rows) for tensor in flat), strict=True))


def _turned(pairs: Tensor) -> Tensor:
    """[..., blocks, pairs, words] in the order of elements, or of a word's pairs: of every second two blocks others."""
    is_turned = torch.arange(pairs.shape[-3], device=pairs.device) & 2 > 0
    return torch.where(is_turned[:, None, None], pairs.roll(PAIRS // 2, dims=-2), pairs)


def _pairs(words: Bits) -> list[Bits]:
    """Each pair of words int32, as the byte that it is in a checkpoint."""
    down, turned = words >> 4 & 0x0FFFFFFF, words << 10 | words >> 22 & 0x3FF
    return [_byte(bits) for bits in (words, words << 4, down ^ turned, down ^ words << 6)]


def _byte(bits: Bits) -> Bits:
    """Of two bfloat16 numbers' bits."""
    return bits >> 6 & 0x07 | bits >> 12 & 0x08 | bits >> 18 & 0x70 | bits >> 24 & 0x80


@functools.cache
def _tables() -> list[list[int]]:
    """For each pair, the bits of the word that each of its 256 bytes asks for, as int32."""
    rows = []
    for bit in range(WORD_BITS):
        rows.append((sum(byte << 8 * i for i, byte in enumerate(_pairs(1 << bit))), 1 << bit))
    for bit in range(WORD_BITS):  # Gauss-Jordan elimination: row `bit` comes to make that bit of the pairs alone
        pivot = next(i for i in range(bit, WORD_BITS) if rows[i][0] >> bit & 1)
        rows[bit], rows[pivot] = rows[pivot], rows[bit]
        made, word = rows[bit]
        for i, row in enumerate(rows):
            if i != bit and row[0] >> bit & 1:
                rows[i] = row[0] ^ made, row[1] ^ word
    tables = [[0] * 256 for _ in range(PAIRS)]
    for bit, (_, word) in enumerate(rows):
        pair, place = divmod(bit, 8)
        signed = word - (word >> WORD_BITS - 1 << WORD_BITS)
        tables[pair] = [kept ^ signed if byte >> place & 1 else kept for byte, kept in enumerate(tables[pair])]
    return tables
