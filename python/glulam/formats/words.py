"""Conversion between a checkpoint's bytes of 4-bit elements and the int32 words of eight elements that kernels read.

The order of bits in a word is chosen so that a kernel decodes it to bfloat16 with few instructions.

A block of 32 elements is four words. Word j holds elements 2j and 2j + 1 of every eight elements of the block. Such a
pair of elements is one byte of a checkpoint. In a kernel it becomes one register of two bfloat16 numbers, the even
element in the lower half. Bit 15 of a bfloat16 number is the element's sign, and bits 8 to 6 are its other three bits.
The registers of a word's four pairs are these expressions, after all other bits of a register are masked away (shifts
fill with zeros):

    pair 0   word                        pair 2   (word >> 4) ^ (word rotated left by 10)
    pair 1   word << 4                   pair 3   (word >> 4) ^ (word << 6)

The 32 bits of the pairs are a linear, invertible function (over GF(2)) of the word's bits, so a word holds all four
pairs. Decoding takes four shifts and four logical operations, since one instruction does the exclusive or and the mask.
A search found no such function with three shifts, nor with four shifts and no exclusive or.

In the third and fourth of every four blocks of a row, pairs 2 and 3 come before pairs 0 and 1. With this order the four
threads that hold neighbouring blocks read x from different banks (`cute_kernels/sm90/mainloop/few_rows.py`).
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
"""Bytes that are converted together. The limit is small because intermediate tensors take 16 times this memory."""


def elements_of(dtype: torch.dtype) -> int:
    """Return the number of 4-bit elements in one entry of data of this dtype: 2 in a byte, 8 in an int32 word."""
    return WORD_ELEMENTS if dtype == WORD_DTYPE else 2


def words_of(data: Tensor, out: Tensor | None = None) -> Tensor:
    """Reorder 4-bit elements from a checkpoint's bytes [..., K/2] to words, int32 [..., K/8]. K is a multiple of 32.

    A word holds eight elements in the order that the top of this file describes.

    Args:
        data: uint8, two elements a byte, the even element in the lower half.
        out: contiguous tensor for the words; it may share the memory of the bytes. None: a new one.
    """
    *lead, num_bytes = data.shape
    words = torch.empty(*lead, num_bytes // WORD_BYTES, dtype=WORD_DTYPE, device=data.device) if out is None else out
    # Not cached: tables made under a FakeTensorMode are fake, and would leave the words of later calls unwritten.
    tables = torch.tensor(_tables(), dtype=WORD_DTYPE, device=data.device)
    for source, target in _chunks(data, words):
        pairs = _turned(source.unflatten(-1, (-1, PAIRS, BLOCK_WORDS))).int().unbind(-2)
        found = [table[pair] for table, pair in zip(tables, pairs, strict=True)]
        target.copy_((found[0] ^ found[1] ^ found[2] ^ found[3]).flatten(-2))
    return words


def bytes_of(words: Tensor) -> Tensor:
    """Reorder 4-bit elements from int32 words [..., K/8] to a checkpoint's bytes, a new uint8 tensor [..., K/2].

    This is the inverse of `words_of`: a byte holds two elements, the even element in the lower half.
    """
    *lead, count = words.shape
    data = torch.empty(*lead, count * WORD_BYTES, dtype=torch.uint8, device=words.device)
    for source, target in _chunks(words, data):
        pairs = torch.stack(_pairs(source.unflatten(-1, (-1, BLOCK_WORDS))), dim=-2)
        target.copy_(_turned(pairs.to(torch.uint8)).flatten(-3))
    return data


def _chunks(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Split the rows of all tensors into the same chunks (ranges of rows) of about CHUNK_BYTES; return views."""
    flat = [tensor.flatten(0, -2) for tensor in tensors]
    rows = max(CHUNK_BYTES // max(flat[0].shape[1] * flat[0].element_size(), 1), 1)
    return list(zip(*(tensor.split(rows) for tensor in flat), strict=True))


def _turned(pairs: Tensor) -> Tensor:
    """Swap pairs 0, 1 with pairs 2, 3 in the third and fourth of every four blocks of [..., blocks, pairs, words]."""
    is_turned = torch.arange(pairs.shape[-3], device=pairs.device) & 2 > 0
    return torch.where(is_turned[:, None, None], pairs.roll(PAIRS // 2, dims=-2), pairs)


def _pairs(words: Bits) -> list[Bits]:
    """Return the four pairs of elements in int32 words; each pair is a byte, as in a checkpoint."""
    down, turned = words >> 4 & 0x0FFFFFFF, words << 10 | words >> 22 & 0x3FF
    return [_byte(bits) for bits in (words, words << 4, down ^ turned, down ^ words << 6)]


def _byte(bits: Bits) -> Bits:
    """Return the byte (pair of elements, as in a checkpoint) of a register of two bfloat16 numbers."""
    return bits >> 6 & 0x07 | bits >> 12 & 0x08 | bits >> 18 & 0x70 | bits >> 24 & 0x80


@functools.cache
def _tables() -> list[list[int]]:
    """Return four tables, one for each pair of elements in a word, that map the pair's byte in a checkpoint (0 to 255)
    to the bits of the word (int32) that hold the pair.

    The word is the exclusive or of the four pairs' entries, since it is a linear function of the bytes over GF(2).
    """
    rows = []
    for bit in range(WORD_BITS):
        rows.append((sum(byte << 8 * i for i, byte in enumerate(_pairs(1 << bit))), 1 << bit))
    for bit in range(WORD_BITS):  # Gauss-Jordan elimination: afterwards row `bit` sets only that bit of the pairs
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
