"""The performance model in docs/blackwell.md: its tables equal the output of `cute_kernels.sm100.cost`.

After an intended change: GLULAM_GOLDEN=write python -m pytest tests/test_blackwell_model.py, then read the tables.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cute_kernels.arch import Gemm
from cute_kernels.sm100 import cost
from cute_kernels.sm100.configs import LARGE, LARGE8, SMALL
from cute_kernels.tiles import TileConfig

PAGE = Path(__file__).parents[1] / "docs/blackwell.md"
HEAD = (
    "| GEMM | rows an expert | tile | MMA | operands | accumulators | TMA loads | bytes | us | bound by |",
    "|---|---|---|---|---|---|---|---|---|---|",
)
LAYERS = {
    "Mixtral-8x7B, FC1": (8, 28672, 4096, 14336),
    "Qwen3-30B, FC1": (128, 1536, 2048, 768),
    "DeepSeek-V3, 32 of its experts, FC1": (32, 4096, 7168, 2048),
    "gpt-oss-120b, FC1": (128, 5760, 2880, 2880),
}
"""Experts, weight rows, depth and columns that are stored."""


def _row(name: str, layer: tuple[int, int, int, int], average: int, tile: TileConfig) -> str:
    experts, columns, depth, stored = layer
    gemm = Gemm(experts * average, experts, columns, depth, stored)
    of = cost.tile_cycles(tile, depth, parts=2)
    alone = cost.even_us(gemm, tile, cost.B200._replace(memory=float("inf")))
    us = cost.even_us(gemm, tile)
    bound = "memory" if us > alone else "operands" if of.operands > of.mma else "MMA"
    size = (us - cost.B200.launch_us) * cost.B200.memory / 1e6 if us > alone else 0
    moved = f"{size:.0f} MB" if size else ""
    kind = "MXFP8" if tile.k == 128 else "BF16"
    cycles = f"{of.mma:.0f} | {of.operands:.0f} | {of.accumulators:.0f} | {of.loads}"
    return f"| {name}, {kind} | {average} | {tile.m} x {tile.n} | {cycles} | {moved} | {us:.0f} | {bound} |"


def _table() -> str:
    rows = [
        _row(name, layer, average, tile)
        for name, layer in LAYERS.items()
        for average, tile in ((1024, LARGE), (16, SMALL), (1024, LARGE8))
    ]
    return "\n".join((*HEAD, *rows))


WGRAD_HEAD = (
    "| gradient of w1 | rows an expert | MMA | operands | GEMM, MB | GEMM, us | quantising, MB | quantising, us | us |",
    "|---|---|---|---|---|---|---|---|---|",
)


def _wgrad_row(name: str, layer: tuple[int, int, int, int], average: int, tile: TileConfig) -> str:
    experts, columns, depth, _ = layer
    of = cost.tile_cycles(tile, average)
    times = cost.wgrad_times(cost.Wgrad(experts, average, columns, depth), tile)
    kind = "MXFP8" if tile.k == 128 else "BF16"
    numbers = " | ".join(f"{number:.0f}" for number in (of.mma, of.operands, *times, times[1] + times[3]))
    return f"| {name.removesuffix(', FC1')}, {kind} | {average} | {numbers} |"


def _wgrad_table() -> str:
    rows = [
        _wgrad_row(name, layer, average, tile)
        for name, layer in LAYERS.items()
        for average in (1024, 4096)
        for tile in (LARGE, LARGE8)
    ]
    return "\n".join((*WGRAD_HEAD, *rows))


@pytest.mark.parametrize(("head", "table"), [(HEAD, _table), (WGRAD_HEAD, _wgrad_table)], ids=["forward", "wgrad"])
def test_a_table_is_what_the_model_says(head: tuple[str, str], table: Callable[[], str]) -> None:
    text = PAGE.read_text()
    begin = text.index(head[0])
    end = text.index("\n\n", begin)
    if os.environ.get("GLULAM_GOLDEN") == "write":
        PAGE.write_text(text[:begin] + table() + text[end:])
        return
    assert text[begin:end] == table()


@pytest.mark.parametrize("tile", [LARGE, SMALL, LARGE8], ids=lambda tile: tile.name)
def test_no_gemm_is_faster_than_the_data_sheet(tile: TileConfig) -> None:
    gemm = Gemm(8 * 8192, 8, 28672, 4096, 14336)
    flop = 2 * gemm.rows * gemm.columns * gemm.depth
    peak = 2 * cost.B200.sms * cost.B200.clock * cost.B200.macs * (2 if tile.k == 128 else 1)
    assert 0.8 < flop / cost.even_us(gemm, tile) / peak <= 1
