"""The gradient kernels against float64, by the rule of `support.criterion`, through the public API."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.checks import SWIGLU, Form, check_bias_grad, check_dglu, check_mm, check_wgrad
from support.criterion import same_bits
from support.inputs import Case, gradient, make_case, poison_allocator, preactivation
from support.routing import catalogue, one_takes_all, spread, zipf
from support.served import IS_PORTABLE

import glulam
from cute_kernels.shipped import activation_forms
from cute_kernels.sm90.configs import WGRAD, WGRAD_WIDE
from cute_kernels.specs import GATED, GroupedWgradSpec
from cute_kernels.tiles import TileConfig

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FORMS = activation_forms()
HIDDEN, INTER = 200, 352
EXPERTS, FEW_ROWS, MANY_ROWS, TAIL = 8, 200, 1500, 13
# Weights by the tile that cuts them with less waste, (N, K).
WEIGHTS = {WGRAD: (INTER, HIDDEN), WGRAD_WIDE: (488, 184)}
CUTS = pytest.mark.parametrize("tile", WEIGHTS, ids=lambda tile: tile.name)
BATCHES = {"few rows": zipf(FEW_ROWS, EXPERTS), "many rows": zipf(MANY_ROWS, EXPERTS)}


def case(sizes: list[int], form: Form = SWIGLU, hidden: int = HIDDEN, inter: int = INTER, **options: Any) -> Case:
    options = {"tail": TAIL, "dtype": BF16, **options}
    return make_case(sizes, hidden, inter, gated=form[0] in GATED, device="cuda", **options)


def padded(value: torch.Tensor, columns: int) -> torch.Tensor:
    """Return an equal matrix with row stride padded by `columns`; the padding is NaN."""
    wide = torch.full((value.shape[0], value.shape[1] + columns), math.nan, dtype=value.dtype, device="cuda")
    wide[:, : value.shape[1]] = value
    return wide[:, : value.shape[1]]


class TestDglu:
    @pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
    @pytest.mark.parametrize("batch", BATCHES)
    @pytest.mark.parametrize("form", FORMS, ids="-".join)
    def test_every_form(self, form: Form, batch: str, dtype: torch.dtype) -> None:
        c = case(BATCHES[batch], form, dtype=dtype)
        dy, h = gradient(c), preactivation(c)
        named = {"activation": form[0], "glu_layout": form[1]}
        for scale, asked in ((None, True), (c.row_scale, True), (c.row_scale, False)):
            got = glulam.grouped_dglu(dy, c.w2, h, offs=c.offs, row_scale=scale, row_scale_grad=asked, **named)
            assert (got.d_row_scale is not None) == (scale is not None and asked)
            check_dglu(c, dy, h, got, form, row_scale=scale)

    @pytest.mark.parametrize("params", [(7.0, 1.702, 1.0), (1, 1, 0), (0.25, 2.5, -0.5), (math.inf, 1.0, 0.0)])
    def test_params_of_clamped_swiglu(self, params: tuple[float, float, float]) -> None:
        form = ("clamped_swiglu", "interleaved")
        c = case(zipf(FEW_ROWS, EXPERTS), form)
        dy, h = gradient(c), preactivation(c)
        options = dict(zip(("limit", "alpha", "offset"), params, strict=True))
        got = glulam.grouped_dglu(dy, c.w2, h, offs=c.offs, activation=form[0], glu_layout=form[1], **options)
        check_dglu(c, dy, h, got, form, params=options)

    @pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
    @pytest.mark.parametrize("name", catalogue(FEW_ROWS, EXPERTS))
    def test_routings(self, name: str, rows: int) -> None:
        sizes = catalogue(rows, EXPERTS)[name]
        c = case(sizes, tail=rows - sum(sizes) + TAIL)
        dy, h = padded(gradient(c), 8), padded(preactivation(c), 16)
        first: Any = None
        for groups in ({"offs": c.offs}, {"splits": c.splits()}, {"splits": c.splits(torch.int64)}, {"splits": sizes}):
            poison_allocator("cuda")
            got = glulam.grouped_dglu(dy, c.w2, h, row_scale=c.row_scale, **groups)
            if first is None:
                check_dglu(c, dy, h, got, row_scale=c.row_scale)
                first = got
            assert all(same_bits(a[: c.rows], b[: c.rows]) for a, b in zip(got, first, strict=True))

    @pytest.mark.parametrize(
        ("sizes", "hidden", "inter"),
        [
            (spread(300, 4), 736, 752),
            (zipf(900, 4), 736, 1504),
            ([3, 0, 5], 8, 32),
            ([70, 3], 4096, 32),
            ([70, 200], 8, 2080),
            ([1], HIDDEN, INTER),
            (zipf(1000, 512), 72, 96),
        ],
    )
    def test_sizes(self, sizes: list[int], hidden: int, inter: int) -> None:
        c = case(sizes, hidden=hidden, inter=inter)
        dy, h = gradient(c), preactivation(c)
        for w2 in (c.w2, list(c.w2.clone())):
            got = glulam.grouped_dglu(dy, w2, h, offs=c.offs, row_scale=c.row_scale)
            check_dglu(c, dy, h, got, row_scale=c.row_scale)

    @pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
    def test_the_same_bits_every_time(self, rows: int) -> None:
        """The row sums span CTAs, whichever comes first."""
        c = case(zipf(rows, EXPERTS), inter=2080)
        dy, h = gradient(c), preactivation(c)
        first, *others = (glulam.grouped_dglu(dy, c.w2, h, offs=c.offs, row_scale=c.row_scale) for _ in range(20))
        for other in others:
            assert all(same_bits(a[: c.rows], b[: c.rows]) for a, b in zip(first, other, strict=True))

    def test_no_rows(self) -> None:
        c = case([0] * EXPERTS, tail=0)
        got = glulam.grouped_dglu(gradient(c), c.w2, preactivation(c), offs=c.offs, row_scale=c.row_scale)
        assert [value.shape for value in got] == [(0, 2 * INTER), (0, INTER), (0,)]


class TestWgrad:
    @CUTS
    @pytest.mark.skipif(IS_PORTABLE, reason="one tile cuts all weights")
    def test_both_tiles_are_tested(self, tile: TileConfig) -> None:
        n, k = WEIGHTS[tile]
        spec = glulam.explain("grouped_wgrad", (64, n), (64, k), splits=[8] * EXPERTS).spec
        assert isinstance(spec, GroupedWgradSpec) and spec.tile == tile

    @CUTS
    @pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
    @pytest.mark.parametrize("float32", [False, True])
    @pytest.mark.parametrize("name", catalogue(MANY_ROWS, EXPERTS))
    def test_routings(self, name: str, float32: bool, dtype: torch.dtype, tile: TileConfig) -> None:
        """NaN after the last group and in memory that the result reuses; groups without rows."""
        n, k = WEIGHTS[tile]
        sizes = catalogue(MANY_ROWS, EXPERTS)[name]
        c = case(sizes, hidden=k, dtype=dtype, tail=MANY_ROWS - sum(sizes) + TAIL)
        dy, x = padded(gradient(c, n), 8), padded(c.x, 24)
        options = {"out_dtype": F32} if float32 else {}
        for groups in ({"offs": c.offs}, {"splits": c.splits()}, {"splits": c.splits(torch.int64)}, {"splits": sizes}):
            poison_allocator("cuda")
            dw = glulam.grouped_wgrad(dy, x, **groups, **options)
            assert dw.dtype == (F32 if float32 else dtype)
            check_wgrad(c, dy, x, dw)

    @CUTS
    @pytest.mark.parametrize("listed", [False, True])
    @pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
    @pytest.mark.parametrize("adds", ["overwrite", "accumulate", "mask"])
    @pytest.mark.parametrize("rows", ["few rows", "many rows"])
    def test_given_buffers(self, rows: str, adds: str, dtype: torch.dtype, listed: bool, tile: TileConfig) -> None:
        """What dw holds is loaded, or added to in memory where experts have more than 768 rows on average."""
        n, k = WEIGHTS[tile]
        sizes = {"few rows": [90, 0, 64, 1, 0, 300, 7, 128], "many rows": [900, 0, 640, 1, 0, 3000, 70, 2100]}[rows]
        c = case(sizes, hidden=k)
        dy = gradient(c, n)
        mask = torch.tensor([e in (0, 1, 3, 5) for e in range(EXPERTS)], device="cuda")
        flags = {"overwrite": [False] * EXPERTS, "accumulate": [True] * EXPERTS, "mask": mask.tolist()}[adds]
        options: dict[str, Any] = {"accumulate": {"accumulate": True}, "mask": {"mask": mask}}.get(adds, {})
        packed = torch.randn(EXPERTS, n, k, device="cuda").to(dtype)
        out: Any = [packed[(3 * e) % EXPERTS].clone() for e in range(EXPERTS)] if listed else packed
        for one, add in zip(out, flags, strict=True):
            if not add:
                one.fill_(math.nan)
        before = [one.clone() if add else None for one, add in zip(out, flags, strict=True)]
        assert glulam.grouped_wgrad(dy, c.x, offs=c.offs, out=out, **options) is out
        check_wgrad(c, dy, c.x, out, before)

    @pytest.mark.parametrize(
        ("sizes", "n", "k"),
        [
            (spread(300, 4), 1504, 736),
            ([3, 0, 5], 8, 8),
            ([70, 3], 8, 4096),
            ([40, 0, 90], 1208, 4744),  # bands of either side, the last one lower than the others
            ([40, 0, 90], 4744, 1208),
            ([40, 0, 90], 2296, 576),  # wider tiles, swept either way
            ([40, 0, 90], 488, 1344),
            (zipf(1000, 512), 200, 192),
            ([4097], 264, 8),
            (zipf(1000, 512), 72, 96),
            ([1], INTER, HIDDEN),
        ],
    )
    def test_sizes(self, sizes: list[int], n: int, k: int) -> None:
        c = case(sizes, hidden=k, inter=32)
        dy = gradient(c, n)
        check_wgrad(c, dy, c.x, glulam.grouped_wgrad(dy, c.x, offs=c.offs))

    @pytest.mark.parametrize(("n", "k"), [(264, 72), (232, 184)])
    @pytest.mark.parametrize("heavy", [200, 1000])
    def test_last_rows_of_every_count(self, heavy: int, n: int, k: int) -> None:
        """Contractions that end anywhere in a k-tile, in light groups and between them in heavy ones."""
        sizes = [size for rest in range(1, 65) for size in (rest, heavy + rest, 0)]
        c = case(sizes, hidden=k, inter=32)
        dy = gradient(c, n)
        dw = glulam.grouped_wgrad(dy, c.x, offs=c.offs)
        check_wgrad(c, dy, c.x, dw)
        for rows in dy[: c.rows].split(sizes)[::2]:
            rows.fill_(math.nan)
        got = glulam.grouped_wgrad(dy, c.x, offs=c.offs)
        assert same_bits(got[1::2], dw[1::2]), "rows of other groups"

    @CUTS
    def test_the_same_bits_every_time(self, tile: TileConfig) -> None:
        n, k = WEIGHTS[tile]
        c = case(zipf(MANY_ROWS, EXPERTS), hidden=k)
        dy = gradient(c, n)
        first, *others = (glulam.grouped_wgrad(dy, c.x, offs=c.offs) for _ in range(10))
        check_wgrad(c, dy, c.x, first)
        assert all(same_bits(other, first) for other in others)

    def test_no_rows(self) -> None:
        c = case([0] * EXPERTS, tail=0)
        out = torch.ones(EXPERTS, INTER, HIDDEN, device="cuda")
        dy = gradient(c, INTER)
        glulam.grouped_wgrad(dy, c.x, offs=c.offs, out=out, accumulate=True)
        assert bool((out == 1).all())
        mask = torch.arange(EXPERTS, device="cuda") % 2 == 0
        glulam.grouped_wgrad(dy, c.x, offs=c.offs, out=out, mask=mask)
        assert torch.equal(out[:, 0, 0], mask.float())
        assert not bool(glulam.grouped_wgrad(dy, c.x, offs=c.offs).any())


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", catalogue(MANY_ROWS, EXPERTS))
def test_grouped_bias_grad(name: str, dtype: torch.dtype) -> None:
    sizes = catalogue(MANY_ROWS, EXPERTS)[name]
    c = case(sizes, dtype=dtype, tail=MANY_ROWS - sum(sizes) + TAIL)
    dy = gradient(c)
    for scale in (None, c.row_scale):
        for out_dtype in (dtype, F32):
            poison_allocator("cuda")
            db = glulam.grouped_bias_grad(dy, offs=c.offs, row_scale=scale, out_dtype=out_dtype)
            check_bias_grad(c, dy, db, scale)


@pytest.mark.parametrize("batch", BATCHES)
def test_data_gradient_form(batch: str) -> None:
    """dx = dpreact w1, the transposed form of grouped_mm."""
    c = case(BATCHES[batch])
    dh = gradient(c, 2 * INTER)
    c.x = dh
    check_mm(c, c.w1, glulam.grouped_mm(dh, c.w1, offs=c.offs, transpose_w=True), transpose_w=True)


def test_captured_once_replayed_with_other_routings() -> None:
    rows = 1200
    c = case([rows // EXPERTS] * EXPERTS, tail=0)
    dy, h, offs = gradient(c), preactivation(c), c.offs
    out = torch.empty(EXPERTS, HIDDEN, HIDDEN, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = glulam.grouped_dglu(dy, c.w2, h, offs=offs, row_scale=c.row_scale)
        glulam.grouped_wgrad(dy, c.x, offs=offs, out=out)
        db = glulam.grouped_bias_grad(dy, offs=offs, row_scale=c.row_scale)
    routings = {**catalogue(rows - 11, EXPERTS), "first_takes_all": one_takes_all(rows, EXPERTS, 0)}
    for name, sizes in routings.items():
        used = sum(sizes)
        offs.copy_(torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32))
        for value in (*got, out, db):
            value.fill_(7.0)
        for _ in range(2):
            graph.replay()
        eager = glulam.grouped_dglu(dy, c.w2, h, offs=offs, row_scale=c.row_scale)
        assert all(same_bits(a[:used], b[:used]) for a, b in zip(got, eager, strict=True)), name
        assert all(bool((value[used:] == 7).all()) for value in got[:2]), f"{name}: the tail was written"
        assert not bool(got.d_row_scale[used:].any()), f"{name}: d_row_scale starts as zeros at each replay"
        assert same_bits(out, glulam.grouped_wgrad(dy, c.x, offs=offs, out_dtype=F32)), name
        assert same_bits(db, glulam.grouped_bias_grad(dy, offs=offs, row_scale=c.row_scale)), name
