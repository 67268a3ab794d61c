"""Assignment of weight rows to threads in a swapped tile: no row has two threads, and an output's rows of a and u have
the same thread.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from cute_kernels import formats
from cute_kernels.formats import E8M0, MXFP8, Format
from cute_kernels.sm90.swapped_rows import ROW_HALVES, SWIZZLE_CHUNK, SwappedRows, chunk_of_k
from cute_kernels.tiles import SCHEDULES, SpecError, TileConfig

THREADS = 128
PAIR = 2
LANES_OF_A_ROW = 4


def swapped_tiles() -> list[TileConfig]:
    tiles = []
    for name, schedule in SCHEDULES.items():
        for m, n in product(schedule.heights, schedule.widths) if schedule.swapped else ():
            try:
                tiles.append(TileConfig(m=m, n=n, k=128, schedule=name))
            except SpecError:
                continue
    return tiles


TILES = swapped_tiles()
cases = pytest.mark.parametrize(
    ("tile", "parts"),
    list(product(TILES, (1, 2))),
    ids=lambda case: case.name if isinstance(case, TileConfig) else str(case),
)


def test_all_numbers_of_slabs_are_among_the_tiles() -> None:
    assert {tile.slabs for tile in TILES} == {1, 2, 4}


@cases
def test_each_row_is_one_threads_and_its_three_neighbours(tile: TileConfig, parts: int) -> None:
    rows = SwappedRows(tile, parts)
    had = Counter(
        rows.part(row) * (tile.n // parts) + rows.column(row, warpgroup, thread)
        for warpgroup, thread, row in product(range(tile.stage_readers), range(THREADS), range(rows.count))
    )
    assert had == dict.fromkeys(range(tile.n), LANES_OF_A_ROW)


@cases
def test_rows_lie_where_shared_memory_has_their_swizzle(tile: TileConfig, parts: int) -> None:
    rows = SwappedRows(tile, parts)
    for row in range(rows.count):
        assert rows.distance(row) % 8 == 0
        part, column = rows.part(row), rows.column(row, 1, 77)
        assert part * (tile.n // parts) + column == rows.column(0, 1, 77) + rows.distance(row)


@cases
def test_a_thread_has_what_an_output_is_made_of(tile: TileConfig, parts: int) -> None:
    rows = SwappedRows(tile, parts)
    for warpgroup, thread, row in product(range(tile.warpgroups), range(THREADS), range(rows.part_count)):
        partners = [row + part * rows.part_count for part in range(parts)]
        assert [rows.part(partner) for partner in partners] == list(range(parts))
        assert len({rows.column(partner, warpgroup, thread) for partner in partners}) == 1


@cases
def test_a_warpgroup_makes_neighbouring_columns(tile: TileConfig, parts: int) -> None:
    rows = SwappedRows(tile, parts)
    for warpgroup in range(tile.warpgroups):
        first = rows.first_column(warpgroup)
        columns = {rows.column(row, warpgroup, t) for row in range(rows.count) for t in range(THREADS)}
        assert columns == set(range(first, first + tile.slabs * 64 // parts))
        # A chunk has a thread's rows 0 .. thread_columns - 1, its first warp has the first of them.
        chunk = {rows.column(row, warpgroup, t) for row in range(rows.thread_columns) for t in range(THREADS)}
        assert chunk == set(range(first, first + rows.chunk_columns))
        warp = {rows.column(row, warpgroup, t) for row in range(rows.thread_columns) for t in range(32)}
        assert warp == set(range(first, first + rows.chunk_columns // 4))


def test_of_one_slab_the_halves_are_a_and_u() -> None:
    tile = TileConfig(m=16, n=256, k=128, schedule="swapped_single")
    gated, plain = SwappedRows(tile, 2), SwappedRows(tile, 1)
    assert (gated.count, gated.distance(1), gated.chunk_columns) == (ROW_HALVES, 128, 32)
    assert (plain.count, plain.distance(1), plain.chunk_columns) == (ROW_HALVES, 8, 64)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_lanes_of_a_row_read_each_of_its_bytes_once(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """Of a format with other elements, too: a wgmma of 16 takes two pairs a lane, 8 elements apart."""
    monkeypatch.setitem(formats.BITS, "narrow", bits)
    weights = Format("of narrow elements", "narrow", E8M0, MXFP8.block)
    had: Counter[int] = Counter()
    for k, half, lane in product(range(0, 128, 16), range(ROW_HALVES), range(LANES_OF_A_ROW)):
        chunk, inside = chunk_of_k(weights, k)
        first = inside + weights.num_bytes(8) * half + weights.num_bytes(PAIR) * lane
        assert first + weights.num_bytes(PAIR) <= SWIZZLE_CHUNK, "in the chunk that the swizzle moves"
        had.update(range(chunk * SWIZZLE_CHUNK + first, chunk * SWIZZLE_CHUNK + first + weights.num_bytes(PAIR)))
    assert had == dict.fromkeys(range(weights.num_bytes(128)), 1)


def test_bytes_of_formats() -> None:
    assert (MXFP8.num_bytes(48), formats.DENSE.num_bytes(48)) == (48, 96)
