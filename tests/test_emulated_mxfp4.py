"""Hopper's kernels of MXFP8 rows times MXFP4 weights, emulated: sums that float32 holds, bit for bit."""

from __future__ import annotations

import pytest
import torch
from emulator.launch import Emulator
from support import mxfp4
from torch import Tensor

from cute_kernels.sm90.configs import LARGE8_W4, SLIM8_W4, SLIM8_W4_FC2, SMALL8, SMALL8_FC2, TINY8_W4, TINY8_W4_FC2
from cute_kernels.specs import GroupedMmSpec
from cute_kernels.tiles import TileConfig

SPANS = 13
"""Scales of a row's blocks: 0 to 12 binades under the greatest."""


def _weights(experts: int, rows: int, columns: int, random: torch.Generator) -> tuple[Tensor, ...]:
    """Return random weights: bytes, scales, powers of two by row, and values."""
    data = torch.randint(256, (experts, rows, columns // 2), generator=random, dtype=torch.uint8)
    greatest = torch.randint(125, 130, (experts, rows, 1), generator=random)
    below = torch.randint(SPANS, (experts, rows, columns // 32), generator=random)
    scale = (greatest - below).to(torch.uint8)
    return data.view(torch.int32), scale, scale.amax(dim=-1) - 6, mxfp4.values(data, scale)


def _rows(count: int, columns: int, random: torch.Generator) -> tuple[Tensor, ...]:
    """Return random rows: E4M3 numbers of few bits, scales of 128-element blocks, and values."""
    data = (torch.randint(-8, 9, (count, columns), generator=random).float() / 4).to(torch.float8_e4m3fn)
    blocks = torch.randint(125, 130, (count, -(-columns // 128)), generator=random)
    scale = blocks.repeat_interleave(4, dim=1)[:, : columns // 32].contiguous().to(torch.uint8)
    return data, scale, data.double() * torch.exp2(scale.double() - 127).repeat_interleave(32, dim=1)


@pytest.mark.parametrize(
    ("tile", "columns", "out", "sizes", "by_index"),
    [
        (SMALL8_FC2, 384, 256, [9, 70, 0, 64], False),  # k-tiles that two warpgroups do not share evenly
        (SMALL8, 608, 288, [7, 130], True),
        (LARGE8_W4, 384, 256, [9, 70, 0, 64, 130], False),
        (LARGE8_W4, 608, 288, [9, 170], True),
        (TINY8_W4_FC2, 384, 256, [9, 30, 0, 16], False),
        (TINY8_W4, 608, 288, [7, 18], True),
        (SLIM8_W4, 384, 256, [9, 70, 0, 32], False),
        (SLIM8_W4_FC2, 608, 288, [7, 33], True),
    ],
    ids=str,
)
def test_sums_are_exact(tile: TileConfig, columns: int, out: int, sizes: list[int], by_index: bool) -> None:
    random = torch.Generator().manual_seed(columns)
    used = sum(sizes)
    count = 50 if by_index else used + 3
    x, x_scale, x_values = _rows(count, columns, random)
    w, w_scale, w_rows, w_values = _weights(len(sizes), out, columns, random)
    rows = torch.randint(count, (used + 3,), generator=random, dtype=torch.int32) if by_index else None
    if not by_index:
        x.view(torch.uint8)[used:] = 0x7F  # NaN
    bias = torch.randint(-3, 4, (len(sizes), out), generator=random).bfloat16()
    scale = torch.exp2(torch.randint(-1, 2, (used + 3,), generator=random).float())
    y = torch.full((used + 3, out), torch.nan, dtype=torch.bfloat16)
    call = Emulator("sm_90a", seed=0, check_races=True).function(GroupedMmSpec(tile=tile, operands="mxfp4"))
    call(
        x=x, w=w, y=y, rows=rows, groups=torch.tensor(sizes).cumsum(0).int(), group_form=0, num_groups=len(sizes),
        tickets=None, x_scale=x_scale, w_scale=w_scale, w_global_scale=w_rows, bias=bias, bias_table=None, scale=scale,
        num_sms=2, position=0,
    )  # fmt: skip
    taken = x_values[rows.long()] if rows is not None else x_values
    groups = zip(taken[:used].split(sizes), scale[:used].split(sizes), w_values, bias, strict=True)
    wanted = torch.cat([one @ weight.T + b.double() * s[:, None].double() for one, s, weight, b in groups])
    assert float(wanted.abs().mean()) > 1
    assert torch.equal(y[:used], wanted.to(torch.bfloat16)) and bool(y[used:].isnan().all())
