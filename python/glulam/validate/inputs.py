"""Inputs that expose mistakes.

Neighbouring rows, experts and blocks of the contraction have different scales, rows after the last group are NaN, and
groups have usual and extreme sizes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.formats import MXFP8

TAIL = 13
"""Rows after the last group, in routings that have a tail."""
UNREACHED = 1e4
"""A limit of clamped activations so large that no preactivation reaches it."""


class Routing(NamedTuple):
    """A distribution of rows over experts.

    Attributes:
        name: its name.
        sizes: number of rows of each expert.
        tail: number of rows after the last group.
    """

    name: str
    sizes: tuple[int, ...]
    tail: int = TAIL

    @property
    def rows(self) -> int:
        return sum(self.sizes)

    @property
    def offs(self) -> Tensor:
        return torch.tensor(list(itertools.accumulate(self.sizes)), dtype=torch.int32)


class Size(NamedTuple):
    """Sizes of a function's trials.

    Attributes:
        rows, experts: rows of all groups and E, in most routings.
        kinds: names of the routings to try. Empty: all.
        hidden, inter: H and I.
        in_blocks: H for weights with block scales, a multiple of 32.
        has_odd: True: also try N = 1504, K = 736.
        has_every_pair: True: try every activation and layout with every combination of biases, scales and weights.
            False: only the first activation and layout.
        tokens: numbers of tokens that are routed, sorted, or copied to rows.
        row_width: H of these tokens.
        matrices: shapes of matrices that are quantised.
        streams: for hyper-connections, pairs (dimensions of the tokens, C) of streams [..., n, C].
        has_tail: True: a grouped GEMM has rows after the last group. False: every row belongs to a group.
    """

    rows: int = 300
    experts: int = 8
    kinds: tuple[str, ...] = ()
    hidden: int = 200
    inter: int = 352
    in_blocks: int = 224
    has_odd: bool = True
    has_every_pair: bool = True
    tokens: tuple[int, ...] = (1, 65, 700)
    row_width: int = 264
    matrices: tuple[tuple[int, int], ...] = ((1, 32), (130, 256), (257, 96), (1000, 736))
    streams: tuple[tuple[tuple[int, ...], int], ...] = (
        ((1, 1), 8), ((3, 5), 8), ((2, 61), 736), ((4, 33), 2056), ((300,), 256),
    )  # fmt: skip
    has_tail: bool = True

    @property
    def tail(self) -> int:
        """Rows after the last group."""
        return TAIL if self.has_tail else 0


FULL = Size()
"""Sizes of a full validation.

`tokens`: one; one more than `route` serves in one launch; and more choices than `from_topk` sorts in one launch
(MOST_SORTED). `streams`: one token and unusual numbers of tokens; widths C of one vector of 16 bytes, of no multiple
of any tile, and of more vectors than threads.
"""


def spread(rows: int, experts: int) -> tuple[int, ...]:
    """Return `experts` group sizes, as even as possible, that sum to `rows`."""
    return tuple(rows // experts + (e < rows % experts) for e in range(experts))


def _zipf(rows: int, experts: int) -> tuple[int, ...]:
    """Return group sizes for popularity 1 / rank; the most popular expert is the third."""
    chances = torch.tensor([1 / (1 + (e - 2) % experts) for e in range(experts)])
    generator = torch.Generator().manual_seed(0)
    picks = chances.multinomial(rows, replacement=True, generator=generator)
    return tuple(torch.bincount(picks, minlength=experts).tolist())


def _but(rows: int, experts: int, empty: Sequence[int]) -> tuple[int, ...]:
    """Return even group sizes; experts in `empty` get no rows."""
    sizes = iter(spread(rows, experts - len(empty)))
    return tuple(0 if e in empty else next(sizes) for e in range(experts))


@functools.cache
def routings(size: Size = FULL) -> tuple[Routing, ...]:
    """Return the routings to try.

    The first has groups of many different sizes; the second has as many experts and rows, so a graph can be replayed
    with it.
    """
    rows, experts = size.rows, size.experts
    last = experts - 1
    every = (
        Routing("Zipf", _zipf(rows, experts)),
        Routing("uniform", spread(rows, experts)),
        Routing("one takes all", _but(rows, experts, [e for e in range(experts) if e != experts // 2])),
        Routing("first empty", _but(rows, experts, [0])),
        Routing("middle empty", _but(rows, experts, [1, 2])),
        Routing("last empty", _but(rows, experts, [last])),
        Routing("all empty", (0,) * experts),
        Routing("one row", (*(0,) * last, 1)),
        Routing("no rows", (0,) * experts, tail=0),
        Routing("one expert", (rows,)),
        Routing("512 experts", _zipf(rows, 512)),
    )
    chosen = (routing for routing in every if not size.kinds or routing.name in size.kinds)
    return tuple(routing._replace(tail=min(routing.tail, size.tail)) for routing in chosen)


def total_rows(routing: Routing) -> int:
    """Return T, with the rows after the last group."""
    return routing.rows + routing.tail


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _powers(count: int, most: int, step: int) -> Tensor:
    """Return `count` powers of two within 2^-most .. 2^most; exponents advance by `step`, modulo the range."""
    return torch.exp2(((torch.arange(count) * step) % (2 * most + 1) - most).float())


def rows_of(total: int, columns: int, dtype: torch.dtype, used: int, seed: int = 0) -> Tensor:
    """Return random rows [total, columns], NaN from row `used` on.

    Scales of rows differ by up to 2^4, of blocks of columns by up to 2^2: squared, weighted and summed twice, the
    largest value stays below float16's 65504.
    """
    by_block = _powers(-(-columns // MXFP8.block), 1, 2).repeat_interleave(MXFP8.block)[:columns]
    values = randn(total, columns, seed=seed) * 0.5 * _powers(total, 2, 3)[:, None] * by_block
    values[used:] = math.nan
    return values.to(dtype)


def weights_of(experts: int, rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return random weights [experts, rows, columns]; each expert has another scale than its neighbours."""
    scale = _powers(experts, 1, 2)[:, None, None] / math.sqrt(columns)
    return (randn(experts, rows, columns, seed=seed) * scale).to(dtype)


def scales_of(total: int, used: int, seed: int = 1) -> Tensor:
    """Return random scales, float32 [total], positive; NaN from row `used` on."""
    scales = 0.5 + randn(total, seed=seed).abs()
    scales[used:] = math.nan
    return scales
