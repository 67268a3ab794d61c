"""An MLP with weights stored as [E, K, N], forward and backward, against float64, through the public API.

Sizes divide no tile; rows per expert lie on both sides of the threshold between the tiles.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from support.checks import Form, check_dglu, check_glu, check_mlp
from support.criterion import same_bits
from support.gradients import check_gradients, transposed_back, transposed_leaves
from support.inputs import (
    Case,
    gradient,
    make_case,
    poison_allocator,
    poisoned,
    preactivation,
    scattered,
    transposed,
)
from support.launches import groups_of, launch
from support.routing import ODD_SIZES, catalogue, one_takes_all, spread, zipf

import glulam
from cute_kernels.shipped import activation_forms
from cute_kernels.sm90.configs import TILES, glu_form
from cute_kernels.specs import GATED, KINDS, LAYOUTS, GroupedGluSpec, GroupedMlpSpec
from cute_kernels.tiles import TileConfig
from glulam.host import tickets

pytestmark = pytest.mark.gpu

BF16, F16 = torch.bfloat16, torch.float16
HIDDEN, INTER = 200, 352
EXPERTS, FEW_ROWS, MANY_ROWS, TAIL = 8, 200, 1500, 13
BATCHES = {"few rows": zipf(FEW_ROWS, EXPERTS), "many rows": zipf(MANY_ROWS, EXPERTS)}
GPT_OSS: Form = ("clamped_swiglu", "interleaved")
GATES = ("concat", "interleaved", "interleaved32")


def case(sizes: list[int], form: Form = GPT_OSS, hidden: int = HIDDEN, inter: int = INTER, **options: Any) -> Case:
    options = {"tail": TAIL, "dtype": BF16, **options}
    return make_case(sizes, hidden, inter, gated=form[0] in GATED, device="cuda", **options)


def of(form: Form) -> dict[str, Any]:
    return {"activation": form[0], "glu_layout": form[1], "transpose_w": True}


def test_batches_use_different_kernels() -> None:
    few, many = (
        glulam.explain(
            "grouped_mlp", (n, HIDDEN), (EXPERTS, HIDDEN, 2 * INTER), (EXPERTS, INTER, HIDDEN), **of(GPT_OSS)
        )
        for n in (FEW_ROWS + TAIL, MANY_ROWS + TAIL)
    )
    assert few.spec != many.spec and few.source == many.source == "shipped"
    for told in (few, many):
        assert isinstance(told.spec, GroupedMlpSpec) and told.spec.fc1.transpose_w and told.spec.fc2.transpose_w


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("form", activation_forms(), ids="-".join)
def test_every_form(form: Form, batch: str, dtype: torch.dtype) -> None:
    """Each activation and layout in both fused operators, plain and with all addends."""
    c = case(BATCHES[batch], form, dtype=dtype)
    w1, w2 = transposed(c)
    for extras in (False, True):
        options = c.addends if extras else {}
        check_mlp(c, glulam.grouped_mlp(c.x, w1, w2, offs=c.offs, **of(form), **options), form, **options)
        options = {"bias": c.b1, "row_scale": c.row_scale} if extras else {}
        both = glulam.grouped_glu(c.x, w1, offs=c.offs, return_preact=True, **of(form), **options)
        check_glu(c, *both, form, **options)
        alone = glulam.grouped_glu(c.x, w1, offs=c.offs, **of(form), **options)
        check_glu(c, alone, None, form, **options)


SIZES = {
    "H = 1504, I = 736": (spread(300, 4), 1504, 736),
    "H = 736, I = 1504": (zipf(900, 4), 736, 1504),
    "one load of columns": ([40, 30], 72, 64),
    **ODD_SIZES,
}


@pytest.mark.parametrize("layout", GATES)
@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str, layout: str) -> None:
    sizes, hidden, inter = SIZES[name]
    form = ("swiglu", layout)
    c = case(sizes, form, hidden, inter, tail=TAIL if any(sizes) else 0)
    w1, w2 = transposed(c)
    check_mlp(c, glulam.grouped_mlp(c.x, w1, w2, offs=c.offs, **of(form), **c.addends), form, **c.addends)
    both = glulam.grouped_glu(c.x, w1, splits=c.splits(), bias=c.b1, return_preact=True, **of(form))
    check_glu(c, *both, form, bias=c.b1)


@pytest.mark.parametrize("width", [8, 24, 40, 72, 136, 1000])
@pytest.mark.parametrize("layout", ["concat", "interleaved"])
@pytest.mark.parametrize("batch", BATCHES)
def test_halves_that_no_load_and_no_block_divides(batch: str, layout: str, width: int) -> None:
    form = ("swiglu", layout)
    c = case(BATCHES[batch], form, inter=width)
    both = glulam.grouped_glu(c.x, transposed(c)[0], offs=c.offs, bias=c.b1, return_preact=True, **of(form))
    check_glu(c, *both, form, bias=c.b1)


@pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
@pytest.mark.parametrize("name", catalogue(FEW_ROWS, EXPERTS))
def test_routings(name: str, rows: int) -> None:
    """Every routing, into poisoned padded outputs whose tail must stay."""
    c = case(catalogue(rows, EXPERTS)[name], tail=rows - sum(catalogue(rows, EXPERTS)[name]) + TAIL)
    w1, w2 = transposed(c)
    total = c.x.shape[0]
    for columns, call in (
        (HIDDEN, lambda out: glulam.grouped_mlp(c.x, w1, w2, offs=c.offs, out=out, **of(GPT_OSS), **c.addends)),
        (INTER, lambda out: glulam.grouped_glu(c.x, w1, offs=c.offs, bias=c.b1, out=out, **of(GPT_OSS))),
    ):
        buffer = torch.full((total, columns + 8), math.nan, dtype=BF16, device="cuda")
        out = buffer[:, :columns]
        assert call(out) is out
        assert bool(buffer[c.rows :].isnan().all()), "the tail was written"
        assert bool(buffer[:, columns:].isnan().all()), "padding was written"
        if columns == HIDDEN:
            check_mlp(c, out, GPT_OSS, **c.addends)
        else:
            check_glu(c, out, None, GPT_OSS, bias=c.b1)


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("layout", GATES)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
def test_rows_of_other_groups_reach_no_result(tile: TileConfig, layout: str, saves: bool) -> None:
    """Every other group holds NaN; shared memory behind a tile's own rows keeps what other tiles had there."""
    sizes = [64, 1, 128, 15, 257, 16, 300, 17, 64, 48, 130, 49, 200, 63, 128, 65, 1, 127, 190, 129, 31, 193]
    c = case(sizes, ("geglu", layout), inter=160)  # an odd number of weight tiles
    w1 = transposed(c)[0]
    forms = glu_form("geglu", layout, 160, "16bit", tile, saves, transpose_w=True)
    spec = GroupedGluSpec("bfloat16", *forms, saves, tile, transpose_w=True)
    counters = tickets.new_counters(c.offs.device)

    def results(x: torch.Tensor) -> list[torch.Tensor]:
        made = {"act": poisoned(c.x.shape[0], 160, c.x, 8)}
        if saves:
            made["preact"] = poisoned(c.x.shape[0], 320, c.x, 16)
        launch(
            spec, x=x, w=w1, **made, bias=c.b1, kind=KINDS["geglu"], glu_layout=LAYOUTS[layout], **groups_of(c.offs),
            tickets=counters,
        )  # fmt: skip
        return list(made.values())

    clean = results(c.x)
    check_glu(c, clean[0], clean[1] if saves else None, ("geglu", layout), bias=c.b1)
    assert all(bool(one[c.rows :].isnan().all()) for one in clean)
    x = c.x.clone()
    for group in x[: c.rows].split(c.sizes)[::2]:
        group.fill_(math.nan)
    for made, wanted in zip(results(x), clean, strict=True):
        got, want = (one[: c.rows].split(c.sizes) for one in (made, wanted))
        assert all(bool(y.isnan().all()) for y in got[::2])
        assert all(same_bits(*map(torch.Tensor.contiguous, pair)) for pair in zip(got[1::2], want[1::2], strict=True))


@pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
def test_layouts_agree(rows: int) -> None:
    """The same layer with its columns in three orders, one loaded as halves and two as they lie."""
    c = case(zipf(rows, EXPERTS), ("swiglu", "concat"))
    index = torch.arange(2 * INTER, device="cuda")
    half, i = index // INTER, index % INTER
    places = {"interleaved": 2 * i + half, "interleaved32": 64 * (i // 32) + 32 * half + i % 32}
    w1 = transposed(c)[0]
    act, preact = glulam.grouped_glu(c.x, w1, offs=c.offs, bias=c.b1, return_preact=True, transpose_w=True)
    check_glu(c, act, preact, bias=c.b1)
    for layout, place in places.items():
        moved, b1 = torch.empty_like(w1), torch.empty_like(c.b1)
        moved[:, :, place], b1[:, place] = w1, c.b1
        options = {"glu_layout": layout, "transpose_w": True, "return_preact": True}
        one, other = glulam.grouped_glu(c.x, moved, offs=c.offs, bias=b1, **options)
        assert same_bits(one[: c.rows], act[: c.rows]), layout
        assert same_bits(other[: c.rows, place].contiguous(), preact[: c.rows]), layout


@pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
@pytest.mark.parametrize("layout", GATES)
def test_lists_of_experts(layout: str, rows: int) -> None:
    form = ("swiglu", layout)
    c = case(zipf(rows, EXPERTS), form)
    w1, w2 = transposed(c)
    want = glulam.grouped_mlp(c.x, w1, w2, offs=c.offs, **of(form), **c.addends)
    check_mlp(c, want, form, **c.addends)
    lists = {"b1": scattered(c.b1), "b2": scattered(c.b2), "row_scale": c.row_scale}
    for weights in ((scattered(w1), scattered(w2)), (w1, scattered(w2)), (scattered(w1), w2)):
        got = glulam.grouped_mlp(c.x, *weights, offs=c.offs, **of(form), **lists)
        assert same_bits(got[: c.rows], want[: c.rows])


@pytest.mark.parametrize("return_preact", [False, True])
@pytest.mark.parametrize("form", [("swiglu", layout) for layout in GATES] + [("srelu", "concat")], ids="-".join)
@pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
def test_rows_by_index(rows: int, form: Form, return_preact: bool) -> None:
    """The same bits as on a copy of the rows."""
    c = case(zipf(rows, EXPERTS), form)
    w1 = transposed(c)[0]
    x = torch.randn(rows // 4, HIDDEN, device="cuda").to(BF16)
    indices = torch.randint(-3, rows // 4 + 3, (c.x.shape[0],), device="cuda", dtype=torch.int32)
    indices[c.rows :] = 2**31 - 1
    copied = x[indices.clamp(0, rows // 4 - 1).long()]
    options = {"offs": c.offs, "bias": c.b1, "return_preact": return_preact, **of(form)}
    made, wanted = glulam.grouped_glu(x, w1, rows=indices, **options), glulam.grouped_glu(copied, w1, **options)
    for one, other in zip(*(m if return_preact else (m,) for m in (made, wanted)), strict=True):
        assert same_bits(one[: c.rows], other[: c.rows]) and other[: c.rows].abs().max() > 0.2


@pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
def test_a_graph_follows_its_groups(rows: int) -> None:
    c = case(zipf(rows, EXPERTS))
    w1, w2 = transposed(c)
    offs, graph = c.offs.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = glulam.grouped_mlp(c.x, w1, w2, offs=offs, **of(GPT_OSS), **c.addends)
    for sizes in (c.sizes, one_takes_all(c.rows, EXPERTS, 3)):
        offs.copy_(torch.tensor(sizes).cumsum(0))
        graph.replay()
        assert same_bits(y[: c.rows], glulam.grouped_mlp(c.x, w1, w2, offs=offs, **of(GPT_OSS), **c.addends)[: c.rows])
    offs.copy_(c.offs)
    graph.replay()
    check_mlp(c, y, GPT_OSS, **c.addends)


@pytest.mark.parametrize("params", [(7.0, 1.702, 1.0), (1, 1, 0), (0.25, 2.5, -0.5), (math.inf, 1.0, 0.0)])
@pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
def test_params_of_clamped_swiglu(rows: int, params: tuple[float, float, float]) -> None:
    c = case(zipf(rows, EXPERTS))
    options = dict(zip(("limit", "alpha", "offset"), params, strict=True))
    w1, w2 = transposed(c)
    act = glulam.grouped_glu(c.x, w1, offs=c.offs, **of(GPT_OSS), **options)
    check_glu(c, act, None, GPT_OSS, params=options)
    dy, h = gradient(c), preactivation(c)
    check_dglu(c, dy, h, glulam.grouped_dglu(dy, w2, h, offs=c.offs, **of(GPT_OSS), **options), GPT_OSS, params=options)


class TestDglu:
    @pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
    @pytest.mark.parametrize("batch", BATCHES)
    @pytest.mark.parametrize("form", activation_forms(), ids="-".join)
    def test_every_form(self, form: Form, batch: str, dtype: torch.dtype) -> None:
        c = case(BATCHES[batch], form, dtype=dtype)
        dy, h, w2 = gradient(c), preactivation(c), transposed(c)[1]
        for scale, asked in ((None, True), (c.row_scale, True), (c.row_scale, False)):
            options = {"row_scale": scale, "row_scale_grad": asked, **of(form)}
            got = glulam.grouped_dglu(dy, w2, h, offs=c.offs, **options)
            assert (got.d_row_scale is not None) == (scale is not None and asked)
            check_dglu(c, dy, h, got, form, row_scale=scale)

    @pytest.mark.parametrize("layout", GATES)
    @pytest.mark.parametrize("name", SIZES)
    def test_sizes(self, name: str, layout: str) -> None:
        sizes, hidden, inter = SIZES[name]
        form = ("swiglu", layout)
        c = case(sizes, form, hidden, inter, tail=TAIL if any(sizes) else 0)
        dy, h = gradient(c), preactivation(c)
        got = glulam.grouped_dglu(dy, transposed(c)[1], h, splits=c.splits(), row_scale=c.row_scale, **of(form))
        check_dglu(c, dy, h, got, form, row_scale=c.row_scale)

    @pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
    @pytest.mark.parametrize("name", catalogue(FEW_ROWS, EXPERTS))
    def test_routings(self, name: str, rows: int) -> None:
        sizes = catalogue(rows, EXPERTS)[name]
        c = case(sizes, tail=rows - sum(sizes) + TAIL)
        dy, h, w2 = gradient(c), preactivation(c), transposed(c)[1]
        poison_allocator("cuda")
        got = glulam.grouped_dglu(dy, w2, h, offs=c.offs, row_scale=c.row_scale, **of(GPT_OSS))
        assert got.d_row_scale is not None and not bool(got.d_row_scale[c.rows :].any())
        check_dglu(c, dy, h, got, GPT_OSS, row_scale=c.row_scale)

    @pytest.mark.parametrize("layout", GATES)
    def test_rows_of_other_groups_reach_no_result(self, layout: str) -> None:
        """Every other group holds NaN."""
        sizes = [64, 1, 128, 15, 257, 16, 300, 17, 64, 48, 130, 49, 200, 63, 128, 65, 1, 127, 190, 129, 31, 193]
        c = case(sizes, ("geglu", layout), inter=160)  # an odd number of weight tiles
        dy, h, w2 = gradient(c), preactivation(c), transposed(c)[1]
        options = {"offs": c.offs, "row_scale": c.row_scale, **of(("geglu", layout))}
        clean = glulam.grouped_dglu(dy, w2, h, **options)
        check_dglu(c, dy, h, clean, ("geglu", layout), row_scale=c.row_scale)
        for group in dy[: c.rows].split(c.sizes)[::2]:
            group.fill_(math.nan)
        made = glulam.grouped_dglu(dy, w2, h, **options)
        got, want = (one.dpreact[: c.rows].split(c.sizes) for one in (made, clean))
        assert all(bool(y.isnan().all()) for y in got[::2])
        assert all(same_bits(*map(torch.Tensor.contiguous, pair)) for pair in zip(got[1::2], want[1::2], strict=True))

    @pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
    @pytest.mark.parametrize("layout", GATES)
    def test_lists_and_rows_by_index(self, layout: str, rows: int) -> None:
        """The same bits as of packed weights on a copy of the rows."""
        c = case(zipf(rows, EXPERTS), ("swiglu", layout))
        h, w2 = preactivation(c), transposed(c)[1]
        dy = torch.randn(rows // 4, HIDDEN, device="cuda").to(BF16)
        indices = torch.randint(-3, rows // 4 + 3, (c.x.shape[0],), device="cuda", dtype=torch.int32)
        indices[c.rows :] = 2**31 - 1
        copied = dy[indices.clamp(0, rows // 4 - 1).long()]
        options = {"offs": c.offs, "row_scale": c.row_scale, **of(("swiglu", layout))}
        want = glulam.grouped_dglu(copied, w2, h, **options)
        check_dglu(c, copied, h, want, ("swiglu", layout), row_scale=c.row_scale)
        for weights in (w2, scattered(w2)):
            got = glulam.grouped_dglu(dy, weights, h, rows=indices, **options)
            assert all(same_bits(one[: c.rows], other[: c.rows]) for one, other in zip(got, want, strict=True))

    def test_a_square_weight_is_read_as_the_flag_says(self) -> None:
        c = case(zipf(MANY_ROWS, EXPERTS), ("swiglu", "concat"), hidden=352, inter=352)
        dy, h = gradient(c), preactivation(c)
        one = glulam.grouped_dglu(dy, c.w2, h, offs=c.offs)
        other = glulam.grouped_dglu(dy, c.w2.mT.contiguous(), h, offs=c.offs, transpose_w=True)
        for got in (one, other):
            check_dglu(c, dy, h, got, ("swiglu", "concat"))


@pytest.mark.usefixtures("with_gradients")
class TestGradients:
    def check(self, c: Case, form: Form = GPT_OSS, **options: Any) -> None:
        given, dy = transposed_leaves(c), gradient(c)
        poison_allocator("cuda")
        y = glulam.grouped_mlp(**given, offs=c.offs, **of(form), **options)
        poison_allocator("cuda")
        y.backward(dy)
        got = {name: value.grad for name, value in given.items() if value.grad is not None}
        check_gradients(c, dy, transposed_back(got), form)

    @pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
    @pytest.mark.parametrize("batch", BATCHES)
    @pytest.mark.parametrize("form", activation_forms(), ids="-".join)
    def test_every_form(self, form: Form, batch: str, dtype: torch.dtype) -> None:
        self.check(case(BATCHES[batch], form, dtype=dtype), form)

    @pytest.mark.parametrize("recompute", [False, True])
    @pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
    @pytest.mark.parametrize("name", [name for name in catalogue(FEW_ROWS, EXPERTS) if name != "one_row"])
    def test_routings(self, name: str, rows: int, recompute: bool) -> None:
        sizes = catalogue(rows, EXPERTS)[name]
        self.check(case(sizes, tail=rows - sum(sizes) + TAIL), recompute=recompute)

    @pytest.mark.parametrize("layout", GATES)
    @pytest.mark.parametrize("sizes", [(736, 1504), (1504, 736), (72, 64), (2880, 2880)], ids=str)
    def test_sizes(self, sizes: tuple[int, int], layout: str) -> None:
        self.check(case(zipf(900, 4), ("swiglu", layout), *sizes), ("swiglu", layout))

    def test_lists(self) -> None:
        c = case(zipf(MANY_ROWS, EXPERTS))
        given, dy = transposed_leaves(c), gradient(c)
        lists: dict[str, Any] = dict(given)
        for name in ("w1", "w2", "b1", "b2"):
            lists[name] = [one.detach().clone().requires_grad_() for one in given[name]]
        glulam.grouped_mlp(**lists, offs=c.offs, **of(GPT_OSS)).backward(dy)
        got = {n: torch.stack([one.grad for one in v]) if isinstance(v, list) else v.grad for n, v in lists.items()}
        check_gradients(c, dy, transposed_back(got), GPT_OSS)

    @pytest.mark.parametrize("recompute", [False, True])
    @pytest.mark.parametrize("width", [2**30, 0], ids=["rows by index", "rows copied"])
    def test_moe(self, width: int, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Against the layer of weights that lie otherwise, whose own tests compare it with float64."""
        monkeypatch.setattr(sys.modules["glulam.layer.of_tokens"], "COPIED_WIDTH", width)
        c, tokens = case([1] * EXPERTS), 700
        x, dy = (torch.randn(tokens, HIDDEN, device="cuda").to(BF16) for _ in range(2))
        logits = torch.randn(tokens, EXPERTS, device="cuda")

        def gradients(w1: torch.Tensor, w2: torch.Tensor, transpose_w: bool) -> tuple[torch.Tensor, ...]:
            given = [t.detach().clone().requires_grad_() for t in (x, logits, c.b1, c.b2, w1, w2)]
            options = {"b1": given[2], "b2": given[3], "recompute": recompute, **of(GPT_OSS)}
            options["transpose_w"] = transpose_w
            out = glulam.moe(given[0], glulam.route(given[1], 3), *given[4:], residual=given[0], **options)
            return torch.autograd.grad(out, given, dy)

        made, wanted = gradients(*transposed(c), True), gradients(c.w1, c.w2, False)
        for one, other in zip(made, (*wanted[:4], wanted[4].mT, wanted[5].mT), strict=True):
            error = (one.double() - other.double()).norm() / other.double().norm()
            assert error < 0.01 and other.abs().max() > 1e-3

    def test_a_graph_of_a_step(self) -> None:
        c = case(zipf(MANY_ROWS, EXPERTS))
        given, dy, offs = transposed_leaves(c), gradient(c), c.offs.clone()

        def step() -> tuple[torch.Tensor, ...]:
            y = glulam.grouped_mlp(**given, offs=offs, **of(GPT_OSS))
            return torch.autograd.grad(y, list(given.values()), dy)

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for sizes in (c.sizes, one_takes_all(c.rows, EXPERTS, 3)):
            offs.copy_(torch.tensor(sizes).cumsum(0))
            graph.replay()
            for one, other in zip(captured, step(), strict=True):
                assert same_bits(one, other) and bool(other.any())
