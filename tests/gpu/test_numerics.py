"""Kernels against float64, by the rule of `support.criterion`, through the public API.

Sizes are small and divide no tile; rows per expert lie on both sides of the threshold between the tiles.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from support.checks import SWIGLU, Form, check_glu, check_mlp, check_mm
from support.criterion import same_bits
from support.inputs import Case, make_case, poisoned, scattered
from support.launches import groups_of, launch
from support.routing import ODD_SIZES, catalogue, spread, zipf

import glulam
from cute_kernels.shipped import activation_forms
from cute_kernels.sm90.configs import TILES
from cute_kernels.specs import GATED, GroupedMmSpec
from cute_kernels.tiles import TileConfig
from glulam.host import tickets

pytestmark = pytest.mark.gpu

BF16, F16 = torch.bfloat16, torch.float16
FORMS = activation_forms()
HIDDEN, INTER = 200, 352
EXPERTS, FEW_ROWS, MANY_ROWS, TAIL = 8, 200, 1500, 13
BATCHES = {"few rows": zipf(FEW_ROWS, EXPERTS), "many rows": zipf(MANY_ROWS, EXPERTS)}


def case(sizes: list[int], form: Form = SWIGLU, hidden: int = HIDDEN, inter: int = INTER, **options: Any) -> Case:
    options = {"tail": TAIL, "dtype": BF16, **options}
    return make_case(sizes, hidden, inter, gated=form[0] in GATED, device="cuda", **options)


def named(form: Form) -> dict[str, str]:
    return {"activation": form[0], "glu_layout": form[1]}


def test_batches_use_different_kernels() -> None:
    """Else half of this file would test nothing new."""
    few, many = (
        glulam.explain("grouped_mlp", (rows + TAIL, HIDDEN), (EXPERTS, 2 * INTER, HIDDEN), (EXPERTS, HIDDEN, INTER))
        for rows in (FEW_ROWS, MANY_ROWS)
    )
    assert few.spec != many.spec and few.source == many.source == "shipped"


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_every_form(form: Form, batch: str, dtype: torch.dtype) -> None:
    """Each activation and layout in both fused operators, plain and with all addends."""
    c = case(BATCHES[batch], form, dtype=dtype)
    for extras in (False, True):
        options = c.addends if extras else {}
        check_mlp(c, glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, **named(form), **options), form, **options)
        options = {"bias": c.b1, "row_scale": c.row_scale} if extras else {}
        act, preact = glulam.grouped_glu(c.x, c.w1, offs=c.offs, return_preact=True, **named(form), **options)
        check_glu(c, act, preact, form, **options)
        alone = glulam.grouped_glu(c.x, c.w1, offs=c.offs, **named(form), **options)
        check_glu(c, alone, None, form, **options)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("transpose_w", [False, True])
def test_grouped_mm(transpose_w: bool, batch: str, dtype: torch.dtype) -> None:
    c = case(BATCHES[batch], dtype=dtype)
    w = c.w1.mT.contiguous() if transpose_w else c.w1
    for bias, scale in ((None, None), (c.b1, None), (c.b1, c.row_scale), (list(c.b1), c.row_scale)):
        options = {"bias": bias, "bias_scale": scale, "transpose_w": transpose_w}
        check_mm(c, w, glulam.grouped_mm(c.x, w, offs=c.offs, **options), **options)


@pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
@pytest.mark.parametrize("name", catalogue(FEW_ROWS, EXPERTS))
def test_routings(name: str, rows: int) -> None:
    """Every routing, in every form of group sizes, into poisoned padded outputs whose tail must stay."""
    c = case(catalogue(rows, EXPERTS)[name], tail=rows - sum(catalogue(rows, EXPERTS)[name]) + TAIL)
    total = c.x.shape[0]
    first: torch.Tensor | None = None
    for groups in (
        {"offs": c.offs},
        {"splits": c.splits()},
        {"splits": c.splits(torch.int64)},
        {"splits": c.sizes},
        {"splits": torch.tensor(c.sizes)},
    ):
        buffer = torch.full((total, HIDDEN + 8), math.nan, dtype=BF16, device="cuda")
        before = buffer.clone()
        out = buffer[:, :HIDDEN]
        assert glulam.grouped_mlp(c.x, c.w1, c.w2, out=out, **c.addends, **groups) is out
        assert same_bits(buffer[c.rows :], before[c.rows :]), "the tail was written"
        assert same_bits(buffer[:, HIDDEN:].contiguous(), before[:, HIDDEN:].contiguous()), "padding was written"
        if first is None:
            check_mlp(c, out, **c.addends)
            first = out[: c.rows].clone()
        assert same_bits(out[: c.rows].contiguous(), first), f"{list(groups)} differs from offs"


@pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
def test_outputs_of_the_other_operators_keep_their_tail(rows: int) -> None:
    c = case(zipf(rows, EXPERTS), tail=300)
    total = c.x.shape[0]
    act = poisoned(total, INTER, c.x, padding=16)
    assert glulam.grouped_glu(c.x, c.w1, offs=c.offs, out=act) is act
    check_glu(c, act, None)
    y = poisoned(total, 2 * INTER, c.x, padding=8)
    assert glulam.grouped_mm(c.x, c.w1, offs=c.offs, out=y) is y
    check_mm(c, c.w1, y)
    assert bool(act[c.rows :].isnan().all()) and bool(y[c.rows :].isnan().all())


SIZES = {
    "N = 1504, K = 736": (spread(300, 4), 736, 752),
    "I = 1504, H = 736": (zipf(900, 4), 736, 1504),
    "33 experts": (spread(333, 33), 72, 96),
    **ODD_SIZES,
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    sizes, hidden, inter = SIZES[name]
    tail = TAIL if any(sizes) else 0
    for layout in ("concat", "interleaved" if inter % 32 else "interleaved32"):
        form = ("swiglu", layout)
        c = case(sizes, form, hidden, inter, tail=tail)
        check_mlp(c, glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, **named(form), **c.addends), form, **c.addends)
    act, preact = glulam.grouped_glu(c.x, c.w1, splits=c.splits(), return_preact=True, **named(form))
    check_glu(c, act, preact, form)
    transposed = c.w1.mT.contiguous()
    check_mm(c, c.w1, glulam.grouped_mm(c.x, c.w1, offs=c.offs))
    check_mm(c, transposed, glulam.grouped_mm(c.x, transposed, offs=c.offs, transpose_w=True), transpose_w=True)


# Sizes around the ends of boxes of 16 and 64 rows, and of tiles; every other group holds NaN.
BESIDE_NAN = [64, 1, 128, 15, 257, 16, 300, 17, 64, 48, 130, 49, 200, 63, 128, 65, 1, 127, 190, 129, 31, 193]


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
def test_rows_of_other_groups_reach_no_result(tile: TileConfig, transpose_w: bool) -> None:
    """Shared memory behind a tile's own rows keeps what other tiles had there."""
    c = case(BESIDE_NAN, inter=320)  # an odd number of weight tiles
    w = c.w1.mT.contiguous() if transpose_w else c.w1
    spec, counters = GroupedMmSpec("bfloat16", transpose_w, tile), tickets.new_counters(c.offs.device)

    def product(x: torch.Tensor) -> torch.Tensor:
        y = poisoned(c.x.shape[0], c.w1.shape[1], c.x)
        launch(spec, x=x, w=w, y=y, **groups_of(c.offs), tickets=counters)
        return y

    clean = product(c.x)
    check_mm(c, w, clean, transpose_w=transpose_w)
    x = c.x.clone()
    for group in x[: c.rows].split(c.sizes)[::2]:
        group.fill_(math.nan)
    got, want = (y[: c.rows].split(c.sizes) for y in (product(x), clean))
    assert all(bool(y.isnan().all()) for y in got[::2])
    assert all(same_bits(y, clean_y) for y, clean_y in zip(got[1::2], want[1::2], strict=True))


def test_layouts_agree() -> None:
    """The same layer with its rows in three orders gives the same bits."""
    c = case(zipf(MANY_ROWS, EXPERTS))
    index = torch.arange(2 * INTER, device="cuda")
    half = index // INTER
    i = index % INTER
    places = {"interleaved": 2 * i + half, "interleaved32": 64 * (i // 32) + 32 * half + i % 32}
    concat = glulam.grouped_glu(c.x, c.w1, offs=c.offs, bias=c.b1)
    for layout, place in places.items():
        w1, b1 = torch.empty_like(c.w1), torch.empty_like(c.b1)
        w1[:, place], b1[:, place] = c.w1, c.b1
        act = glulam.grouped_glu(c.x, w1, offs=c.offs, bias=b1, glu_layout=layout)
        assert same_bits(act[: c.rows], concat[: c.rows]), layout
    assert float(concat[: c.rows].abs().max()) > 0


@pytest.mark.parametrize("params", [(7.0, 1.702, 1.0), (1, 1, 0), (0.25, 2.5, -0.5), (math.inf, 1.0, 0.0)])
def test_params_of_clamped_swiglu(params: tuple[float, float, float]) -> None:
    form = ("clamped_swiglu", "interleaved")
    c = case(zipf(FEW_ROWS, EXPERTS), form)
    options = dict(zip(("limit", "alpha", "offset"), params, strict=True))
    check_glu(c, glulam.grouped_glu(c.x, c.w1, offs=c.offs, **named(form), **options), None, form, params=options)


@pytest.mark.parametrize("listed", list(itertools.product([False, True], repeat=4)))
@pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
def test_lists_of_experts(listed: tuple[bool, ...], rows: int) -> None:
    c = case(zipf(rows, EXPERTS))
    packed = (c.w1, c.w2, c.b1, c.b2)
    w1, w2, b1, b2 = (scattered(t) if as_list else t for t, as_list in zip(packed, listed, strict=True))
    want = glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, **c.addends)
    check_mlp(c, want, **c.addends)
    for _ in range(2):
        got = glulam.grouped_mlp(c.x, w1, w2, offs=c.offs, b1=b1, b2=b2, row_scale=c.row_scale)
        assert same_bits(got[: c.rows], want[: c.rows])


@pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
def test_lists_in_the_other_operators(rows: int) -> None:
    c = case(zipf(rows, EXPERTS))
    w1, b1 = scattered(c.w1), scattered(c.b1)
    act, preact = glulam.grouped_glu(c.x, w1, offs=c.offs, bias=b1, return_preact=True)
    check_glu(c, act, preact, bias=c.b1)
    transposed = c.w1.mT.contiguous()
    y = glulam.grouped_mm(c.x, scattered(transposed), offs=c.offs, bias=b1, transpose_w=True)
    check_mm(c, transposed, y, bias=c.b1, transpose_w=True)
    check_mm(c, c.w1, glulam.grouped_mm(c.x, w1, offs=c.offs))


def test_padded_and_odd_inputs() -> None:
    c = case(zipf(MANY_ROWS, EXPERTS))
    wide = torch.full((c.x.shape[0], HIDDEN + 24), math.nan, dtype=BF16, device="cuda")
    wide[:, 8 : 8 + HIDDEN] = c.x
    check_mlp(c, glulam.grouped_mlp(wide[:, 8 : 8 + HIDDEN], c.w1, c.w2, offs=c.offs))
    one = case([0, 1, 0], tail=0)
    x, out = (t.as_strided((1, HIDDEN), (1, 1)) for t in (one.x, poisoned(1, HIDDEN, one.x)))
    glulam.grouped_mlp(x, one.w1, one.w2, offs=one.offs, out=out)
    check_mlp(one, out)


def test_parameters() -> None:
    c = case(zipf(FEW_ROWS, EXPERTS))
    w1, w2 = torch.nn.Parameter(c.w1), torch.nn.Parameter(c.w2)
    check_mlp(c, glulam.grouped_mlp(c.x, w1, w2, offs=c.offs))
    with torch.inference_mode():
        check_mlp(c, glulam.grouped_mlp(c.x, w1, list(w2), offs=c.offs))


@pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
def test_the_same_bits_every_time(rows: int) -> None:
    c = case(zipf(rows, EXPERTS))
    first, *others = (glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, **c.addends) for _ in range(5))
    check_mlp(c, first, **c.addends)
    assert all(same_bits(other[: c.rows], first[: c.rows]) for other in others)


WILD = {
    "beyond the end": [5, 50, 10**9, 2 * 10**9, 2 * 10**9, 2 * 10**9, 2**31 - 1, 2**31 - 1],
    "negative": [-5, 10, -(2**31), 20, 30, -1, 40, 50],
    "falling": [100, 90, 80, 70, 60, 50, 40, 30],
}


@pytest.mark.parametrize("values", WILD.values(), ids=WILD)
@pytest.mark.parametrize("form", ["offs", "splits int32", "splits int64"])
def test_group_sizes_out_of_range_stay_in_the_buffers(values: list[int], form: str) -> None:
    """What only the device knows is clamped: guards on both sides of the output stay as they are."""
    c = case(zipf(FEW_ROWS, EXPERTS), tail=0)
    guard = 512
    buffer = torch.full((c.x.shape[0] + 2 * guard, HIDDEN), 7.0, dtype=BF16, device="cuda")
    dtype = torch.int64 if form == "splits int64" else torch.int32
    groups = {form.split()[0]: torch.tensor(values, dtype=dtype, device="cuda")}
    glulam.grouped_mlp(c.x, c.w1, c.w2, out=buffer[guard:-guard], **groups)
    torch.cuda.synchronize()
    assert bool((buffer[:guard] == 7).all()) and bool((buffer[-guard:] == 7).all())
    check_mlp(c, glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs))
