"""Calls of operators whose launches are recorded for mutants: small, but such that kernels use all their features.

Rings wrap around. There are more groups than lanes in a warp, some without rows; ragged tails of every kind; NaN after
the last group.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from support.fake_gpu import reference

import glulam

from .calls import F32, Inputs

SIZES = (19, 0, 5)
"""Rows of each expert: more than a tile of 16, none, and less than a tile."""
FEW_ROWS = (19, 0, 5, 33, 3, 17, 2, 9)
"""Rows of each expert, for kernels that pass tiles through a ring: enough tiles to fill the ring more than once."""


def spread(rows: dict[int, int]) -> tuple[int, ...]:
    """Return group sizes from `rows`, rows by expert; experts that are not listed have none."""
    return tuple(rows.get(expert, 0) for expert in range(max(rows) + 1))


# Experts of each 32, whose rows a warp adds up, that tell its steps apart: steps too short, or a lane too few.
SMALL = spread({0: 3, 1: 17, 2: 20, 4: 1, 8: 2, 16: 2, 21: 5, 31: 2, 32: 33, 33: 1, 34: 9, 36: 7, 40: 1, 48: 2, 53: 3,
                96: 18, 98: 5})  # fmt: skip
"""Few rows in more groups than three times the lanes of a warp; in some stretches of 32 groups none has rows."""
MANY = spread({0: 40, 1: 390, 2: 170, 4: 75, 8: 97, 16: 17, 21: 1, 28: 200, 31: 161, 32: 163, 33: 34, 34: 170, 36: 3,
               40: 1, 48: 161, 53: 2})  # fmt: skip
"""More groups than a warp has lanes, of one to seven k-tiles of 64 rows.

Some last k-tiles are more than half full, some less.
"""


def offs_of(given: Inputs, sizes: tuple[int, ...]) -> torch.Tensor:
    return given.given(np.cumsum(sizes), torch.int32)


def rows_of(given: Inputs, sizes: tuple[int, ...], columns: int) -> torch.Tensor:
    """Return random rows for all groups, and 3 rows of NaN after the last group."""
    x = given.normal(sum(sizes) + 3, columns)
    x[sum(sizes) :] = torch.nan
    return x


def indices(given: Inputs, count: int, of: int) -> torch.Tensor:
    """Return indices below `of`; half are the last row, after which a read of too many columns is a fault."""
    return torch.where(given.order(count, 2) == 0, given.order(count, of), of - 1).int()


def mxfp4(given: Inputs, experts: int, n: int, k: int) -> Any:
    """Return MXFP4 weights with ordinary block scales and, in some rows, one block of each special scale."""
    with reference():
        exponents = given.order(n, 21).view(-1, 1) - 8
        exponents[64:].clamp_(max=0)  # kernels take other ways where all scales are small
        w = glulam.quantize_mxfp4(given.normal(experts, n, k) * 2.0**exponents)
    row, scale = torch.arange(54), w.scale.view(torch.uint8)
    block, turn = row % (k // 32), row // (k // 32)
    scale[:, 8 + row, block] = torch.tensor(SCALES, dtype=torch.uint8)[(block + turn) % len(SCALES)]
    scale[:, 63], w.data.view(torch.uint8)[:, 63] = 252, 0  # a zero must stay one
    return w


SCALES = (0, 1, 252, 253, 254, 255)
"""E8M0 scale bytes: the two least, the largest with which BF16 holds a weight, two larger ones, and NaN."""


# grouped_mm


def mm(given: Inputs, sizes: tuple[int, ...] = SIZES, n: int = 136, k: int = 264) -> Any:
    x, w = rows_of(given, sizes, k), given.normal(len(sizes), n, k)
    options = {"bias": given.normal(len(sizes), n), "bias_scale": given.normal(len(x), dtype=F32)}
    return glulam.grouped_mm(x, w, offs=offs_of(given, sizes), **options)


def mm_of_three_columns(given: Inputs) -> Any:
    """Call with odd numbers of row tiles and weight tiles, and five k-tiles."""
    return mm(given, (300, 0, 250, 20), 264, 264)


def mm_of_listed_experts(given: Inputs) -> Any:
    sizes = spread({0: 40, 1: 150, 2: 20, 4: 129, 8: 1, 16: 3, 32: 70, 33: 9, 34: 2, 36: 5, 40: 1, 48: 7})
    x, w = rows_of(given, sizes, 200), [given.normal(136, 200) for _ in sizes]
    return glulam.grouped_mm(x, w, splits=given.given(sizes, torch.int64))


def mm_of_many_experts(given: Inputs) -> Any:
    """Call with rows by index, and more experts than lanes in a warp."""
    x, w = given.normal(50, 136), [given.normal(72, 136) for _ in SMALL]
    splits, rows = given.given(SMALL, torch.int64), indices(given, sum(SMALL) + 3, 50)
    return glulam.grouped_mm(x, w, splits=splits, rows=rows)


def mm_by_tickets(given: Inputs) -> Any:
    """Call with rows by index, so many columns that clusters draw tickets, and groups of few and of many rows.

    A thread copies up to eight rows, which are 4 apart. The groups contain its first row, its first two rows, up to all
    eight.
    """
    many, few = {1: 140, 8: 94, 32: 70, 34: 140, 40: 66, 48: 66}, {0: 20, 2: 5, 4: 55, 16: 15, 33: 27, 36: 3, 53: 2}
    sizes = spread({**many, **few})
    x, w = given.normal(70, 840), given.normal(len(sizes), 136, 840)
    rows, bias = given.order(sum(sizes) + 3, 70), given.normal(len(sizes), 136)
    return glulam.grouped_mm(x, w, splits=given.given(sizes, torch.int32), rows=rows, bias=bias)


def mm_of_two_tiles(given: Inputs, k: int = 64) -> Any:
    """Call with one tile for each MMA warpgroup of a cluster, and no tile for another cluster."""
    return mm(given, (50, 0, 19), 64, k)


mm_of_two_k_tiles, mm_of_three_k_tiles = partial(mm_of_two_tiles, k=72), partial(mm_of_two_tiles, k=136)


EACH_COUNT = tuple(range(1, 64, 4))
"""Rows of each expert.

A thread copies rows that are 4 apart; the groups give it one row, two rows, up to all 16.
"""


def mm_by_index(given: Inputs, k: int = 256) -> Any:
    """Call with rows by index.

    By default there are four k-tiles, which a thread copies together; another k gives another number.
    """
    x, w, rows = given.normal(50, k), given.normal(len(EACH_COUNT), 72, k), indices(given, sum(EACH_COUNT), 50)
    return glulam.grouped_mm(x, w, offs=offs_of(given, EACH_COUNT), rows=rows)


def mm_of_bands(given: Inputs, rows: int = 2310, k: int = 64) -> Any:
    """Call with so many row tiles that the scheduler walks them in two bands."""
    return mm(given, (rows,), 136, k)


def mm_mxfp4(given: Inputs, sizes: tuple[int, ...] = SIZES, n: int = 152, k: int = 288) -> Any:
    x, w = rows_of(given, sizes, k), mxfp4(given, len(sizes), n, k)
    options = {"bias": given.normal(len(sizes), n), "bias_scale": given.normal(len(x), dtype=F32)}
    return glulam.grouped_mm(x, w, offs=offs_of(given, sizes), **options)


def mm_mxfp4_of_many_tiles(given: Inputs) -> Any:
    return mm_mxfp4(given, FEW_ROWS[:5])


def mm_mxfp4_of_many_experts(given: Inputs) -> Any:
    """Call with whole k-tiles, for which kernels may tell L2 that weights are read once."""
    x, w = rows_of(given, SMALL, 256), mxfp4(given, len(SMALL), 72, 256)
    return glulam.grouped_mm(x, w, splits=given.given(SMALL, torch.int64))


def mm_mxfp4_of_many_columns(given: Inputs) -> Any:
    """Call with one tile of more k-tiles than the ring has stages; other CTAs have no tile."""
    splits = given.given([0, 5], torch.int32)
    return glulam.grouped_mm(rows_of(given, (5,), 1056), mxfp4(given, 2, 64, 1056), splits=splits)


def mm_mxfp4_of_bands(given: Inputs) -> Any:
    return mm_mxfp4(given, (150,), 152, 64)


# others


def glu(given: Inputs) -> Any:
    w = given.normal(3, 256, 264, scale=0.1)
    return glulam.grouped_glu(rows_of(given, SIZES, 264), w, offs=offs_of(given, SIZES), bias=given.normal(3, 256))


def glu_of_many_experts(given: Inputs) -> Any:
    """Call with rows by index, and a factor for each row."""
    x, w = given.normal(50, 232), [given.normal(320, 232, scale=0.1) for _ in SMALL]
    splits, rows = given.given(SMALL, torch.int64), indices(given, sum(SMALL) + 3, 50)
    options = {"row_scale": given.normal(len(rows), dtype=F32), "activation": "geglu", "glu_layout": "interleaved32"}
    return glulam.grouped_glu(x, w, splits=splits, rows=rows, bias=given.normal(len(SMALL), 320), **options)


def glu_of_bands(given: Inputs) -> Any:
    w, options = given.normal(1, 320, 64), {"activation": "clamped_swiglu", "limit": 1.0, "glu_layout": "interleaved"}
    return glulam.grouped_glu(rows_of(given, (150,), 64), w, offs=offs_of(given, (150,)), **options)


def wgrad(given: Inputs) -> Any:
    """Call whose groups contain all rows, so that a read after the last row is a fault."""
    dy, x = given.normal(192, 136), given.normal(192, 136)
    return glulam.grouped_wgrad(dy, x, offs=offs_of(given, (0, 192)))


def wgrad_of_many(given: Inputs, n: int = 72, k: int = 136, **options: Any) -> Any:
    """Call with groups of more than 160 rows, whose tiles run in another order than the tiles of smaller groups."""
    dy, x = rows_of(given, MANY, n), rows_of(given, MANY, k)
    return glulam.grouped_wgrad(dy, x, splits=given.given(MANY, torch.int64), **options)


def wgrad_by_index(given: Inputs, k: int = 136, n: int = 136, **options: Any) -> Any:
    """Call with rows by index, added to the results of the experts in a mask."""
    sizes = (127, 0, 5, 164)
    dy, x = rows_of(given, sizes, n), given.normal(50, k)
    out, mask = given.normal(4, n, k), given.given([1, 1, 0, 1], torch.bool)
    rows = indices(given, len(dy), 50)
    return glulam.grouped_wgrad(dy, x, offs=offs_of(given, sizes), x_rows=rows, out=out, mask=mask, **options)


def wgrad_added(given: Inputs, k: int = 136, n: int = 136, **options: Any) -> Any:
    """Call with so many rows that partial sums are added in memory."""
    dy, x = given.normal(70, n), rows_of(given, (3, 831), k)
    out, splits, rows = given.normal(2, n, k), given.given([3, 831], torch.int32), given.order(len(x), 70)
    return glulam.grouped_wgrad(dy, x, splits=splits, dy_rows=rows, out=out, accumulate=True, **options)


def wgrad_of_many_columns(
    given: Inputs, sizes: tuple[int, ...] = (5,), n: int = 136, k: int = 2312, **options: Any
) -> Any:
    """Call with more tiles along one side than the scheduler walks before it advances along the other."""
    dy, x = rows_of(given, sizes, n), rows_of(given, sizes, k)
    return glulam.grouped_wgrad(dy, x, offs=offs_of(given, sizes), **options)


def wgrad_of_many_rows(given: Inputs) -> Any:
    return wgrad_of_many_columns(given, (5, 161), 1160, 264)


def wgrad_of_heavy_columns(given: Inputs) -> Any:
    return wgrad_of_many_columns(given, (161,), 72)


def wgrad_of_wraps(given: Inputs, n: int = 72, k: int = 136, **options: Any) -> Any:
    """Call with tiles whose last k-tile lies in the ring's last stage, for each depth."""
    return wgrad_of_many_columns(given, (330, 161, 170, 340, 161, 161), n, k, **options)


ENDS = (161, 161, 330, 290, 330, 300, 240, 170, 290, 300)
"""Rows of ten groups, for five clusters of two tiles.

Rings end at different places, and last tiles have 5, 4 and 3 k-tiles of 64 rows.
"""


def wgrad_of_ends(given: Inputs) -> Any:
    return wgrad_of_many_columns(given, ENDS, 72, 136)


def mlp_mxfp8(given: Inputs, sizes: tuple[int, ...] = FEW_ROWS, h: int = 384, i: int = 128, **options: Any) -> Any:
    x, experts = rows_of(given, sizes, h), len(sizes)
    w1, w2 = given.normal(experts, 2 * i, h, scale=0.1), given.normal(experts, h, i, scale=0.1)
    return glulam.grouped_mlp(x, w1, w2, recipe="mxfp8", **{"offs": offs_of(given, sizes), **options})


def mlp_mxfp8_of_many_rows(given: Inputs) -> Any:
    """Call with more rows than a tile, more k-tiles than stages, two weight tiles, and row factors."""
    sizes = (100, 0, 5)
    scale, bias = given.normal(sum(sizes) + 3, dtype=F32), given.normal(3, 512)
    return mlp_mxfp8(given, sizes, 768, 256, row_scale=scale, b1=bias, b2=given.normal(3, 768), activation="geglu")


def mlp_mxfp8_by_index(
    given: Inputs, sizes: tuple[int, ...] = FEW_ROWS, h: int = 384, i: int = 128, **options: Any
) -> Any:
    """Call with rows by index, which threads copy."""
    rows, experts = indices(given, sum(sizes) + 3, 50), len(sizes)
    w1, w2 = given.normal(experts, 2 * i, h, scale=0.1), given.normal(experts, h, i, scale=0.1)
    x, offs = given.normal(50, h), offs_of(given, sizes)
    return glulam.grouped_mlp(x, w1, w2, recipe="mxfp8", rows=rows, offs=offs, **options)


def mlp_mxfp8_of_two_tiles(given: Inputs) -> Any:
    """Call with one tile for each of two CTAs, and none for others."""
    return mlp_mxfp8(given, (5,), 128, 256)


def mlp_mxfp8_of_many_experts(given: Inputs, i: int = 128) -> Any:
    return mlp_mxfp8(given, SMALL, 128, i, offs=None, splits=given.given(SMALL, torch.int64))


def mlp_mxfp8_of_whole_vectors(given: Inputs) -> Any:
    """Call with rows of 32 scales, in two CTAs, and a limit."""
    return mlp_mxfp8(given, (19, 0, 140), 1024, activation="clamped_swiglu", limit=1.0)


SCALES_A_ROW = (*(count for count in range(32) if count % 4), 45, 46, 47)
"""Numbers of 32-element blocks in a row for which scales are read byte by byte.

Such reads occur in a tile's first eight k-tiles, and in later ones.
"""


def mlp_mxfp8_of_scales(given: Inputs, blocks: int) -> Any:
    """Call with one tile of rows by index, with scales that differ by block."""

    def scaled(*rows: int) -> torch.Tensor:
        scales = given.scales(*rows, blocks).repeat_interleave(32, -1)
        return given.normal(*rows, 32 * blocks, scale=0.1) * scales.to(torch.bfloat16)

    w2, offs = given.normal(1, 32 * blocks, 64, scale=0.1), given.given([128], torch.int32)
    rows = indices(given, 128, 50)
    return glulam.grouped_mlp(scaled(50), scaled(1, 128), w2, recipe="mxfp8", offs=offs, rows=rows)


def mlp_mxfp8_of_bands(given: Inputs) -> Any:
    return mlp_mxfp8(given, (0, 600), 128, 256, offs=None, splits=given.given([0, 600], torch.int32))


def dglu(given: Inputs, sizes: tuple[int, ...] = (150, 0, 5), h: int = 200, i: int = 136, **options: Any) -> Any:
    """Call that also computes the gradient of the row factors."""
    dy, preact = rows_of(given, sizes, h), rows_of(given, sizes, 2 * i)
    w2, row_scale = given.normal(len(sizes), h, i, scale=0.1), given.normal(len(dy), dtype=F32)
    return glulam.grouped_dglu(dy, w2, preact, offs=offs_of(given, sizes), row_scale=row_scale, **options)


def dglu_by_index(given: Inputs, h: int = 136) -> Any:
    """Call with rows by index, more and fewer than a tile; a thread copies the last of three k-tiles piece by piece."""
    sizes = (140, *EACH_COUNT)
    dy, preact, offs = given.normal(50, h), rows_of(given, sizes, 144), offs_of(given, sizes)
    w2 = given.normal(len(sizes), h, 72, scale=0.1)
    return glulam.grouped_dglu(dy, w2, preact, offs=offs, rows=indices(given, len(preact), 50))


def dglu_of_many_experts(given: Inputs) -> Any:
    """Call with rows by index, and more experts than lanes in a warp."""
    dy, preact = given.normal(50, 72), rows_of(given, SMALL, 144)
    w2, splits = [given.normal(72, 72, scale=0.1) for _ in SMALL], given.given(SMALL, torch.int64)
    return glulam.grouped_dglu(dy, w2, preact, splits=splits, rows=indices(given, len(preact), 50))


def quantize(given: Inputs, rows: int = 226, **options: Any) -> Any:
    """Call with special numbers at each position that a thread of the unrolled code reads.

    They are inf or NaN, and a number that becomes subnormal. In a band of 128 rows, a thread has 8 elements of each of
    the rows 0, 1, 32, 33, 64, 65, 96 and 97, relative to its first.
    """
    x = given.normal(rows, 512) * given.scales(rows, 1).to(torch.bfloat16)
    row = torch.arange(rows)
    place = 24 * row % 512 + row // 2 % 8
    x[row, place] = torch.where(row % 32 < 16, torch.inf, torch.nan).to(x.dtype)
    x[row, (place + 64) % 512] *= 2.0**-16
    x[3, :70], x[4, ::33], x[rows - 1] = 0, 3e38, 1e-38
    return glulam.quantize_mxfp8(x, **options)


def quantize_to_an_end(given: Inputs) -> Any:
    return quantize(given, 240, offs=given.given([40, 201], torch.int32))


LAST_ROWS = (20, 21, 50, 51, 80, 81, 115)
"""Numbers of rows in a band. The last row is then one of a thread's rows, or the row before one."""


def wgrad_of_all_kinds(given: Inputs, sizes: tuple[int, ...] = (*LAST_ROWS, 226), **options: Any) -> Any:
    """Call with special numbers at each position that a thread of the quantiser by groups reads.

    They are inf, NaN and a number that becomes subnormal. A thread has 8 columns of 16 rows. x has fewer columns than a
    CTA takes.
    """
    dy, x = given.normal(sum(sizes), 512), given.normal(sum(sizes), 32)
    column = torch.arange(128)
    for begin in offs_of(given, sizes) - torch.tensor(sizes):
        row = begin + column // 8
        dy[row, column], dy[row, 128 + column] = torch.inf, torch.nan
        dy[row, 256 + column] *= 2.0**-16
    return glulam.grouped_wgrad(dy, x, offs=offs_of(given, sizes), **options)


def special(logits: torch.Tensor) -> torch.Tensor:
    """Put 0 and NaN at each position that a lane reads; make one row negative, and one row's largest number 0."""
    numbers = range(2, logits.shape[1], 32)
    for row, expert in enumerate(numbers):
        logits[row, expert], logits[4 + row, expert] = 0, torch.nan
    logits[8:10] = -logits[8:10].abs() - 1
    logits[9, 1], logits[10, 3], logits[11] = 0, -0.0, -torch.inf
    logits[12] = 30 + logits[12]  # sigmoids are 1, and the first ones win
    return logits


ROUTINGS: dict[int, dict[str, Any]] = {
    20: {"score": "sigmoid"},
    24: {"normalize": False},
    52: {"score": "sigmoid"},
    84: {},
    116: {"score": "sigmoid", "scale": 2.5, "num_groups": 4, "top_groups": 2},
    120: {"normalize": False},
}
"""Options of `route` by number of experts. The numbers give each lane one to four experts, or some lanes one fewer."""
BIASED = (84, 116)


def route_special(given: Inputs, experts: int, dtype: torch.dtype) -> Any:
    """Call in which the first expert has the largest score but, if there is a bias, is chosen by no token."""
    logits, options = special(given.normal(13, experts, dtype=dtype)), dict(ROUTINGS[experts])
    if experts in BIASED:
        logits[:, 0], options["bias"] = 4, given.normal(experts, dtype=F32)
        bias = options["bias"]
        bias[0], bias[2::32] = -100, -0.5 if "score" in options else 0  # scores of 0, where logits are 0
    return glulam.route(logits, 9, **options)


CHOICES = ((3, 9), (32, 8), (32, 9), (50, 20), (128, 4), (144, 4))
"""(tokens, choices a token) for `route_choices`.

A chunk's choices are 32 times 1, 8, 9, 32, 8 and 9, and the last chunk is not always whole.
"""


def route_choices(given: Inputs, tokens: int, k: int) -> Any:
    return glulam.route(given.normal(tokens, 128, dtype=F32), k)


def route(given: Inputs) -> Any:
    """Call with scores that are negative after adding the bias.

    Sort keys of negative numbers are encoded differently.
    """
    logits, bias = given.normal(70, 100, dtype=F32), given.normal(100, dtype=F32) - 3
    logits[torch.arange(4), 32 * torch.arange(4) + 2] = 0  # of a lane's every number
    return glulam.route(logits, 20, score="sigmoid", bias=bias, scale=2.5)


def route_in_groups(given: Inputs) -> Any:
    """Call in which some tokens have no expert, so choices of no expert must not be counted."""
    logits = given.normal(64, 128, dtype=F32)
    for row in range(4):
        logits.view(torch.int32)[row, 5 + 33 * row] = -0x3FFFFF  # a NaN whose sign is set
    logits[4, 7], logits[4, 77], logits[5] = 0.0, -0.0, -torch.inf
    logits[6:30] = -logits[6:30].abs()  # groups whose largest scores, or their sum, are negative or 0
    logits[30:60, 112:] = -1 - logits[30:60, 112:].abs()
    for row, largest in ((30, (0, -0.5)), (40, (0.1, 0)), (50, (0.5, -0.5))):
        logits[row : row + 10, 112:114] = torch.tensor(largest)
    return glulam.route(logits, 20, num_groups=8, top_groups=3, num_tokens=given.given([61], torch.int32))


def route_to_most(given: Inputs) -> Any:
    """Call with the largest number of choices, and fewer valid tokens than rows of logits."""
    logits, bias = given.normal(8, 120).half(), given.normal(120, dtype=F32)
    logits[torch.arange(4), 5 + 33 * torch.arange(4)] = torch.nan  # of a lane's every number
    return glulam.route(logits, 32, bias=bias, num_tokens=given.given([7], torch.int32))


def route_to_nearly_all(given: Inputs) -> Any:
    """Call with so many choices that all lanes of each of 32 warps have one."""
    return glulam.route(given.normal(64, 40), 32, score="sigmoid")


def route_to_one(given: Inputs) -> Any:
    return glulam.route(given.normal(65, 120), 1, normalize=False, num_groups=4, top_groups=1)
